"""What computing takes of electricity, where the machine can tell: RAPL counters of the processor, or a battery's gauge.

RAPL counts what the processor's packages take (Linux: powercap, root only on most systems); a battery that is being
emptied says what the whole machine takes at the moment. Elsewhere there is no figure, and none is made up.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

SYSFS: Final = Path("/sys/class")


@dataclass(frozen=True, slots=True)
class Gauge:
    """The energy counters of this machine: package domains of RAPL with the value at which each wraps, or a battery."""

    domains: tuple[tuple[Path, int], ...] = ()
    battery: Path | None = None

    def read(self) -> Reading:
        """The counters as of now."""
        watts = None if self.battery is None else _number(self.battery / "power_now")
        return Reading(
            time.monotonic(),
            tuple(_number(folder / "energy_uj") for folder, _ in self.domains),
            None if watts is None else watts / 1e6,
        )

    def joules(self, before: Reading, after: Reading) -> float | None:
        """What was taken between two readings; None where it cannot be told."""
        if self.domains:
            total = 0
            for (_, wraps), start, end in zip(self.domains, before.energy_uj, after.energy_uj, strict=True):
                if start is None or end is None:
                    return None
                total += end - start if end >= start else end - start + wraps
            return total / 1e6
        if before.watts is None or after.watts is None:
            return None
        return (before.watts + after.watts) / 2 * (after.at_s - before.at_s)


@dataclass(frozen=True, slots=True)
class Reading:
    """Microjoules of each domain, and the watts that a battery gives."""

    at_s: float
    energy_uj: tuple[int | None, ...]
    watts: float | None


def gauge(sysfs: Path = SYSFS) -> Gauge | None:
    """What counts energy here; None where nothing does."""
    domains = []
    for folder in sorted((sysfs / "powercap").glob("intel-rapl:*")):
        is_package = _text(folder / "name").startswith("package")
        wraps = _number(folder / "max_energy_range_uj")
        if is_package and wraps is not None and _number(folder / "energy_uj") is not None:
            domains.append((folder, wraps))
    if domains:
        return Gauge(domains=tuple(domains))
    for folder in sorted((sysfs / "power_supply").glob("BAT*")):
        if _text(folder / "status") == "Discharging" and _number(folder / "power_now") is not None:
            return Gauge(battery=folder)
    return None


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _number(path: Path) -> int | None:
    text = _text(path)
    return int(text) if text.isdecimal() else None
