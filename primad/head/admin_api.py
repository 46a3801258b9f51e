"""The head's admin API: what its owner sees and does on the page."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import chain, count
from pathlib import Path
from typing import Final

from halda import DeviceProfile
from primad.api.page.admin_api import (
    DeviceLimit,
    DevicesBody,
    HeadKey,
    Imagined,
    KnownDevice,
    OpenCode,
    OtherCluster,
    Paired,
    PlannedDevice,
    ShownCode,
)
from primad.daemon.pairing_service import PairingService
from primad.errors import ClusterError, RequestError, printable
from primad.gguf.shapes import profiles_directory
from primad.head.members.core import HeadContext
from primad.head.model.limits import DeviceLimits
from primad.head.rings.planner import DevicePool
from primad.head.serving import ModelServing
from primad.membership import types
from primad.network.admin import PairingCode
from primad.network.peer import Peer
from primad.planning.forecast import Forecast
from primad.planning.question import parse_link
from primad.profiler.store import load_profile
from primad.settings.config import NAME, check_address
from primad.trust.identity import fingerprint, key_hex, parse_key
from primad.trust.labels import free_name
from primad.trust.trust import BY_HAND, TrustStore, trusted_now

MAX_SHOWN: Final = 256
MAX_IMAGINED: Final = 8


class HeadAdminApi:
    """The admin API of one head, which serves the models ``servings``; what-if compares with the last one."""

    def __init__(
        self,
        head: HeadContext,
        pool: DevicePool,
        pairing: PairingService,
        servings: Callable[[], Sequence[ModelServing]],
    ) -> None:
        self._node = head.node
        self._devices, self._device_limits = pool.others, pool.limits
        self._pairing, self._servings = pairing, servings
        self._single_device = head.options.single_device
        self._imagining = False

    async def devices(self) -> DevicesBody:
        own = self._node.identity.public
        known = await asyncio.to_thread(
            known_devices, self._node.trust, self._devices.labels, self._devices.in_sight, self._device_limits
        )
        code = self._pairing.shown()
        return DevicesBody(
            own=HeadKey(device=self._node.config.name, fingerprint=fingerprint(own), key=key_hex(own)),
            devices=known,
            code=None if code is None else _open_code(code),
        )

    async def open_code(self) -> OpenCode:
        self._check_not_single_device()
        return _open_code(await self._pairing.open())

    async def bring_code(self, shown: ShownCode) -> Paired:
        self._check_not_single_device()
        at = None if shown.at is None else check_address(shown.at, "address")
        other = await self._pairing.bring(shown.code, at)
        return Paired(device=other.device)

    def _check_not_single_device(self) -> None:
        if self._single_device:
            raise ClusterError(
                f"{self._node.config.name} serves with --single-device; start it without to pair devices"
            )

    async def trust(self, device: str, key: str) -> None:
        await asyncio.to_thread(self._node.trust.add, trusted_now(device, parse_key(key), BY_HAND))

    async def revoke(self, key: str) -> None:
        await asyncio.to_thread(self._node.trust.revoke, parse_key(key))

    async def limit_device(self, device_limit: DeviceLimit) -> None:
        labels = self._devices.labels  # empty on a head that serves with --single-device
        known = {labels.get(each.key, each.device) for each in self._node.trust.entries()}
        if device_limit.device not in known or device_limit.device == self._node.config.name:
            raise ClusterError(f"{printable(device_limit.device, 70)}: not another device that is trusted here")
        is_less = await asyncio.to_thread(self._device_limits.put, device_limit)
        event = types.DeviceMemoryLow if is_less else types.DeviceMemoryRecovered
        for serving in self._servings():
            serving.corrected(event(device_limit.device, by_owner=True))

    async def what_if(self, asked: OtherCluster) -> Imagined:
        if self._imagining:
            raise RequestError("another what-if is being planned; try again in a moment", status=429, code="busy")
        for name in asked.without:
            if name not in self._devices.workers:
                known = ", ".join(sorted(self._devices.workers)) or "none"
                raise ClusterError(f"{printable(name, 70)}: not a device to leave out; there are: {known}")
        self._imagining = True
        try:
            more = await asyncio.to_thread(_profiles, asked.profiles, {self._node.config.name, *self._devices.workers})
            servings, speed = self._servings(), parse_link(asked.link, "link")
            if not servings:
                raise ClusterError("no model is loaded, so there is no plan to compare with; load one")
            serving = servings[-1]
            now = serving.rings.offered_forecast
            forecast = await serving.planner.what_if(now, frozenset(asked.without), more, speed)
        finally:
            self._imagining = False
        return _imagined(forecast, now)

    def profiles(self) -> list[str]:
        return sorted(path.stem for path in _folder().glob("*.json"))


def _open_code(code: PairingCode) -> OpenCode:
    return OpenCode(code=code.code, expires_s=code.expires_s, port=code.port, addresses=code.addresses)


def _folder() -> Path:
    return profiles_directory() / "devices"


def _profiles(names: Sequence[str], taken: set[str]) -> list[DeviceProfile]:
    """Return the built-in profiles ``names``, each renamed if a device has its name. Raises ``ClusterError``."""
    if len(names) > MAX_IMAGINED:
        raise ClusterError(f"{len(names)} more devices are too many; give {MAX_IMAGINED} at most")
    found = []
    for name in names:
        path = _folder() / f"{name}.json"
        if not NAME.fullmatch(name) or not path.is_file():
            raise ClusterError(f"{printable(name, 70)}: not a built-in profile")
        free = next(each for each in chain([name], (f"{name}-{i}" for i in count(2))) if each not in taken)
        taken.add(free)
        found.append(replace(load_profile(path).device, device=free, host=free))
    return found


def _imagined(forecast: Forecast, now: Forecast | None) -> Imagined:
    prediction, before = forecast.prediction, None if now is None else now.prediction
    assert prediction is not None, "a solved plan has a forecast"
    return Imagined(
        tokens_per_s=1 / prediction.tpot_s,
        ttft_ms=prediction.ttft_s * 1e3,
        sequences=forecast.sequences,
        devices=[
            PlannedDevice(
                device=name,
                layers=forecast.assignments[name].layers,
                gpu_layers=forecast.assignments[name].gpu_layers,
                streamed=forecast.assignments[name].streamed_layers,
            )
            for name in forecast.plan.devices
        ],
        now_tokens_per_s=None if before is None else 1 / before.tpot_s,
        now_ttft_ms=None if before is None else before.ttft_s * 1e3,
    )


def known_devices(
    trust: TrustStore, labels: Mapping[str, str], peers: Iterable[Peer], device_limits: DeviceLimits
) -> list[KnownDevice]:
    """Return trusted devices, named by ``labels`` (by key), then formerly trusted ones, then others in sight; each
    group by name."""
    in_sight = {peer.key: peer.device for peer in peers}
    trusted = {each.key: each for each in trust.entries()}
    revoked = {each.key: each for each in trust.lost()}
    names = {key: labels.get(key, each.device) for key, each in (revoked | trusted).items()}
    taken = set(names.values())
    for key in sorted(in_sight.keys() - names.keys()):
        names[key] = free_name(in_sight[key], taken)
        taken.add(names[key])
    found = []
    for key in sorted(names, key=lambda key: (key not in trusted, key not in revoked, names[key], key))[:MAX_SHOWN]:
        entry = trusted.get(key)
        device_limit = device_limits.of(names[key]) if entry is not None else DeviceLimit(device=names[key])
        found.append(
            KnownDevice(
                device=names[key],
                key=key_hex(key),
                fingerprint=fingerprint(key),
                trusted="yes" if entry is not None else "revoked" if key in revoked else "no",
                how="" if entry is None else entry.how,
                since="" if entry is None else entry.since,
                in_sight=key in in_sight,
                is_paused=device_limit.is_paused,
                ram_bytes=device_limit.ram_bytes,
            )
        )
    return found
