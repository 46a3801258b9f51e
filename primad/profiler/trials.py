"""The daemon's side of trials: one child times window after window.

A crash or a hang of it is an answer, too, and the next task gets a new child.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from typing import Final, Protocol, TypeVar

import msgspec

from primad.engine.devices import GpuDevice
from primad.profiler.trial import (
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
    Task,
    TimeHead,
    TimeWindow,
    TrialTimes,
)
from primad.ring.spawn import environment, how_it_ended

TIMEOUT_S: Final = 90.0
_Answer = TypeVar("_Answer")


class Trials(Protocol):
    """Times windows in a process of its own. Text instead of an answer says in one line how that process ended."""

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
        self._gpu = gpu
        self._place = place
        self._timeout_s = timeout_s
        self._threads = threads
        self._child: subprocess.Popen[bytes] | None = None
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115  (closed by ``close``)

    def time(self, task: TimeWindow) -> TrialTimes | str:
        """As in ``Trials``."""
        return self._ask(task, TrialTimes)

    def compare(self, task: CompareRows) -> ExactRows | str:
        """As in ``Trials``."""
        return self._ask(task, ExactRows)

    def hold(self, task: HoldWindow) -> Stepped | str:
        """Load the window of ``task`` and compute a step of it; the child keeps it."""
        return self._ask(task, Stepped)

    def step(self) -> Stepped | str:
        """Compute another step of the window that the child keeps."""
        return self._ask(StepWindow(), Stepped)

    def step_on(self, seconds: float) -> SteppedOn | str:
        """Compute steps of the window that the child keeps."""
        return self._ask(StepOn(seconds), SteppedOn)

    def head(self, task: TimeHead) -> HeadTimes | str:
        """Time what a head does besides computing."""
        return self._ask(task, HeadTimes)

    def gpus(self) -> tuple[GpuDevice, ...] | str:
        """As in ``Trials``."""
        answer = self._ask(ListGpus(), Gpus)
        return answer if isinstance(answer, str) else answer.gpus

    def close(self) -> None:
        """End the child, whatever it does."""
        if self._child is not None:
            self._child.kill()
            self._bury(self._child)
        self._errors.close()

    def _start(self) -> subprocess.Popen[bytes]:
        """A child with a session of its own: Ctrl-C in a terminal must not end it, which would look like a crash."""
        return subprocess.Popen(
            [sys.executable, "-m", "primad.profiler.trial"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env=environment(os.environ, self._threads, self._place, gpu=self._gpu),
            start_new_session=True,
        )

    def _ask(self, task: Task, kind: type[_Answer]) -> _Answer | str:
        if self._child is None:
            self._child = self._start()
        child = self._child
        assert child.stdin is not None
        assert child.stdout is not None
        late = threading.Event()

        def give_up() -> None:
            late.set()
            child.kill()

        timer = threading.Timer(self._timeout_s, give_up)
        timer.start()
        try:
            with contextlib.suppress(OSError):  # it may be gone: then there is no answer
                child.stdin.write(msgspec.json.encode(task) + b"\n")
                child.stdin.flush()
            answer = child.stdout.readline()
        finally:
            timer.cancel()
        if answer.endswith(b"\n"):
            return msgspec.json.decode(answer, type=kind)
        code = self._bury(child)
        if late.is_set():
            return f"a trial did not end within {self._timeout_s:g} s"
        said = self._last_line()
        return f"a trial {how_it_ended(code)}" + (f": {said}" if said else "")

    def _bury(self, child: subprocess.Popen[bytes]) -> int:
        self._child = None
        code = child.wait()
        for stream in (child.stdin, child.stdout):
            assert stream is not None
            with contextlib.suppress(OSError):
                stream.close()
        return code

    def _last_line(self) -> str:
        self._errors.seek(0)
        lines = self._errors.read().decode("utf-8", errors="replace").strip().splitlines()
        return lines[-1].strip() if lines else ""


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
