"""Split layers in proportion, as systems do that know of each device nothing but its memory."""

from __future__ import annotations

from collections.abc import Sequence


def apportion(weights: Sequence[int], total: int, *, minimum: Sequence[int]) -> list[int]:
    """Split ``total`` in proportion to ``weights`` by largest remainder, at least ``minimum[i]`` each; sums to ``total``."""
    assert total >= sum(minimum)
    free = total - sum(minimum)
    ideal = [weight / sum(weights) * total for weight in weights]
    wanted = [max(0.0, want - low) for want, low in zip(ideal, minimum, strict=True)]
    scale = free / sum(wanted) if sum(wanted) else 0.0
    extra = [int(want * scale) for want in wanted]
    by_remainder = sorted(range(len(weights)), key=lambda i: extra[i] - wanted[i] * scale)
    for i in by_remainder[: free - sum(extra)]:
        extra[i] += 1
    return [low + more for low, more in zip(minimum, extra, strict=True)]
