"""Measure costs of attention, and of layers and matrices whose shape differs from those that rates were measured on.

Each cost is a difference: the time of a window with such a shape, minus the prediction from the rates. Short rows are
timed on layers that have little else, attention with and without tokens in the KV cache.
"""

from __future__ import annotations

import logging
import math
import statistics
from collections.abc import Sequence
from itertools import chain, takewhile
from typing import Final, get_args

from halda import PREFILL_ROWS, RATE_WIDTH, CacheCost, StateKind, TypeRows, TypeSpeed, WidthCost
from primad.profiler.effort import MORE_COMPARED, TYPES
from primad.profiler.speeds import Bench, answered
from primad.profiler.synthetic import BIG, MIDDLE, NARROW, WIDE, LayerShape

logger = logging.getLogger(__name__)

CACHED: Final = PREFILL_ROWS
"""Tokens in the KV cache when attention is timed."""
ATTENDING: Final = 16
"""Rows of one sequence that are timed together."""
_LAYERS: Final = 4
"""Layers of the window that attention is timed on: reading their weights takes less time than that many tokens."""
_OF_SHAPE: Final = 0.02
"""Share of all time for running one window; writing and loading it take additional time."""
_ENOUGH: Final = 0.06
"""Share of all time that must be left for each."""
MODEL_BYTES: Final = (64 << 20, 112 << 20)
"""Sizes of models that may partly fit into caches."""
_MIN_RATIO: Final = 0.1
"""Minimum time of a byte, relative to a byte that no cache holds."""
_RATIO: Final = (0.8, 1.25)
"""Bounds of the time of a wide layer relative to the rates; only a disturbed trial exceeds them."""
_MANY_RATIO: Final = (1.0, 2.0)
"""The same bounds for a narrow layer with many rows."""


def measure_widths(bench: Bench, main: TypeSpeed, step_s: float, layer_s: float) -> tuple[WidthCost, ...]:
    """Time per byte of a wide layer, if memory and time suffice, relative to the rates, which are those of a big layer."""
    of_layer_s = _of_layer_s(bench, WIDE, main, step_s, layer_s)
    if of_layer_s is None:
        return ()
    ratio = of_layer_s * main.decode_bytes_per_s / WIDE.weight_bytes(main.type)
    minimum, maximum = _RATIO
    return (
        WidthCost(weights=MIDDLE.weights, ratio=1.0, many_ratio=_narrow_ratio(bench, main, step_s, layer_s)),
        WidthCost(weights=BIG.weights, ratio=1.0),
        WidthCost(weights=WIDE.weights, ratio=min(maximum, max(minimum, ratio))),
    )


def _narrow_ratio(bench: Bench, main: TypeSpeed, step_s: float, layer_s: float) -> float:
    """Time of many rows of a middle-sized layer relative to big ones."""
    timings = bench.time_rows(main.type, (main.extra_buffers,), _OF_SHAPE * bench.effort.seconds, MIDDLE)[0]
    if isinstance(timings, str):
        return 1.0
    layers, rows = bench.layers_of(MIDDLE), timings.prefill_rows
    flop = layers * rows * (2 * MIDDLE.weights + 4 * rows * MIDDLE.width)
    seconds = statistics.median(timings.prefill_s) - step_s - layers * layer_s
    minimum, maximum = _MANY_RATIO
    return min(maximum, max(minimum, seconds * main.prefill_flop_per_s / flop))


def measure_rows(bench: Bench, main: TypeSpeed, step_s: float, layer_s: float) -> float:
    """Seconds per row of a matrix besides its bytes; 0 if no time is left to measure it."""
    of_layer_s = _of_layer_s(bench, NARROW, main, step_s, layer_s)
    if of_layer_s is None:
        return 0.0
    more_s = of_layer_s - NARROW.weight_bytes(main.type) / main.decode_bytes_per_s
    return max(0.0, more_s) / NARROW.short_rows / (1 - NARROW.width / RATE_WIDTH)


