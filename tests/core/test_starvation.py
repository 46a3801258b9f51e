"""Time spent waiting for a processor does not count as elapsed for a process."""

from __future__ import annotations

from pathlib import Path

from primad.system.processors import OwnTime


class Machine:
    """The files of process 7, and a clock."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.now = folder, 100.0

    def waits(self, **seconds: float) -> None:
        """Set the total time that each thread has waited for a processor."""
        for thread, waited_s in seconds.items():
            path = self.folder / "7" / "task" / thread
            path.mkdir(parents=True, exist_ok=True)
            (path / "schedstat").write_text(f"12345 {waited_s * 1e9:.0f} 67\n")

    def own_time(self) -> OwnTime:
        return OwnTime(7, proc=self.folder, clock=lambda: self.now)


def test_time_spent_waiting_for_a_processor_does_not_count(tmp_path):
    machine = Machine(tmp_path)
    machine.waits(a=50, b=2)
    own = machine.own_time()
    machine.now += 10
    machine.waits(a=57, b=5)
    assert own.left_s(40) == 37, "the thread that waited longest"
    machine.now += 10
    machine.waits(a=57, b=11)
    assert own.left_s(40) == 33
    machine.now += 40
    assert own.left_s(40) == -7, "it waits for something else, or computes"


def test_a_new_thread_waits_no_longer_than_the_clock_goes(tmp_path):
    machine = Machine(tmp_path)
    own = machine.own_time()
    machine.now += 5
    machine.waits(new=1000)
    assert own.left_s(40) == 40


def test_it_waits_ten_times_as_long_at_the_most(tmp_path):
    machine = Machine(tmp_path)
    machine.waits(a=0)
    own = machine.own_time()
    machine.now += 390
    machine.waits(a=390)
    assert own.left_s(40) == 10
    machine.now += 20
    machine.waits(a=410)
    assert own.left_s(40) == -10


def test_where_the_system_has_no_figures_all_time_counts(tmp_path):
    machine = Machine(tmp_path)
    own = machine.own_time()
    machine.now += 12
    assert own.left_s(40) == 28
