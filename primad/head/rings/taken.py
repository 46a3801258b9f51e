"""The memory that plans of one model take of each device, so that plans of other models know what is left."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Self

from halda import DeviceProfile
from primad.planning.forecast import Forecast


@dataclass(frozen=True, slots=True, kw_only=True)
class Taken:
    """Bytes of a device's RAM, and of the VRAM of each GPU by its id."""

    ram_bytes: int = 0
    vram_bytes: Mapping[str, int] = field(default_factory=dict)

    @property
    def total_bytes(self) -> int:
        """RAM and VRAM together."""
        return self.ram_bytes + sum(self.vram_bytes.values())

    def and_also(self, other: Taken) -> Taken:
        """Return the sum of both."""
        vram = Counter(self.vram_bytes) + Counter(other.vram_bytes)
        return Taken(ram_bytes=self.ram_bytes + other.ram_bytes, vram_bytes=vram)

    def or_else(self, other: Taken) -> Taken:
        """Return the maximum of both: the rings of one model follow each other."""
        vram = Counter(self.vram_bytes) | Counter(other.vram_bytes)
        return Taken(ram_bytes=max(self.ram_bytes, other.ram_bytes), vram_bytes=vram)

    def off(self, profile: DeviceProfile) -> DeviceProfile:
        """Return ``profile`` without the memory taken. Unified memory that a GPU takes counts as RAM too."""
        shared = sum(self.vram_bytes.get(gpu.id, 0) for gpu in profile.gpus if gpu.unified_memory)
        gpus = [
            replace(gpu, vram_available_bytes=max(0, gpu.vram_available_bytes - self.vram_bytes.get(gpu.id, 0)))
            for gpu in profile.gpus
        ]
        ram_bytes = max(0, profile.ram_available_bytes - self.ram_bytes - shared)
        return replace(profile, ram_available_bytes=ram_bytes).with_gpus(gpus)

    @classmethod
    def of(cls, forecast: Forecast, device: str) -> Self:
        """Return what the plan of ``forecast`` takes of ``device``. A plan by hand has no prediction: its resident
        layers count as RAM."""
        for each in () if forecast.prediction is None else forecast.prediction.devices:
            if each.device == device:
                vram = {gpu.id: gpu.vram_bytes for gpu in each.each_gpu if gpu.vram_bytes}
                return cls(ram_bytes=each.ram_bytes, vram_bytes=vram)
        return cls(ram_bytes=sum(each.resident_bytes for each in forecast.assignments[device].windows))


def peak(forecasts: Iterable[Forecast]) -> dict[str, Taken]:
    """Return the most that any of ``forecasts``, all of one model, takes of each device."""
    found: dict[str, Taken] = {}
    for forecast in forecasts:
        for device in forecast.plan.devices:
            taken = Taken.of(forecast, device)
            found[device] = found[device].or_else(taken) if device in found else taken
    return found
