"""The loader thread and the computing thread: what is read and released, in which order, and how an error travels.

The units are fakes that log calls. Tests wait for log lines, never for time.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from primad.engine.streaming.pages import FileRange
from primad.engine.streaming.prefetch import Streamer, WindowStream
from primad.engine.streaming.pressure import INTERVAL_S, PressureWatch, Reading
from primad.engine.streaming.residency import Residency, Spread
from primad.errors import EngineError, WeightsError
from primad.settings.timings import StreamingTimings

PATIENCE_S = 180
HALF = 5
SIZE = 10


class Log:
    """The calls so far, in order."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self._news = threading.Condition()

    def add(self, line: str) -> None:
        with self._news:
            self.lines.append(line)
            self._news.notify_all()

    def wait(self, line: str, count: int = 1) -> None:
        self.wait_until(lambda: self.lines.count(line) >= count, f"{count} times {line!r}")

    def wait_until(self, condition: Callable[[], bool], description: str) -> None:
        """Wait until ``condition`` holds; it is checked after every line."""
        with self._news:
            if not self._news.wait_for(condition, PATIENCE_S):
                pytest.fail(f"not {description} in {self.lines}")

    def since(self, start: int) -> list[str]:
        return self.lines[start:]


class FakePages:
    """A unit of two pieces. ``gate`` blocks its reading after ``begun`` is set; ``error`` makes it fail."""

    def __init__(self, number: int, log: Log) -> None:
        self.number, self._log = number, log
        self.size = SIZE
        self.ranges = (FileRange(f"layer-{number}", 0, SIZE),)
        self.gate, self.started = threading.Event(), threading.Event()
        self.gate.set()
        self.error: EngineError | None = None
        self.halves: set[int] = set()
        self.touched: list[str] = []
        self.trusted: list[str] = []
        self.locked_halves: set[int] = set()
        self.closed = self.is_in_groups = False

    @property
    def present(self) -> int:
        return len(self.halves) * HALF

    @present.setter
    def present(self, size: int) -> None:
        assert size in (0, SIZE)
        self.halves = {0, 1} if size else set()

    @property
    def locked(self) -> bool:
        return bool(self.locked_halves)

    def find(self) -> None:
        assert not self.closed

    def in_groups(self) -> None:
        assert not self.closed
        self.is_in_groups = True

    def part(self, begin: int, end: int) -> FakePart:
        return FakePart(self, begin, end)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.part(0, self.size), name)

    def read_piece(self, half: int) -> int:
        assert not self.closed
        self.started.set()
        assert self.gate.wait(PATIENCE_S)
        if self.error is not None:
            raise self.error
        missing = HALF * (half not in self.halves)
        self.halves.add(half)
        self._log.add(f"read {self.number}")
        return missing

    def changed(self) -> list[str]:
        return list(self.touched)

    def trust(self, path: str) -> None:
        self.touched.remove(path)
        self.trusted.append(path)

    def close(self) -> None:
        self.closed = True


