"""The child process that times windows: ``python -m primad.profiler.trial`` with tasks as lines of JSON on standard input.

It replies to each line with one line. A task may crash or hang it (llama.cpp's extra buffers do on some builds); its
parent (``trials.py``) handles that. Small windows are timed after the caches are swept, since they would stay in caches
where a model's layers never do. During the sweep's pause compute threads go to sleep, as they do in a ring.

If the system reports that a step waited for processors used by other programs, the step's time is at most the time that
its first thread computed. Waiting for the device's own quota counts as the step's time.
"""

from __future__ import annotations

import itertools
import os
import statistics
import time
from collections.abc import Callable, Sequence
from functools import cache
from typing import Final

import msgspec

from halda import BATCH_ROWS, OFFLOAD_FEW_ROWS, PREFILL_ROWS
from primad.engine.protocol import KV_CELL_PADDING, EngineOptions, Hidden, Rows
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
    Task,
    TimeHead,
    TimeWindow,
    TrialTimes,
)
from primad.system.children.reply_stream import answer_lines
from primad.system.processors import OwnTime, usable_cpus

CONTEXT: Final = PREFILL_ROWS + 256
_RUN_STEPS: Final = 6
"""A run is the median of this many steps."""
_RUNS: Final = 6
"""Maximum number of runs; more give no new information."""
COMPARED: Final = (2, 3, 4, 7, 8)
"""Row counts that are compared with single rows, in this order: kernels of llama.cpp change at these."""
PIECES: Final = (4, 8, 16, 32)
"""Piece sizes, in rows and in this order: a chunk is computed in such pieces and compared with the whole."""
CHUNK: Final = 43
"""Rows of that chunk: not a multiple of any number that kernels compute together."""
BEFORE: Final = KV_CELL_PADDING - 16
"""Rows before that chunk, so that its pieces attend to other numbers of cells than the whole does."""
STEPS: Final = 3
"""Rows of each sequence if layers keep a state: before the first row there is no state."""
REPLAYED: Final = 24
"""Rows that are compared with single ones, as when a completion is recomputed."""
FEWEST_ROWS: Final = OFFLOAD_FEW_ROWS
"""Smallest chunk of a prompt, for a slow device."""
_CPUS: Final = usable_cpus()
"""Asked before OpenMP binds this thread to one of them."""
_WAKING: Final = 0.02
"""A step may wait for processors for this share of its time and still count as undisturbed: waking threads wait as
well."""


def main() -> None:
    """Answer tasks until standard input ends."""
    answer_lines(msgspec.json.Decoder(Task), _Answers().answer)


class _Answers:
    """Answers tasks; between two the window of ``HoldWindow`` is kept, with a step of which tasks follow."""

    def __init__(self) -> None:
        self._step: Callable[[], float] | None = None

    def answer(self, task: Task) -> TrialTimes | ExactRows | Stepped | SteppedOn | HeadTimes | Gpus:
        match task:
            case HoldWindow():
                self._step = _hold(task)
                return Stepped(self._step())
            case StepWindow():
                assert self._step is not None
                return Stepped(self._step())
            case StepOn(seconds):
                assert self._step is not None
                return SteppedOn(_step_on(self._step, seconds))
            case TimeHead():
                from primad.profiler.beside import time_head

                return HeadTimes(time_head(task))
            case ListGpus():
                return _gpus()
            case TimeWindow():
                return _time(task)
            case CompareRows():
                return _compare(task)


def _gpus() -> Gpus:
    from primad.engine.devices import list_gpus

    return Gpus(tuple(list_gpus()))


def _options(threads: int, batch_threads: int, *, flash: bool = True, gpu: str = "") -> EngineOptions:
    return EngineOptions(
        context=CONTEXT,
        sequences=1,
        rows=PREFILL_ROWS,
        threads=threads,
        batch_threads=batch_threads,
        kv_type="f16",
        lock=False,
        flash=flash,
        gpu=gpu,
    )


