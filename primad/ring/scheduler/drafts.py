"""Builds steps of draft tokens, adds drafts to decode steps, and resolves them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from primad.ring.messages import (
    KvCopy,
    KvRemove,
)
from primad.ring.scheduler.state import PlannedStep, SampledToken, SchedulerState
from primad.ring.slots import Running
from primad.ring.speculation.drafter import DraftToken
from primad.ring.speculation.tree import NO_TREE, TreeRows, chain_of, child, depth, placed

MAX_DRAFTS: Final = 64
"""Limit of draft steps in flight, including discarded ones."""


def draft_step(state: SchedulerState) -> PlannedStep | None:
    """Return a step for the surest draft, when no generation needs that place in the ring."""
    steps = state.in_flight.values()
    if state.drafting is None or not all(step.decodes for step in steps):
        return None
    drafts = sum(step.is_draft for step in steps)
    if sum(bool(step.samples) for step in steps) >= state.drafting.room or drafts >= MAX_DRAFTS:
        return None
    best: tuple[float, Running, Sequence[DraftToken]] | None = None
    for running in state.running.values():
        found = next_drafts(state, running)
        if found and (best is None or found[0].sure > best[0]):
            best = found[0].sure, running, found
    return step_ahead(state, best[1], best[2]) if best is not None else None


def next_drafts(state: SchedulerState, running: Running) -> Sequence[DraftToken]:
    """Draft tokens to follow all tokens in flight for ``running``, if a token after those is wanted."""
    speculation = running.speculation
    if speculation is None or not running.sampled or not running.is_decoding or running.has_step:
        return ()
    if running.held_back_s is not None or not state.slots.may_be_ahead:
        return ()
    rows = block_rows(state, running.sequence.cells) if speculation.holds else 1
    return speculation.next(min(rows, drafts_wanted(state, running)))


def block_rows(state: SchedulerState, cells: int) -> int:
    """How many consecutive draft rows a step may have, with ``cells`` of context."""
    if state.drafting is None or state.drafting.block == 1 or state.waiting or len(state.running) > 1:
        return 1
    return max(1, state.batching.in_one_step(cells, state.drafting.block))


def drafts_wanted(state: SchedulerState, running: Running) -> int:
    """How many more drafts of ``running`` would be followed by a token that it may still sample."""
    ahead = running.sequence.cells - running.certain
    room = min(running.generate.max_tokens, state.context - len(running.generate.prompt)) - len(running.sampled)
    return max(0, room - ahead - 1)


def step_ahead(state: SchedulerState, running: Running, draft_tokens: Sequence[DraftToken]) -> PlannedStep:
    """Return a step of ``draft_tokens`` alone."""
    sequence = running.sequence
    step = PlannedStep(
        step=state.steps,
        requests=[running.generate.request],
        tokens=[],
        positions=[],
        sequences=[],
        samples={},
        ops=[*sequence.take_ops(), *state.slots.keep_ahead(sequence, sequence.cells)],
    )
    _add_ahead(state, step, running, draft_tokens)
    return state.hand_out(step, [running], decodes=True, is_draft=True, tree=chain_of(draft_tokens[1:]))


def _add_ahead(state: SchedulerState, step: PlannedStep, running: Running, draft_tokens: Sequence[DraftToken]) -> None:
    """Add rows of ``draft_tokens`` to ``step``; from each that is accepted the next token is sampled."""
    sequence = running.sequence
    for draft_token in draft_tokens:
        step.samples[len(step.tokens)] = [running.generate]
        step.tokens.append(draft_token.token)
        step.positions.append(sequence.cells)
        step.sequences.append(sequence.number)
        sequence.cells += 1
    assert running.speculation is not None
    running.speculation.handed_out(draft_tokens, step.step)
    state.tally.drafted += len(draft_tokens)


def _block_with(state: SchedulerState, step: PlannedStep, running: Running) -> TreeRows:
    """Drafts to verify with the next token, where such steps follow each other: as many as fit into a block."""
    first = running.sequence.cells - len(step.tokens)
    maximum = min(block_rows(state, first) - len(step.tokens), drafts_wanted(state, running))
    speculation = running.speculation
    if speculation is None or not speculation.holds or not state.slots.may_be_ahead or maximum <= 0:
        return NO_TREE
    draft_tokens = speculation.next(maximum)
    if draft_tokens:
        step.ops.extend(state.slots.keep_ahead(running.sequence, first))
        _add_ahead(state, step, running, draft_tokens)
    return chain_of(draft_tokens)


def drafts_with(state: SchedulerState, step: PlannedStep, running: Running) -> TreeRows:
    """Add drafts of ``running`` to ``step``, which has its next token."""
    speculation, sequence = running.speculation, running.sequence
    if speculation is None or not step.samples:
        return NO_TREE
    if state.has_blocks:
        return _block_with(state, step, running)
    nodes, text = speculation.together(max_drafts(state, running, sequence.cells - 1)), sequence.cells
    tree = placed(nodes, state.pool)
    step.ops.extend(KvCopy(sequence.number, number, text - 1) for number, _ in tree.ends)
    if tree.ends:
        step.shared[0] = tree.sequences(-1, sequence.number)
    for node, each in enumerate(nodes):
        row = len(step.tokens)
        step.tokens.append(each.draft_token.token)
        step.positions.append(text + depth(nodes, node) - 1)
        step.sequences.append(sequence.number)
        step.samples[row] = [running.generate]
        if tree.ends:
            step.shared[row] = tree.sequences(node, sequence.number)
    sequence.cells = text + len(tree.main)
    if nodes:
        speculation.handed_out_tree(nodes)
    state.tally.drafted += len(nodes)
    return tree


def resolve(state: SchedulerState, running: Running | None, tree: TreeRows, sample: SampledToken | None) -> None:
    """Settle a finished step with ``tree``: the KV cache of the accepted path stays, in the sequence of the text
    itself.

    Nothing follows the token sampled last: if its row had been sampled from, there would be one more token.
    """
    if not tree.nodes:
        return
    if state.has_blocks:
        drawn = 0 if sample is None else 1 + len(sample.more)
        is_running = running is not None and running.generate.request in state.running
        if running is not None and is_running and 0 < drawn <= len(tree.nodes) and not running.has_step:
            state.take_back(running, running.known - 1)  # the mask of a draft's row was late
        return
    removes = [KvRemove(number, 0, -1) for number, _ in tree.ends]
    if running is None:
        state.slots.first(*removes)
        return
    if running.speculation is not None:
        running.speculation.take_back()
    at = -1
    for token in [each.token for each in (sample, *sample.more)][:-1] if sample is not None else []:
        found = child(tree.nodes, at, token)
        if found is None:
            break
        at = found
    sequence, holder = running.sequence, tree.holder(at)
    text = sequence.cells - len(tree.main)
    cells = text + depth(tree.nodes, at)
    if holder is not None:
        state.slots.first(KvCopy(holder, sequence.number, cells))
    elif cells < sequence.cells:
        state.slots.take_back(sequence, cells)
    sequence.cells = cells
    state.slots.first(*removes)


def max_drafts(state: SchedulerState, running: Running, cells: int) -> int:
    """How many drafts of ``running`` a step may have with its next token, which has ``cells`` of context."""
    if state.drafting is None or state.waiting or len(state.running) > 1:
        return 0
    room = min(running.generate.max_tokens, state.context - len(running.generate.prompt)) - len(running.sampled)
    rows = min(state.batching.in_one_step(cells, state.drafting.rows), state.context - cells)
    return max(0, min(rows, room) - 1)


def waits_for_drafts(state: SchedulerState, running: Running) -> bool:
    """Whether the next step of ``running`` waits for drafts."""
    speculation, cells = running.speculation, running.sequence.cells
    if speculation is None or state.in_flight or cells != running.known - 1:
        return False
    state.waits_until_s = speculation.waits(max_drafts(state, running, cells), state.now_s)
    return state.waits_until_s is not None
