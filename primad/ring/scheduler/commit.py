"""What a finished step means for its generations."""

from __future__ import annotations

from primad.ring.messages import (
    Finished,
    Generate,
    GenerationEvent,
    PromptProgress,
    Sampled,
)
from primad.ring.scheduler.state import SampledToken, SchedulerState
from primad.ring.slots import Running


def reused_events(running: Running) -> list[GenerationEvent]:
    """The number of reused prompt tokens, unless it was reported before."""
    reused, running.reused = running.reused, 0
    return [PromptProgress(request=running.generate.request, tokens=reused, reused=reused)] if reused else []


def finished_event(
    generate: Generate,
    sampled: int,
    reason: str,
    *,
    prompt_s: float,
    decode_s: float,
    error: str | None = None,
    drafted: int = 0,
    accepted: int = 0,
) -> Finished:
    return Finished(
        request=generate.request,
        reason=reason,
        error=error,
        prompt_tokens=len(generate.prompt),
        completion_tokens=sampled,
        prompt_s=prompt_s,
        decode_s=decode_s,
        drafted=drafted,
        accepted=accepted,
    )


def all_drawn(
    state: SchedulerState, running: Running, sample: SampledToken, now: float, ring_pass_s: float
) -> list[GenerationEvent]:
    reported: list[GenerationEvent] = []
    if running.speculation is not None and not state.has_blocks:
        running.speculation.measured(ring_pass_s)
    for each in (sample, *sample.more):
        if running.last_token_s is not None:
            state.tally.count(ring_pass_s, now - running.last_token_s)
        running.last_token_s = now
        reported += one_drawn(state, running, each, now)
    return reported


def one_drawn(state: SchedulerState, running: Running, sample: SampledToken, now: float) -> list[GenerationEvent]:
    request = running.generate.request
    if running.first_token_s is None:
        running.first_token_s = now
    if sample.error is not None:
        return [finish(state, running, sample.reason, now, error=sample.error)]
    if sample.ends:
        return [finish(state, running, "stop", now)]
    running.sampled.append(sample.token)
    running.mirostat_mu = sample.mirostat_mu
    if running.speculation is not None:
        accepted = running.speculation.accepted
        if not running.speculation.took(sample.token, now):
            state.tally.missed += 1
            state.take_back(running, running.known - 1)
        inside = state.has_blocks and bool(running.speculation.tokens)
        state.slots.settle(running.sequence, running.known, inside=inside)
        state.tally.accepted += running.speculation.accepted - accepted
    sampled = Sampled(
        request=request, token=sample.token, logprob=sample.logprob, top=sample.top, mirostat_mu=sample.mirostat_mu
    )
    if state.is_full(running.generate, len(running.sampled)):
        return [sampled, finish(state, running, "length", now)]
    return [sampled]


def finish(state: SchedulerState, running: Running, reason: str, now: float, *, error: str | None = None) -> Finished:
    first_token_s = running.first_token_s if running.first_token_s is not None else now
    state.release(running.generate.request)
    speculation = running.speculation
    return finished_event(
        running.generate,
        len(running.sampled),
        reason,
        error=error,
        prompt_s=first_token_s - running.started_s,
        decode_s=now - first_token_s,
        drafted=speculation.drafted if speculation is not None else 0,
        accepted=speculation.accepted if speculation is not None else 0,
    )
