"""Halda: given profiles of devices, links and a model, say which device computes which layers.

A pure library: profiles in, ``Plan`` out. No I/O, no clock, no import of primad.
"""

from halda.arrange import arrange, by_memory
from halda.evaluate import OBJECTIVES, DevicePrediction, Objective, Prediction, Short, evaluate, residency
from halda.instance import Instance, instance
from halda.plan import Infeasible, LeftOut, Plan, Streaming, Window
from halda.profile import (
    BATCH_ROWS,
    PREFILL_ROWS,
    CpuProfile,
    DeviceProfile,
    DiskProfile,
    GpuProfile,
    LayerProfile,
    Limits,
    LinkProfile,
    ModelProfile,
    TypeSpeed,
    Workload,
)
from halda.search import Solution, solve, solve_alone, solve_heads
from halda.solving import SOLVERS, SolverName

__all__ = [
    "BATCH_ROWS",
    "OBJECTIVES",
    "PREFILL_ROWS",
    "SOLVERS",
    "CpuProfile",
    "DevicePrediction",
    "DeviceProfile",
    "DiskProfile",
    "GpuProfile",
    "Infeasible",
    "Instance",
    "LayerProfile",
    "LeftOut",
    "Limits",
    "LinkProfile",
    "ModelProfile",
    "Objective",
    "Plan",
    "Prediction",
    "Short",
    "Solution",
    "SolverName",
    "Streaming",
    "TypeSpeed",
    "Window",
    "Workload",
    "arrange",
    "by_memory",
    "evaluate",
    "instance",
    "residency",
    "solve",
    "solve_alone",
    "solve_heads",
]
