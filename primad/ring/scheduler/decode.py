"""Builds decode steps: the next tokens of generations that are batched together."""

from __future__ import annotations

from collections.abc import Sequence

from primad.ring.grouping import Candidate
from primad.ring.messages import (
    KvRemove,
)
from primad.ring.pictures import PictureRows, rope_of
from primad.ring.scheduler.drafts import block_rows, drafts_with
from primad.ring.scheduler.state import PlannedStep, SchedulerState
from primad.ring.slots import KvSequence, Running
from primad.ring.speculation.tree import NO_TREE


def may_decode(state: SchedulerState) -> bool:
    """Whether a decode step may be handed out now, rather than waiting for more generations to join it."""
    if not state.in_flight:
        return True
    under_way = sum(step.decodes and bool(step.samples) and not step.is_draft for step in state.in_flight.values())
    return under_way < state.batching.max_steps(state.decoding)


def decode_step(state: SchedulerState, ready: Sequence[Running], first: Running) -> PlannedStep:
    """Return a step with the next token of ``first`` and of those among ``ready`` that are batched with it."""
    by_number = {each.sequence.number: each for each in ready}
    # After a step of several sequences the state of another sequence cannot be rolled back.
    others = [] if state.may_take_back else [other for other in ready if other is not first]
    step = PlannedStep(step=state.steps, requests=[], tokens=[], positions=[], sequences=[], samples={}, ops=[])
    chosen: list[Running] = []
    pictures: list[list[PictureRows]] = []
    numbers = _together(state, first, others) if others else [first.sequence.number]
    for number in numbers:
        running, sequence = by_number.get(number), state.slots.sequences[number]
        if running is None:
            add_padding(state, step, sequence)
            pictures.append([])
            continue
        step.ops.extend(sequence.take_ops())
        step.requests.append(running.generate.request)
        begin = sequence.cells
        end = min(begin + block_rows(state, begin), running.known) if len(numbers) == 1 else begin + 1
        step.tokens.extend(running.tokens(begin, end))
        step.positions.extend(range(begin, end))
        step.sequences.extend([number] * (end - begin))
        sequence.cells = end
        if not running.has_step:
            step.samples[len(step.tokens) - 1] = [running.generate]
        chosen.append(running)
        pictures.extend([running.generate.pictures] * (end - begin))
    if any(pictures):
        turns = [rope_of(each, [at]) for each, at in zip(pictures, step.positions, strict=True)]
        for turn, at in zip(turns, step.positions, strict=True) if any(turns) else ():
            step.rope.extend(turn or (at, at, at, 0))
    tree = drafts_with(state, step, first) if len(numbers) == 1 else NO_TREE
    return state.hand_out(step, chosen, decodes=True, tree=tree)


def _together(state: SchedulerState, first: Running, others: Sequence[Running]) -> range:
    """The sequences of a step with ``first``, including those of ``others`` that are batched with it."""
    candidates = [
        Candidate(sequence=each.sequence.number, owner=each.generate.owner, cells=each.sequence.cells)
        for each in (first, *others)
    ]
    return state.batching.together(candidates, state.decoding)


def add_padding(state: SchedulerState, step: PlannedStep, sequence: KvSequence) -> None:
    """Add a padding row at the end of ``sequence``; the next step with a row of that sequence drops it.

    Drafts in that step may be skipped, and would leave a hole before it.
    """
    for running in state.running.values():
        if running.sequence is sequence:
            state.take_back(running, running.certain)
    step.ops.extend(sequence.take_ops())
    step.tokens.append(0)
    step.positions.append(sequence.cells)
    step.sequences.append(sequence.number)
    sequence.ops.append(KvRemove(sequence.number, sequence.cells, -1))


def step_without_rows(state: SchedulerState) -> PlannedStep | None:
    """Return a step without tokens that only saves KV blocks and states."""
    if not state.slots.keeps:
        return None
    step = PlannedStep(step=state.steps, requests=[], tokens=[], positions=[], sequences=[], samples={}, ops=[])
    return state.hand_out(step, [], decodes=False)
