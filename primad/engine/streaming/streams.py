"""All windows of a ring process and the one ``Streamer`` of their units."""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, Protocol

from halda import Assignment, WindowAssignment
from primad.engine.streaming.expert_loader import ExpertFiles, ExpertLoader
from primad.engine.streaming.expert_usage import UsageFolder
from primad.engine.streaming.pages import GROUP_BYTES, KNOWS_GROUPS, FileRange, Pages
from primad.engine.streaming.prefetch import Follower, Streamer, WindowStream
from primad.engine.streaming.pressure import PressureWatch
from primad.engine.streaming.readings import Sources
from primad.engine.streaming.residency import Spread, by_expert
from primad.engine.streaming.units import WindowUnits, is_still_whole, without

MIN_IN_GROUPS_BYTES: Final = 32 << 20
"""Smaller layers are not read in large groups of pages: too much of them would share groups with neighbours."""


class Streamable(Protocol):
    """A window of llama.cpp."""

    def attach(self, stream: WindowStream | None) -> None:
        """Stream its units from now on; None: all are in memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamedWindow:
    """Window ``index`` of the route: ``units`` are the file ranges of its layers and its output matrix.

    None where llama.cpp makes copies of its weights: these are not managed.
    """

    index: int
    assignment: WindowAssignment
    units: WindowUnits | None


class Streams:
    """Call ``begin`` once the ``windows`` are loaded. Their units keep the assigned bytes in memory, in sum.

    ``read_ahead_bytes`` of what streams are read ahead. ``lock`` pins what stays. Usage of experts is kept in the
    folder ``usage``, if there is one.
    """

    def __init__(
        self, windows: Iterable[StreamedWindow], *, read_ahead_bytes: int, lock: bool, usage: Path | None
    ) -> None:
        self._windows = sorted(windows, key=lambda window: window.index)
        self.assigned = Assignment(
            windows=tuple(window.assignment for window in self._windows), read_ahead_bytes=read_ahead_bytes
        )
        """What is to stay; memory pressure may reduce it."""
        self._lock, self._usage = lock, usage
        self._rest = Pages([part for _, units in self._cared_for for part in units.rest])
        self._streamer = self._make()
        self._is_reopened = False

    @property
    def streamer(self) -> Streamer | None:
        """Reads ahead; None where all weights are llama.cpp's own copies."""
        return self._streamer

    @property
    def _cared_for(self) -> list[tuple[StreamedWindow, WindowUnits]]:
        return [(window, window.units) for window in self._windows if window.units is not None]

    @property
    def outputs(self) -> frozenset[int]:
        """The units that are output matrices."""
        found, first = set(), 0
        for _, units in self._cared_for:
            first += len(units.layers)
            if units.output:
                found.add(first)
                first += 1
        return frozenset(found)

    def _make(self) -> Streamer | None:
        units: list[tuple[FileRange, ...]] = []
        experts: dict[int, ExpertFiles] = {}
        for _, own in self._cared_for:
            experts |= {len(units) + i: files for i, files in enumerate(own.experts) if files.tensors}
            units += [*own.layers, *([own.output] if own.output else [])]
        if not units:
            return None
        sizes = tuple(sum(part.size for part in unit) for unit in units)
        resident_bytes = max(0, sum(sizes) - self.assigned.streamed_bytes)
        spread, loader = None, None
        if experts and self.assigned.streamed_bytes:
            residency = by_expert(sizes, {unit: files.size for unit, files in experts.items()}, resident_bytes)
            units = [without(unit, experts[i]) if i in experts else unit for i, unit in enumerate(units)]
            loader = ExpertLoader(experts, residency.pool_bytes, UsageFolder(self._usage), lock=self._lock)
        pages = [Pages(unit) for unit in units]
        if loader is None:
            spread = Spread(sizes, tuple(each.cuts() for each in pages), self.assigned.read_ahead_bytes)
            residency = spread.keeping(resident_bytes)
            if KNOWS_GROUPS and statistics.median(sizes) >= MIN_IN_GROUPS_BYTES:
                groups = replace(spread, in_groups=True)
                found = groups.keeping(resident_bytes)
                # Else more of an output matrix would stream, since the bytes of layers between groups stay.
                if (
                    max(found.resident_bytes - resident_bytes, found.room_bytes - residency.room_bytes - GROUP_BYTES)
                    <= 0
                ):
                    spread, residency = groups, found
        return Streamer(
            pages,
            residency,
            spread=spread,
            experts=loader,
            lock=self._lock,
            verify=is_still_whole,
            watch=PressureWatch(Sources().read),
        )

    def loading(self) -> AbstractContextManager[object]:
        """Return a context for loading the windows in llama.cpp, which releases streamed units once they are read."""
        if self._streamer is None:
            return contextlib.nullcontext()
        return Follower([*self._streamer.streamed_pages(), *([self._rest] if self._rest.ranges else [])])

    def begin(self, models: Mapping[int, Streamable]) -> None:
        """Attach the windows, loaded by llama.cpp as ``models`` by route index, and start to read ahead.

        Raises ``EngineError``.
        """
        if self._rest.ranges and self._rest.mapped():
            self._rest.at_random()
        if self._streamer is None:
            return
        self._streamer.start(anew=self._is_reopened)
        first = place = 0
        for window, units in self._cared_for:
            routers: dict[int, tuple[int, int]] = {}
            for layer, files in enumerate(units.experts if self._streamer.experts is not None else ()):
                if files.tensors:
                    routers[layer] = place, files.count
                    place += 1
            stream = WindowStream(
                self._streamer,
                first,
                layers=window.assignment.layers,
                ram_layers=len(units.layers),
                output=bool(units.output),
                routers=routers,
            )
            models[window.index].attach(stream)
            first += len(units.layers) + bool(units.output)

    def end(self) -> None:
        """Stop reading; call it before a window is released."""
        if self._streamer is not None:
            self._streamer.close()
            self._streamer = None
        self._rest.close()

    def reopened(
        self, indices: Sequence[int], assignments: Sequence[WindowAssignment], read_ahead_bytes: int
    ) -> Streams:
        """Return the same for these windows, in their order, under another plan; call it after ``end``."""
        found = Streams(
            (
                replace(window, index=index, assignment=assignment)
                for window, index, assignment in zip(self._windows, indices, assignments, strict=True)
            ),
            read_ahead_bytes=read_ahead_bytes,
            lock=self._lock,
            usage=self._usage,
        )
        found._is_reopened = True
        return found
