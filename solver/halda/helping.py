"""Choose the devices that use prefill offload: their GPU computes prompts through layers in RAM (llama.cpp's
``op_offload``).

This is decided for a plan that was found. A device offloads if its GPU computes a prompt chunk faster than its CPU, it
streams nothing, the VRAM that the plan leaves suffices, and the objective does not get worse. Decode takes as long as
before, unless the device had extra buffers, which offload excludes.

For objectives with TTFT another split of layers may suit offloading devices. So plans are also solved with offload on
all able devices, including the memory that this takes, and, where these are few, on each of them singly. The best plan
is taken, without proof that it is the best of all plans with offload.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from halda.evaluate import Objective, Prediction, evaluate
from halda.instance import Instance
from halda.solution import Solution

OF_FIRST_TOKEN: Final[frozenset[Objective]] = frozenset(("ttft", "balanced"))
"""Objectives that improve when prompts take less time."""
MAX_ALONE: Final = 3
"""Up to this number of able devices each is also tried singly; with more this would take too long."""
_SAME: Final = 1e-9
"""Relative difference below which values count as equal."""


def able_to_offload(question: Instance) -> frozenset[str]:
    """Return the devices with a GPU that computes a prompt chunk through layers in RAM faster than their CPU."""
    known = frozenset(device.device for device in question.devices if any(gpu.prefill_offload for gpu in device.gpus))
    pairs = zip(question.members, replace(question, prefill_offload=known).members, strict=True)

    def chunk_s(layer_s: tuple[float, ...]) -> float:
        return sum(count * seconds for count, seconds in zip(question.kind_totals, layer_s, strict=True))

    return frozenset(
        prefill_offload.name
        for alone, prefill_offload in pairs
        if chunk_s(prefill_offload.prefill.cpu) < chunk_s(alone.prefill.cpu)
    )


def others_to_try(able: frozenset[str]) -> list[frozenset[str]]:
    """Return the sets of offloading devices to solve for, besides the empty one."""
    alone = [frozenset({name}) for name in sorted(able)] if 1 < len(able) <= MAX_ALONE else []
    return [able, *alone] if able else []


def with_offload(found: Solution, question: Instance, able: frozenset[str]) -> Solution:
    """Return ``found``, a solution of ``question``, with offload on those of the ``able`` devices that gain from it."""
    question = question.with_rows(found.prediction.chunk_rows, found.prediction.step_rows)
    plan, prediction = found.plan, found.prediction

    def value(prediction: Prediction) -> float:
        return prediction.objective_s(found.objective, question.workload.answer_tokens)

    for device in plan.devices:
        offloads_prefill, is_of_use = device in plan.prefill_offload, plan.ram_layers_of(device) > 0
        if device not in able or plan.streaming_of(device).streamed_bytes or not (offloads_prefill or is_of_use):
            continue
        trial = plan.with_offload({*plan.prefill_offload} ^ {device})
        then = evaluate(trial, question)
        if then.short or value(then) > value(prediction) * (1 + _SAME):
            continue
        is_better = value(then) < value(prediction) * (1 - _SAME) or then.ttft_s < prediction.ttft_s * (1 - _SAME)
        if is_better or not is_of_use:
            plan, prediction = trial, then
    objective_s = value(prediction)
    return replace(
        found,
        plan=plan,
        prediction=prediction,
        objective_s=objective_s,
        bound_s=min(found.bound_s, objective_s - found.given_up_s),
    )
