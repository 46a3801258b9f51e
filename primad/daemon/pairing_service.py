"""Pairing in a daemon: shows a code and waits for a device that knows it, or brings a code to the device that shows
it."""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass, replace
from typing import Final

from primad import __version__
from primad.daemon.node import Node
from primad.daemon.reporter import ReportLine
from primad.errors import ClusterError
from primad.network.admin import PairingCode
from primad.network.discovery import Discovery, look
from primad.network.own_places import local_name, own_hosts
from primad.settings.config import DEFAULT_CONTROL_PORT, Config, is_loopback, join_address, split_address
from primad.trust.pairing import BETWEEN_TRIES_S, LIFETIME_S, CodeOutcome, Who
from primad.trust.pairing_links import NobodyThereError, PairingServer, pair_with
from primad.trust.proofs import Proofs
from primad.trust.trust import TrustedDevice, TrustRole
from primad.trust.words import Code, new_code, parse_code

LOOK_S: Final = 3.0
"""How long a device with a code looks for the device that shows it, before it looks again."""
LOOKS: Final = 5
PATIENCE_S: Final = 55.0
"""Maximum time for bringing a code, however many devices announce it; ``primad pair`` waits a little longer."""
MAX_HOSTS: Final = 4
TURN_S: Final = 13.0
"""Maximum time for one device that announces the code, however many addresses it names and however slow they are."""
_NAME_IT: Final = "name the place that 'primad pair' prints with --device"


@dataclass(frozen=True, slots=True)
class _OpenCode:
    """A code that is valid until ``ends_at``, the server that accepts it, and the addresses to bring it to."""

    code: Code
    server: PairingServer
    ends_at: float
    places: list[str]


