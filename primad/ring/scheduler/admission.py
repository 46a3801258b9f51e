"""Which generation gets a sequence next, and which is preempted for another owner."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from functools import partial
from typing import Final

import msgspec

from primad.ring.messages import (
    Generate,
    PromptProgress,
)
from primad.ring.scheduler.state import SchedulerState
from primad.ring.slots import Running
from primad.ring.speculation.speculation import Speculation

MIN_TURN: Final = 256
"""Tokens sampled for the only generation of an owner before it can be preempted for another owner."""
PROMPT_SHARE: Final = 16
"""Tokens of a prompt that are computed in the time of one decoded token, where prompts are short."""


def wait(state: SchedulerState, generate: Generate) -> None:
    """Queue ``generate`` at its owner, after generations in progress and those of the same priority."""
    waiting = state.waiting.setdefault(generate.owner, [])
    waiting.append(generate)
    waiting.sort(key=partial(place_of, state))


def place_of(state: SchedulerState, generate: Generate) -> tuple[float, int]:
    if generate.request in state.set_back:
        return -math.inf, generate.request
    return (-math.inf, 0) if generate.sampled else (generate.priority, 0)


def waits_no_longer(state: SchedulerState, generate: Generate) -> None:
    waiting = state.waiting[generate.owner]
    waiting.remove(generate)
    if not waiting:
        del state.waiting[generate.owner]


def share(state: SchedulerState, now: float) -> Running | None:
    """Start the generations that may start; return the one that must give up its sequence once it has no step in
    flight."""
    while True:
        held = Counter(running.generate.owner for running in state.running.values())
        owner = min(state.waiting, key=lambda each: (held[each], state.owners.get(each, 0)))
        if len(state.running) < (state.at_once if held[owner] else state.sequences):
            generate = state.waiting[owner][0]
            waits_no_longer(state, generate)
            begin(state, generate, now)
            if not state.waiting:
                return None
            continue
        leaving = None if held[owner] else who_leaves(state, held)
        if leaving is None:
            return None
        request = leaving.generate.request
        if any(request in step.computed and not step.is_draft for step in state.in_flight.values()):
            return leaving
        let_wait(state, leaving)


def who_leaves(state: SchedulerState, held: Mapping[str, int]) -> Running | None:
    """The generation that is preempted for an owner without one; ``held`` is the number of sequences of each owner."""
    several = [each for each in state.running.values() if held[each.generate.owner] > 1]
    if several:
        return max(several, key=lambda each: (held[each.generate.owner], each.generate.request))
    had_a_turn = [each for each in state.running.values() if each.num_sampled >= max(MIN_TURN, each.costs)]
    return min(had_a_turn, key=lambda each: each.since, default=None)


def let_wait(state: SchedulerState, running: Running) -> None:
    """Preempt ``running`` and queue it again; only draft steps of it may be in flight."""
    before = running.generate
    generate = msgspec.structs.replace(
        before,
        sampled=list(running.sampled),
        sampling=msgspec.structs.replace(before.sampling, mirostat_mu=running.mirostat_mu),
        blocks=state.slots.kept(running),
        reports_begin=False,
    )
    state.slots.lease(generate)
    state.release(before.request)
    state.set_back[before.request] = running
    wait(state, generate)


def begin(state: SchedulerState, generate: Generate, now: float) -> None:
    running = state.slots.begin(generate, now, state.running.values())
    running.since = state.steps
    again = len(generate.prompt) - running.there
    running.costs = max(0, again) // PROMPT_SHARE + len(generate.sampled) + min(0, again)
    if state.drafting is not None and generate.speculates and not generate.pictures:
        running.speculation = Speculation(
            state.drafter(generate.prompt), state.drafting, generate.sampled, state.losses, state.costs
        )
    if (before := state.set_back.pop(generate.request, None)) is not None:
        running.goes_on(before)
    state.running[generate.request] = running
    if generate.reports_begin:
        state.begun.append(PromptProgress(request=generate.request, tokens=0))