def _compare(task: CompareRows) -> ExactRows:
    import numpy as np

    from primad.engine.llama.windows import MiddleWindow

    maximum = max(COMPARED)
    options = msgspec.structs.replace(
        _options(task.threads, task.threads, flash=False), context=2 * KV_CELL_PADDING, sequences=maximum, rows=BEFORE
    )
    window = MiddleWindow(task.window, options)
    hidden = np.random.default_rng(0).standard_normal((BEFORE + CHUNK, task.width), np.float32)

    def computed(rows: range, positions: Sequence[int], sequences: Sequence[int]) -> Hidden:
        return window.forward(
            Rows(
                content=hidden[rows.start : rows.stop],
                positions=list(positions),
                sequences=[[sequence] for sequence in sequences],
                outputs=[True] * len(rows),
            )
        )

    def together(sequences: range) -> Hidden:
        """The results (steps, rows, width)."""
        for sequence in sequences:
            window.kv_remove(sequence, 0, -1)
        steps = range(STEPS if task.has_state else 1)
        return np.stack([computed(sequences, [step] * len(sequences), sequences) for step in steps])

    alone = np.concatenate([together(range(row, row + 1)) for row in range(maximum)], axis=1)
    exact = 1
    for count in COMPARED:
        if together(range(count)).tobytes() != alone[:, :count].tobytes():
            break
        exact = count

    def piece(first: int, last: int) -> bytes:
        rows = range(first, last)
        return computed(rows, rows, [0] * len(rows)).tobytes()

    def chunk(rows: int) -> bytes:
        """The results of one sequence in pieces of ``rows`` rows, the last of which may be larger."""
        window.kv_remove(0, 0 if task.has_state else BEFORE, -1)
        if task.has_state:
            piece(0, BEFORE)
        starts = range(BEFORE, BEFORE + CHUNK - rows + 1, rows)
        return b"".join(map(piece, starts, [*starts[1:], BEFORE + CHUNK]))

    window.kv_remove(0, 0, -1)
    piece(0, BEFORE)
    whole = chunk(CHUNK)
    pieces = next((rows for rows in PIECES if chunk(rows) == whole), 0)
    window.release()
    return ExactRows(exact, pieces, _replayed(task, hidden))


def _replayed(task: CompareRows, hidden: Hidden) -> int:
    """How many rows of one sequence flash attention computes together bit for bit like single ones."""
    from primad.engine.llama.windows import MiddleWindow

    options = msgspec.structs.replace(_options(task.threads, task.threads), context=KV_CELL_PADDING, rows=max(COMPARED))
    window = MiddleWindow(task.window, options)

    def computed(rows: int) -> bytes:
        """The results of ``REPLAYED`` rows, ``rows`` at a time."""
        window.kv_remove(0, 0, -1)
        steps = [range(first, min(first + rows, REPLAYED)) for first in range(0, REPLAYED, rows)]
        outputs = [
            window.forward(
                Rows(
                    content=hidden[step.start : step.stop],
                    positions=list(step),
                    sequences=[[0]] * len(step),
                    outputs=[True] * len(step),
                )
            )
            for step in steps
        ]
        return b"".join(output.tobytes() for output in outputs)

    single, exact = computed(1), 1
    for count in COMPARED:
        if computed(count) != single:
            break
        exact = count
    window.release()
    return exact


def _hold(task: HoldWindow) -> Callable[[], float]:
    """Load the window; each call of the result computes a step and returns its seconds."""
    import numpy as np

    from primad.engine.llama.windows import MiddleWindow

    window = MiddleWindow(task.window, _options(task.threads, task.threads))
    hidden = np.random.default_rng(0).standard_normal((1, task.width), np.float32)
    positions = itertools.count()

    def step() -> float:
        rows = Rows(content=hidden, positions=[next(positions) % CONTEXT], sequences=[[0]], outputs=[True])
        if rows.positions[0] == 0:
            window.kv_remove(0, 0, -1)
        start = time.perf_counter()
        window.forward(rows)
        return time.perf_counter() - start

    return step


def _step_on(step: Callable[[], float], seconds: float) -> tuple[float, ...]:
    until, times = time.perf_counter() + seconds, list[float]()
    while len(times) < 2 or time.perf_counter() < until:
        times.append(step())
    return tuple(times)