class PairingService:
    """Lets new devices in, as ``role``. One code is open at a time; paired devices are in the trust store."""

    def __init__(self, node: Node, report_line: ReportLine, role: TrustRole) -> None:
        self._node = node
        self._config, self._identity, self._trust = node.config, node.identity, node.trust
        self._report_line, self._role = report_line, role
        self._open: _OpenCode | None = None
        self._task: asyncio.Task[None] | None = None
        self._discovery: Discovery | None = None
        self.name = node.config.name

    def use(self, discovery: Discovery) -> None:
        """Announce open codes with ``discovery``."""
        self._discovery = discovery

    async def open(self) -> PairingCode:
        """Return the open code, a new one if there is none. Raises ``ClusterError`` if no port can be listened on."""
        loop = asyncio.get_running_loop()
        hosts = [] if self._open is not None else await self._hosts()
        if self._open is None:
            code = new_code()
            who = Who(device=self.name, key=self._identity.public, cluster=self._config.cluster, version=__version__)
            server = PairingServer(self._config.host, code, who, self._paired, preferred=DEFAULT_CONTROL_PORT)
            places = [join_address(host, server.port) for host in hosts]
            self._open = _OpenCode(code, server, loop.time() + LIFETIME_S, places)
            self._task = asyncio.create_task(self._run(server))
            if self._discovery is not None:
                await self._discovery.set_pairing(code.number, server.port)
        shown = self.shown()
        assert shown is not None
        return shown

    async def _hosts(self) -> list[str]:
        """Return what leads to this device: its addresses, and its mDNS name if others find it by that."""
        hosts = own_hosts(self._config.host, self._config.interface)[:MAX_HOSTS]
        name, discovery = local_name(), self._discovery
        if discovery is None or is_loopback(self._config.host) or not await discovery.leads_here(name):
            return hosts
        return [*hosts, name]

    async def bring(self, code: str, at: str | None) -> TrustedDevice:
        """Pair with the device that shows ``code``. Raises as ``pair``."""
        return await pair(self._node, code, at, self._report_line, self._role)

    def shown(self) -> PairingCode | None:
        """Return the open code; None if there is none."""
        if self._open is None:
            return None
        left_s = max(0.0, self._open.ends_at - asyncio.get_running_loop().time())
        shown = self._open
        return PairingCode(code=str(shown.code), expires_s=left_s, port=shown.server.port, addresses=shown.places)

    async def close(self) -> None:
        """Invalidate the open code."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    def _paired(self, device: TrustedDevice) -> None:
        kept = self._trust.add(replace(device, role=self._role))
        self._report_line(f"paired with {kept.device}")

    async def _run(self, server: PairingServer) -> None:
        try:
            outcome = await server.run()
            if outcome is CodeOutcome.BURNT:
                self._report_line("the pairing code was tried too often and is void; 'primad pair' shows a new one")
        finally:
            assert self._open is not None
            number = self._open.code.number
            self._open = None
            if self._discovery is not None:
                await self._discovery.set_pairing(number, None)


async def pair(node: Node, code: str, at: str | None, report_line: ReportLine, role: TrustRole) -> TrustedDevice:
    """Bring ``code`` to the device that shows it, at the address ``at`` (host:port) or found by mDNS; trust it as
    ``role``.

    Raises ``ClusterError`` if it is not found, or does not accept the code.
    """
    known = parse_code(code)
    config = node.config
    who = Who(device=config.name, key=node.identity.public, cluster=config.cluster, version=__version__)
    proofs = Proofs(config.home, node.identity, known)
    proofs.check()
    errand = _Errand(known, who, proofs, report_line)
    try:
        async with asyncio.timeout(PATIENCE_S):
            device = await (errand.bring([split_address(at)]) if at is not None else errand.search(config))
    except TimeoutError as exc:
        raise ClusterError(f"{errand}: no device took it within {PATIENCE_S:g} s; {_NAME_IT}") from exc
    device = node.trust.add(replace(device, role=role))
    report_line(f"paired with {device.device}")
    return device


class _Errand:
    """Brings ``code`` to one device after another. Each gets one proof; ``proofs`` limits their total number."""

    def __init__(self, code: Code, who: Who, proofs: Proofs, report_line: ReportLine) -> None:
        self._code, self._who, self._proofs, self._report_line = code, who, proofs, report_line
        self._refused: set[tuple[str, int]] = set()
        self._slow: list[list[tuple[str, int]]] = []

    def __str__(self) -> str:
        return f"--code {self._code.number}-..."

    async def search(self, config: Config) -> TrustedDevice:
        """Bring the code to devices that announce its number: the first to do so need not be the one that shows it."""
        self._report_line(f"looking for the device that shows the code {self._code.number}-...")
        error: ClusterError | None = None
        for _ in range(LOOKS):
            announced = [
                places
                for places in await self._look(config)
                if self._refused.isdisjoint(places) and places not in self._slow
            ]
            if not announced and error is not None:
                raise error
            random.shuffle(announced)  # sorted by name, the same ones would be first each time
            for places in announced:
                if not self._refused.isdisjoint(places):
                    continue
                if error is not None:
                    self._report_line(f"{error}; another device announces this code and is tried")
                    await asyncio.sleep(BETWEEN_TRIES_S)
                self._proofs.check()
                try:
                    async with asyncio.timeout(TURN_S):
                        return await self.bring(places)
                except ClusterError as exc:
                    error = exc
                except TimeoutError:
                    self._slow.append(places)
                    error = ClusterError(f"{self}: a device that announces it does not respond within {TURN_S:g} s")
        raise error or ClusterError(
            f"{self}: no discovered device of cluster {config.cluster} shows this code; check that 'primad pair' "
            f"still shows it, or {_NAME_IT}"
        )

    async def bring(self, places: list[tuple[str, int]]) -> TrustedDevice:
        """Pair at the first of ``places`` that can be reached: they are addresses of one device, the most likely
        first."""
        for host, port in places:
            try:
                return await pair_with(host, port, self._code, self._who, self._proofs.count)
            except NobodyThereError as exc:
                error = exc
            except ClusterError:
                self._refused.add((host, port))
                raise
        raise error

    async def _look(self, config: Config) -> list[list[tuple[str, int]]]:
        return [
            [(address, peer.pairing[1]) for address in peer.addresses]
            for peer in await look(config.host, LOOK_S, config.interface)
            if peer.cluster == config.cluster and peer.pairing is not None and peer.pairing[0] == self._code.number
        ]
