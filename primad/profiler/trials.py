"""The daemon's side of trials: one child times window after window.

A crash or a hang of the child is a result, too.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Final, Protocol

from primad.engine.devices import GpuDevice
from primad.profiler.trial_messages import (
    CompareRows,
    ExactRows,
    Gpus,
    HeadTimes,
    HoldWindow,
    ListGpus,
    StepOn,
    Stepped,
    SteppedOn,
    StepWindow,
    TimeHead,
    TimeWindow,
    TrialTimes,
)
from primad.system.children.spawn import environment
from primad.system.children.task_child import TaskChild

TIMEOUT_S: Final = 90.0


class Trials(Protocol):
    """Times windows in a separate process. A text instead of a result says in one line how that process ended."""

    def time(self, task: TimeWindow) -> TrialTimes | str:
        """Time the window of ``task``."""

    def compare(self, task: CompareRows) -> ExactRows | str:
        """Compare rows of the window of ``task``."""

    def gpus(self) -> tuple[GpuDevice, ...] | str:
        """The GPUs that llama.cpp can use."""


class ChildTrials:
    """``Trials`` in children with the environment of a ring process of ``threads`` compute threads at ``place``.

    Without ``gpu`` they see none.
    """

    def __init__(self, threads: int, *, place: int = 0, timeout_s: float = TIMEOUT_S, gpu: bool = False) -> None:
        variables = environment(os.environ, threads, place, gpu=gpu)
        self._child = TaskChild("primad.profiler.trial", "a trial", variables, timeout_s=timeout_s)

    def time(self, task: TimeWindow) -> TrialTimes | str:
        """As in ``Trials``."""
        return self._child.ask(task, TrialTimes)

    def compare(self, task: CompareRows) -> ExactRows | str:
        """As in ``Trials``."""
        return self._child.ask(task, ExactRows)

    def hold(self, task: HoldWindow) -> Stepped | str:
        """Load the window of ``task`` and compute a step of it; the child keeps it."""
        return self._child.ask(task, Stepped)

    def step(self) -> Stepped | str:
        """Compute another step of the window that the child keeps."""
        return self._child.ask(StepWindow(), Stepped)

    def step_on(self, seconds: float) -> SteppedOn | str:
        """Compute steps of the window that the child keeps."""
        return self._child.ask(StepOn(seconds), SteppedOn)

    def head(self, task: TimeHead) -> HeadTimes | str:
        """Time a head's work besides computing."""
        return self._child.ask(task, HeadTimes)

    def gpus(self) -> tuple[GpuDevice, ...] | str:
        """As in ``Trials``."""
        answer = self._child.ask(ListGpus(), Gpus)
        return answer if isinstance(answer, str) else answer.gpus

    def close(self) -> None:
        """End the child, even while it computes."""
        self._child.close()


@contextlib.contextmanager
def child_trials(
    threads: int, *, place: int = 0, timeout_s: float = TIMEOUT_S, gpu: bool = False
) -> Iterator[ChildTrials]:
    """``ChildTrials`` that end with the block; ``place`` is the core of the first thread, as in ``environment``."""
    trials = ChildTrials(threads, place=place, timeout_s=timeout_s, gpu=gpu)
    try:
        yield trials
    finally:
        trials.close()
