"""What a ring process measures of its own work."""

from __future__ import annotations

import statistics
from collections import deque
from typing import Final

import msgspec
import psutil

from halda.assignment import layers_worth
from primad.engine.streaming.streams import Streams
from primad.ring.messages import MAX_HOPS, DecodeStatus, DraftStatus, MemoryStatus, PromptStatus, Status

TOKENS_KEPT: Final = 32
CHUNKS_KEPT: Final = 8
"""The fastest of this many prompt chunks counts: the first chunk of a prompt has the least to attend to."""
LARGE_ROWS: Final = 64
"""Chunks of this many rows take about as long per row as any larger ones."""


class _Visit(msgspec.Struct, frozen=True):
    """One row in one window: seconds of computing and of waiting for the disk, and bytes read since the visit
    before."""

    compute_s: float
    stall_s: float
    read_bytes: int


class Meter:
    """Measures what ``Status`` reports."""

    def __init__(self) -> None:
        self.steps = 0
        self.rows = 0
        self.compute_s = 0.0
        self.hop_s: deque[float] = deque(maxlen=MAX_HOPS)
        self._visits: dict[int, deque[_Visit]] = {}
        self._chunks: dict[int, deque[tuple[float, int]]] = {}
        """By visit: seconds per row and number of rows of the latest large chunks."""
        self._token_s: deque[float] = deque(maxlen=TOKENS_KEPT)
        self._drawn: tuple[int, float] | None = None
        self._disk: tuple[float, int] | None = None

    def computed(self, visit: int, rows: int, seconds: float, streams: Streams) -> None:
        """Note that a step of ``rows`` was computed in ``seconds``; ``visit`` distinguishes the visits of a step to
        this device."""
        self.steps += 1
        self.rows += rows
        self.compute_s += seconds
        before, self._disk = self._disk, _disk(streams)
        if before is None:  # bytes read before the first visit were read to load
            return
        waited_s, read_bytes = self._disk[0] - before[0], max(0, self._disk[1] - before[1])
        if rows >= LARGE_ROWS:
            chunks = self._chunks.setdefault(visit, deque(maxlen=CHUNKS_KEPT))
            chunks.append(((seconds - waited_s) / rows, rows))
        if rows == 1:
            kept = self._visits.setdefault(visit, deque(maxlen=TOKENS_KEPT))
            kept.append(_Visit(seconds - waited_s, waited_s, read_bytes))

    def drew(self, request: int, now: float, *, alone: bool) -> None:
        """Note a sampled token of ``request``. Its time is counted only while one row has the ring ``alone``."""
        if alone and self._drawn is not None and self._drawn[0] == request:
            self._token_s.append(now - self._drawn[1])
        self._drawn = (request, now) if alone else None

    def decode(self) -> DecodeStatus:
        """The cost of the latest tokens."""
        visits = self._visits.values()
        return DecodeStatus(
            tokens=min(map(len, visits), default=0),
            token_s=statistics.median(self._token_s) if self._token_s else None,
            compute_s=sum(statistics.median(each.compute_s for each in kept) for kept in visits),
            stall_s=sum(statistics.fmean(each.stall_s for each in kept) for kept in visits),
            read_bytes=sum(statistics.fmean(each.read_bytes for each in kept) for kept in visits),
        )

    def prompt(self) -> PromptStatus | None:
        """The cost of a row of the latest prompts; None before the first large chunk."""
        quickest = [min(chunks) for chunks in self._chunks.values()]
        if not quickest:
            return None
        return PromptStatus(
            rows=statistics.fmean(rows for _, rows in quickest), row_s=sum(row_s for row_s, _ in quickest)
        )

    def status(self, refused: int, streams: Streams, drafts: DraftStatus | None = None) -> Status:
        """The figures so far; ``streams`` manages the weights, ``drafts`` are the counts of drafts."""
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
            decode=self.decode(),
            prompt=self.prompt(),
            drafts=drafts,
        )


def _disk(streams: Streams) -> tuple[float, int]:
    """Seconds waited for the disk and bytes read so far; asking takes a while, so it is done only where layers
    stream."""
    streamer = streams.streamer
    if streamer is None:
        return 0.0, 0
    reads = streamer.residency.streams or streamer.experts is not None
    return streamer.stall_s, streamer.read_bytes if reads else 0


def _memory(streams: Streams) -> MemoryStatus:
    kept, streamer = streams.assigned, streams.streamer
    if streamer is None:
        return MemoryStatus(
            resident=kept.layers,
            streamed=0,
            streams_output=False,
            read_ahead_bytes=0,
            resident_bytes=kept.resident_bytes,
            streamed_bytes=0,
            read_bytes=0,
            stall_s=0.0,
            pressure="calm",
        )
    now, total = streamer.residency, streamer.experts.pool.total_bytes if streamer.experts is not None else 0
    streamed, read_ahead = kept.streamed_layers, kept.read_ahead_bytes if kept.streamed_bytes else 0
    if streamer.is_short:
        layers = [unit for unit in range(len(now.sizes)) if unit not in streams.outputs]
        part = sum(now.part_sizes[unit] for unit in layers) + total - now.pool_bytes
        streamed = layers_worth(part, sum(now.sizes[unit] for unit in layers) + total, len(layers))
        read_ahead = min(now.room_bytes, now.streamed_bytes)
    return MemoryStatus(
        resident=kept.layers - streamed,
        streamed=streamed,
        streams_output=bool(streams.outputs & now.streamed),
        read_ahead_bytes=read_ahead,
        resident_bytes=now.resident_bytes + now.pool_bytes,
        streamed_bytes=now.streamed_bytes + total - now.pool_bytes,
        read_bytes=streamer.read_bytes,
        stall_s=streamer.stall_s,
        pressure=streamer.level,
        experts_picked=0 if streamer.experts is None else streamer.experts.pool.picked,
        experts_found=0 if streamer.experts is None else streamer.experts.pool.found,
    )
