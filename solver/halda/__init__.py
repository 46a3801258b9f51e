"""Halda: decides which device computes which layers, given profiles of devices, links and a model.

A pure library: profiles in, ``Plan`` out. No I/O, no clock, no import of primad. The solver itself takes a third of a
second to load and is imported on the first solve.
"""

from typing import TYPE_CHECKING, Any

from halda.arrange import arrange
from halda.assignment import Assignment, RankBytes, ShareBytes, WindowAssignment, assignments
from halda.chunk_rows import CHUNKS
from halda.evaluate import (
    OBJECTIVES,
    DevicePrediction,
    Objective,
    Prediction,
    Short,
    evaluate,
    prompt_row_s,
    residency,
)
from halda.instance import EXPERT_PLACES, ExpertPlace, Instance, instance
from halda.plan import CutOff, Infeasible, LeftOut, NotBelow, Plan, Rank, Streaming, Window
from halda.profile import (
    BATCH_ROWS,
    KV_BLOCK,
    KV_TYPES,
    OFFLOAD_FEW_ROWS,
    PREFILL_ROWS,
    RATE_WIDTH,
    CacheCost,
    CacheType,
    CpuProfile,
    DeviceProfile,
    DiskProfile,
    GpuProfile,
    LayerProfile,
    Limits,
    LinkProfile,
    MessageTime,
    ModelProfile,
    OffloadSpeed,
    RoutingCost,
    RowSpeed,
    StateKind,
    TypeRows,
    TypeSpeed,
    WidthCost,
    Workload,
)
from halda.solution import Solution

if TYPE_CHECKING:
    from halda.search import solve

_SOLVING = ("solve",)


def __getattr__(name: str) -> Any:
    if name not in _SOLVING:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from halda import search

    return getattr(search, name)


__all__ = [
    "BATCH_ROWS",
    "CHUNKS",
    "EXPERT_PLACES",
    "KV_BLOCK",
    "KV_TYPES",
    "OBJECTIVES",
    "OFFLOAD_FEW_ROWS",
    "PREFILL_ROWS",
    "RATE_WIDTH",
    "Assignment",
    "CacheCost",
    "CacheType",
    "CpuProfile",
    "CutOff",
    "DevicePrediction",
    "DeviceProfile",
    "DiskProfile",
    "ExpertPlace",
    "GpuProfile",
    "Infeasible",
    "Instance",
    "LayerProfile",
    "LeftOut",
    "Limits",
    "LinkProfile",
    "MessageTime",
    "ModelProfile",
    "NotBelow",
    "Objective",
    "OffloadSpeed",
    "Plan",
    "Prediction",
    "Rank",
    "RankBytes",
    "RoutingCost",
    "RowSpeed",
    "ShareBytes",
    "Short",
    "Solution",
    "StateKind",
    "Streaming",
    "TypeRows",
    "TypeSpeed",
    "WidthCost",
    "Window",
    "WindowAssignment",
    "Workload",
    "arrange",
    "assignments",
    "evaluate",
    "instance",
    "prompt_row_s",
    "residency",
    "solve",
]
