"""Choose the chunk size of prompts that suits the best plan found."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from halda.evaluate import evaluate, residency
from halda.instance import Instance
from halda.solution import Solution

CHUNKS: Final = (128, 256, 1024, 2048)
"""Chunk sizes (tokens) that may beat the requested one where layers stream: larger chunks use each read for more
tokens, smaller buffers leave more room for layers."""
MAX_CHUNK_S: Final = 60.0
"""Chunks that take longer are not enlarged: nothing else is computed meanwhile, and a ring whose step does not return
counts as broken after a while."""
RING_CHUNKS: Final = (256, 128, 64, 32)
"""Chunk sizes (tokens) with which a ring may finish a prompt sooner, as devices compute different chunks concurrently.
Buffers keep their size."""
RING_GAIN: Final = 0.01
"""Share of TTFT that each smaller chunk size must gain; other prompts are hardly slower with it."""
FEWER_GAIN: Final = 0.05
"""Share of the objective that smaller chunks must gain, since they may slow down prompts unlike the typical one."""
_SAME: Final = 1e-9
"""Relative difference below which values count as equal."""


def in_smaller_chunks(found: Solution, question: Instance) -> Solution:
    """Return ``found`` with the chunk size that gives its ring the lowest TTFT."""
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
    """Return the best chunk size for the plan found, with the streaming it then needs; empty if its present one is
    best.

    Smaller chunks must be clearly better. Chunks longer than the prompt are not tried.
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
    """Return ``found``, a plan with fixed windows, with its best chunk size."""
    answer = question.workload.answer_tokens
    for rows in other_chunks(found, question, CHUNKS):
        other = question.with_rows(rows)
        plan = residency(found.plan, other, lambda each: each.objective_s(found.objective, answer))
        prediction = evaluate(plan, other)
        value_s = prediction.objective_s(found.objective, answer)
        return replace(found, plan=plan, prediction=prediction, objective_s=value_s)
    return found if found.plan.streaming else in_smaller_chunks(found, question)
