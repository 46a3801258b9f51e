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
_SLOW_S: Final = 1.2
"""Prefill that takes longer is not run as often."""


class TrialTimes(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds of a step by run: with 1 row, with ``BATCH_ROWS`` and with ``PREFILL_ROWS``; empty where not asked for."""

    decode_s: tuple[float, ...]
    batch_s: tuple[float, ...]
    prefill_s: tuple[float, ...]


class TimeWindow(msgspec.Struct, frozen=True, kw_only=True, tag="time"):
    """Time ``window``; ``sweep_bytes`` are read between two steps (0: the window itself is larger than caches).

    ``decode_runs`` and ``batch_runs`` are of ``_RUN_STEPS`` steps each, ``prefill_runs`` of one.
    """

    window: WindowSource
    width: int
    threads: int
    batch_threads: int
    sweep_bytes: int
    decode_runs: int
    batch_runs: int
    prefill_runs: int


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

    def prefill() -> float:
        window.kv_remove(0, 0, -1)
        return step(PREFILL_ROWS, 0)

    timings = TrialTimes(
        decode_s=tuple(run(1) for _ in range(task.decode_runs)),
        batch_s=tuple(run(BATCH_ROWS) for _ in range(task.batch_runs)),
        prefill_s=tuple(_several(prefill, task.prefill_runs)),
    )
    window.release()
    return timings


def _several(run: Callable[[], float], runs: int) -> list[float]:
    """Run it ``runs`` times after a first one that is not counted; where it is slow, twice in all."""
    if runs == 0:
        return []
    times = [run()]
    slow = times[0] > _SLOW_S
    times += [run() for _ in range(1 if slow else runs)]
    return times if slow else times[1:]


if __name__ == "__main__":
    main()
