"""The head's desk: what its owner sees and does by way of the page."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import chain, count
from pathlib import Path
from typing import Final

from halda import DeviceProfile
from primad.api.page.desk import (
    DevicesBody,
    HeadKey,
    Imagined,
    KnownDevice,
    Loan,
    OpenCode,
    OtherCluster,
    Paired,
    PlannedDevice,
    ShownCode,
)
from primad.daemon.pairing_service import PairingService
from primad.daemon.station import Station
from primad.errors import ClusterError, RequestError, printable
from primad.gguf.shapes import profiles_directory
from primad.head.members.core import Core
from primad.head.members.devices import Devices
from primad.head.model.limits import Lending
from primad.head.rings.planner import Planner
from primad.membership import types
from primad.network.admin import PairingCode
from primad.network.peer import Peer
from primad.planning.forecast import Promise
from primad.planning.question import parse_link
from primad.profiler.store import load_profile
from primad.settings.config import NAME, check_address
from primad.trust.identity import fingerprint, key_hex, parse_key
from primad.trust.labels import free_name
from primad.trust.trust import BY_HAND, TrustStore, trusted_now

MOST_SHOWN: Final = 256
MOST_IMAGINED: Final = 8


class HeadDesk:
    """The desk of one head. ``promised`` is what the ring that serves promises."""

    def __init__(
        self,
        station: Station,
        *,
        pairing: PairingService,
        devices: Devices,
        planner: Planner,
        lending: Lending,
        promised: Callable[[], Promise | None],
        core: Core,
        alone: bool,
    ) -> None:
        self._station, self._pairing, self._devices = station, pairing, devices
        self._planner, self._lending, self._promised, self._core = planner, lending, promised, core
        self._alone = alone
        self._imagining = False

    async def devices(self) -> DevicesBody:
        own = self._station.identity.public
        known = await asyncio.to_thread(
            known_devices, self._station.trust, self._devices.labels, self._devices.in_sight, self._lending
        )
        code = self._pairing.shown()
        return DevicesBody(
            own=HeadKey(device=self._station.config.name, fingerprint=fingerprint(own), key=key_hex(own)),
            devices=known,
            code=None if code is None else _open_code(code),
        )

    async def open_code(self) -> OpenCode:
        self._check_not_alone()
        return _open_code(await self._pairing.open())

    async def bring_code(self, shown: ShownCode) -> Paired:
        self._check_not_alone()
        at = None if shown.at is None else check_address(shown.at, "address")
        other = await self._pairing.bring(shown.code, at)
        return Paired(device=other.device)

    def _check_not_alone(self) -> None:
        if self._alone:
            raise ClusterError(f"{self._station.config.name} serves with --alone; start it without to pair devices")

    async def trust(self, device: str, key: str) -> None:
        await asyncio.to_thread(self._station.trust.add, trusted_now(device, parse_key(key), BY_HAND))

    async def revoke(self, key: str) -> None:
        await asyncio.to_thread(self._station.trust.revoke, parse_key(key))

    async def lend(self, loan: Loan) -> None:
        labels = self._devices.labels  # which a head that serves alone does not look for
        known = {labels.get(each.key, each.device) for each in self._station.trust.entries()}
        if loan.device not in known or loan.device == self._station.config.name:
            raise ClusterError(f"{printable(loan.device, 70)}: is no other device that is trusted here")
        is_less = await asyncio.to_thread(self._lending.put, loan)
        self._planner.forget()
        self._core.post(
            types.DeviceMemoryLow(loan.device, by_owner=True)
            if is_less
            else types.DeviceMemoryRecovered(loan.device, by_owner=True)
        )

    async def what_if(self, asked: OtherCluster) -> Imagined:
        if self._imagining:
            raise RequestError("another plan is being tried; ask again in a moment", status=429, code="busy")
        for name in asked.without:
            if name not in self._devices.workers:
                known = ", ".join(sorted(self._devices.workers)) or "none"
                raise ClusterError(f"{printable(name, 70)}: is no device to leave out; there are: {known}")
        self._imagining = True
        try:
            more = await asyncio.to_thread(
                _profiles, asked.profiles, {self._station.config.name, *self._devices.workers}
            )
            now, speed = self._promised(), parse_link(asked.link, "link")
            promise = await self._planner.what_if(now, frozenset(asked.without), more, speed)
        finally:
            self._imagining = False
        return _imagined(promise, now)

    def profiles(self) -> list[str]:
        return sorted(path.stem for path in _folder().glob("*.json"))


def _open_code(code: PairingCode) -> OpenCode:
    return OpenCode(code=code.code, expires_s=code.expires_s, port=code.port, addresses=code.addresses)


def _folder() -> Path:
    return profiles_directory() / "devices"


def _profiles(names: Sequence[str], taken: set[str]) -> list[DeviceProfile]:
    """The profiles of ``names`` that come with primad, each under a name that no device has. Raises ``ClusterError``."""
    if len(names) > MOST_IMAGINED:
        raise ClusterError(f"{len(names)} more devices are too many to try; give {MOST_IMAGINED} at most")
    found = []
    for name in names:
        path = _folder() / f"{name}.json"
        if not NAME.fullmatch(name) or not path.is_file():
            raise ClusterError(f"{printable(name, 70)}: is no profile that comes with primad")
        free = next(each for each in chain([name], (f"{name}-{i}" for i in count(2))) if each not in taken)
        taken.add(free)
        found.append(replace(load_profile(path).device, device=free, host=free))
    return found


def _imagined(promise: Promise, now: Promise | None) -> Imagined:
    prediction, before = promise.prediction, None if now is None else now.prediction
    assert prediction is not None, "a plan that was solved promises something"
    return Imagined(
        tokens_per_s=1 / prediction.tpot_s,
        ttft_ms=prediction.ttft_s * 1e3,
        sequences=promise.sequences,
        devices=[
            PlannedDevice(
                device=name,
                layers=promise.assignments[name].layers,
                gpu_layers=promise.assignments[name].gpu_layers,
                streamed=promise.assignments[name].streamed_layers,
            )
            for name in promise.plan.devices
        ],
        now_tokens_per_s=None if before is None else 1 / before.tpot_s,
        now_ttft_ms=None if before is None else before.ttft_s * 1e3,
    )


def known_devices(
    trust: TrustStore, labels: Mapping[str, str], peers: Iterable[Peer], lending: Lending
) -> list[KnownDevice]:
    """Those that are trusted, with their ``labels`` by key, those that were, and those in sight; each by name."""
    in_sight = {peer.key: peer.device for peer in peers}
    trusted = {each.key: each for each in trust.entries()}
    revoked = {each.key: each for each in trust.lost()}
    names = {key: labels.get(key, each.device) for key, each in (revoked | trusted).items()}
    taken = set(names.values())
    for key in sorted(in_sight.keys() - names.keys()):
        names[key] = free_name(in_sight[key], taken)
        taken.add(names[key])
    found = []
    for key in sorted(names, key=lambda key: (key not in trusted, key not in revoked, names[key], key))[:MOST_SHOWN]:
        entry = trusted.get(key)
        loan = lending.of(names[key]) if entry is not None else Loan(device=names[key])
        found.append(
            KnownDevice(
                device=names[key],
                key=key_hex(key),
                fingerprint=fingerprint(key),
                trusted="yes" if entry is not None else "revoked" if key in revoked else "no",
                how="" if entry is None else entry.how,
                since="" if entry is None else entry.since,
                in_sight=key in in_sight,
                is_paused=loan.is_paused,
                ram_bytes=loan.ram_bytes,
            )
        )
    return found
