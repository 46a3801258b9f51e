"""From timed windows to the figures of a profile: what a window costs, what a layer costs, and a rate for each type.

The model of time is ``step_s + layers * layer_s + bytes / rate`` for one row. Two windows of small layers and one of a big
layer, of one type, give its three unknowns; for every other type one big layer gives the rate.
"""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from halda import PREFILL_ROWS, TypeSpeed
from primad.engine.probe import ANSWER_TOKENS, PROMPT_ROWS, WORTH
from primad.errors import EngineError
from primad.profiler.synthetic import BIG, MIDDLE, SMALL, LayerShape, write_window
from primad.profiler.trial import TimeWindow, Timings
from primad.profiler.trials import Trials

logger = logging.getLogger(__name__)

TYPES: Final = ("Q4_K", "Q6_K", "Q4_0", "Q4_1", "Q5_K", "Q5_0", "Q8_0", "IQ4_XS", "F16")
"""The first is the one that thread counts and fixed costs are measured with."""
MAIN: Final = TYPES[0]
SMALL_LAYERS: Final = (2, 12)
_LEAST_S: Final = 1e-6
_DECODE_RUNS: Final = 6
_PREFILL_RUNS: Final = 2
_STEADY: Final = 0.25
"""A larger spread of the runs means that something else was running: the trial is repeated, within ``REPEATS_S``."""
REPEATS_S: Final = 20.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Fixed:
    """What a step costs besides weights: once a window, and once a layer."""

    step_s: float
    layer_s: float


