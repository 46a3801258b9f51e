"""The child process that times windows: ``python -m primad.profiler.trial`` with tasks as lines of JSON on standard input.

It answers each line with one line. It may crash or hang in one (llama.cpp's extra buffers do on some builds): that is for
its parent (``trials.py``) to judge. Small windows are timed with swept caches, since they would stay where a model's layers
never do, and with the pause that the sweep makes, after which compute threads sleep as they do in a ring.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from typing import Final

import msgspec

from halda import BATCH_ROWS, PREFILL_ROWS
from primad.engine.devices import GpuDevice
from primad.engine.protocol import EngineOptions, Rows, WindowSource

CONTEXT: Final = PREFILL_ROWS + 256
_RUN_STEPS: Final = 6
"""A run is the median of so many steps."""
_RUNS: Final = 6
"""More tell nothing new."""
FEWEST_ROWS: Final = 64
"""Of a chunk of a prompt, on a device that takes long."""


class TrialTimes(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds of a step by run: with 1 row, with ``BATCH_ROWS`` and with ``prefill_rows``; empty where not asked for.

    ``prefill_rows`` are ``PREFILL_ROWS``, fewer where those take too long.
    """

    decode_s: tuple[float, ...]
    batch_s: tuple[float, ...]
    prefill_s: tuple[float, ...]
    prefill_rows: int


class TimeWindow(msgspec.Struct, frozen=True, kw_only=True, tag="time"):
    """Time ``window``; ``sweep_bytes`` are read between two steps (0: the window itself is larger than caches).

    One row, or where ``many_rows`` several and a chunk of a prompt: runs for ``seconds``, one in any case.
    """

    window: WindowSource
    width: int
    threads: int
    batch_threads: int
    sweep_bytes: int
    many_rows: bool
    seconds: float


class ListGpus(msgspec.Struct, frozen=True, tag="gpus"):
    """Name the GPUs that the installed llama.cpp can use."""


class Gpus(msgspec.Struct, frozen=True, tag="gpus"):
    """The answer."""

    gpus: tuple[GpuDevice, ...]


Task = TimeWindow | ListGpus


def main() -> None:
    """Answer tasks until standard input ends."""
    decoder = msgspec.json.Decoder(Task)
    for line in sys.stdin.buffer:
        task = decoder.decode(line)
        answer: TrialTimes | Gpus = _gpus() if isinstance(task, ListGpus) else _time(task)
        sys.stdout.buffer.write(msgspec.json.encode(answer) + b"\n")
        sys.stdout.buffer.flush()


def _gpus() -> Gpus:
    from primad.engine.devices import list_gpus

    return Gpus(tuple(list_gpus()))


def _time(task: TimeWindow) -> TrialTimes:
    import numpy as np  # only the child loads it and llama.cpp

    from primad.engine.llama import MiddleWindow

    options = EngineOptions(
        context=CONTEXT,
        sequences=1,
        rows=PREFILL_ROWS,
        threads=task.threads,
        batch_threads=task.batch_threads,
        kv_type="f16",
        lock=False,
    )
    window = MiddleWindow(task.window, options, width=task.width)
    sweep = np.ones(task.sweep_bytes // 8, np.uint64)
    hidden = np.random.default_rng(0).standard_normal((PREFILL_ROWS, task.width), np.float32)

    def step(count: int, position: int) -> float:
        rows = Rows(
            content=hidden[:count],
            positions=list(range(position, position + count)),
            sequences=[[0]] * count,
            outputs=[False] * (count - 1) + [True],
        )
        start = time.perf_counter()
        window.forward(rows)
        return time.perf_counter() - start

    def run(count: int) -> float:
        window.kv_remove(0, 0, -1)
        step(count, 0)  # llama.cpp builds its graph anew when the number of rows changes
        times = []
        for i in range(1, _RUN_STEPS + 1):
            sweep.sum()
            times.append(step(count, i * count))
        return statistics.median(times)

    def prefill(count: int) -> float:
        window.kv_remove(0, 0, -1)
        return step(count, 0)

    if not task.many_rows:
        decode_s = _several(lambda: run(1), task.seconds)
        timings = TrialTimes(decode_s=decode_s, batch_s=(), prefill_s=(), prefill_rows=0)
    else:
        start = time.perf_counter()
        batch_s = _several(lambda: run(BATCH_ROWS), task.seconds / 4)
        left_s = task.seconds - (time.perf_counter() - start)
        prefill(FEWEST_ROWS)  # what is done once is done
        few_s = prefill(FEWEST_ROWS)
        rows = affordable_rows(few_s / FEWEST_ROWS, left_s)
        first_s = few_s if rows == FEWEST_ROWS else prefill(rows)
        prefill_s = (first_s, *_more(lambda: prefill(rows), first_s, left_s - first_s))
        timings = TrialTimes(decode_s=(), batch_s=batch_s, prefill_s=prefill_s, prefill_rows=rows)
    window.release()
    return timings


def affordable_rows(row_s: float, seconds: float) -> int:
    """As many rows of prefill as can be computed in ``seconds``, where one takes ``row_s``."""
    rows = PREFILL_ROWS
    while rows > FEWEST_ROWS and rows * row_s > seconds:
        rows //= 2
    return rows


def _several(run: Callable[[], float], seconds: float) -> tuple[float, ...]:
    """What ``run`` gives, once and then as long as another one fits into ``seconds``."""
    start = time.perf_counter()
    first = run()
    return (first, *_more(run, time.perf_counter() - start, seconds - (time.perf_counter() - start)))


def _more(run: Callable[[], float], run_s: float, seconds: float) -> tuple[float, ...]:
    """What ``run`` gives as long as another one, of ``run_s``, fits into ``seconds``."""
    times: list[float] = []
    start = time.perf_counter()
    while len(times) < _RUNS - 1 and time.perf_counter() - start + run_s <= seconds:
        times.append(run())
    return tuple(times)


if __name__ == "__main__":
    main()
