"""Measure costs of a token besides computing: the head's own work, and cores that computed for another process before.

The head's work is measured with ``ring/head.py`` itself and a model that computes nothing: plan a step, sample, notify
another process. Between two tokens more memory is read than the caches hold, as a model does. The cost of waking is the
difference between two processes whose windows compute in turn and one process alone. The last-level cache holds both
windows, or neither.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Final, Protocol, cast

from primad.engine.protocol import GREEDY, Rows, Sampler, Sampling
from primad.errors import EngineError
from primad.profiler.effort import TYPES, Budget
from primad.profiler.synthetic import BIG, write_window
from primad.profiler.trial_messages import HoldWindow, Stepped, TimeHead

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from primad.engine.protocol import LogitsWindow

VOCABULARIES: Final = (32_768, 262_144)
FEWEST_TURNS: Final = 4
_ROUNDS: Final = 40
_MIN_S: Final = 1e-6
_MAX_WAKE_S: Final = 0.005


class Stepper(Protocol):
    """A child that computes steps of a loaded window; a text instead of a result says how the child ended."""

    def hold(self, task: HoldWindow) -> Stepped | str:
        """Load a window and compute a step of it."""

    def step(self) -> Stepped | str:
        """Compute another step."""


def head_costs(medians: tuple[float, float]) -> tuple[float, float]:
    """Seconds of a token, and of a token of the vocabulary, from those of a token with the two ``VOCABULARIES``."""
    (few, many), (few_s, many_s) = VOCABULARIES, medians
    value_s = max(1e-12, (many_s - few_s) / (many - few))
    return max(_MIN_S, few_s - few * value_s), value_s


def time_head(task: TimeHead) -> tuple[float, ...]:
    """In the child: seconds from the end of one step to the beginning of the next."""
    import numpy as np

    from primad.ring.chunks import Chunking
    from primad.ring.head import Head, Notify
    from primad.ring.messages import Finished, Generate, StepLimits
    from primad.ring.scheduler.scheduler import Scheduler
    from primad.ring.scheduler.state import SchedulerState
    from primad.system.children.channel import frame

    tail = _Nothing(task, np.ones(task.vocabulary, np.float32), np.ones(task.sweep_bytes // 8, np.uint64))
    head = Head(
        windows={},
        tail=cast("LogitsWindow", tail),  # it computes nothing, so nothing is kept
        route=1,
        limits=StepLimits(
            ring=1, epoch=1, windows=frozenset((0,)), width=1, rows=1, context=task.tokens + 2, sequences=1
        ),
        scheduler=Scheduler(
            SchedulerState(
                context=task.tokens + 2, chunking=Chunking(rows=1, minimum=1, begins=lambda _: False), depth=1
            )
        ),
        step_timeout_s=60.0,
        clock=time.perf_counter,
    )
    head.submit(Generate(request=1, prompt=[0], sampled=[], max_tokens=task.tokens, sampling=GREEDY, logprobs=None))
    reader = "import sys\nwhile sys.stdin.buffer.read1(65536):\n    continue"
    with subprocess.Popen([sys.executable, "-c", reader], stdin=subprocess.PIPE) as daemon:
        assert daemon.stdin is not None
        is_done = False
        while not is_done:
            outcome = head.turn()
            assert isinstance(outcome, Notify)
            for event in outcome.events:
                daemon.stdin.write(frame(event))
                is_done = is_done or isinstance(event, Finished)
            daemon.stdin.flush()
            is_done = is_done or tail.is_late
    return tuple(tail.gaps)


class _Nothing:
    """A whole model that computes nothing, and reads as much memory as a model would."""

    exchange = None

    def __init__(self, task: TimeHead, logits: NDArray[np.float32], sweep: NDArray[np.uint64]) -> None:
        self._logits, self._sweep = logits, sweep
        self._until = time.perf_counter() + task.seconds
        self._end = 0.0
        self.gaps: list[float] = []

    @property
    def is_late(self) -> bool:
        """Whether the time is used up and enough tokens were timed."""
        return len(self.gaps) >= FEWEST_TURNS and time.perf_counter() > self._until

    def forward(self, rows: Rows) -> None:
        begin = time.perf_counter()
        if self._end:
            self.gaps.append(begin - self._end)
        self._sweep.sum()
        self._end = time.perf_counter()

    def logits(self, row: int) -> NDArray[np.float32]:
        return self._logits

    def sampler(self, sampling: Sampling, prompt: Sequence[int], sampled: Sequence[int]) -> Sampler:
        from primad.engine.sampling import GreedySampler

        return GreedySampler(self)

    def is_end(self, token: int) -> bool:
        return False

    def kv_remove(self, sequence: int, start: int, end: int) -> None:
        """There is no KV cache."""

    def kv_copy(self, source: int, target: int, end: int) -> None:
        """There is no KV cache."""

    def release(self) -> None:
        """There is nothing to release."""


def hold_window(folder: Path, steppers: Sequence[Stepper], threads: int, model_bytes: int) -> None:
    """Have each of ``steppers`` load a window of big layers with at least ``model_bytes``.

    Raises ``EngineError`` when llama.cpp fails, ``OSError`` when the files cannot be written.
    """
    layers = -(-model_bytes // BIG.weight_bytes(TYPES[0]))
    with TemporaryDirectory(prefix="window-", dir=folder) as name:
        window = write_window(Path(name), BIG, TYPES[0], layers, gpu_layers=0)
        task = HoldWindow(window=window, width=BIG.width, threads=threads)
        for stepper in steppers:
            _stepped(stepper.hold(task))


def measure_wake(folder: Path, one: Stepper, other: Stepper, threads: int, model_bytes: int, budget: Budget) -> float:
    """Additional seconds of a step if another process computed just before; at least 0.

    Raises as ``hold_window``.
    """
    hold_window(folder, (one, other), threads, model_bytes)
    alone, after = [], []
    for turn in range(_ROUNDS):
        alone.append(_stepped(one.step()))
        _stepped(other.step())
        after.append(_stepped(one.step()))
        if turn + 1 >= FEWEST_TURNS and budget.left_s <= 0:
            break
    return min(_MAX_WAKE_S, max(0.0, statistics.median(after) - statistics.median(alone[1:])))


def _stepped(answer: Stepped | str) -> float:
    if isinstance(answer, str):
        raise EngineError(f"llama.cpp cannot compute a window on this device: {answer}")
    return answer.seconds
