"""The most that the owner of a device lets primad use of it; plans see the device as if it had no more."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from primad.settings.quantities import Amount, Share, bytes_of


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnerLimits:
    """The most that primad uses of this device; None is no limit besides what is free.

    ``ram`` and ``vram`` may be shares of what the device has; ``disk_bytes`` is the size limit of the layer cache.
    ``gpu`` names the GPUs to use where there are several, or is "off".
    """

    ram: Amount | None
    vram: Amount | None
    disk_bytes: int | None
    gpu: str | None = None

    def ram_bytes(self, available_bytes: int, total_bytes: int) -> int:
        """Bytes of memory that may be used, given what is available and in total."""
        return available_bytes if self.ram is None else min(available_bytes, bytes_of(self.ram, total_bytes))

    def vram_bytes(self, available_bytes: int, total_bytes: int) -> int:
        """Bytes of a GPU's memory that may be used, given what is available and in total."""
        return available_bytes if self.vram is None else min(available_bytes, bytes_of(self.vram, total_bytes))

    def vram_of_each(self, sizes: Sequence[tuple[int, int]]) -> list[int]:
        """The same for each of several GPUs, given (available, total) of each: a share applies to each GPU, a number of
        bytes to all together, the first ones first."""
        found = list[int]()
        for available, total in sizes:
            taken = 0 if isinstance(self.vram, Share) else sum(found)
            found.append(max(0, self.vram_bytes(available + taken, total) - taken))
        return found

    def disk_for_layers(self, free_bytes: int, cached_bytes: int) -> int:
        """Bytes of a disk that layers may take. Cached layers can be evicted for those of a new plan."""
        room = free_bytes + cached_bytes
        return room if self.disk_bytes is None else min(room, self.disk_bytes)


NO_LIMITS: Final = OwnerLimits(ram=None, vram=None, disk_bytes=None)
"""No limits: primad may use what is free."""
