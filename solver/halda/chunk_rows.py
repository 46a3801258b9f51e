"""How many rows of a prompt are computed at a time: what suits a plan that was found best."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from halda.evaluate import evaluate, residency
from halda.instance import Instance
from halda.solution import Solution

CHUNKS: Final = (128, 256, 1024, 2048)
"""Rows of a chunk of the prompt that may be better than those asked for where layers stream: what is read serves more of
them, or a smaller buffer leaves more room for layers."""
MAX_CHUNK_S: Final = 60.0
"""A chunk that takes longer is not made larger: nothing else is computed meanwhile, and a ring whose step does not come back
counts as broken after a while."""
RING_CHUNKS: Final = (256, 128, 64, 32)
"""Rows of a chunk with which a ring may have a prompt sooner: one device computes a chunk while another has the next.
Buffers stay as they are."""
RING_GAIN: Final = 0.01
"""Share of the time to the first token that each smaller chunk must gain then; other prompts are hardly slower with it."""
FEWER_GAIN: Final = 0.05
"""Share of the objective that fewer rows must gain: with other prompts than the typical one they may be slower."""
_SAME: Final = 1e-9
"""Relative difference that is no difference."""


def in_smaller_chunks(found: Solution, question: Instance) -> Solution:
    """``found`` with the chunks of a prompt with which its ring has the first token soonest."""
    best, work = found, question.workload
    for rows in RING_CHUNKS:
        if rows >= min(work.chunk_rows, work.prompt_tokens):
            continue
        prediction = evaluate(found.plan, question.with_rows(rows, work.step_rows))
        if not prediction.short and prediction.ttft_s < best.prediction.ttft_s * (1 - RING_GAIN):
            objective_s = prediction.objective_s(found.objective, work.answer_tokens)
            is_as_before = objective_s >= found.objective_s * (1 - _SAME)
            best = replace(found, prediction=prediction, objective_s=objective_s, proven=found.proven and is_as_before)
    return best


def other_chunks(found: Solution, question: Instance, chunks: Sequence[int]) -> list[int]:
    """How many rows of a chunk are best for the plan that was found, as it then has to stream, if others are than it has.

    Fewer rows have to be clearly better, and more rows than a prompt has are of no use.
    """
    rows, work = question.workload.chunk_rows, question.workload
    if not found.plan.streaming:
        return []
    best, best_s = list[int](), found.objective_s
    more = sorted(chunk for chunk in chunks if chunk > rows and work.prompt_tokens > rows)
    fewer = sorted((chunk for chunk in chunks if chunk < rows), reverse=True)
    for chunk in more + fewer:
        other = question.with_rows(chunk)
        plan = residency(found.plan, other, lambda each: each.objective_s(found.objective, work.answer_tokens))
        prediction = evaluate(plan, other)
        value = prediction.objective_s(found.objective, work.answer_tokens)
        gain = _SAME if chunk > rows else FEWER_GAIN
        too_long = chunk > rows and prediction.prefill_chunk_s > MAX_CHUNK_S
        if value < best_s * (1 - gain) and not prediction.short and not too_long:
            best, best_s = [chunk], value
    return best


def in_best_chunks(found: Solution, question: Instance) -> Solution:
    """``found``, a plan whose windows are set, with the chunks of a prompt with which it is best."""
    answer = question.workload.answer_tokens
    for rows in other_chunks(found, question, CHUNKS):
        other = question.with_rows(rows)
        plan = residency(found.plan, other, lambda each: each.objective_s(found.objective, answer))
        prediction = evaluate(plan, other)
        value_s = prediction.objective_s(found.objective, answer)
        return replace(found, plan=plan, prediction=prediction, objective_s=value_s)
    return found if found.plan.streaming else in_smaller_chunks(found, question)
