"""The whole program: a layout with its memory and its times, and the objective."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import pulp

from halda.evaluate import Objective
from halda.instance import Instance
from halda.milp.layouts import Layout, integer
from halda.milp.memory import StreamVariables, add_memory, add_streaming, uses_of_cpu, uses_of_gpus
from halda.milp.time import READ_TIE, ProgramTime
from halda.variables import Expression, positive

EVEN_MS: Final = 2e-6
"""Tie-breaker: among plans with the same time, the one that leaves the fullest device the most memory is better."""


@dataclass(slots=True)
class Program:
    """The program, with the variables from which a plan is read."""

    problem: Any
    layout: Layout
    streams: StreamVariables
    output_on_gpu: Any
    objective: Expression


def build(
    problem: Any, instance: Instance, layout: Layout, objective: Objective, required: frozenset[int], *, elastic: bool
) -> Program:
    """Build memory, streaming and time over ``layout``. ``elastic`` minimises the memory to be added instead."""
    members = range(len(instance.devices))
    streams = add_streaming(problem, instance, layout)
    uses_gpu = [uses_of_gpus(problem, instance, layout, m) for m in members]
    uses_cpu = uses_of_cpu(problem, instance, layout, uses_gpu)
    output_on_gpu = integer(problem, "output_on_gpu", 0, int(instance.members[0].has_gpu))
    problem += (
        layout.tail_on_gpu <= len(instance.model.layers) * output_on_gpu,
        "the output is behind the tail's GPU layers",
    )
    problem += output_on_gpu <= uses_gpu[0][0], "the head uses its GPU for the output"
    for m in required - {0}:
        problem += layout.used[m] == 1, f"{m} is required"
    fullest = positive(problem, "fullest")
    short = add_memory(problem, instance, layout, streams, uses_gpu, output_on_gpu, fullest, elastic=elastic)
    if elastic:
        wanted: Expression = pulp.lpSum(short)
    else:
        time = ProgramTime(problem, instance, layout, (uses_cpu, uses_gpu), output_on_gpu, streams)
        wanted = time.objective(objective) + READ_TIE * time.reading() + EVEN_MS * fullest
    problem += wanted
    return Program(problem, layout, streams, output_on_gpu, wanted)
