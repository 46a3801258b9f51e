"""The head's part of the ring: sends the step log, computes the head's windows, and samples tokens at the tail.

Steps come back to the head once a round. The step that has come furthest is computed first, so a token never waits for
a later chunk of the same prompt; every window still sees the steps in the order of the log, because each hop keeps it.
When all steps are back the other devices have nothing to compute: they get the next step first, unless a token waits
for its whole prompt. With one round, the next chunk of a prompt always goes before the end of an earlier one, within
the allowed number in flight: the other devices compute it while the head is at its last window.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from primad.engine.protocol import GREEDY, Hidden, HiddenWindow, LogitsRow, LogitsWindow, Predictor, Sampler, Tokens
from primad.errors import AlteredStepError, GrammarError, LateStepError, NotFiniteError, SenderError
from primad.ring.lateness import Lateness
from primad.ring.messages import (
    HIDDEN_DTYPE,
    MAX_SKIPPED,
    PROTOCOL,
    SENDER,
    Cancel,
    DraftStatus,
    Drained,
    Finished,
    Generate,
    GenerationEvent,
    KvNews,
    Overdue,
    Serving,
    Skip,
    Step,
    StepLimits,
)
from primad.ring.pictures import looks_ahead
from primad.ring.scheduler.scheduler import Scheduler
from primad.ring.scheduler.state import PlannedStep, SampledToken
from primad.ring.speculation.predicted import PredictedDrafter
from primad.ring.speculation.tree import child
from primad.ring.worker import WritesKv, apply, check_sent, not_finite, rows_of, skipped, visit

MASKS_WAIT_S: Final = 0.005
"""Time that a step waits in total for late grammar masks; generations that still lack one are held back."""
MASKS_LOOK_S: Final = 0.005
"""Interval at which late masks are checked."""


@dataclass(frozen=True, slots=True)
class Send:
    """Give ``step`` and its hidden states to the next device."""

    step: Step
    hidden: Hidden


HeadEvent = GenerationEvent | KvNews | Serving | Overdue | Drained


@dataclass(frozen=True, slots=True)
class Notify:
    """Give ``events`` to the daemon; ``rows`` tokens were computed for them."""

    events: Sequence[HeadEvent]
    rows: int = field(default=0, compare=False)


TurnOutcome = Send | Skip | Notify
"""A ``Skip`` is for the next device, and need not reach it."""


class Head:
    """The head's windows, its scheduler and the steps in flight.

    ``windows`` maps route indices to the head's windows except the last, ``tail`` is the last one (the whole model when
    ``route`` is 1). ``limits`` names the ring. A step that takes much longer than such steps did is reported as
    ``Overdue``; one that is not back ``step_timeout_s`` after its last sign of life breaks the ring. ``clock`` gives
    seconds on any scale. KV cells are saved through ``kv_writer``, or not at all. A ``predictor`` drafts from the
    states that the tail leaves.
    """

    def __init__(
        self,
        *,
        windows: Mapping[int, HiddenWindow],
        tail: LogitsWindow,
        route: int,
        limits: StepLimits,
        scheduler: Scheduler,
        step_timeout_s: float,
        clock: Callable[[], float],
        kv_writer: WritesKv | None = None,
        predictor: Predictor | None = None,
    ) -> None:
        assert route >= 1
        assert (0 in windows) == (route > 1)
        self._windows = windows
        self._tail = tail
        self._last = route - 1
        self._limits = limits
        self._scheduler = scheduler
        self._step_timeout_s = step_timeout_s
        self._arrived: deque[tuple[Step, Hidden]] = deque()
        self._deadlines: dict[int, float] = {}
        self._under_way: dict[int, Step] = {}
        self._awaited: dict[int, int] = {}
        """By step in flight: the window for which it comes back."""
        self._ring_passes = Lateness()
        self._news: list[HeadEvent] = []
        self._is_draining = False
        self._is_drained = False
        self._failure: NotFiniteError | AlteredStepError | None = None
        """The error of a result that is not finite: it ends the requests of that step, then the ring."""
        self.kv_writer = kv_writer
        self._predictor = predictor
        self._samplers: dict[int, Sampler] = {}
        self._masks_wait_s = MASKS_WAIT_S
        self._held_back: dict[int, tuple[Generate, LogitsRow]] = {}
        """Generations whose next token is sampled once their mask is there, each with its logits, copied because the
        next step overwrites the window's. For a fully cached prompt these are from an earlier step."""
        self._clock = clock

    @property
    def runs_one(self) -> bool:
        """Whether at most one generation runs."""
        return self._scheduler.running <= 1

    @property
    def drafts(self) -> DraftStatus | None:
        """Counts of drafts; None where there are none."""
        tally = self._scheduler.tally
        if not self._scheduler.drafts_anything:
            return None
        return DraftStatus(
            drafted=tally.drafted,
            accepted=tally.accepted,
            missed=tally.missed,
            skipped=tally.skipped,
            tokens_per_pass=tally.tokens_per_pass,
        )

    @property
    def drafted(self) -> int:
        """Number of drafts handed out so far."""
        return self._scheduler.tally.drafted

    @property
    def has_drafts_in_flight(self) -> bool:
        """Whether drafts are in flight."""
        return self._scheduler.has_drafts_in_flight

    def warm_up(self) -> None:
        """Send one token around before anything else; ``Serving`` is reported when it is back, and it is then forgotten
        everywhere."""
        generate = Generate(request=-1, prompt=[0], sampled=[], max_tokens=1, sampling=GREEDY, logprobs=None)
        self._scheduler.submit(generate)

    def submit(self, generate: Generate) -> None:
        """Queue a generation. Raises ``RingError`` after ``drain``."""
        finished = self._scheduler.submit(generate)
        if finished is not None:
            self._news += [finished, *self._scheduler.kv_news()]

    def cancel(self, cancel: Cancel) -> None:
        """Stop a generation."""
        self._scheduler.cancel(cancel)
        self._news += self._scheduler.kv_news()
        self._notify_drained()

    def drain(self) -> None:
        """Compute no further tokens; ``Drained`` is reported, once, when the steps in flight are back and saved."""
        if not self._is_draining:
            self._is_draining = True
            self._held_back.clear()
            self._scheduler.drain()
            self._notify_drained()

    def receive(self, step: Step, hidden: Hidden) -> None:
        """Take a checked step from the ring; a later ``turn`` computes it.

        Raises ``SenderError`` for what the previous device must have caused: a step that is not in flight or was here
        already, a lost step before it, values that are no numbers. Raises ``AlteredStepError`` for a step that any
        device may have altered.
        """
        sent = self._under_way.get(step.step)
        if sent is None:
            raise SenderError(f"{SENDER} sent step {step.step}, which is not in flight")
        if step.window <= sent.window:
            raise SenderError(f"{SENDER} sent step {step.step} for window {step.window}, where it has been already")
        if step.window != self._awaited.get(step.step):
            raise AlteredStepError(f"step {step.step} came back for window {step.window} before it was in all others")
        if step.skipped and not self._scheduler.is_discarded(step.step):
            raise AlteredStepError(f"step {step.step} came back without having been computed, which was not requested")
        if msgspec.structs.replace(sent, window=step.window, skipped=sent.skipped or step.skipped) != step:
            raise AlteredStepError(f"step {step.step} came back with other rows than it left with")
        for number, other in self._under_way.items():
            if number < step.step and other.window < step.window:
                raise SenderError(
                    f"{SENDER} sent step {step.step} but not step {number}, or a connection was interrupted"
                )
        check_sent(step, hidden)
        now = self._clock()
        self._under_way[step.step] = step
        self._deadlines[step.step] = now + self._step_timeout_s
        del self._awaited[step.step]
        self._ring_passes.back(step.step, now)
        self._arrived.append((step, hidden))

    def wait_s(self, *, may_compute: bool = True) -> float:
        """Seconds until something is due without a message: 0 when there is work, infinity when nothing is pending.

        Without ``may_compute``, steps that could be computed do not count as work. Raises ``LateStepError`` when a
        step's time is up.
        """
        if self._news or self._failure is not None or (self._arrived and may_compute):
            return 0.0
        now, waits_until_s = self._clock(), self._scheduler.waits_until_s
        looks_s = MASKS_LOOK_S if self._held_back else math.inf
        if not self._deadlines:
            return looks_s if waits_until_s is None else min(looks_s, max(0.0, waits_until_s - now))
        step, deadline = min(self._deadlines.items(), key=lambda item: item[1])
        if deadline <= now:
            raise LateStepError(f"step {step} did not come back within {self._step_timeout_s:g} s; a device hangs")
        return min(looks_s, max(0.0, min(deadline, self._ring_passes.due_s()) - now))

    def news(self) -> Sequence[HeadEvent]:
        """Return the events that the daemon must get before anything else is computed."""
        overdue = self._ring_passes.overdue(self._clock())
        reported, self._news = self._news, []
        return reported if overdue is None else [*reported, overdue]

    def turn(self) -> TurnOutcome | None:
        """Report events, or compute one window of the step that came furthest; None when there is neither.

        Steps that other devices need not compute are announced first. Raises ``EngineError`` when a window fails.
        """
        if self._failure is not None:
            raise self._failure
        if skip := self._skip():
            return skip
        if news := self.news():
            return Notify(news)
        now = self._clock()
        if self._held_back and (events := self._sample_held_back(now)):
            return Notify(events)
        if len(self._arrived) > 1 and (planned := self._scheduler.refill(now)) is not None:
            return self._begin(planned, now)
        if self._arrived:
            has_tokens = any(any(step.outputs) for step, _ in self._arrived)
            may_begin = not self._awaited or (not has_tokens and len(self._windows) == 1)
            may_begin = may_begin and self._scheduler.may_have_step
            if may_begin and (planned := self._next_step(now, only_tokens=has_tokens)):
                return self._begin(planned, now)
        if self._arrived:
            furthest = max(step.window for step, _ in self._arrived)
            index = next(i for i, (step, _) in enumerate(self._arrived) if step.window == furthest)
            step, hidden = self._arrived[index]
            del self._arrived[index]
            return self._compute(step, hidden)
        planned = self._next_step(now)
        if planned is None:
            self._news += self._sample_held_back(now)
            return Notify(self.news()) if self._news else None
        return self._begin(planned, now)

    def _next_step(self, now: float, *, only_tokens: bool = False) -> PlannedStep | None:
        planned = self._scheduler.next_step(now, only_tokens=only_tokens)
        self._news += self._scheduler.take_begun()
        self._news += self._scheduler.kv_news()
        for generate, logits in self._scheduler.take_found():
            self._sampler_for(generate)
            self._held_back[generate.request] = generate, logits
        return planned

    def _begin(self, planned: PlannedStep, now: float) -> TurnOutcome:
        for generates in planned.samples.values():
            for generate in generates:
                self._sampler_for(generate)
        step = self._step(planned)
        self._deadlines[step.step] = now + self._step_timeout_s
        self._under_way[step.step] = step
        if planned.content:  # a picture's rows may be wider than hidden states, or their extra parts are added later
            content = np.frombuffer(planned.content, "<f4").reshape(step.rows, -1)
            shape = (step.rows, max(content.shape[1], self._limits.width))
            return self._compute(msgspec.structs.replace(step, shape=shape), content)
        return self._compute(step, np.array(planned.tokens, np.int32))

    def _skip(self) -> Skip | None:
        discarded = [step for step in self._scheduler.take_discarded() if step in self._under_way][-MAX_SKIPPED:]
        if not discarded:
            return None
        return Skip(protocol=PROTOCOL, ring=self._limits.ring, epoch=self._limits.epoch, steps=discarded)

    def _step(self, planned: PlannedStep) -> Step:
        rows = len(planned.tokens)
        return Step(
            protocol=PROTOCOL,
            ring=self._limits.ring,
            epoch=self._limits.epoch,
            step=planned.step,
            window=0,
            dtype=HIDDEN_DTYPE,
            shape=(rows, self._limits.width),
            positions=planned.positions,
            sequences=[planned.shared.get(row, [sequence]) for row, sequence in enumerate(planned.sequences)],
            outputs=[row in planned.samples for row in range(rows)],
            ops=planned.ops,
            looks_ahead=looks_ahead(planned.tokens[0]) if planned.tokens else False,
            rope=planned.rope,
        )

    def _compute(self, step: Step, content: Tokens | Hidden) -> TurnOutcome:
        if self._scheduler.skips(step.step):
            self._under_way[step.step] = step = skipped(step)
            content = np.empty(step.payload_shape, np.float32)
        try:
            while step.window in self._windows:
                step, content = visit(self._windows[step.window], step, content, self.kv_writer)
        except NotFiniteError as exc:
            self._failure = self._spoilt(exc, step.window)
            return Notify(self._announce(self._scheduler.fail(step.step, str(exc), self._clock())))
        if step.window < self._last:
            self._ring_passes.left(step.step, step.rows, self._clock())
            self._awaited[step.step] = next(i for i in range(step.window, self._last + 1) if self._has(i))
            return Send(step, content)  # type: ignore[arg-type]
        apply(self._tail, step, self.kv_writer)
        if step.rows:
            self._end_step(step, content)
        del self._deadlines[step.step], self._under_way[step.step]
        self._scheduler.tally.skipped += step.skipped
        self._masks_wait_s = MASKS_WAIT_S
        wanted = self._scheduler.wants_samples(step.step)
        sampled_tokens = {each.request: self._samples(each, row, step) for row, each in wanted}
        if wanted and self._scheduler.ends_prompt(wanted[0][1].request):
            self._scheduler.keep_ending(wanted[0][1].request, self._tail.logits(wanted[0][0]).copy())
        news, self._news = self._news, []  # from before this step
        events = self._announce(self._scheduler.commit(step.step, sampled_tokens, self._clock()))
        events = [*news, *events, *self._scheduler.kv_news()]
        self._notify_drained()
        return Notify(events, step.rows)

    def _has(self, window: int) -> bool:
        return window in self._windows or window == self._last

    def _end_step(self, step: Step, content: Tokens | Hidden) -> None:
        """Compute the tail. If nothing is sampled from it, a drafter that reads states gets those of all rows."""
        reader = None if self._predictor is None or any(step.outputs) else self._drafter_of(step)
        if self._predictor is None or reader is None:
            self._tail.forward(rows_of(step, content))
            return
        self._predictor.keep_all(keeps=True)
        self._tail.forward(rows_of(step, content))
        reader.read(step.positions[0], self._predictor.states(len(step.positions)))
        self._predictor.keep_all(keeps=False)

    def _drafter_of(self, step: Step) -> PredictedDrafter | None:
        """The drafter that works from states, for the only generation of ``step``."""
        requests = self._scheduler.requests_of(step.step)
        drafter = self._scheduler.drafter_of(requests[0]) if len(requests) == 1 else None
        return drafter if isinstance(drafter, PredictedDrafter) and drafter.is_followed else None

    def _spoilt(self, error: NotFiniteError, window: int) -> NotFiniteError | AlteredStepError:
        """Attribute the fault when ``window`` gave no numbers: after other devices' windows, any of those devices may
        have sent numbers that are too large to compute with."""
        return AlteredStepError(f"{error}; or another device sent what it did not compute") if window else error

    def _announce(self, events: list[GenerationEvent]) -> list[HeadEvent]:
        """Turn the warm-up's own events into one ``Serving``."""
        reported: list[HeadEvent] = [event for event in events if event.request >= 0]
        if self._failure is None and any(isinstance(event, Finished) and event.request < 0 for event in events):
            reported.append(Serving())
        return reported

    def _notify_drained(self) -> None:
        if self._is_draining and not self._is_drained and self._scheduler.is_drained:
            self._is_drained = True
            self._news.append(Drained())

    def _samples(self, generate: Generate, row: int, step: Step) -> SampledToken | None:
        """Sample the token after ``row``, and the tokens after draft rows that follow it, while drafts are accepted and
        masks are there.

        None: the mask for ``row`` is late.
        """
        first = self._sampled_at(generate, row, step)
        if first is None:
            if not self._is_draining:
                self._held_back[generate.request] = generate, self._tail.logits(row).copy()
            return None
        more: list[SampledToken] = []
        drafts, node, last = self._scheduler.drafts(step.step), -1, first
        while drafts and not last.ends and (found := child(drafts, node, last.token)) is not None:
            if (following := self._sampled_at(generate, row + found + 1, step)) is None:
                break
            node, last = found, following
            more.append(last)
        return msgspec.structs.replace(first, more=tuple(more)) if more else first

    def _sample_held_back(self, now: float) -> list[HeadEvent]:
        """Sample the tokens of held-back generations whose masks are there now."""
        events: list[HeadEvent] = []
        for request, (generate, logits) in list(self._held_back.items()):
            if not self._scheduler.is_held_back(request):
                del self._held_back[request]
            elif (sampler := self._samplers[request]).is_ready(0.0):
                del self._held_back[request]
                sampled = self._sample(generate, sampler, -1, logits)
                events += self._announce(self._scheduler.sample_held_back(request, sampled, now))
        return [*events, *self._scheduler.kv_news()] if events else []

    def _sampled_at(self, generate: Generate, row: int, step: Step) -> SampledToken | None:
        """Sample the token that follows ``row`` of ``step``; None: its mask is late."""
        # The best logit is NaN where any is, and argmax takes half the time of numpy's maximum; some models rule tokens
        # out with minus infinity.
        logits = self._tail.logits(row)
        if not math.isfinite(logits[logits.argmax()]):
            self._failure = self._spoilt(not_finite(self._tail), self._last)
            return SampledToken(token=0, ends=True, error=str(self._failure), reason="error")
        sampler = self._sampler_for(generate)
        if self._predictor is not None:
            drafter = self._scheduler.drafter_of(generate.request)
            if isinstance(drafter, PredictedDrafter):
                drafter.drawn_from(step.positions[row], self._predictor.state(row), sampler.peek)
        return self._sample(generate, sampler, row) if self._is_ready(sampler) else None

    def _is_ready(self, sampler: Sampler) -> bool:
        if sampler.is_ready(0.0):
            return True
        began_s = self._clock()
        is_ready = sampler.is_ready(self._masks_wait_s)
        self._masks_wait_s = max(0.0, self._masks_wait_s - (self._clock() - began_s))
        return is_ready

    def _sample(self, generate: Generate, sampler: Sampler, row: int, kept: LogitsRow | None = None) -> SampledToken:
        """Sample the token that follows ``row``, or the saved logits ``kept``."""
        logprob: float | None = None
        top: tuple[tuple[int, float], ...] = ()
        try:
            if generate.logprobs is not None:
                logprobs = log_softmax(self._tail.logits(row) if kept is None else kept)
                top = most_likely(logprobs, generate.logprobs)
            token = sampler.sample(row, kept)
        except GrammarError as exc:
            return SampledToken(token=0, ends=True, error=str(exc))
        if generate.logprobs is not None:
            logprob = float(logprobs[token])
        ends = self._tail.is_end(token)
        return SampledToken(token=token, ends=ends, logprob=logprob, top=top, mirostat_mu=sampler.mirostat_mu)

    def _sampler_for(self, generate: Generate) -> Sampler:
        """The sampler of ``generate``, made with its first step, so that its preparation is done in time."""
        found = self._samplers.get(generate.request)
        if found is None:
            for request in [request for request in self._samplers if not self._scheduler.runs(request)]:
                self._samplers.pop(request).release()
            prompt = [token for token in generate.prompt if token >= 0] if generate.pictures else generate.prompt
            found = self._tail.sampler(generate.sampling, prompt, generate.sampled)
            self._samplers[generate.request] = found
        return found


def log_softmax(logits: NDArray[np.float32]) -> NDArray[np.float64]:
    """Log-probabilities (vocabulary,) of ``logits``."""
    shifted = logits.astype(np.float64) - float(logits.max())
    return shifted - math.log(float(np.exp(shifted).sum()))


def most_likely(logprobs: NDArray[np.float64], count: int) -> tuple[tuple[int, float], ...]:
    """The ``count`` most likely tokens with their log-probabilities, best first, ties by token."""
    count = min(count, len(logprobs))
    if count == 0:
        return ()
    best = np.argpartition(-logprobs, count - 1)[:count]
    ordered = sorted(best.tolist(), key=lambda token: (-logprobs[token], token))
    return tuple((int(token), float(logprobs[token])) for token in ordered)
