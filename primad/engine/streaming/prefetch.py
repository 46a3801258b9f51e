"""Streaming: one thread reads what a ``Residency`` wants before the computing thread needs it, and releases what was
used.

The computing thread reports its position at each border between units (``reach``), and waits there only for a unit that
is not in memory yet. The loader thread first releases what is no longer wanted, then reads what is wanted, nearest
first, one piece at a time, so that it can switch to something nearer in between. It never reads more than the residency
allows to be held, and never releases a resident unit. The held bytes of a part are always its beginning, so a part that
was begun is continued where reading stopped.

Resident weights are checked as well: those of one unit a step, and all of a window after the ring was idle; what the
system evicted is read again by range. Between prompts more stays in memory, in the room that freed scratch memory
leaves (``prepare`` and ``spare``). After every visit the files' stamps show whether one was written to.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Final

from primad.engine.streaming.expert_loader import ExpertLoader
from primad.engine.streaming.experts import Picks
from primad.engine.streaming.pages import COLD, IDLE_S, ByteRange, Pages, ReadCall, disk_read_bytes
from primad.engine.streaming.pressure import Grow, Hold, Holding, Level, PressureWatch, Replan, Shrink
from primad.engine.streaming.residency import Residency, Spread, ladder
from primad.errors import EngineError, WeightsError
from primad.settings.timings import StreamingTimings

logger = logging.getLogger(__name__)

WAIT_S: Final = 300.0
"""A disk that takes longer for one unit counts as failed."""
SPARE_LEVELS: Final = 4
"""Steps in which that room is used, since not all of it may still be there."""

Verify = Callable[[str], bool]
"""Whether the weights in a file that was written to are still the same."""


class Streamer:
    """The pages of one ring process's units, in visiting order. Call ``start`` once llama.cpp has loaded them.

    ``spread`` says what else may stay or stream with more or less room; without it units stream as a whole. ``reach``,
    ``arrive`` and ``depart`` belong to the computing thread; any thread may call the others.
    """

    def __init__(
        self,
        units: Sequence[Pages],
        residency: Residency,
        *,
        spread: Spread | None,
        experts: ExpertLoader | None,
        lock: bool,
        verify: Verify,
        watch: PressureWatch,
        timings: StreamingTimings = StreamingTimings(),
    ) -> None:
        assert len(units) == len(residency.sizes)
        self.experts = experts
        """Loads the experts of layers that stream by expert; these are not part of the units."""
        self._units = tuple(units)
        self._residency = residency
        self._spread = spread
        self._levels, self._base, self._level = ladder(residency, spread), 0, 0
        self._spare_bytes = 0
        self._braced_s: float | None = None
        self._is_settled = False
        held = [level.held_bytes for level in self._levels]
        self._layer_bytes = max((more - less for more, less in pairwise(held)), default=max(residency.sizes))
        self._watch, self._timings = watch, timings
        self._reported_evicted = 0
        self._replan: int | None = None
        self._lock_resident = self._may_lock = lock
        self._verify = verify
        self._mutex = threading.RLock()  # taken with each token; by way of the condition this is four more calls
        self._condition = threading.Condition(self._mutex)
        self._position = 0
        self._held: dict[int, int] = {}
        # Of a surplus unit, more may be in memory than stays or is held; of a lacking one, less than should stay in a
        # range.
        self._surplus: set[int] = set()
        self._lacking: dict[int, tuple[int, int]] = {}
        self._error: EngineError | None = None
        self._closing = False
        self._next_look = 0
        self._looked_s = 0.0
        self._departed_s = self._arrived_s = time.monotonic()
        self._thread: threading.Thread | None = None
        self._files: dict[tuple[int, int], list[Pages]] = {}
        self._asked_bytes = 0
        self._read_before = disk_read_bytes()
        self.stall_s = 0.0
        """Seconds that the computing thread has waited so far."""
        self.evicted_bytes = 0
        """Bytes of resident units that the system evicted so far."""

    @property
    def residency(self) -> Residency:
        """What stays and what streams at present."""
        return self._residency

    @property
    def level(self) -> Level:
        """The level of memory pressure."""
        return self._watch.level

    @property
    def is_short(self) -> bool:
        """Whether less stays than was assigned, since memory is short."""
        return self._level > self._base

    def take_replan(self) -> int | None:
        """Return the bytes that only another plan can free, once; None when no replan is needed."""
        needed, self._replan = self._replan, None
        return needed

    @property
    def read_bytes(self) -> int:
        """Bytes that this process read from disk since ``start``; the requested bytes where the system does not count
        them."""
        now = disk_read_bytes()
        if now is None or self._read_before is None:
            return self._asked_bytes + (self.experts.asked_bytes if self.experts is not None else 0)
        return now - self._read_before

    def streamed_pages(self) -> list[ByteRange]:
        """Return the ranges that are not to be held after loading."""
        parts = [self._part(unit) for unit in sorted(self._residency.streamed)] if self._residency.streams else []
        return [*parts, *(self.experts.loaded_pages() if self.experts is not None else [])]

    def _part(self, unit: int) -> ByteRange:
        """Return the part of ``unit`` that streams."""
        return self._units[unit].part(*self._residency.parts[unit])

    def _rest(self, unit: int, part: tuple[int, int], place: tuple[int, int] | None = None) -> list[ByteRange]:
        """Return what stays of ``unit``, or of the range ``place`` in it, when ``part`` streams."""
        pages = self._units[unit]
        first, last = place or (0, pages.size)
        begin, end = part if part[0] < part[1] else (last, last)
        found = (first, min(begin, last)), (max(end, first), last)
        return [pages.part(*each) for each in found if each[0] < each[1]]

    def start(self, *, anew: bool = False) -> None:
        """Start to read ahead. ``anew``: parts that stream now may be resident from another plan, and are released
        first.

        Raises ``EngineError`` where a unit is not mapped or cannot be locked.
        """
        for unit in self._units:
            unit.find()
            if self._spread is not None and self._spread.in_groups:
                unit.in_groups()
        self._read_before, self._asked_bytes = disk_read_bytes(), 0
        residency = self._residency
        for number in residency.streamed if anew and residency.streams else ():
            self._part(number).unlock()
            self._part(number).release()
        for number in range(len(self._units)):
            for rest in self._rest(number, residency.parts[number]):
                self._asked_bytes += rest.read()
                if self._lock_resident:
                    rest.lock()
        if self.experts is not None:
            self.experts.start()
        if not residency.streams:
            self._held = residency.wanted(0)
        self._thread = threading.Thread(target=self._run, name="loader", daemon=True)
        self._thread.start()

    # ---- the computing thread ------------------------------------------------------------------------------------------

    def arrive(self, first: int, last: int) -> None:
        """Prepare for a window of units ``first <= unit < last``. Raises ``EngineError``."""
        now = self._arrived_s = time.monotonic()
        idle = now - self._departed_s > IDLE_S
        self.reach(first)
        if now - self._looked_s > self._timings.look_every_s:
            with self._condition:  # here, while tokens are computed, so as not to delay their results
                self._condition.notify_all()
        if idle:
            start = time.perf_counter()
            for unit in range(first, last):
                self._look_at(unit)
            self.stall_s += time.perf_counter() - start

    def reach(self, unit: int) -> None:
        """Report that the step is before ``unit``, so that earlier units may be released; return when ``unit`` is in
        memory.

        Raises ``EngineError`` when it cannot be read.
        """
        with self._mutex:
            self._position = unit
            is_there = self._is_there(unit)
            if self._residency.streams or not is_there:
                self._condition.notify_all()  # if nothing streams, the loader does not need each token's position
            if not is_there:
                start = time.perf_counter()
                if not self._condition.wait_for(lambda: self._is_there(unit) or self._error is not None, WAIT_S):
                    raise EngineError(f"a layer could not be read within {WAIT_S:g} s; the disk hangs")
                self.stall_s += time.perf_counter() - start
            if self._error is not None:
                raise self._error

    def _is_there(self, unit: int) -> bool:
        if unit in self._lacking:
            return False
        return self._held.get(unit, 0) >= self._residency.part_sizes[unit]  # it may become resident during the wait

    def depart(self, first: int, last: int) -> None:
        """Finish a window. Raises ``EngineError`` if a weight file changed: then its results must not leave."""
        with self._mutex:
            self._position = last % len(self._units)
            self._departed_s = time.monotonic()
            if self._residency.streams:
                self._condition.notify_all()
        self.prove(first, last)

    def prove(self, first: int, last: int) -> None:
        """Raise ``WeightsError`` if a weight file of units ``first <= unit < last`` has changed."""
        for pages in self._files_of(first, last):
            for path in pages.changed():
                if not self._verify(path):
                    raise WeightsError(
                        f"{path}: this file was modified while it was used; it is no longer the model", path
                    )
                pages.trust(path)

    def _files_of(self, first: int, last: int) -> Sequence[Pages]:
        """Return units that together have all files of a window: many units may be in one file."""
        if (first, last) not in self._files:
            seen: set[str] = set()
            chosen = []
            for unit in self._units[first:last]:
                paths = {part.path for part in unit.ranges}
                if not paths <= seen:
                    chosen.append(unit)
                    seen |= paths
            self._files[first, last] = chosen
        return self._files[first, last]

    def prepare(self) -> None:
        """Prepare for a step that needs all its scratch memory: release what uses its room."""
        with self._condition:
            self._braced_s, self._is_settled = None, False
            if self._level < self._base:
                self._climb(self._base)

    def resolve(self) -> None:
        """Note that a small step follows large ones: prefill is over, and freed room may be used immediately."""
        with self._condition:
            self._is_settled = True

    def spare(self, scratch_bytes: int) -> None:
        """Use the room of ``scratch_bytes`` of freed scratch memory; ``prepare`` precedes the next step that needs
        them."""
        with self._condition:
            self._braced_s = time.monotonic()
            if scratch_bytes <= self._spare_bytes:
                return
            self._spare_bytes = scratch_bytes
            if self._level < self._base:  # a failed step left another window's scratch memory in use
                self._climb(self._base)
            base: Residency = self._levels[self._base]
            above: list[Residency] = []
            for step in range(SPARE_LEVELS, 0, -1):
                level = self._with_more(base, scratch_bytes * step // SPARE_LEVELS)
                if base.held_bytes < level.held_bytes < (above[-1].held_bytes if above else math.inf):
                    above.append(level)
            self._levels = (*above, *self._levels[self._base :])
            self._level += len(above) - self._base
            self._base = len(above)

    def _with_more(self, base: Residency, more_bytes: int) -> Residency:
        if self.experts is not None:
            return replace(base, pool_bytes=min(base.pool_bytes + more_bytes, self.experts.pool.total_bytes))
        if self._spread is None or not base.streams:
            return base
        return self._spread.within(base.held_bytes + more_bytes)

    # ---- any thread ----------------------------------------------------------------------------------------------------

    def change(self, residency: Residency) -> None:
        """Stream other parts from now on; the loader thread soon releases and reads accordingly."""
        assert residency.sizes == self._residency.sizes
        with self._condition:
            before, self._residency = self._residency, residency
            for unit, sizes in enumerate(zip(before.part_sizes, residency.part_sizes, strict=True)):
                if sizes[0] != sizes[1]:
                    self._move(unit, before.parts[unit], residency.parts[unit])
            self._condition.notify_all()
        if self.experts is not None and residency.pool_bytes != before.pool_bytes:
            self.experts.resize(residency.pool_bytes)

    def _move(self, unit: int, was: tuple[int, int], now: tuple[int, int]) -> None:
        """Change the streamed part of ``unit`` to one inside or around the former; call it with the lock held."""
        before, behind = was[1] - was[0], now[1] - now[0]
        held = self._held.pop(unit, 0)
        is_there = unit not in self._lacking and held >= before
        if behind > before and is_there:
            held = behind  # all of it is in memory; the loader releases what is not wanted
        elif behind > before:
            held = 0 if unit in self._lacking else held + was[0] - now[0]
            self._surplus.add(unit)
        else:
            held = min(max(held + was[0] - now[0], 0), behind)
            if self._may_lock or not is_there:
                known = self._lacking.get(unit, was)
                self._lacking[unit] = min(known[0], was[0]), max(known[1], was[1])
        if held:
            self._held[unit] = held
        if behind > before and self._lock_resident:
            self._units[unit].part(*now).unlock()

    def close(self) -> None:
        """End the loader thread and close the files."""
        with self._condition:
            self._closing = True
            self._condition.notify_all()
        if self._thread is not None:
            self._thread.join(self._timings.close_timeout_s)
            if self._thread.is_alive():  # the disk hangs; closing must end anyway
                logger.warning("a layer that is being read does not come; its file stays open")
                return
        if self.experts is not None:
            self.experts.close()
        for unit in self._units:
            unit.close()

    # ---- the loader thread ---------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._closing:
                self._turn()
        except EngineError as exc:
            with self._condition:
                self._error = exc
                self._condition.notify_all()
        except Exception as exc:
            logger.exception("the loader thread ended")
            with self._condition:
                self._error = EngineError(f"reading layers ahead failed: {exc}")
                self._condition.notify_all()

    def _turn(self) -> None:
        self._attend_to_pressure()
        with self._condition:
            stale = self._let_go()  # as ranges: another thread may change what streams at any time
            due = self._first()
        for part in stale:
            part.release()
        if due is not None:
            unit, until = due
            if until is None:
                self._complete(unit)
            else:
                self._load(unit, until)
            return
        if stale:
            return
        now = time.monotonic()
        if now - self._looked_s > self._timings.look_every_s > now - max(self._arrived_s, self._departed_s):
            self._looked_s = now
            self._look_at_one()
        with self._condition:
            wanted = self._residency.wanted(self._position)
            is_due = self._surplus or self._first() is not None
            is_due = is_due or any(held > wanted.get(unit, 0) for unit, held in self._held.items())
            if not (self._closing or is_due):
                self._condition.wait(IDLE_S)

    def _let_go(self) -> list[ByteRange]:
        """Return ranges that are no longer wanted and are, or may be, in memory; call it with the lock held."""
        wanted, found = self._residency.wanted(self._position), []
        for unit in self._surplus.union(self._held):
            begin, end = self._residency.parts[unit]
            keep, held = wanted.get(unit, 0), self._held.pop(unit, 0)
            last = end if unit in self._surplus else begin + held
            if begin + keep < last:
                found.append(self._units[unit].part(begin + keep, last))
            if held := min(held, keep):
                self._held[unit] = held
            if held == keep:
                self._surplus.discard(unit)
        return found

    def _first(self) -> tuple[int, int | None] | None:
        """Return what to read next: a unit and the bytes of its part, or None for what it lacks; call it with the lock
        held."""
        count, position = len(self._units), self._position
        wanted = self._residency.wanted(position)
        load = next((unit for unit, size in wanted.items() if self._held.get(unit, 0) < size), None)
        lacking = min(self._lacking, key=lambda unit: (unit - position) % count, default=None)
        if lacking is not None and (load is None or (lacking - position) % count <= (load - position) % count):
            return lacking, None
        return None if load is None else (load, wanted[load])

    def _attend_to_pressure(self) -> None:
        """Move down or up the ladder as the pressure watch decides."""
        total = self.evicted_bytes + (self.experts.evicted_bytes if self.experts is not None else 0)
        evicted, self._reported_evicted = total - self._reported_evicted, total
        with self._condition:
            now, level, levels = self._residency, self._level, self._levels
            settled = self._braced_s is not None and (
                self._is_settled or time.monotonic() - self._braced_s > self._timings.settled_s
            )
            returned = levels[level - 1].held_bytes - now.held_bytes if 0 < level <= self._base and settled else 0
            growable = level if settled else max(level - self._base, 0)
        locked = now.resident_bytes + now.pool_bytes if self._may_lock else 0
        holding = Holding(
            held_bytes=now.held_bytes - locked,
            layer_bytes=self._layer_bytes,
            shrinkable=len(levels) - 1 - level,
            growable=growable,
            returned_bytes=returned,
            evicted_bytes=evicted,
        )
        match self._watch.sample(time.monotonic(), holding):
            case Shrink(layers):
                with self._condition:
                    self._climb(min(self._level + layers, len(self._levels) - 1))
            case Grow():
                with self._condition:
                    if self._braced_s is not None or self._level > self._base:  # else a prompt has come meanwhile
                        self._climb(max(self._level - 1, 0))
            case Replan(needed_bytes):
                self._replan = needed_bytes
            case Hold():
                pass

    def _climb(self, level: int) -> None:
        now = self._levels[level]
        severity = logging.DEBUG if level <= self._base and self._level <= self._base else logging.INFO
        logger.log(severity, "memory: %d MB resident (pressure: %s)", now.resident_bytes // 1_000_000, self.level)
        self._level = level
        self.change(now)

    def _load(self, unit: int, until: int) -> None:
        """Read the streamed part of ``unit`` up to ``until``, unless something else becomes more urgent."""
        with self._condition:
            place, held = self._residency.parts[unit], self._held.get(unit, 0)
        for piece in self._units[unit].part(place[0] + held, place[0] + until).pieces():
            if self._closing or not self._is_still_first(unit, until):
                return
            self._read(piece)
            held += piece.size
            with self._condition:
                if self._residency.parts[unit] != place:
                    self._surplus.add(unit)
                    return
                self._held[unit] = held
                self._condition.notify_all()

    def _complete(self, unit: int) -> None:
        """Read what is to become resident of ``unit``, as ``_load`` does."""
        with self._condition:
            was, now = self._lacking[unit], self._residency.parts[unit]
        came = self._rest(unit, now, was)
        for part in came:
            for piece in part.pieces():
                if self._closing or self._residency.parts[unit] != now or not self._is_still_first(unit, None):
                    return
                self._read(piece)
        with self._condition:
            if (self._lacking[unit], self._residency.parts[unit]) == (was, now):
                self._lock(came)
                del self._lacking[unit]
                self._condition.notify_all()

    def _lock(self, parts: Sequence[ByteRange]) -> None:
        """Pin what became resident; what cannot be pinned still stays."""
        try:
            for part in parts if self._may_lock else ():
                part.lock()
        except EngineError as exc:
            logger.warning("%s; layers that come to stay are not locked from now on", exc)
            self._may_lock = False

    def _is_still_first(self, unit: int, until: int | None) -> bool:
        with self._condition:
            return self._first() == (unit, until)

    def _read(self, piece: ReadCall) -> None:
        self._asked_bytes += piece.read()

    def _look_at_one(self) -> None:
        self._next_look = (self._next_look + 1) % len(self._units)
        self._look_at(self._next_look)

    def _look_at(self, unit: int) -> None:
        """Read again what should stay of a unit if the system evicted it."""
        with self._condition:
            if unit in self._lacking:
                return  # it has not been read yet
            place = self._residency.parts[unit]
        for rest in self._rest(unit, place):
            missing = rest.missing()
            if missing <= COLD * rest.size:
                continue
            if self._residency.parts[unit] != place:
                return  # no longer all of it is to stay
            self.evicted_bytes += missing
            self._asked_bytes += rest.read()
            with self._condition:
                if self._residency.parts[unit] != place:
                    self._surplus.add(unit)
                    self._condition.notify_all()


class Follower:
    """While llama.cpp fills its mappings, releases each streamed unit that it is done with. A context manager."""

    def __init__(self, units: Sequence[ByteRange]) -> None:
        self._units = units
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="follower", daemon=True)

    def __enter__(self) -> Follower:
        if self._units:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._units:
            self._stop.set()
            self._thread.join()
            for unit in self._units:
                if unit.pages.mapped():
                    unit.release()

    def _run(self) -> None:
        mapped: set[int] = set()
        while not self._stop.wait(0.01):
            for number, unit in enumerate(self._units):
                if number not in mapped and not unit.pages.mapped():
                    break  # nor is any later one
                mapped.add(number)
                if unit.has_last_page():
                    unit.release()


class WindowStream:
    """One window's part of a ``Streamer``: its units begin at ``first``.

    The first ``ram_layers`` of its ``layers`` are units, in order; with ``output``, so is the output matrix after them.
    ``routers`` are those layers that stream by expert, counted from the window's first, with their index among all such
    layers and their number of experts.
    """

    def __init__(
        self,
        streamer: Streamer,
        first: int,
        *,
        layers: int,
        ram_layers: int,
        output: bool,
        routers: Mapping[int, tuple[int, int]],
    ) -> None:
        self.routers = dict(routers)
        self.streamer = streamer
        self._first = first
        self._layers, self._ram_layers, self._output = layers, ram_layers, output
        self._last = first + ram_layers + output

    def unit_ends(self) -> dict[int, int]:
        """Return the layers (counted from the window's first) after which to call ``reach``, with the unit that
        follows.

        These are where a streamed unit ends or begins; ``arrive`` and ``depart`` report the window's own ends.
        """
        streamed, first = self.streamer.residency.streamed, self._first
        found = {
            layer: first + layer + 1
            for layer in range(self._ram_layers - 1)
            if first + layer in streamed or first + layer + 1 in streamed
        }
        output = first + self._ram_layers
        if self._output and (output in streamed or output - 1 in streamed):
            found[self._layers - 1] = output
        return found

    def arrive(self) -> None:
        """Call ``Streamer.arrive`` and ``ExpertLoader.arrive``."""
        if self.routers and self.streamer.experts is not None:
            self.streamer.experts.arrive()
        if self._first < self._last:
            self.streamer.arrive(self._first, self._last)

    def pick(self, place: int, picks: Picks) -> None:
        """Call ``ExpertLoader.pick``."""
        assert self.streamer.experts is not None
        start = time.perf_counter()
        self.streamer.experts.pick(place, picks)
        self.streamer.stall_s += time.perf_counter() - start

    def depart(self) -> bool:
        """Call ``Streamer.depart``; return whether all ``routers`` reported their picks."""
        reported = True
        if self.routers and self.streamer.experts is not None:
            reported = self.streamer.experts.depart(place for place, _ in self.routers.values())
        if self._first < self._last:
            self.streamer.depart(self._first, self._last)
        return reported

    def prove(self) -> None:
        """Call ``Streamer.prove``."""
        if self._first < self._last:
            self.streamer.prove(self._first, self._last)
