"""What a ring process counts of its own work."""

from __future__ import annotations

from collections import deque
from typing import Final

import psutil

from halda.assignment import layers_worth
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
        """The figures until now; ``streams`` looks after the weights."""
        memory = psutil.Process().memory_info()
        return Status(
            steps=self.steps,
            rows=self.rows,
            compute_s=self.compute_s,
            hop_s=list(self.hop_s),
            rss_bytes=memory.rss,
            private_bytes=memory.rss - getattr(memory, "shared", 0),
            refused=refused,
            memory=_memory(streams),
        )


def _memory(streams: Streams) -> MemoryStatus:
    kept, streamer = streams.assigned, streams.streamer
    if streamer is None:
        return MemoryStatus(
            resident=kept.layers,
            streamed=0,
            streams_output=False,
            ahead_bytes=0,
            resident_bytes=kept.resident_bytes,
            streamed_bytes=0,
            read_bytes=0,
            stall_s=0.0,
            pressure="calm",
        )
    now, total = streamer.residency, streamer.experts.pool.total_bytes if streamer.experts is not None else 0
    streamed, ahead = kept.streamed_layers, kept.ahead_bytes if kept.streamed_bytes else 0
    if streamer.is_short:
        layers = [unit for unit in range(len(now.sizes)) if unit not in streams.outputs]
        part = sum(now.part_sizes[unit] for unit in layers) + total - now.pool_bytes
        streamed = layers_worth(part, sum(now.sizes[unit] for unit in layers) + total, len(layers))
        ahead = min(now.room_bytes, now.streamed_bytes)
    return MemoryStatus(
        resident=kept.layers - streamed,
        streamed=streamed,
        streams_output=bool(streams.outputs & now.streamed),
        ahead_bytes=ahead,
        resident_bytes=now.resident_bytes + now.pool_bytes,
        streamed_bytes=now.streamed_bytes + total - now.pool_bytes,
        read_bytes=streamer.read_bytes,
        stall_s=streamer.stall_s,
        pressure=streamer.level,
    )
