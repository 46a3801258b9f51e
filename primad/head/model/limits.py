"""A head owner's limits on other devices: a paused device is not used, others may have a maximum of memory.

A device's own owner sets limits and pauses on the device (``--max-ram``, ``primad pause``). This is the head's side,
stored in its home by device name; plans obey it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Final

import msgspec

from halda import DeviceProfile
from primad.api.page.admin_api import DeviceLimit
from primad.errors import ConfigError
from primad.settings.config import NAME
from primad.system.files import write_whole

MIN_RAM_BYTES: Final = 64 << 20
MAX_KEPT: Final = 1024
FILE_NAME: Final = "device-limits.json"
_OLD_FILE_NAME: Final = "lending.json"
"""Its earlier name; read while the new file does not exist."""


class DeviceLimits:
    """The device limits of one head. A damaged file counts as empty."""

    def __init__(self, home: Path) -> None:
        self._path = home / FILE_NAME
        self._limits: dict[str, DeviceLimit] = {}
        with contextlib.suppress(OSError, msgspec.MsgspecError, UnicodeDecodeError):
            path = self._path if self._path.exists() else home / _OLD_FILE_NAME
            kept = msgspec.json.decode(path.read_bytes(), type=list[DeviceLimit])
            self._limits = {
                device_limit.device: device_limit
                for device_limit in kept[:MAX_KEPT]
                if NAME.fullmatch(device_limit.device)
            }

    def of(self, device: str) -> DeviceLimit:
        """Return the limit of ``device``."""
        return self._limits.get(device, DeviceLimit(device=device))

    def put(self, device_limit: DeviceLimit) -> bool:
        """Store ``device_limit``; return whether it is stricter than before. Raises ``ConfigError``."""
        if device_limit.ram_bytes is not None and device_limit.ram_bytes < MIN_RAM_BYTES:
            raise ConfigError(
                f"{device_limit.device}: {device_limit.ram_bytes} bytes are too few; pause it, or give 64 MiB or more"
            )
        before = self.of(device_limit.device)
        limits = {name: each for name, each in self._limits.items() if name != device_limit.device}
        if device_limit != DeviceLimit(device=device_limit.device):
            limits[device_limit.device] = device_limit
        if len(limits) > MAX_KEPT:
            raise ConfigError(f"{self._path}: has {MAX_KEPT} devices, which is the maximum")
        try:
            write_whole(self._path, msgspec.json.encode(list(limits.values())))
        except OSError as exc:
            raise ConfigError(f"{self._path}: cannot write: {exc.strerror or exc}") from exc
        self._limits = limits
        return _ram(device_limit) < _ram(before)

    def unpaused(self, names: Iterable[str]) -> frozenset[str]:
        """Return those of ``names`` that are not paused."""
        return frozenset(name for name in names if not self.of(name).is_paused)

    def apply(self, profile: DeviceProfile) -> DeviceProfile:
        """Return ``profile`` with its memory capped to the limit."""
        maximum = self.of(profile.device).ram_bytes
        if maximum is None or maximum >= profile.ram_available_bytes:
            return profile
        gpus = [
            replace(gpu, vram_available_bytes=min(gpu.vram_available_bytes, maximum)) if gpu.unified_memory else gpu
            for gpu in profile.gpus
        ]
        return replace(profile.with_gpus(gpus), ram_available_bytes=maximum)


def _ram(device_limit: DeviceLimit) -> float:
    """Return the usable RAM as a number, for comparisons."""
    if device_limit.is_paused:
        return 0.0
    return float("inf") if device_limit.ram_bytes is None else float(device_limit.ram_bytes)
