"""How much disk the layer cache may take, and which layers are evicted first: the least recently used. Decides only."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from primad.system.files import reserve_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class CachedLayer:
    """A layer in the cache: its size with all copies, when it was last used (Unix time), whether something holds it."""

    digest: str
    size_bytes: int
    used_s: float
    held: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Disk:
    """The size of the cache, its limit (None: no limit), and the disk it lies on."""

    used_bytes: int
    limit_bytes: int | None
    free_bytes: int
    total_bytes: int

    @property
    def reserve_bytes(self) -> int:
        """Disk space that always stays free."""
        return reserve_bytes(self.total_bytes)

    def excess(self, needed_bytes: int) -> int:
        """Bytes to evict before ``needed_bytes`` more fit; 0 or less when they fit."""
        over = needed_bytes + self.reserve_bytes - self.free_bytes
        return over if self.limit_bytes is None else max(over, self.used_bytes + needed_bytes - self.limit_bytes)


def oldest_first(layers: Iterable[CachedLayer], excess_bytes: int) -> list[CachedLayer]:
    """The layers to remove so that ``excess_bytes`` are gained: unheld, least recently used first; all of them when even
    that is not enough."""
    chosen: list[CachedLayer] = []
    gained = 0
    for layer in sorted((layer for layer in layers if not layer.held), key=lambda layer: (layer.used_s, layer.digest)):
        if gained >= excess_bytes:
            break
        chosen.append(layer)
        gained += layer.size_bytes
    return chosen