def measure_caches(bench: Bench, main: TypeSpeed, step_s: float, layer_s: float) -> tuple[CacheCost, ...]:
    """Time per byte in models so small that caches hold part of them; empty for lack of time."""
    if not _has_time(bench):
        return ()
    seconds, layer_bytes = _OF_SHAPE * bench.effort.seconds, MIDDLE.weight_bytes(main.type)

    def cost_of(layers: int) -> CacheCost:
        timings = bench.time_decode(MIDDLE, main.type, (main.extra_buffers,), seconds, layers)[0]
        taken_s = statistics.median(answered(timings).decode_s)
        ratio = ((taken_s - step_s) / layers - layer_s) * main.decode_bytes_per_s / layer_bytes
        return CacheCost(bytes=layers * layer_bytes, ratio=min(1.0, max(_MIN_RATIO, ratio)))

    return tuple(cost_of(size // layer_bytes) for size in MODEL_BYTES)


def measure_attention(bench: Bench, main: TypeSpeed) -> dict[str, float]:
    """The attention figures of a ``CpuProfile``, in seconds per channel of a row for each token in the KV cache; none
    for lack of time."""
    if not _has_time(bench):
        return {}
    seconds = _OF_SHAPE * bench.effort.seconds

    def step_s(cached: int, *, flash: bool, rows: int = 1) -> float:
        timings = bench.time_cached(MIDDLE, main.type, _LAYERS, cached, seconds, flash=flash, rows=rows)
        return statistics.median(answered(timings).decode_s)

    channels = _LAYERS * CACHED * MIDDLE.width
    without_s = step_s(0, flash=True)
    flash_s, plain_s = (max(0.0, step_s(CACHED, flash=flash) - without_s) for flash in (True, False))
    found = {"attention_s": flash_s / channels, "plain_attention_s": plain_s / channels}
    if _has_time(bench):
        behind_s, first_s = (step_s(cached, flash=False, rows=ATTENDING) for cached in (CACHED, 0))
        found["rows_attention_s"] = max(0.0, behind_s - first_s) / ATTENDING / channels
    return found


def measure_exact(bench: Bench, speeds: Sequence[TypeSpeed]) -> tuple[TypeRows, ...]:
    """Which steps of several rows are bit-identical to single rows, by type; with and without extra buffers where they
    are used.

    Streamed windows have none. All of ``TYPES`` are compared, others as far as time allows.
    """
    extra = {speed.type for speed in speeds if speed.extra_buffers}
    more = takewhile(lambda _: not bench.effort.is_quick and bench.budget.left_s > 0, MORE_COMPARED)
    return tuple(
        _both(bench.exact_rows(kind, extra=False), bench.exact_rows(kind, extra=True))
        if kind in extra
        else bench.exact_rows(kind, extra=False)
        for kind in chain(TYPES, more)
    )


def measure_states(bench: Bench) -> tuple[TypeRows, ...]:
    """``measure_exact`` for layers with a state, by its kind: everything but matrix products is the same for all types."""
    return tuple(bench.exact_states(state, TYPES[0]) for state in get_args(StateKind))


def _both(one: TypeRows, other: TypeRows) -> TypeRows:
    """The properties that both have."""
    return TypeRows(
        type=one.type,
        rows=min(one.rows, other.rows),
        piece_rows=math.lcm(one.piece_rows, other.piece_rows),
        replay_rows=min(one.replay_rows, other.replay_rows),
    )


def _of_layer_s(bench: Bench, shape: LayerShape, main: TypeSpeed, step_s: float, layer_s: float) -> float | None:
    """Seconds of a layer besides its fixed cost; None where there is no memory or time for it."""
    if not _has_time(bench):
        return None
    timings = bench.time_decode(shape, main.type, (main.extra_buffers,), _OF_SHAPE * bench.effort.seconds)[0]
    if isinstance(timings, str):
        logger.warning("layers %d wide are not measured: %s", shape.width, timings)
        return None
    return (statistics.median(timings.decode_s) - step_s) / bench.layers_to_read(shape, main.type) - layer_s


def _has_time(bench: Bench) -> bool:
    return not bench.effort.is_quick and bench.budget.left_s >= _ENOUGH * bench.effort.seconds
