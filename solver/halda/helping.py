"""Whose GPU computes prompts through layers that stay in RAM (llama.cpp's ``op_offload``).

It is decided for a plan that was found: a device is helped if its GPU is faster at a chunk of a prompt than its processor,
nothing of the device streams, the VRAM that the plan leaves is enough, and what the plan is for takes no longer. A token
takes as long as before, unless the device had extra buffers, which help excludes.

Where the first token counts, other layers may suit devices that are helped. So plans are also solved in which all of them
are, with the memory that this takes, and where they are few each alone; the best is the answer. It is not proven to be the
best of all that have help.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from halda.evaluate import Objective, Prediction, evaluate
from halda.instance import Instance
from halda.solution import Solution

OF_FIRST_TOKEN: Final[frozenset[Objective]] = frozenset(("ttft", "balanced"))
"""What takes less where prompts do."""
MAX_ALONE: Final = 3
"""Of so many devices that could be helped each is tried alone, too; with more it would take too long."""
_SAME: Final = 1e-9
"""Relative difference that is no difference."""


def able_to_offload(question: Instance) -> frozenset[str]:
    """The devices of which a GPU is faster than their processor at a chunk of a prompt through layers in RAM."""
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
    """Who is helped in the plans that are solved besides the one without help."""
    alone = [frozenset({name}) for name in sorted(able)] if 1 < len(able) <= MAX_ALONE else []
    return [able, *alone] if able else []


def with_offload(found: Solution, question: Instance, able: frozenset[str]) -> Solution:
    """``found``, of ``question``, in which those of the devices ``able`` to be helped are for which that is better."""
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
