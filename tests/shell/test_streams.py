"""A ring process keeps the assigned part of its windows resident and reports it; nothing is loaded here."""

from __future__ import annotations

import mmap
import os
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from halda import WindowAssignment
from primad.engine.streaming.pages import FileRange
from primad.engine.streaming.prefetch import WindowStream
from primad.engine.streaming.residency import ladder
from primad.engine.streaming.streams import StreamedWindow, Streams
from primad.engine.streaming.units import WindowUnits
from primad.ring.meter import Meter

LAYER, OUTPUT, LAYERS = 1 << 20, 3 << 20, 4
"""Layers so small that each streams as a whole or not at all."""


def a_window(folder: Path, index: int, streamed_bytes: int, *, output: bool) -> StreamedWindow:
    """A window of four layers, each in its own file."""
    units = []
    for number, size in enumerate([LAYER] * LAYERS + [OUTPUT] * output):
        path = folder / f"{index}-{number}.weights"
        path.write_bytes(bytes(size))
        units.append((FileRange(str(path), 0, size),))
    assignment = WindowAssignment(
        first=index * LAYERS,
        last=(index + 1) * LAYERS,
        gpu_layers=0,
        output="cpu" if output else "none",
        layer_bytes=LAYERS * LAYER,
        output_bytes=OUTPUT * output,
        resident_bytes=LAYERS * LAYER + OUTPUT * output - streamed_bytes,
    )
    return StreamedWindow(
        index=index,
        assignment=assignment,
        units=WindowUnits(tuple(units[:LAYERS]), (), units[LAYERS] if output else (), ()),
    )


@contextmanager
def ended(streams: Streams) -> Iterator[Streams]:
    try:
        yield streams
    finally:
        streams.end()


def streams_of(folder: Path, *streamed: int) -> AbstractContextManager[Streams]:
    """Windows that stream ``streamed`` bytes each; the last one has the output matrix."""
    windows = [a_window(folder, i, size, output=i == len(streamed) - 1) for i, size in enumerate(streamed)]
    return ended(Streams(windows, read_ahead_bytes=LAYER, lock=False, usage=None))


@pytest.mark.parametrize(
    ("streamed", "layers", "output"),
    [
        ((0, 0), 0, False),
        ((LAYER // 8, LAYER // 8), 1, False),
        ((LAYER, 2 * LAYER), 3, False),
        ((4 * LAYER, 4 * LAYER), 8, False),
        ((4 * LAYER, 4 * LAYER + OUTPUT // 2), 8, True),
    ],
)
def test_all_windows_keep_and_report_the_memory_assigned_to_them(tmp_path, streamed, layers, output):
    with streams_of(tmp_path, *streamed) as streams:
        residency = streams.streamer.residency
        kept = streams.assigned.resident_bytes
        assert kept - LAYER <= residency.resident_bytes <= kept
        assert residency.read_bytes in (residency.streamed_bytes, 0 if residency.streamed_bytes <= LAYER else None)
        printed = Meter().status(0, streams).memory
        assert (printed.streamed, printed.resident, printed.streams_output) == (layers, 2 * LAYERS - layers, output)
        assert (printed.streamed, printed.read_ahead_bytes) == (
            streams.assigned.streamed_layers,
            LAYER if layers else 0,
        )
        assert printed.resident_bytes + printed.streamed_bytes == sum(residency.sizes)


def test_under_memory_pressure_the_remaining_resident_layers_are_reported(tmp_path):
    with streams_of(tmp_path, LAYER, LAYER) as streams:
        streamer = streams.streamer
        assert not streamer.is_short
        minimum = ladder(streamer.residency, streamer._spread)[-1]
        streamer._climb(len(streamer._levels) - 1)
        assert streamer.is_short
        assert streamer.residency == minimum
        printed = Meter().status(0, streams).memory
        assert (printed.resident, printed.streamed, printed.streams_output) == (0, 2 * LAYERS, True)
        assert printed.resident_bytes == minimum.resident_bytes


def test_another_plan_may_keep_more_or_less_of_the_same_windows(tmp_path):
    with streams_of(tmp_path, 2 * LAYER, 2 * LAYER) as streams:
        assert streams.streamer.residency.streams
    kept = [a_window(tmp_path, i, 0, output=i == 1).assignment for i in (0, 1)]
    with ended(streams.reopened([3, 5], kept, LAYER)) as again:
        assert again.streamer.residency.read_bytes == 0
        assert again.assigned.streamed_layers == 0


class Loaded:
    """A window that computes nothing."""

    def attach(self, stream: WindowStream | None) -> None:
        """Ignored."""


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere nothing that streams is ever given back")
def test_units_resident_in_another_plan_are_released(tmp_path):
    windows = [a_window(tmp_path, i, 0, output=i == 1) for i in (0, 1)]
    models = {window.index: Loaded() for window in windows}
    with ExitStack() as stack:
        for path in tmp_path.iterdir():
            file = stack.enter_context(path.open("rb"))
            os.fsync(file.fileno())  # only what is on disk can leave memory
            stack.enter_context(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
        with ended(Streams(windows, read_ahead_bytes=LAYER, lock=False, usage=None)) as before:
            before.begin(models)
            assert not any(part.missing() for unit in range(9) for part in before.streamer._rest(unit, (0, 0)))
        less = [replace(window.assignment, resident_bytes=LAYER) for window in windows]
        with ended(before.reopened([0, 1], less, LAYER)) as after:
            after.begin(models)
            streamer = after.streamer
            later = streamer.residency.streamed.difference(streamer.residency.wanted(0))
            assert len(later) >= LAYERS
            assert all(streamer._part(unit).missing() == LAYER for unit in later if unit < 2 * LAYERS)
