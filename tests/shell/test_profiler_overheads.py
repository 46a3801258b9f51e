"""The cost of a token besides computing it: with fakes, and once in real children."""

from __future__ import annotations

import pytest

from primad.errors import EngineError
from primad.profiler.beside import FEWEST_TURNS, VOCABULARIES, head_costs, measure_wake
from primad.profiler.effort import Budget
from primad.profiler.synthetic import LayerShape, write_window
from primad.profiler.trial_messages import HeadTimes, HoldWindow, Stepped, TimeHead
from primad.profiler.trials import child_trials


class Cores:
    """Two processes on the same cores: a step takes longer after one of the other process."""

    def __init__(self, wake_s: float) -> None:
        self.wake_s = wake_s
        self.last: object = None

    def computed(self, process: object) -> Stepped:
        more = 0.0 if self.last is process else self.wake_s
        self.last = process
        return Stepped(0.01 + more)


class Process:
    """A child on ``cores``."""

    def __init__(self, cores: Cores) -> None:
        self.cores = cores

    def hold(self, task: HoldWindow) -> Stepped | str:
        return self.cores.computed(self)

    def step(self) -> Stepped | str:
        return self.cores.computed(self)


@pytest.mark.parametrize("wake_s", [0.0, 0.0005])
def test_the_cost_of_waking_is_the_extra_time_of_steps_after_another_process(tmp_path, wake_s):
    cores = Cores(wake_s)
    found = measure_wake(tmp_path, Process(cores), Process(cores), 2, 1, Budget(0.0))
    assert found == pytest.approx(wake_s)
    assert not list(tmp_path.iterdir())


def test_a_child_that_ends_is_one_clear_error(tmp_path):
    class Dead(Process):
        def step(self) -> str:
            return "a trial ended with code -9"

    cores = Cores(0.0)
    with pytest.raises(EngineError, match="ended with code -9"):
        measure_wake(tmp_path, Dead(cores), Process(cores), 2, 1, Budget(0.0))


def test_the_cost_of_the_head_is_linear_in_the_vocabulary():
    few, many = VOCABULARIES
    assert head_costs((3e-4 + few * 1e-9, 3e-4 + many * 1e-9)) == pytest.approx((3e-4, 1e-9))
    assert min(head_costs((5e-4, 1e-4))) > 0


def test_children_hold_windows_and_time_a_head(tmp_path):
    shape = LayerShape(width=256, feed_forward=512, heads=4, heads_kv=2)
    task = HoldWindow(window=write_window(tmp_path, shape, "Q4_K", 1, 0), width=shape.width, threads=1)
    with child_trials(1) as one:
        for answer in (one.hold(task), one.step()):
            assert isinstance(answer, Stepped), answer
            assert answer.seconds > 0
        head = one.head(TimeHead(vocabulary=300, tokens=20, sweep_bytes=8, seconds=0.0))
        assert isinstance(head, HeadTimes), head
        assert len(head.token_s) >= FEWEST_TURNS
        assert min(head.token_s) > 0