def _time(task: TimeWindow) -> TrialTimes:
    import numpy as np  # only the child loads it and llama.cpp

    from primad.engine import devices
    from primad.engine.llama.windows import MiddleWindow

    options = _options(task.threads, task.batch_threads, flash=task.flash, gpu=task.gpu)
    free_bytes = _free_at_first(task.gpu) if task.gpu else 0
    window = MiddleWindow(task.window, options)
    sweep = np.ones(task.sweep_bytes // 8, np.uint64)
    hidden = np.random.default_rng(0).standard_normal((PREFILL_ROWS, task.width), np.float32)
    has_quota = max(task.threads, task.batch_threads) > _CPUS

    def step(count: int, position: int) -> float:
        rows = Rows(
            content=hidden[:count],
            positions=list(range(position, position + count)),
            sequences=[[0]] * count,
            outputs=[False] * (count - 1) + [True],
        )
        own, start_s = OwnTime(os.getpid(), clock=time.perf_counter), time.thread_time()
        window.forward(rows)
        computed_s = time.thread_time() - start_s
        took_s, waited_s = own.took_s()
        return took_s if has_quota or task.gpu else own_s(took_s, waited_s, computed_s)

    def run(count: int) -> float:
        window.kv_remove(0, task.cached, -1)
        step(count, task.cached)  # llama.cpp rebuilds its graph when the number of rows changes
        times: list[float] = []
        while len(times) < _RUN_STEPS and (not times or task.run_s is None or sum(times) < task.run_s):
            sweep.sum()
            times.append(step(count, task.cached + (len(times) + 1) * count))
        return statistics.median(times)

    def prefill(count: int) -> float:
        window.kv_remove(0, 0, -1)
        return step(count, 0)

    for first in range(0, task.cached, PREFILL_ROWS):
        step(min(PREFILL_ROWS, task.cached - first), first)
    if not task.many_rows:
        decode_s = _several(lambda: run(task.rows), task.seconds)
        timings = TrialTimes(decode_s=decode_s, batch_s=(), prefill_s=(), prefill_rows=0)
    else:
        start = time.perf_counter()
        batch_s = _several(lambda: run(BATCH_ROWS), task.seconds / 4)
        few_counts_s = [run(count) for count in task.counts if count <= FEWEST_ROWS]
        left_s = task.seconds - (time.perf_counter() - start)
        prefill(FEWEST_ROWS)  # one-time work is done
        few_s = prefill(FEWEST_ROWS)
        rows = affordable_rows(few_s / FEWEST_ROWS, max(left_s, task.chunk_s))
        more_s = [
            _second(prefill, count) if count < rows and 2 * count * few_s < left_s * FEWEST_ROWS else 0.0
            for count in task.counts
            if count > FEWEST_ROWS
        ]
        counts_s, left_s = (*few_counts_s, *more_s), left_s - 2 * sum(more_s)
        first_s = few_s if rows == FEWEST_ROWS else prefill(rows)
        prefill_s = (first_s, *_more(lambda: prefill(rows), first_s, left_s - first_s))
        timings = TrialTimes(
            decode_s=(), batch_s=batch_s, prefill_s=prefill_s, prefill_rows=rows, few_s=few_s, counts_s=counts_s
        )
        if task.gpu:
            timings = msgspec.structs.replace(timings, taken_bytes=max(0, free_bytes - devices.free_bytes(task.gpu)))
    window.release()
    return timings


def own_s(took_s: float, waited_s: float, computed_s: float) -> float:
    """The undisturbed time of a step that took ``took_s``, while its first thread computed for ``computed_s`` and one
    thread waited ``waited_s`` for a processor. Threads that wait for each other do so in turn, so the step waited
    longer than any one of them.
    """
    return min(took_s, computed_s) if waited_s > _WAKING * took_s else took_s


def _second(run: Callable[[int], float], count: int) -> float:
    """The result of the second ``run``: one-time work is done in the first."""
    run(count)
    return run(count)


@cache
def _free_at_first(gpu: str) -> int:
    """Free memory of the GPU before this process computed anything on it."""
    from primad.engine import devices

    return devices.free_bytes(gpu)


def affordable_rows(row_s: float, seconds: float) -> int:
    """How many rows of prefill can be computed in ``seconds``, if one takes ``row_s``."""
    rows = PREFILL_ROWS
    while rows > FEWEST_ROWS and rows * row_s > seconds:
        rows //= 2
    return rows


def _several(run: Callable[[], float], seconds: float) -> tuple[float, ...]:
    """Results of ``run``, once and then as long as another run fits into ``seconds``."""
    start = time.perf_counter()
    first = run()
    return (first, *_more(run, time.perf_counter() - start, seconds - (time.perf_counter() - start)))


def _more(run: Callable[[], float], run_s: float, seconds: float) -> tuple[float, ...]:
    """Results of ``run`` as long as another one, of ``run_s``, fits into ``seconds``."""
    times: list[float] = []
    start = time.perf_counter()
    while len(times) < _RUNS - 1 and time.perf_counter() - start + run_s <= seconds:
        times.append(run())
    return tuple(times)


if __name__ == "__main__":
    main()
