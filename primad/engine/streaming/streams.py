"""All windows of a ring process and the one ``Streamer`` that looks after their units."""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, Protocol

from primad.engine.streaming.expert_loader import ExpertFiles, ExpertLoader
from primad.engine.streaming.expert_usage import UsageFolder
from primad.engine.streaming.pages import KNOWS_GROUPS, FileRange, Pages
from primad.engine.streaming.prefetch import Follower, Streamer, WindowStream
from primad.engine.streaming.pressure import PressureWatch
from primad.engine.streaming.readings import Sources
from primad.engine.streaming.residency import Residency, Spread, ahead_bytes, by_expert, two_slots
from primad.engine.streaming.units import WindowUnits, is_still_whole, without

LEAST_AHEAD_BYTES: Final = 16 << 20
"""So much is held of what streams, or two layers where they are smaller: with less the disk waits between small parts."""


LEAST_IN_GROUPS_BYTES: Final = 32 << 20
"""Smaller layers are not read in large groups of pages: what neighbours share of them would be too large a part."""
RESERVE_BYTES: Final = 16 << 20
"""So much of what a plan leaves over stays free: the system reads a little behind a part, and must not run dry over it."""


class Streamable(Protocol):
    """A window of llama.cpp."""

    def attach(self, stream: WindowStream | None) -> None:
        """Stream its units from now on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamedWindow:
    """Window ``index`` of the route: ``units`` are its layers' and its output matrix's places in files.

    Of its ``layers`` those in ``streamed``, counted from its first, are read each time they are used; ``layers`` itself
    stands for the output matrix.
    """

    index: int
    layers: int
    streamed: frozenset[int]
    units: WindowUnits

    def indices(self, first: int) -> frozenset[int]:
        """Its streamed units where its units begin at ``first``."""
        count = len(self.units.layers)
        layers = {first + layer for layer in self.streamed if layer < count}
        output = {first + count} if self.layers in self.streamed and self.units.output else set()
        return frozenset(layers | output)


class Streams:
    """``begin`` once the ``windows`` are loaded. They share ``slots`` buffers, and ``room_bytes`` more may stay.

    ``lock`` pins what stays.

    What the slots are for depends on who else computes: while other devices do, they are filled for the next window. A
    process that computes ``alone`` needs no more than to read one part while it computes another. How often experts are
    used is kept in the folder ``usage``, if there is one.
    """

    def __init__(
        self,
        windows: Iterable[StreamedWindow],
        *,
        slots: int,
        room_bytes: int,
        alone: bool,
        lock: bool,
        usage: Path | None,
    ) -> None:
        self._usage = usage
        self._alone = alone
        self._windows = sorted(windows, key=lambda window: window.index)
        self._slots, self._room_bytes, self._lock = slots, max(0, room_bytes - RESERVE_BYTES), lock
        self._rest = Pages([part for window in self._windows for part in window.units.rest])
        self._streamer = self._make()

    @property
    def streamer(self) -> Streamer | None:
        """What reads ahead; None where all weights are llama.cpp's own copies."""
        return self._streamer

    @property
    def outputs(self) -> frozenset[int]:
        """Which units are output matrices."""
        found, first = set(), 0
        for window in self._windows:
            first += len(window.units.layers)
            if window.units.output:
                found.add(first)
                first += 1
        return frozenset(found)

    def _make(self) -> Streamer | None:
        units: list[tuple[FileRange, ...]] = []
        streamed: set[int] = set()
        layers: set[int] = set()
        experts: dict[int, ExpertFiles] = {}
        for window in self._windows:
            streamed |= window.indices(len(units))
            layers |= set(range(len(units), len(units) + len(window.units.layers)))
            experts |= {len(units) + i: files for i, files in enumerate(window.units.experts) if files.tensors}
            units += [*window.units.layers, *([window.units.output] if window.units.output else [])]
        if not units:
            return None
        sizes = tuple(sum(part.size for part in unit) for unit in units)
        ahead = ahead_bytes(sizes, streamed, layers, self._slots)
        residency = Residency.whole(sizes, streamed, ahead)
        split = by_expert(residency, {unit: files.size for unit, files in experts.items()}, self._room_bytes)
        spread = None
        if split is not None:
            units = [without(unit, experts[i]) if i in experts else unit for i, unit in enumerate(units)]
        pages = [Pages(unit) for unit in units]
        if split is None:
            cuts = tuple(each.cuts() for each in pages)
            least = min(LEAST_AHEAD_BYTES, two_slots(sizes, range(len(sizes))))
            held = residency.held_bytes + self._room_bytes
            in_groups = KNOWS_GROUPS and statistics.median(sizes) >= LEAST_IN_GROUPS_BYTES
            spread = Spread(sizes, cuts, least if self._alone else max(ahead, least), in_groups)
            found = spread.within(held)
            if in_groups and found.held_bytes > held:
                spread = replace(spread, in_groups=False)
                found = spread.within(held)
            if streamed:
                residency = found
        return Streamer(
            pages,
            residency if split is None else split,
            spread=spread,
            experts=None
            if split is None
            else ExpertLoader(experts, split.pool_bytes, UsageFolder(self._usage), lock=self._lock),
            lock=self._lock,
            verify=is_still_whole,
            watch=PressureWatch(Sources().read),
        )

    def loading(self) -> AbstractContextManager[object]:
        """While llama.cpp loads the windows: what it reads of streamed units is given back behind it."""
        if self._streamer is None:
            return contextlib.nullcontext()
        return Follower([*self._streamer.streamed_pages(), *([self._rest] if self._rest.ranges else [])])

    def begin(self, models: Mapping[int, Streamable]) -> None:
        """Attach the windows, which llama.cpp has loaded as ``models`` by route index, and begin to read ahead.

        Raises ``EngineError``.
        """
        if self._rest.ranges and self._rest.mapped():
            self._rest.at_random()
        if self._streamer is None:
            return
        self._streamer.start()
        first = place = 0
        for window in self._windows:
            routers: dict[int, tuple[int, int]] = {}
            for layer, files in enumerate(window.units.experts if self._streamer.experts is not None else ()):
                if files.tensors:
                    routers[layer] = place, files.count
                    place += 1
            stream = WindowStream(
                self._streamer,
                first,
                layers=window.layers,
                cpu_layers=len(window.units.layers),
                output=bool(window.units.output),
                routers=routers,
            )
            models[window.index].attach(stream)
            first += len(window.units.layers) + bool(window.units.output)

    def end(self) -> None:
        """Read nothing any more; to be called before a window is released."""
        if self._streamer is not None:
            self._streamer.close()
            self._streamer = None
        self._rest.close()

    def reopened(self, indices: Sequence[tuple[int, int]], room_bytes: int) -> Streams:
        """The same for windows that are kept, (old route index, new one), under another plan; after ``end``."""
        new = dict(indices)
        kept = [replace(window, index=new[window.index]) for window in self._windows if window.index in new]
        return Streams(
            kept, slots=self._slots, room_bytes=room_bytes, alone=self._alone, lock=self._lock, usage=self._usage
        )