class FakePart:
    """A range of a unit's pieces."""

    def __init__(self, unit: FakePages, begin: int, end: int) -> None:
        assert begin % HALF == end % HALF == 0
        self.pages, self.size = unit, end - begin
        self._halves = range(begin // HALF, end // HALF)

    def pieces(self) -> Iterator[FakePiece]:
        return (FakePiece(self.pages, half) for half in self._halves)

    def read(self) -> int:
        return sum(piece.read() for piece in self.pieces())

    def missing(self) -> int:
        return sum(HALF for half in self._halves if half not in self.pages.halves)

    def release(self) -> None:
        assert not self.pages.closed
        self.pages.halves -= set(self._halves)
        if self._halves:
            self.pages._log.add(f"release {self.pages.number}")

    def lock(self) -> None:
        self.pages.locked_halves |= set(self._halves)

    def unlock(self) -> None:
        self.pages.locked_halves -= set(self._halves)


class FakePiece:
    size = HALF

    def __init__(self, unit: FakePages, half: int) -> None:
        self._unit, self._half = unit, half

    def read(self) -> int:
        return self._unit.read_piece(self._half)


def calm() -> Reading:
    return Reading(
        total_bytes=1 << 40,
        available_bytes=1 << 39,
        counts_mapped=False,
        stalls=(),
        swapped_in_bytes=None,
        major_faults=None,
        verdict=None,
    )


class Rig:
    """A streamer over ``count`` fake units."""

    def __init__(
        self,
        count: int,
        streamed: set[int],
        slots: int,
        *,
        lock: bool = False,
        whole: bool = False,
        spread: Spread | None = None,
        watch_every_s: float = INTERVAL_S,
        **timings: float,
    ) -> None:
        self.log = Log()
        self.units = [FakePages(number, self.log) for number in range(count)]
        self.residency = Residency.whole((SIZE,) * count, frozenset(streamed), slots * SIZE)
        if spread is not None:
            self.residency = spread.within(self.residency.held_bytes)
        self.verified: list[str] = []

        def verify(path: str) -> bool:
            self.verified.append(path)
            return whole

        self.streamer = Streamer(
            self.units,
            self.residency,
            spread=spread,
            experts=None,
            lock=lock,
            verify=verify,
            watch=PressureWatch(calm, interval_s=watch_every_s),
            timings=StreamingTimings(**timings),
        )

    def ring_pass(self, *, first: int = 0, last: int | None = None) -> None:
        """Compute one window, reporting all borders."""
        end = len(self.units) if last is None else last
        self.streamer.arrive(first, end)
        for unit in range(first, end):
            self.streamer.reach(unit)
            if unit in self.streamer.residency.streamed:
                assert self.units[unit].present == SIZE, f"unit {unit} is computed and not in memory"
        self.streamer.depart(first, end)

    def held(self) -> set[int]:
        return {unit.number for unit in self.units if unit.present}

    def read_ahead(self) -> None:
        """Wait until the loader has completed its read-ahead."""
        read_ahead(self.streamer)

    def is_at_the_top(self) -> bool:
        """Whether all that may stay does: the loader takes no more room, and will not."""
        with self.streamer._condition:
            return self.streamer._level == 0


def read_ahead(streamer: Streamer) -> None:
    """Wait until the loader has completed its read-ahead or failed."""
    deadline = time.monotonic() + PATIENCE_S
    with streamer._condition:
        while streamer._held != streamer.residency.wanted(streamer._position) and streamer._error is None:
            assert time.monotonic() < deadline
            streamer._condition.wait(0.01)  # a release alone notifies nobody


Make = Callable[..., Rig]


@pytest.fixture
def rig() -> Iterator[Make]:
    """Makes rigs; none leaves a thread behind."""
    made: list[Rig] = []

    def make(*args: object, **options: object) -> Rig:
        made.append(Rig(*args, **options))
        return made[-1]

    before = set(threading.enumerate())
    yield make
    for each in made:
        for unit in each.units:
            unit.gate.set()
        each.streamer.close()
        assert all(unit.closed for unit in each.units)
    assert not [thread for thread in threading.enumerate() if thread.name == "loader" and thread not in before]


def test_resident_units_are_read_first_and_then_streamed_ones_in_order(rig):
    made = rig(5, {1, 3}, 1)
    made.streamer.start()
    made.log.wait("read 1", 2)
    assert made.log.lines == [f"read {unit}" for unit in (0, 0, 2, 2, 4, 4, 1, 1)]


def test_ring_passes_read_each_streamed_unit_at_most_once_and_no_resident_one(rig):
    made = rig(6, {0, 2, 4}, 2)
    made.streamer.start()
    for _ in range(6):
        made.ring_pass()
    made.log.wait("read 4", 2)
    assert all(made.log.lines.count(f"read {unit}") <= 2 * (6 + 1) for unit in (0, 2, 4)), (
        "one more pass: the read-ahead"
    )
    assert made.log.lines[:6] == [f"read {unit}" for unit in (1, 1, 3, 3, 5, 5)]
    assert not {f"{verb} {unit}" for verb in ("read", "release") for unit in (1, 3, 5)} & set(made.log.since(6))


def test_no_more_is_held_than_the_slots(rig):
    made = rig(8, set(range(8)), 2)
    made.streamer.start()
    for _ in range(4):
        made.ring_pass()
    held: set[int] = set()
    for line in made.log.lines:
        description, unit = line.split()
        if description == "read":
            held.add(int(unit))
        else:
            held.discard(int(unit))
        assert len(held) <= 2, made.log.lines


def test_the_start_of_the_next_part_is_read_ahead_into_free_memory_and_the_rest_in_its_turn(rig):
    made = rig(4, {0, 1, 2, 3}, 2)
    made.streamer.change(replace(made.residency, read_ahead_bytes=SIZE + HALF, cuts=((0, HALF, SIZE),) * 4))
    made.streamer.start()
    made.read_ahead()
    assert made.log.lines == ["read 0", "read 0", "read 1"]
    made.streamer.reach(1)
    made.read_ahead()
    assert made.log.since(3) == ["release 0", "read 1", "read 2"]
    made.streamer.reach(3)
    made.read_ahead()
    assert made.log.since(6) == ["release 1", "release 2", "read 3", "read 3", "read 0"]


def test_a_unit_is_released_before_the_next_is_read(rig):
    made = rig(3, {0, 1, 2}, 1)
    made.streamer.start()
    made.log.wait("read 0", 2)
    made.streamer.reach(1)
    made.log.wait("read 1", 2)
    assert made.log.lines == ["read 0", "read 0", "release 0", "read 1", "read 1"]


def test_the_computing_thread_waits_for_a_missing_unit_and_the_wait_is_counted(rig):
    made = rig(3, {0, 1, 2}, 1)
    made.units[1].gate.clear()
    made.streamer.start()
    made.streamer.reach(0)
    arrived = threading.Event()

    def compute() -> None:
        made.streamer.reach(1)
        arrived.set()

    thread = threading.Thread(target=compute)
    thread.start()
    made.log.wait("release 0")
    assert not arrived.is_set()
    made.units[1].gate.set()
    thread.join(PATIENCE_S)
    assert arrived.is_set()
    assert made.units[1].present == SIZE
    assert made.streamer.stall_s > 0


def test_an_overtaken_loader_turns_to_the_needed_unit(rig):
    """A step moved elsewhere during a unit's read, whose rest is then skipped."""
    made = rig(4, {0, 1, 2, 3}, 1)
    made.units[0].gate.clear()
    made.streamer.start()
    assert made.units[0].started.wait(PATIENCE_S)
    thread = threading.Thread(target=made.streamer.reach, args=[2])
    thread.start()
    # The first piece of unit 0 is being read; the position has moved when the second is due.
    while made.streamer._position != 2:
        pass
    made.units[0].gate.set()
    thread.join(PATIENCE_S)
    assert made.log.lines[:4] == ["read 0", "release 0", "read 2", "read 2"]


def test_nothing_is_released_if_everything_fits(rig):
    made = rig(4, {1, 2}, 2)
    made.streamer.start()
    for unit in (1, 2):
        made.units[unit].present = SIZE  # as llama.cpp leaves them
    for _ in range(3):
        made.ring_pass()
    assert made.log.lines == ["read 0", "read 0", "read 3", "read 3"]
    assert made.streamer.streamed_pages() == []


def test_an_error_of_the_disk_reaches_the_computing_thread(rig):
    made = rig(3, {0, 1, 2}, 1)
    made.units[1].error = WeightsError("layer-1: weights cannot be read: Input/output error", "layer-1")
    made.streamer.start()
    made.streamer.reach(0)
    for _ in range(2):
        with pytest.raises(WeightsError, match="Input/output error") as caught:
            made.streamer.reach(1)
        assert caught.value.file == "layer-1"
    assert "read 2" not in made.log.lines


def test_an_error_of_the_read_ahead_is_raised_at_any_unit(rig):
    made = rig(4, {1, 3}, 1)
    made.streamer.start()
    made.streamer.reach(1)
    made.units[3].error = WeightsError("layer-3: weights cannot be read: Input/output error", "layer-3")
    made.streamer.reach(2)
    made.streamer._thread.join(PATIENCE_S)
    with pytest.raises(WeightsError):
        made.streamer.reach(0)


def test_a_resident_unit_that_cannot_be_read_does_not_begin(rig):
    made = rig(2, {1}, 1)
    made.units[0].error = WeightsError("layer-0: weights cannot be read: Input/output error", "layer-0")
    with pytest.raises(WeightsError):
        made.streamer.start()


def test_any_other_failure_of_the_loader_is_an_error_too(rig, caplog):
    made = rig(2, {0, 1}, 1)
    made.units[0].error = ZeroDivisionError("a bug")
    made.streamer.start()
    with pytest.raises(EngineError, match="reading layers ahead failed: a bug"):
        made.streamer.reach(0)
    assert "the loader thread ended" in caplog.text


def test_less_may_stay_while_steps_pass(rig):
    made = rig(4, {1}, 2)
    made.units[1].present = SIZE
    made.streamer.start()
    made.ring_pass()
    made.streamer.change(Residency.whole((SIZE,) * 4, frozenset(range(4)), 2 * SIZE))
    made.ring_pass()
    made.log.wait_until(lambda: made.held() == {0, 1}, "the first two alone")
    assert {"release 2", "release 3"} <= set(made.log.lines)
    made.streamer.reach(2)
    made.log.wait_until(lambda: made.held() == {2, 3}, "the last two alone")
    assert made.log.lines.count("read 3") >= 4


def test_more_may_stay_while_steps_pass(rig):
    made = rig(4, {0, 1, 2, 3}, 2)
    made.streamer.start()
    made.ring_pass()
    made.streamer.change(Residency.whole((SIZE,) * 4, frozenset({1}), 2 * SIZE))
    for _ in range(2):
        made.ring_pass()
    start = len(made.log.lines)
    for _ in range(3):
        made.ring_pass()
    assert not [line for line in made.log.since(start) if line.startswith("release")]


def test_a_unit_that_became_resident_while_being_read_is_not_released(rig):
    made = rig(5, {0, 1, 2, 3, 4}, 2)
    made.units[0].gate.clear()
    made.streamer.start()
    made.streamer.change(Residency.whole((SIZE,) * 5, frozenset({1, 2, 3, 4}), 2 * SIZE))
    made.units[0].gate.set()
    made.log.wait("read 2", 2)
    made.streamer.reach(3)
    made.log.wait("read 4", 2)
    assert "release 0" not in made.log.lines


def test_resident_units_are_locked_and_streamed_ones_are_not(rig):
    made = rig(3, {1}, 1, lock=True)
    made.streamer.start()
    assert [unit.locked for unit in made.units] == [True, False, True]
    made.streamer.change(Residency.whole((SIZE,) * 3, frozenset({2}), SIZE))
    assert not made.units[2].locked
    made.streamer.reach(1)
    assert [unit.locked for unit in made.units] == [True, True, False]


def test_resident_units_evicted_by_the_system_are_read_before_a_step_after_a_rest(rig):
    made = rig(4, {3}, 1, look_every_s=0.0)  # the loader itself does not check
    made.units[3].present = SIZE
    made.streamer.start()
    made.units[1].present = 0
    made.streamer._departed_s -= 10  # it was idle
    made.streamer.arrive(0, 4)
    assert made.units[1].present == SIZE
    assert made.log.lines.count("read 1") == 4
    assert made.streamer.evicted_bytes == SIZE


def test_the_loader_is_woken_at_the_start_of_a_step_and_not_before_its_results_are_sent(rig, monkeypatch):
    made = rig(2, frozenset(), 1, look_every_s=0.0)
    made.streamer.start()
    woken = []
    monkeypatch.setattr(made.streamer._condition, "notify_all", lambda: woken.append("step"))
    made.streamer.arrive(0, 2)
    assert woken == ["step"]
    made.streamer.depart(0, 2)
    assert woken == ["step"]


def test_resident_units_are_checked_one_by_one_while_steps_pass(rig):
    made = rig(4, {3}, 1)
    made.units[3].present = SIZE
    made.streamer.start()
    made.units[2].present = 0
    while made.log.lines.count("read 2") < 4:  # as often as needed; a ring pass is short
        made.ring_pass()
    assert made.units[2].present == SIZE


def test_a_rewritten_file_with_the_same_content_is_trusted(rig):
    made = rig(3, {0, 1, 2}, 1, whole=True)
    made.streamer.start()
    made.units[1].touched.append("layer-1")
    made.ring_pass()
    made.ring_pass()
    assert made.verified == ["layer-1"]
    assert made.units[1].trusted == ["layer-1"]


def test_results_of_a_modified_file_are_not_sent(rig):
    made = rig(3, {0, 1, 2}, 1)
    made.streamer.start()
    made.units[2].touched.append("layer-2")
    with pytest.raises(WeightsError, match="this file was modified while it was used") as caught:
        made.ring_pass()
    assert caught.value.file == "layer-2"


def test_closing_ends_the_thread_in_the_middle_of_a_unit(rig):
    made = rig(3, {0, 1, 2}, 1)
    made.units[0].gate.clear()
    made.streamer.start()
    assert made.units[0].started.wait(PATIENCE_S)
    closing = threading.Thread(target=made.streamer.close)
    closing.start()
    made.units[0].gate.set()
    closing.join(PATIENCE_S)
    assert not closing.is_alive()
    assert made.log.lines.count("read 0") <= 2
    assert "read 1" not in made.log.lines


def test_a_hanging_disk_does_not_keep_the_process_from_ending(rig, caplog):
    made = rig(3, {0, 1, 2}, 1, close_timeout_s=0.01)
    made.units[0].gate.clear()
    made.streamer.start()
    assert made.units[0].started.wait(PATIENCE_S)
    made.streamer.close()
    assert "does not come" in caplog.text
    assert not any(unit.closed for unit in made.units), "the thread that hangs may still use them"
    made.units[0].gate.set()
    made.streamer._thread.join(PATIENCE_S)


def halves(count: int) -> Spread:
    return Spread((SIZE,) * count, ((0, HALF, SIZE),) * count, 0)


def test_only_the_streamed_part_of_a_split_unit_is_read_and_released(rig):
    made = rig(8, {0, 1, 2, 3}, 2, spread=halves(8))
    assert set(made.residency.parts) == {(HALF, SIZE), (0, 0)}
    for unit in made.units:
        unit.present = SIZE
    made.streamer.start()
    made.ring_pass()
    made.read_ahead()
    start = len(made.log.lines)
    made.ring_pass()
    made.ring_pass()
    made.read_ahead()
    read = [line for line in made.log.since(start) if line.startswith("read")]
    assert len(read) == 2 * len(made.residency.streamed), "half of each unit of which something streams"
    assert all(0 in unit.halves for unit in made.units), "what stays is never given back"


def parted(rig: Callable[..., Rig], settled_s: float = 0.0) -> Rig:
    """Units in memory, of which some stream by halves, and a loader that takes room as soon as there is any."""
    made = rig(8, {0, 1, 2, 3, 4, 5}, 2, spread=halves(8), settled_s=settled_s, watch_every_s=0.0)
    for unit in made.units:
        unit.present = SIZE
    return made


def test_idle_scratch_memory_holds_more_units_and_is_released_for_the_next_prompt(rig):
    made = parted(rig)
    streamer, base = made.streamer, made.residency
    streamer.start()
    streamer.prepare()
    made.ring_pass()
    assert streamer.residency == base, "nothing was given back yet"
    streamer.spare(2 * SIZE)
    while not made.is_at_the_top():
        made.ring_pass()
    grown = streamer.residency
    assert grown.held_bytes >= base.held_bytes + SIZE
    assert grown.held_bytes <= base.held_bytes + 2 * SIZE
    assert grown.read_bytes < base.read_bytes
    streamer.prepare()
    assert streamer.residency == base
    made.ring_pass()
    assert streamer.residency == base, "no more stays before scratch memory is given back again"
    streamer.spare(2 * SIZE)
    while streamer.residency != grown:
        made.ring_pass()


def test_residency_grows_right_after_a_small_step_but_not_between_chunks_of_a_prompt(rig):
    made = parted(rig, settled_s=1000.0)
    streamer, base = made.streamer, made.residency
    streamer.start()
    for _ in range(2):
        streamer.prepare()
        made.ring_pass()
        streamer.spare(2 * SIZE)
        made.ring_pass()
        assert streamer.residency == base, "another window may need it for its part of the chunk"
    streamer.resolve()
    while not made.is_at_the_top():
        made.ring_pass()
    streamer.prepare()
    streamer.spare(2 * SIZE)
    made.ring_pass()
    assert streamer.residency == base, "a prompt came"


def test_a_part_that_became_resident_is_read_and_checked(rig):
    made = rig(4, {0, 1, 2, 3}, 1)
    made.streamer.start()
    made.ring_pass()
    parts = ((0, 0), (HALF, SIZE), (0, SIZE), (0, SIZE))
    made.streamer.change(Residency((SIZE,) * 4, parts, SIZE))
    made.ring_pass()
    while made.units[0].present < SIZE or 0 not in made.units[1].halves:
        made.ring_pass()


def test_a_unit_that_becomes_resident_during_a_wait_ends_the_wait_once_read(rig):
    made = rig(3, {0, 1, 2}, 1)
    made.units[0].gate.clear()
    made.streamer.start()
    waiting = threading.Thread(target=made.streamer.reach, args=(0,))
    waiting.start()
    made.streamer.change(Residency.whole((SIZE,) * 3, frozenset({1, 2}), SIZE))
    made.units[0].gate.set()
    waiting.join(PATIENCE_S)
    assert not waiting.is_alive()
    assert made.units[0].present == SIZE


def test_a_resident_unit_that_was_not_read_yet_does_not_count_as_held(rig):
    made = rig(4, {0, 1, 2, 3}, 1)
    made.units[0].gate.clear()
    made.streamer.start()
    made.streamer.change(Residency.whole((SIZE,) * 4, frozenset({0, 1, 2}), SIZE))
    made.streamer.change(Residency.whole((SIZE,) * 4, frozenset({0, 1, 2, 3}), SIZE))
    made.units[0].gate.set()
    made.streamer.reach(3)
    assert made.units[3].present == SIZE


def test_a_unit_that_became_resident_and_was_not_read_yet_does_not_count_as_evicted(rig):
    made = rig(4, {0, 1, 2, 3}, 1)
    made.units[0].gate.clear()
    made.streamer.start()
    made.streamer.change(Residency.whole((SIZE,) * 4, frozenset({0, 1, 2}), SIZE))
    made.streamer._look_at(3)
    assert made.streamer.evicted_bytes == 0
    made.units[0].gate.set()


def test_layers_that_become_resident_and_cannot_be_locked_still_stay(rig, monkeypatch, caplog):
    made = rig(3, {1, 2}, 1, lock=True)
    made.streamer.start()

    def refuse(_: FakePart) -> None:
        raise EngineError("layer-1: cannot be locked in memory")

    monkeypatch.setattr(FakePart, "lock", refuse)
    made.streamer.change(Residency.whole((SIZE,) * 3, frozenset({2}), SIZE))
    for _ in range(3):
        made.ring_pass()
    assert made.units[1].present == SIZE
    assert caplog.text.count("not locked from now on") == 1


def test_spare_scratch_memory_reported_without_preparation_counts_from_the_planned_residency(rig):
    """As after a failed step of another window."""
    made = parted(rig)
    streamer, base = made.streamer, made.residency
    streamer.start()
    streamer.spare(SIZE)
    while not made.is_at_the_top():
        made.ring_pass()
    assert streamer.residency != base
    streamer._timings = StreamingTimings(settled_s=1000.0)
    streamer.spare(2 * SIZE)
    assert streamer.residency == base
    streamer.prepare()
    assert streamer.residency == base


class Parts(FakePages):
    """A unit of eight pieces without a log."""

    def __init__(self, number: int) -> None:
        super().__init__(number, Log())
        self.size = 8 * HALF
        self.halves = set(range(8))

    def read_piece(self, half: int) -> int:
        missing = HALF * (half not in self.halves)
        self.halves.add(half)
        return missing


class Counted(Parts):
    """A unit that counts reads of its pieces: the streamed pieces of all units never exceed the room."""

    def __init__(self, number: int, all_units: list[Counted], residency: Residency) -> None:
        super().__init__(number)
        self._all, self._residency = all_units, residency
        self._streamed = set(range(*(place // HALF for place in residency.parts[number])))
        self.reads = 0

    def read_piece(self, half: int) -> int:
        if half in self._streamed:
            self.reads += 1
            assert half not in self.halves, "read twice"
            held = sum(len(unit.halves & unit._streamed) for unit in self._all)
            assert HALF * (held + 1) <= self._residency.room_bytes
        return super().read_piece(half)


@pytest.mark.parametrize("seed", range(8))
def test_in_any_number_of_rounds_all_room_is_used_and_never_more(seed):
    dice = random.Random(seed)
    count, size = dice.randrange(3, 12), 8 * HALF
    cuts = (tuple(range(0, size + 1, HALF)),) * count
    residency = Spread((size,) * count, cuts, HALF * dice.randrange(2, 20)).within(count * size * 3 // 4)
    units: list[Counted] = []
    units += [Counted(number, units, residency) for number in range(count)]
    for unit in units:
        unit.halves -= unit._streamed
    streamer = Streamer(
        units,
        residency,
        spread=None,
        experts=None,
        lock=False,
        verify=lambda _: True,
        watch=PressureWatch(calm),
    )
    streamer.start()
    unit_ends = sorted({0, count, *(dice.randrange(1, count) for _ in range(dice.randrange(4)))})
    passes = 20
    try:
        for _ in range(passes):
            for first, last in pairwise(unit_ends):
                streamer.arrive(first, last)
                for unit in range(first, last):
                    streamer.reach(unit)
                    read_ahead(streamer)
                    assert len(units[unit].halves) == 8
                streamer.depart(first, last)
                read_ahead(streamer)
    finally:
        streamer.close()
    read = HALF * sum(unit.reads for unit in units)
    assert residency.streams
    assert 0 <= read - passes * residency.read_bytes <= residency.room_bytes, (
        "each lap, and what is read ahead of the next"
    )


@pytest.mark.parametrize("seed", range(12))
def test_concurrent_changes_of_residency_keep_needed_units_present_and_others_released(seed):
    """Steps in any order, at times a large one, while another thread changes what stays and what streams."""
    dice = random.Random(seed)
    count, size = dice.randrange(1, 12), 8 * HALF
    spread = Spread((size,) * count, (tuple(range(0, size + 1, HALF)),) * count, dice.choice([0, size]))
    total = count * size
    units = [Parts(number) for number in range(count)]
    streamer = Streamer(
        units,
        spread.within(dice.randrange(total // 2, total + 1)),
        spread=spread,
        experts=None,
        lock=seed % 2 == 0,
        verify=lambda _: True,
        watch=PressureWatch(calm, interval_s=0.0),
        timings=StreamingTimings(settled_s=0.0),
    )
    for unit in streamer.streamed_pages():
        unit.release()
    streamer.start()
    ended = threading.Event()

    def interfere() -> None:
        others = random.Random(seed)
        while not ended.wait(others.random() / 500):
            streamer.change(spread.within(others.randrange(total // 4, total + 1)))

    thread = threading.Thread(target=interfere)
    thread.start()
    try:
        for _ in range(60):
            if dice.random() < 0.3:
                streamer.prepare()
            first = dice.randrange(count)
            last = dice.randrange(first, count) + 1
            streamer.arrive(first, last)
            for unit in range(first, last):
                streamer.reach(unit)
                assert len(units[unit].halves) == 8, f"unit {unit} is computed and not in memory"
            streamer.depart(first, last)
            if dice.random() < 0.3:
                streamer.spare(dice.randrange(size))
            if dice.random() < 0.2:
                time.sleep(dice.random() / 200)
    finally:
        ended.set()
        thread.join(PATIENCE_S)

    def left() -> list[str]:
        """Differences between what is in memory or locked and what should be."""
        now, wanted = streamer.residency, streamer.residency.wanted(streamer._position)
        found = []
        for unit, (begin, end) in zip(units, now.parts, strict=True):
            part = set(range(begin // HALF, end // HALF))
            due = set(range(8)) - part | set(range(begin // HALF, (begin + wanted.get(unit.number, 0)) // HALF))
            if unit.halves != due or unit.locked_halves != (set(range(8)) - part if seed % 2 == 0 else set()):
                found.append(f"{unit.number}: {unit.halves} {unit.locked_halves} of {due} with {part}")
        return found

    streamer.prepare()
    deadline = time.monotonic() + PATIENCE_S
    while left() and time.monotonic() < deadline:
        time.sleep(0.001)
    assert not left()
    streamer.close()


@pytest.mark.parametrize("in_groups", [None, False, True], ids=["by expert", "small", "large"])
def test_a_unit_that_is_split_at_group_ends_is_read_in_groups(rig, in_groups):
    made = rig(3, {1}, 1, spread=None if in_groups is None else replace(halves(3), in_groups=in_groups))
    made.streamer.start()
    assert [unit.is_in_groups for unit in made.units] == [bool(in_groups)] * 3


def test_a_streamer_that_never_started_can_be_closed(rig):
    rig(2, {0}, 1)


@pytest.mark.parametrize(
    ("streamed", "first", "layers", "ram_layers", "output", "unit_ends"),
    [
        (set(), 0, 4, 4, False, {}),
        ({0, 1, 2, 3}, 0, 4, 4, False, {0: 1, 1: 2, 2: 3}),
        ({1}, 0, 4, 4, False, {0: 1, 1: 2}),
        ({3}, 0, 4, 4, False, {2: 3}),
        ({6}, 4, 4, 4, False, {1: 6, 2: 7}),
        ({4}, 0, 4, 4, True, {3: 4}),
        ({3}, 0, 4, 4, True, {2: 3, 3: 4}),
        ({2}, 0, 4, 2, True, {3: 2}),
        ({0, 1}, 0, 4, 2, False, {0: 1}),
    ],
)
def test_unit_ends_are_where_a_streamed_unit_starts_or_ends(
    rig, streamed, first, layers, ram_layers, output, unit_ends
):
    made = rig(8, streamed, 1)
    window = WindowStream(made.streamer, first, layers=layers, ram_layers=ram_layers, output=output, routers={})
    assert window.unit_ends() == unit_ends
