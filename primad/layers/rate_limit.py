"""Who may send how much and when, decided without clock or socket: fair turns and a bandwidth cap."""

from __future__ import annotations

from collections import deque
from typing import Final, Generic, TypeVar

Item = TypeVar("Item")

BURST_S: Final = 0.25


class FairQueue(Generic[Item]):
    """Items of several owners, at most ``maximum`` of each, taken in turns: an owner with many makes only itself wait."""

    def __init__(self, maximum: int) -> None:
        self._maximum = maximum
        self._waiting: dict[str, deque[Item]] = {}

    def put(self, owner: str, item: Item) -> bool:
        """Add ``item`` behind the others of ``owner``; False, and nothing is added, when it has too many."""
        waiting = self._waiting.setdefault(owner, deque())
        if len(waiting) >= self._maximum:
            return False
        waiting.append(item)
        return True

    def take(self) -> Item | None:
        """The next item of the owner whose turn it is; None when there is none."""
        for owner in self._waiting:
            waiting = self._waiting.pop(owner)
            item = waiting.popleft()
            if waiting:
                self._waiting[owner] = waiting  # behind all others
            return item
        return None


class TokenBucket:
    """At most ``bytes_per_s`` on average; None: no cap. After a pause a quarter of a second's worth goes at once."""

    def __init__(self, bytes_per_s: float | None) -> None:
        assert bytes_per_s is None or bytes_per_s > 0
        self._rate = bytes_per_s
        self._saved = 0.0
        self._at_s: float | None = None

    def take(self, size_bytes: int, now_s: float) -> float:
        """Book ``size_bytes`` at ``now_s``; the seconds to wait before sending them. Bookings are served in their order."""
        if self._rate is None:
            return 0.0
        burst = self._rate * BURST_S
        earned = burst if self._at_s is None else max(0.0, now_s - self._at_s) * self._rate
        self._saved = min(burst, self._saved + earned) - size_bytes
        self._at_s = now_s
        return max(0.0, -self._saved / self._rate)
