"""Pairing in a daemon: show a code and wait for who knows it, or bring a code to the device that shows it."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Final

from primad import __version__
from primad.daemon.reporter import Say
from primad.daemon.station import Station
from primad.errors import ClusterError, PrimadError
from primad.network.admin import PairingCode
from primad.network.discovery import Discovery, look
from primad.settings.config import Config, split_address
from primad.trust.pairing import LIFETIME_S, CodeOutcome, Who
from primad.trust.pairing_links import PairingServer, pair_with
from primad.trust.trust import TrustedDevice, TrustRole
from primad.trust.words import Code, new_code, parse_code

LOOK_S: Final = 3.0
"""How long a device with a code looks for the one that shows it, before it looks again."""
LOOKS: Final = 5


class PairingService:
    """Where this daemon lets new devices in, as ``role``. One code is open at a time; the trust store has who was paired."""

    def __init__(self, station: Station, say: Say, role: TrustRole) -> None:
        self._station = station
        self._config, self._identity, self._trust = station.config, station.identity, station.trust
        self._say, self._role = say, role
        self._open: tuple[Code, PairingServer, float] | None = None
        self._task: asyncio.Task[None] | None = None
        self._discovery: Discovery | None = None
        self.name = station.config.name

    def use(self, discovery: Discovery) -> None:
        """Announce open codes by ``discovery``."""
        self._discovery = discovery

    async def open(self) -> PairingCode:
        """The code that is open, a new one if none is. Raises ``ClusterError`` when no port can be listened on."""
        loop = asyncio.get_running_loop()
        if self._open is None:
            code = new_code()
            who = Who(device=self.name, key=self._identity.public, cluster=self._config.cluster, version=__version__)
            server = PairingServer(self._config.host, code, who, self._paired)
            self._open = (code, server, loop.time() + LIFETIME_S)
            self._task = asyncio.create_task(self._run(server))
            if self._discovery is not None:
                await self._discovery.set_pairing(code.number, server.port)
        shown = self.shown()
        assert shown is not None
        return shown

    async def bring(self, code: str, at: str | None) -> TrustedDevice:
        """Pair with the device that shows ``code``. Raises as ``pair``."""
        return await pair(self._station, code, at, self._say, self._role)

    def shown(self) -> PairingCode | None:
        """The code that is open."""
        if self._open is None:
            return None
        code, server, ends_at = self._open
        left_s = max(0.0, ends_at - asyncio.get_running_loop().time())
        return PairingCode(code=str(code), expires_s=left_s, port=server.port)

    async def close(self) -> None:
        """No code is good any more."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    def _paired(self, device: TrustedDevice) -> None:
        kept = self._trust.add(replace(device, role=self._role))
        self._say(f"paired with {kept.device}")

    async def _run(self, server: PairingServer) -> None:
        try:
            outcome = await server.run()
            if outcome is CodeOutcome.BURNT:
                self._say("the pairing code was tried too often and is void; 'primad pair' shows a new one")
        finally:
            assert self._open is not None
            number = self._open[0].number
            self._open = None
            if self._discovery is not None:
                await self._discovery.set_pairing(number, None)


async def pair(station: Station, code: str, at: str | None, say: Say, role: TrustRole) -> TrustedDevice:
    """Bring ``code`` to the device that shows it, at the address ``at`` (host:port) or looked for by mDNS; trust it
    as ``role``.

    Raises ``ClusterError`` when it is not found, or does not take the code.
    """
    known = parse_code(code)
    config = station.config
    who = Who(device=config.name, key=station.identity.public, cluster=config.cluster, version=__version__)
    if at is not None:
        places = [split_address(at)]
    else:
        say(f"looking for the device that shows the code {known.number}-...")
        places = await _find(config, known)
    device = await _first(places, known, who)
    device = station.trust.add(replace(device, role=role))
    say(f"paired with {device.device}")
    return device


async def _find(config: Config, code: Code) -> list[tuple[str, int]]:
    for _ in range(LOOKS):
        peers = await look(config.host, LOOK_S, config.interface)
        places = [
            (address, peer.pairing[1])
            for peer in peers
            if peer.cluster == config.cluster and peer.pairing is not None and peer.pairing[0] == code.number
            for address in peer.addresses
        ]
        if places:
            return places
    raise ClusterError(
        f"--code {code.number}-...: no device of cluster {config.cluster} in sight shows this code; check that "
        "'primad pair' still shows it, or name the place that it prints with --device"
    )


async def _first(places: list[tuple[str, int]], code: Code, who: Who) -> TrustedDevice:
    """Pair at the first of ``places`` that works: they are addresses of one device, most likely ones first."""
    errors: list[PrimadError] = []
    for host, port in places:
        try:
            _, writer = await asyncio.wait_for(asyncio.open_connection(host, port), 2.0)
            writer.close()
        except (OSError, TimeoutError) as exc:
            errors.append(ClusterError(f"{host}:{port}: {exc or 'no answer'}"))
            continue
        return await pair_with(host, port, code, who)
    raise ClusterError(f"--code: the device that shows it cannot be reached: {errors[-1]}")
