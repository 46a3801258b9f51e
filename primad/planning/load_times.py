"""Estimate how long a ring still loads: each device gets the layers that it lacks, then reads its windows. Pure.

A device reports what it lacks as soon as it gets any of it; until then it is assumed to hold everything. Layers arrive
at the rate of its link to the head, and all of them together at the rate of the head's fastest link; once they have
arrived for a while, the measured rate is used. The rate of a hub is not known in advance. Layers that arrived are in
the page cache; others are read from the disk.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from halda import DeviceProfile, ModelProfile
from primad.planning.forecast import Forecast

START_S: Final = 1.0
"""Start-up time of a ring process, whatever it loads."""
MIN_MEASURED_S: Final = 2.0
"""Layers must have arrived for this long before their rate counts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceLoad:
    """A device reads windows of ``window_bytes`` at ``disk_bytes_per_s``, and gets what it lacks at
    ``link_bytes_per_s``, None if that is not known."""

    window_bytes: int
    disk_bytes_per_s: float
    link_bytes_per_s: float | None


@dataclass(slots=True, eq=False)
class _Device:
    """It lacked ``lacked_bytes`` at ``since_s``, of which ``to_come_bytes`` had yet to arrive; ``missing_bytes`` are
    still missing. It reads its windows from ``reads_s`` on."""

    load: DeviceLoad
    since_s: float
    lacked_bytes: int = 0
    to_come_bytes: int = 0
    missing_bytes: int = 0
    reads_s: float | None = None
    is_ready: bool = False

    @property
    def is_moving(self) -> bool:
        return self.missing_bytes > 0

    def is_measured(self, now_s: float) -> bool:
        return now_s - self.since_s >= MIN_MEASURED_S and self.missing_bytes < self.to_come_bytes

    def moves_s(self, now_s: float) -> float | None:
        """Seconds until all layers have arrived."""
        if self.is_measured(now_s):
            came_bytes = self.to_come_bytes - self.missing_bytes
            return self.missing_bytes * (now_s - self.since_s) / came_bytes
        rate = self.load.link_bytes_per_s
        return None if rate is None else self.missing_bytes / rate

    def reads_for_s(self, now_s: float, began_s: float) -> float:
        """Seconds that it still reads its windows, once all layers are there."""
        takes_s = START_S + max(0, self.load.window_bytes - self.lacked_bytes) / self.load.disk_bytes_per_s
        since_s = now_s if self.is_moving else began_s if self.reads_s is None else self.reads_s
        return max(0.0, takes_s - (now_s - since_s))


class LoadTimes:
    """Loading times of one ring, which began at ``began_s``; all times are on one scale."""

    def __init__(self, devices: Mapping[str, DeviceLoad], began_s: float) -> None:
        self._devices = {name: _Device(load, began_s) for name, load in devices.items()}
        self._began_s = began_s

    @property
    def moves(self) -> bool:
        """Whether a device lacked layers."""
        return any(each.lacked_bytes for each in self._devices.values())

    def arrived(self, device: str, done_bytes: int, total_bytes: int, now_s: float) -> None:
        """Record that ``done_bytes`` of the ``total_bytes`` that ``device`` lacked have arrived."""
        each = self._devices[device]
        each.missing_bytes = total_bytes - done_bytes
        if not each.lacked_bytes:
            each.lacked_bytes, each.to_come_bytes, each.since_s = total_bytes, each.missing_bytes, now_s
        if not each.missing_bytes and each.reads_s is None:
            each.reads_s = now_s

    def ready(self, device: str) -> None:
        """Record that ``device`` has loaded its windows."""
        self._devices[device].is_ready = True

    def left_s(self, now_s: float) -> float | None:
        """Seconds until the last device has loaded; None if that is not known."""
        waiting = [each for each in self._devices.values() if not each.is_ready]
        moving = [each for each in waiting if each.is_moving]
        links = [each.load.link_bytes_per_s or 0.0 for each in moving if not each.is_measured(now_s)]
        together_s = sum(each.missing_bytes for each in moving) / max(links) if any(links) else 0.0
        left_s = 0.0
        for each in waiting:
            moves_s = each.moves_s(now_s) if each.is_moving else 0.0
            if moves_s is None:
                return None
            if each.is_moving:
                moves_s = max(moves_s, together_s)
            left_s = max(left_s, moves_s + each.reads_for_s(now_s, self._began_s))
        return left_s


def load_times(
    forecast: Forecast,
    model: ModelProfile,
    profiles: Mapping[str, DeviceProfile],
    rates: Mapping[tuple[str, str], float],
    now_s: float,
    *,
    from_hub: bool,
) -> LoadTimes:
    """Return the loading times of the ring of ``forecast`` for ``model``, which begins to load at ``now_s``.

    ``rates`` are those of links, in bytes/s. The head cuts layers out of its file, unless they come ``from_hub``.
    """
    head = forecast.plan.head

    def load(device: str) -> DeviceLoad:
        own, disk_bytes_per_s = forecast.assignments[device], profiles[device].disk.prefetch_bytes_per_s
        layers = [layer for window in own.windows for layer in model.layers[window.first : window.last]]
        link = disk_bytes_per_s if device == head else rates.get((head, device))
        return DeviceLoad(
            window_bytes=sum(layer.size_bytes for layer in layers) - own.streamed_bytes,
            disk_bytes_per_s=disk_bytes_per_s,
            link_bytes_per_s=None if from_hub else link,
        )

    return LoadTimes({device: load(device) for device in forecast.plan.devices}, now_s)
