"""A head's message that loads one window in the middle of a small ring on a worker, and a layer for it."""

from __future__ import annotations

from gguf import GGMLQuantizationType
from msgspec.structs import replace

from halda.assignment import WindowAssignment, in_memory
from primad.gguf.layers import LayerRef, LayerTensor
from primad.gguf.windows import WindowPlan, WindowSpec
from primad.network.messages import Load

LAYER = LayerRef("ab" * 32, 64, (LayerTensor("blk.*.attn_q.weight", int(GGMLQuantizationType.F32), (8, 2), 0, 64),))


def a_load(
    epoch: int = 3,
    *,
    window: int = 1,
    first: int = 2,
    last: int = 4,
    layers: tuple[LayerRef, ...] = (LAYER, LAYER),
    metadata: bytes = b"",
    assignment: WindowAssignment | None = None,
    extra_buffers: bool = False,
    **changes: object,
) -> Load:
    """Layers ``first <= layer < last`` as ``window`` of the route, in the files ``layers``, with other ``changes``."""
    load = Load(
        ring=1,
        epoch=epoch,
        route=3,
        width=8,
        windows=[
            WindowPlan(
                spec=WindowSpec(window=window, first=first, last=last, metadata=metadata, layers=layers),
                assignment=assignment or in_memory(first, last),
                extra_buffers=extra_buffers,
            )
        ],
        read_ahead_bytes=0,
        sources=[],
        context=64,
        sequences=1,
        rows=16,
        step_timeout_s=5.0,
        place=0,
        kv_type="f16",
    )
    return replace(load, **changes)
