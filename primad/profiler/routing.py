"""Measure the cost of a layer with experts in addition to the bytes of the experts that it uses.

A window of such layers is timed with one row and with many, and the time of dense layers with as many bytes is
subtracted: for one row this leaves the router, selection and collecting; for many rows also the cost of experts with
few rows each, which do not fill a kernel.
"""

from __future__ import annotations

import logging
import statistics
from dataclasses import replace
from typing import Final

from halda import CpuProfile, GpuProfile, LayerProfile, ModelProfile, RoutingCost
from halda.cost import experts_s, layer_s
from primad.profiler.speeds import Bench
from primad.profiler.synthetic import MIXED, LayerShape

logger = logging.getLogger(__name__)

_OF_ROUTING: Final = 0.02
"""Share of all time for running one window; writing and loading it take additional time."""
_ENOUGH: Final = 0.08
"""Share of all time that must be left."""
_RATIO: Final = (1.0, 8.0)
"""Bounds of the expert factor with many rows; only a disturbed trial exceeds them, or one in which routing takes longer
per row than the layer does without it."""


def measure_routing(bench: Bench, processor: CpuProfile | GpuProfile) -> RoutingCost:
    """The routing cost of ``processor``, whose other figures are known; none for lack of time or if llama.cpp fails."""
    if bench.effort.is_quick or bench.budget.left_s < _ENOUGH * bench.effort.seconds:
        return RoutingCost()
    kind, seconds = processor.speeds[0].type, _OF_ROUTING * bench.effort.seconds
    layers = max(1, -(-bench.model_bytes // _used_bytes(MIXED, kind)))
    one = bench.time_decode(MIXED, kind, (False,), seconds, layers)[0]
    many = bench.time_rows(kind, (False,), seconds, MIXED)[0]
    if isinstance(one, str) or isinstance(many, str):
        logger.warning("layers with experts are not measured: %s", one if isinstance(one, str) else many)
        return RoutingCost()
    one_s = (statistics.median(one.decode_s) - processor.step_s) / layers
    many_s = (statistics.median(many.prefill_s) - processor.step_s) / bench.layers_of(MIXED)
    return routing_of(processor, MIXED, one_s, many_s, many.prefill_rows)


def _used_bytes(shape: LayerShape, kind: str) -> int:
    share = shape.experts_used / shape.experts
    return round(shape.weight_bytes(kind) * (1 - (1 - share) * shape.expert_weights / shape.weights))


def routing_of(
    processor: CpuProfile | GpuProfile, shape: LayerShape, one_s: float, many_s: float, rows: int
) -> RoutingCost:
    """The rest of a layer's seconds with one row and with ``rows``, after subtracting the known costs."""
    if isinstance(processor, CpuProfile):
        processor = processor.with_extra_buffers(())
    plain = replace(processor, routing=RoutingCost())
    layer, model = _profiles(shape, plain.speeds[0].type)

    def known_s(count: int) -> float:
        return layer_s(plain, _FAST, layer, model, count, count / 2, "f16", chunk=count > 1)

    routed_s = min(known_s(1), max(0.0, one_s - known_s(1)))
    experts = experts_s(plain, layer, model, rows)
    minimum, maximum = _RATIO
    ratio = (many_s - routed_s - known_s(rows) + experts) / experts
    return RoutingCost(layer_s=routed_s, many_ratio=min(maximum, max(minimum, ratio)))


_FAST: Final = 1e12
"""Bytes per second for reading a KV cache that is nearly empty."""


def _profiles(shape: LayerShape, kind: str) -> tuple[LayerProfile, ModelProfile]:
    of_experts = round(shape.weight_bytes(kind) * shape.expert_weights / shape.weights)
    layer = LayerProfile(
        bytes_by_type={kind: shape.weight_bytes(kind) - of_experts},
        expert_bytes_by_type={kind: of_experts},
        kv_bytes_per_token=0,
    )
    model = ModelProfile(
        name="experts",
        architecture="llama",
        layers=(layer,),
        embedding_bytes=0,
        output_bytes_by_type={},
        tied=False,
        width=shape.width,
        vocabulary=1,
        context_tokens=1,
        experts=shape.experts,
        experts_used=shape.experts_used,
        kv_head_width=1,
        cut_multiple=1,
    )
    return layer, model
