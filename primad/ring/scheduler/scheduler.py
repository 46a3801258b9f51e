"""The queue of generations, and the next step of the log."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from primad.engine.protocol import LogitsRow
from primad.errors import RingError
from primad.kv.keys import is_chain
from primad.ring.messages import (
    Cancel,
    Finished,
    Generate,
    GenerationEvent,
    KvNews,
    PromptProgress,
)
from primad.ring.pictures import longest_run
from primad.ring.scheduler.admission import share, wait, waits_no_longer
from primad.ring.scheduler.commit import all_drawn, finish, finished_event, reused_events
from primad.ring.scheduler.decode import decode_step, may_decode, step_without_rows
from primad.ring.scheduler.drafts import block_rows, draft_step, resolve, waits_for_drafts
from primad.ring.scheduler.prefill import replay_step, step_of_prompt
from primad.ring.scheduler.state import PlannedStep, SampledToken, SchedulerState
from primad.ring.speculation.drafter import Drafter
from primad.ring.speculation.pace import Tally
from primad.ring.speculation.tree import TreeNode


class Scheduler:
    """Schedules the waiting and running generations held in ``state``."""

    def __init__(self, state: SchedulerState) -> None:
        self._state = state

    @property
    def tally(self) -> Tally:
        """Counts of accepted and rejected drafts."""
        return self._state.tally

    @property
    def waits_until_s(self) -> float | None:
        """The time until which no step is handed out because drafts are about to arrive; None: no such wait."""
        return self._state.waits_until_s

    @property
    def in_flight(self) -> int:
        """Steps handed out and not yet committed."""
        return len(self._state.in_flight)

    @property
    def is_idle(self) -> bool:
        """Whether there is nothing to compute, to keep or to wait for."""
        return not (self._state.running or self._state.waiting or self._state.in_flight or self._state.slots.keeps)

    @property
    def is_drained(self) -> bool:
        """Whether ``drain`` was called and every step is back."""
        return self._state.drains and not self._state.in_flight and not self._state.slots.keeps

    @property
    def running(self) -> int:
        """How many generations hold a sequence."""
        return len(self._state.running)

    @property
    def drafts_anything(self) -> bool:
        """Whether drafts are computed here."""
        return self._state.drafting is not None

    @property
    def has_drafts_in_flight(self) -> bool:
        """Whether draft tokens are in flight."""
        return any(step.is_draft or step.tree.nodes for step in self._state.in_flight.values())

    def requests_of(self, step: int) -> list[int]:
        """The generations that have tokens in step ``step``."""
        return list(self._state.in_flight[step].computed)

    def drafter_of(self, request: int) -> Drafter | None:
        """The drafter of ``request``, if it has one."""
        running = self._state.running.get(request)
        return None if running is None or running.speculation is None else running.speculation.drafter

    def runs(self, request: int) -> bool:
        """Whether generation ``request`` holds a sequence."""
        return request in self._state.running

    def is_held_back(self, request: int) -> bool:
        """Whether generation ``request`` has no step until its next token is sampled with ``sample_held_back``."""
        running = self._state.running.get(request)
        return running is not None and running.held_back_s is not None

    def ends_prompt(self, request: int) -> bool:
        """Whether generation ``request`` waits for its first token."""
        running = self._state.running.get(request)
        return running is not None and not running.sampled

    def keep_ending(self, request: int, logits: LogitsRow) -> None:
        """Keep ``logits``, from which the first token of ``request`` is sampled, for when its prompt comes again."""
        self._state.slots.keep_ending(self._state.running[request], logits)

    def take_found(self) -> list[tuple[Generate, LogitsRow]]:
        """Generations whose whole prompt was cached, since the last call, with the logits for their first token: for
        ``sample_held_back``."""
        found = []
        for running in self._state.running.values():
            if running.ending is not None:
                found.append((running.generate, running.ending))
                running.ending, running.held_back_s = None, 0.0
        return found

    def submit(self, generate: Generate) -> Finished | None:
        """Queue a generation. Return its end if the tokens of earlier epochs are all that it may have, or if a picture
        has more rows than a step may have.

        Its prompt has at least one token and fits the context with one token to spare. Raises ``RingError`` after
        ``drain``.
        """
        assert 0 < len(generate.prompt) < self._state.context
        assert generate.max_tokens > 0
        assert is_chain(generate.blocks)
        if self._state.drains:
            raise RingError(f"request {generate.request} was given to a ring that drains; give it to the next one")
        if generate.pictures and (rows := longest_run(generate.prompt)) > self._state.step_rows:
            error = (
                f"an image has {rows} rows, which belong in one step; this ring's have {self._state.step_rows} at most"
            )
            return finished_event(generate, 0, "refused", prompt_s=0.0, decode_s=0.0, error=error)
        self._state.slots.lease(generate)
        if self._state.is_full(generate, len(generate.sampled)):
            self._state.slots.end_lease(generate)
            return finished_event(generate, len(generate.sampled), "length", prompt_s=0.0, decode_s=0.0)
        wait(self._state, generate)
        return None

    def drain(self) -> None:
        """Hand out no tokens from now on; one more step saves the sampled tokens' KV cells that are in no block yet."""
        self._state.drains = True
        for running in self._state.running.values():
            self._state.slots.keep_rest(running)

    def cancel(self, cancel: Cancel) -> None:
        """Forget a generation in any state; results in flight for it are dropped when they come back."""
        if cancel.request in self._state.running:
            self._state.release(cancel.request)
        for waiting in [each for of in self._state.waiting.values() for each in of if each.request == cancel.request]:
            waits_no_longer(self._state, waiting)
            self._state.set_back.pop(cancel.request, None)
            self._state.slots.end_lease(waiting)

    @property
    def may_have_step(self) -> bool:
        """Whether a next step is possible before one in flight is back: in a ring this is asked with each token."""
        state = self._state
        if state.waiting or state.drains or state.drafting is not None or state.slots.have_states:
            return True
        return any(each.has_step or each.behind is not None for each in state.running.values())

    def next_step(self, now: float, *, only_tokens: bool = False) -> PlannedStep | None:
        """The next step of the log, or None when the ring must reply first or there is nothing to do. With
        ``only_tokens`` the step is neither prefill nor replay.
        """
        self._state.now_s, self._state.waits_until_s = now, None
        if self._state.drains:
            return step_without_rows(self._state)
        if self._state.is_full_of_steps:
            return None
        self._state.slots.keep_certain(self._state.running.values())
        leaving = share(self._state, now) if self._state.waiting else None
        self._state.slots.go_on(self._state.running, self._state.steps)
        ready = [running for running in self._state.running.values() if running.has_step and running is not leaving]
        if len(ready) > 1:
            ready.sort(key=lambda each: (self._state.owners.get(each.generate.owner, 0), each.waits_since))
        for running in ready:
            if not running.is_decoding:
                if only_tokens:
                    return None
                if not self._state.may_have_chunk:
                    continue
                return step_of_prompt(self._state, running, ready)
            of_earlier_epoch = running.sequence.cells < running.known - block_rows(self._state, running.sequence.cells)
            if of_earlier_epoch and only_tokens:
                return None
            if of_earlier_epoch and (self._state.batching.replays > 1 or not running.generate.replays_rows):
                return replay_step(self._state, running)
            if of_earlier_epoch or may_decode(self._state):
                if waits_for_drafts(self._state, running):
                    return None
                return decode_step(self._state, [each for each in ready if each.is_decoding], running)
        if not ready and (step := draft_step(self._state)) is not None:
            return step
        return None if self._state.in_flight else step_without_rows(self._state)

    def refill(self, now: float) -> PlannedStep | None:
        """A draft step if no generation waits for a step: it keeps the ring busy while the head works on what came
        back."""
        if (
            self._state.drains
            or self._state.waiting
            or any(running.has_step for running in self._state.running.values())
        ):
            return None
        self._state.now_s = now
        return draft_step(self._state)

    def take_begun(self) -> list[GenerationEvent]:
        """Events of the generations that got a sequence since the last call."""
        begun, self._state.begun = self._state.begun, []
        return begun

    def take_discarded(self) -> list[int]:
        """Return the steps that were discarded since the last call; none where the ring does not skip them."""
        discarded, self._state.discarded = self._state.discarded, []
        return discarded if self._state.drafting is not None and self._state.drafting.skips else []

    def is_discarded(self, step: int) -> bool:
        """Whether step ``step`` computes nothing of use."""
        return self._state.in_flight[step].is_discarded

    def skips(self, step: int) -> bool:
        """Whether the remaining windows skip step ``step``."""
        return self._state.drafting is not None and self._state.drafting.skips and self.is_discarded(step)

    def commit(self, step: int, sampled_tokens: Mapping[int, SampledToken | None], now: float) -> list[GenerationEvent]:
        """Take back step ``step`` with the tokens sampled for its requests, as far as they are still wanted.

        None: the token is sampled later, and the generation is held back until then.
        """
        back = self._state.in_flight.pop(step)
        self._state.slots.back(step)
        reported: list[GenerationEvent] = []
        settled = False
        for request, computed in back.computed.items():
            running = self._state.running.get(request)
            if running is None:
                continue
            reported += reused_events(running)
            if request in sampled_tokens:
                sample, ring_pass_s = sampled_tokens[request], now - back.since_s
                if sample is None:
                    running.held_back_s = ring_pass_s
                    self._state.take_back(running, running.certain)
                else:
                    reported += all_drawn(self._state, running, sample, now, ring_pass_s)
                resolve(self._state, running, back.tree, sample)
                settled = True
            elif computed < len(running.generate.prompt):
                reported.append(PromptProgress(request=request, tokens=computed))
        if not settled:
            resolve(self._state, None, back.tree, None)
        return reported

    def fail(self, step: int, error: str, now: float) -> list[GenerationEvent]:
        """End the generations that step ``step`` is for with ``error``. The ring ends with them."""
        found = [
            self._state.running[request]
            for request in self._state.in_flight[step].computed
            if request in self._state.running
        ]
        return [finish(self._state, running, "error", now, error=error) for running in found]

    def sample_held_back(self, request: int, sample: SampledToken, now: float) -> list[GenerationEvent]:
        """Commit the token of ``request``, which was held back until it could be sampled."""
        running = self._state.running[request]
        ring_pass_s, running.held_back_s = running.held_back_s, None
        assert ring_pass_s is not None
        return [*reused_events(running), *all_drawn(self._state, running, sample, now, ring_pass_s)]

    def kv_news(self) -> list[KvNews]:
        """Blocks that are being kept, that are kept, and that are no longer needed, since the last call."""
        return self._state.slots.news()

    def wants_samples(self, step: int) -> list[tuple[int, Generate]]:
        """The rows of step ``step`` from which a token is still wanted, each with its generation.

        Rows of ``drafts`` are not among them.
        """
        found = self._state.in_flight[step]
        rows = list(found.samples.items())[: len(found.samples) - len(found.tree.nodes)]
        return [(row, each) for row, of in rows for each in of if each.request in self._state.running]

    def drafts(self, step: int) -> Sequence[TreeNode]:
        """The drafts that follow the first row of step ``step``: from the row of each accepted one another token is
        sampled."""
        return self._state.in_flight[step].tree.nodes