class Patience:
    """Seconds that are left for repeating trials that were disturbed."""

    def __init__(self, seconds: float) -> None:
        self._left_s = seconds

    def is_left(self) -> bool:
        """Whether another trial may be repeated."""
        return self._left_s > 0

    @contextmanager
    def used(self) -> Iterator[None]:
        """Takes what the block takes."""
        start = time.monotonic()
        yield
        self._left_s -= time.monotonic() - start


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """Where and how windows are timed: on the CPU, or all on the GPU.

    About ``weights`` weights stand for a model, ``sweep_bytes`` are read between decode steps, ``folder`` takes the files.
    """

    trials: Trials
    folder: Path
    threads: int
    batch_threads: int
    on_gpu: bool
    weights: int
    sweep_bytes: int
    patience: Patience

    def model(self, kind: str) -> tuple[LayerShape, int]:
        """Shape and number of the layers that stand for a model of type ``kind``."""
        small_blocks = GGML_QUANT_SIZES[GGMLQuantizationType[kind]][0] == 32
        shape = MIDDLE if small_blocks and not self.on_gpu else BIG
        return shape, -(-self.weights // shape.weights)

    def time(
        self, shape: LayerShape, kind: str, layers: int, *, extra: Sequence[bool], prefill: bool
    ) -> list[Timings | str]:
        """Time a window of ``layers`` layers of ``kind`` for each setting of ``extra`` buffers."""
        with TemporaryDirectory(prefix="window-", dir=self.folder) as name:
            # llama.cpp counts the output matrix as one more layer, the last of all.
            files = write_window(Path(name), shape, kind, layers, gpu_layers=layers + 1 if self.on_gpu else 0)
            return [
                self._steadily(
                    TimeWindow(
                        files=files,
                        width=shape.width,
                        threads=self.threads,
                        batch_threads=self.batch_threads,
                        extra_buffers=setting,
                        sweep_bytes=self.sweep_bytes,
                        decode_runs=_DECODE_RUNS,
                        prefill_runs=_PREFILL_RUNS if prefill else 0,
                    )
                )
                for setting in extra
            ]

    def _steadily(self, task: TimeWindow) -> Timings | str:
        """Time ``task``, again while its runs disagree; disturbances only add, so each phase keeps its best trial."""
        best = self.trials.time(task)
        while not isinstance(best, str) and not _is_steady(best) and self.patience.is_left():
            with self.patience.used():
                more = self.trials.time(task)
            if isinstance(more, str):
                return more
            best = Timings(
                decode_s=min(best.decode_s, more.decode_s, key=statistics.median),
                batch_s=min(best.batch_s, more.batch_s, key=statistics.median),
                prefill_s=min(best.prefill_s, more.prefill_s, key=statistics.median) if best.prefill_s else (),
            )
        return best


def _is_steady(timings: Timings) -> bool:
    return all(spread(times) <= _STEADY for times in (timings.decode_s, timings.prefill_s) if times)


def answered(timings: Timings | str) -> Timings:
    """The timings. Raises ``EngineError`` where the child ended without."""
    if isinstance(timings, str):
        raise EngineError(f"llama.cpp cannot compute a window on this device: {timings}")
    return timings


def measure_fixed(bench: Bench, big: Timings) -> Fixed:
    """The fixed costs; ``big`` are the timings of the big layers of type ``MAIN`` without extra buffers.

    They are differences of short times, so the least of the runs counts: what disturbs a run only adds to it.
    Raises ``EngineError`` when llama.cpp fails, ``OSError`` when the files cannot be written.
    """
    few, many = (
        min(answered(bench.time(SMALL, MAIN, layers, extra=(False,), prefill=False)[0]).decode_s)
        for layers in SMALL_LAYERS
    )
    return fit(few, many, min(big.decode_s), bench.model(MAIN)[1])


def fit(few_s: float, many_s: float, big_s: float, big_layers: int) -> Fixed:
    """Solve for the fixed costs from a decode step of few and of many small layers and of the big ones."""
    small_bytes, big_bytes = SMALL.weight_bytes(MAIN), big_layers * BIG.weight_bytes(MAIN)
    few, many = SMALL_LAYERS
    small_s = max(_LEAST_S, (many_s - few_s) / (many - few))  # a small layer with its weights
    step_s = max(_LEAST_S, few_s - few * small_s)
    layer_s = small_s
    for _ in range(8):  # the weights of a small layer take little of its time, so this settles at once
        weights_s = max(_LEAST_S, big_s - step_s - big_layers * layer_s)
        layer_s = max(_LEAST_S, small_s - small_bytes * weights_s / big_bytes)
    return Fixed(step_s=step_s, layer_s=layer_s)


def measure_types(bench: Bench, fixed: Fixed, advance: Callable[[str], None]) -> tuple[TypeSpeed, ...]:
    """The speed of every type that llama.cpp computes here, each with extra buffers where they are worth it.

    Raises ``EngineError`` when none is computed, ``OSError`` when the files cannot be written.
    """
    speeds = []
    settings = (False,) if bench.on_gpu else (False, True)
    for kind in TYPES:
        advance(kind)
        shape, layers = bench.model(kind)
        plain, *more = bench.time(shape, kind, layers, extra=settings, prefill=True)
        chosen, extra = choose(plain, more[0] if more else "not tried")
        if isinstance(chosen, str):
            logger.warning("%s is not measured: %s", kind, chosen)
        else:
            speeds.append(speed(kind, chosen, fixed, shape, layers, extra_buffers=extra))
    if not speeds:
        raise EngineError(
            "llama.cpp cannot compute any quantisation type on this device; install llama-cpp-python anew"
        )
    return tuple(speeds)


def choose(plain: Timings | str, extra: Timings | str) -> tuple[Timings | str, bool]:
    """The better of both settings by the time of a typical exchange, and whether it is the one with extra buffers."""
    if isinstance(extra, str):
        return plain, False
    if isinstance(plain, str) or _exchange_s(extra) < WORTH * _exchange_s(plain):
        return extra, True
    return plain, False


def _exchange_s(timings: Timings) -> float:
    prefill_s = statistics.median(timings.prefill_s) / PREFILL_ROWS
    return PROMPT_ROWS * prefill_s + ANSWER_TOKENS * statistics.median(timings.decode_s)


def speed(
    kind: str, timings: Timings, fixed: Fixed, shape: LayerShape, layers: int, *, extra_buffers: bool
) -> TypeSpeed:
    """The rates of type ``kind`` from a window of ``layers`` layers, less what the fixed costs take."""
    fixed_s = fixed.step_s + layers * fixed.layer_s
    size = layers * shape.weight_bytes(kind)
    # Attention is computed for the whole square of rows and columns, masked or not.
    flop = layers * PREFILL_ROWS * (2 * shape.weights + 4 * PREFILL_ROWS * shape.width)

    def weights_s(times: Sequence[float]) -> float:
        median = statistics.median(times)
        return max(median - fixed_s, median / 10)

    return TypeSpeed(
        type=kind,
        decode_bytes_per_s=size / weights_s(timings.decode_s),
        batch_bytes_per_s=size / weights_s(timings.batch_s),
        prefill_flop_per_s=flop / weights_s(timings.prefill_s),
        extra_buffers=extra_buffers,
        decode_spread=spread(timings.decode_s),
        prefill_spread=spread(timings.prefill_s),
    )


def spread(times: Sequence[float]) -> float:
    """(Largest - smallest) / median."""
    return (max(times) - min(times)) / statistics.median(times)
