"""Decide when bytes may be sent under a bandwidth cap, without clock or socket."""

from __future__ import annotations

from typing import Final

BURST_S: Final = 0.25


class TokenBucket:
    """At most ``bytes_per_s`` on average; None: no cap. After a pause, a quarter of a second's worth is sent immediately."""

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
