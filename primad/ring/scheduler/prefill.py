"""Steps of prompts, and of tokens that an earlier epoch sampled."""

from __future__ import annotations

from collections.abc import Sequence

from primad.ring.pictures import content_of, looks_ahead, rope_of
from primad.ring.scheduler.state import PlannedStep, SchedulerState
from primad.ring.slots import Running


def step_of_prompt(state: SchedulerState, running: Running, ready: Sequence[Running]) -> PlannedStep:
    """The turn of ``running``: among the ``ready`` prompts of its owner, compute the one with the least left.

    If all took turns, all would end last. Rows that were computed while a prompt waited count as its own, so a long
    prompt waits for short ones no longer than it takes itself.
    """
    prompts = [each for each in ready if not each.is_decoding and each.generate.owner == running.generate.owner]
    first = min(prompts, key=_rows_left)
    waits_since = first.waits_since
    step = chunk_step(state, first)
    for other in prompts:
        if other is not first:
            other.rows_before += len(step.tokens)
    if first is not running:
        running.waits_since, first.waits_since = first.waits_since, waits_since
    return step


def _rows_left(running: Running) -> tuple[int, int]:
    return len(running.generate.prompt) - running.sequence.cells - running.rows_before, running.generate.request


def chunk_step(state: SchedulerState, running: Running) -> PlannedStep:
    """Return a step with the next chunk of the prompt, or the next piece of it."""
    prompt, sequence = running.generate.prompt, running.sequence
    first = sequence.cells
    if first >= running.chunk_end:
        running.chunk_end = running.chunking.end(prompt, first)
    last, is_picture = running.chunk_end, prompt[first] < 0
    if not looks_ahead(prompt[first]):
        last = running.chunking.piece(first, last, len(prompt), state.decoding)
    if last == running.chunk_end:
        sequence.computed.ends.append(last)
    sequence.cells = last
    step = PlannedStep(
        step=state.steps,
        requests=[running.generate.request],
        tokens=prompt[first:last],
        positions=list(range(first, last)),
        sequences=[sequence.number] * (last - first),
        samples={} if running.has_step else {last - first - 1: [running.generate]},
        ops=sequence.take_ops(),
        content=content_of(running.generate.pictures, first, last) if is_picture else b"",
        rope=rope_of(running.generate.pictures, range(first, last)),
    )
    handed_out = state.hand_out(step, [running], decodes=False)
    if last == running.chunk_end:
        state.slots.keep_state(running, state.steps)
    if running.is_decoding:
        join(state, running, step)
    return handed_out


def join(state: SchedulerState, leader: Running, step: PlannedStep) -> None:
    """Let generations with the prompt that ``step`` ends continue after it; their first tokens are sampled from its
    last row."""
    for running in state.running.values():
        if running.behind is leader:
            state.slots.copy(running, state.steps)
            state.in_flight[step.step].computed[running.generate.request] = running.sequence.cells
            if not running.has_step:
                step.samples.setdefault(len(step.tokens) - 1, []).append(running.generate)


def replay_step(state: SchedulerState, running: Running) -> PlannedStep:
    """Replay tokens that an earlier epoch sampled, except for the last, after which a new one is sampled."""
    sequence, known = running.sequence, running.known - 1
    first = sequence.cells
    if running.generate.replays_rows:
        last = state.batching.replayed(first, known)
    else:
        if first >= running.chunk_end:
            running.chunk_end = min(first + running.chunking.rows, known)
        last = running.chunking.piece(first, running.chunk_end, known, state.decoding - 1)
    sequence.cells = last
    step = PlannedStep(
        step=state.steps,
        requests=[running.generate.request],
        tokens=running.tokens(first, last),
        positions=list(range(first, last)),
        sequences=[sequence.number] * (last - first),
        samples={},
        ops=sequence.take_ops(),
        rope=rope_of(running.generate.pictures, range(first, last)),
    )
    return state.hand_out(step, [running], decodes=True)
