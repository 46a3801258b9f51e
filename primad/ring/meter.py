"""What a ring process counts of its own work."""

from __future__ import annotations

from collections import deque
from typing import Final

import psutil

from primad.engine.streaming.prefetch import Streamer
from primad.engine.streaming.streams import Streams
from primad.ring.messages import MemoryStatus, Status

HOPS_KEPT: Final = 4096


class Meter:
    """What ``Status`` reports."""

    def __init__(self) -> None:
        self.steps = 0
        self.rows = 0
        self.compute_s = 0.0
        self.hop_s: deque[float] = deque(maxlen=HOPS_KEPT)

    def status(self, refused: int, streams: Streams) -> Status:
        """The figures until now; ``streams`` looks after the weights, where these are not llama.cpp's own copies."""
        memory = psutil.Process().memory_info()
        return Status(
            steps=self.steps,
            rows=self.rows,
            compute_s=self.compute_s,
            hop_s=list(self.hop_s),
            rss_bytes=memory.rss,
            private_bytes=memory.rss - getattr(memory, "shared", 0),
            refused=refused,
            memory=None if streams.streamer is None else _memory(streams.streamer, streams.outputs),
        )


def _memory(streamer: Streamer, outputs: frozenset[int]) -> MemoryStatus:
    now, experts = streamer.residency, streamer.experts
    by_expert = frozenset() if experts is None else experts.units.intersection(now.resident)
    total = 0 if experts is None else experts.pool.total_bytes
    shares = [part / size for part, size in zip(now.part_sizes, now.sizes, strict=True)]
    parted = sum(share for unit, share in enumerate(shares) if unit not in outputs)
    streamed = max(round(parted), parted > 0) + len(outputs & now.streamed) + len(by_expert)
    return MemoryStatus(
        resident=len(now.sizes) - streamed,
        streamed=streamed,
        slots=len(now.wanted(0)),
        resident_bytes=now.resident_bytes + now.pool_bytes,
        streamed_bytes=now.streamed_bytes + total - now.pool_bytes,
        read_bytes=streamer.read_bytes,
        stall_s=streamer.stall_s,
        pressure=streamer.level,
        output=("streamed" if outputs & now.streamed else "resident") if outputs else "",
    )
