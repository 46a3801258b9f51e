"""Decides what each step computes: whose prompt rows, whose next token, which KV cells are forgotten.

``schedule -> the ring computes -> commit``. The scheduler sees no ring: it hands out ``PlannedStep`` steps in order (the
step log) and takes back what was sampled for each. Time is passed in.

Each generation has a KV sequence of its own, and each step rows of one generation, so what it computes is what it would
compute alone. As many run ``at_once`` as may; of those that wait the first one of the owner who has the fewest running is
next. Of those that run it is the owner who waited longest for a step, and of theirs the one that did: so the devices of a
ring compute for different ones, neither a long prompt nor a long answer keeps the others from going on, and who asks for
more at once has no larger share.

Prompts are fed in chunks (``chunks.py``). Chunks follow each other into the ring without waiting (up to ``depth`` in
flight), since only the last one's output is needed; decode steps wait for the token before them. The cells of a prompt stay
when its generation is over: of the next prompt in that sequence only what follows the chunks that both have is computed, and
a generation takes the sequence with which it has most in common.

A generation that an earlier epoch began comes with the tokens it has sampled already. They are fed one by one, as they were
fed then: llama.cpp computes a batch of several rows in another order than single rows, and its sums would differ in the
last bits. Like chunks they do not wait for each other.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field

from primad.errors import RingError
from primad.ring.chunks import Chunking, Computed
from primad.ring.messages import (
    Cancel,
    Finished,
    Generate,
    GenerationEvent,
    KvOp,
    KvRemove,
    PromptProgress,
    Sampled,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedStep:
    """One step before it is computed: row ``i`` is ``tokens[i]`` at ``positions[i]``; the last may want an output."""

    step: int
    request: int
    tokens: list[int]
    positions: list[int]
    wants_output: bool
    ops: list[KvOp]
    sequence: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Draw:
    """The token that was sampled for a step: ``ends`` when it ends the generation; ``top`` as in ``Sampled``.

    ``error``: none could be sampled, and the generation ends with it. ``mirostat_mu`` as in ``Sampled``.
    """

    token: int
    ends: bool
    error: str | None = None
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()
    mirostat_mu: float | None = None


@dataclass(slots=True)
class _Sequence:
    """One KV sequence, and what its cells hold besides an answer."""

    number: int
    computed: Computed = field(default_factory=Computed)
    used: int = 0
    """How many steps there were when it was used last; 0 while its cells are empty."""


@dataclass(slots=True)
class _Running:
    """A generation that holds a sequence."""

    generate: Generate
    sequence: _Sequence
    started_s: float
    sampled: list[int]
    """All tokens after the prompt, those of earlier epochs first."""
    reused: int
    """Tokens of the prompt whose cells were there, until that is told."""
    fed: int
    """Tokens of prompt and ``sampled`` handed out, or there."""
    ops: list[KvOp]
    """What its next step does to the cells before it computes."""
    first_token_s: float | None = None

    @property
    def has_step(self) -> bool:
        """Whether there is something to compute without another token."""
        return self.fed < len(self.generate.prompt) + len(self.sampled)


class Scheduler:
    """The queue of generations and those that run. ``context`` is that of each of the ring's ``sequences``."""

    def __init__(
        self, *, context: int, chunking: Chunking, depth: int, sequences: int = 1, at_once: int | None = None
    ) -> None:
        self._context = context
        self._chunking = chunking
        self._depth = depth
        self._at_once = min(sequences, at_once or sequences)
        self._waiting: deque[Generate] = deque()
        self._running: dict[int, _Running] = {}
        self._free = [_Sequence(number) for number in range(sequences)]
        self._in_flight: dict[int, tuple[int, int]] = {}
        """By step its request, and how many tokens are computed behind it."""
        self._steps = 0
        self._owners: dict[str, int] = {}
        """Who asks, and the latest step for them."""
        self._drains = False

    @property
    def in_flight(self) -> int:
        """Steps handed out and not yet committed."""
        return len(self._in_flight)

    @property
    def is_idle(self) -> bool:
        """Whether there is nothing to compute and nothing to wait for."""
        return not (self._running or self._waiting or self._in_flight)

    @property
    def is_drained(self) -> bool:
        """Whether ``drain`` was called and every step is back."""
        return self._drains and not self._in_flight

    @property
    def running(self) -> int:
        """How many generations hold a sequence."""
        return len(self._running)

    def runs(self, request: int) -> bool:
        """Whether generation ``request`` holds a sequence."""
        return request in self._running

    def submit(self, generate: Generate) -> Finished | None:
        """Queue a generation; its end, when the tokens of earlier epochs are all that it may have.

        Its prompt has at least one token and fits the context with one token to spare. Raises ``RingError`` after
        ``drain``.
        """
        assert 0 < len(generate.prompt) < self._context
        assert generate.max_tokens > 0
        if self._drains:
            raise RingError(f"request {generate.request} was given to a ring that drains; give it to the next one")
        if self._is_full(generate, len(generate.sampled)):
            return _finished(generate, len(generate.sampled), "length", prompt_s=0.0, decode_s=0.0)
        self._waiting.append(generate)
        return None

    def drain(self) -> None:
        """Hand out no step from now on."""
        self._drains = True

    def cancel(self, cancel: Cancel) -> None:
        """Forget a generation, wherever it is; what is in flight for it is dropped when it comes back."""
        if cancel.request in self._running:
            self._release(cancel.request)
        else:
            self._waiting = deque(waiting for waiting in self._waiting if waiting.request != cancel.request)

    def next_step(self, now: float) -> PlannedStep | None:
        """The next step of the log, or None when the ring must answer first or there is nothing to do."""
        if self._drains or len(self._in_flight) >= self._depth:
            return None
        while self._waiting and len(self._running) < self._at_once:
            held = Counter(running.generate.owner for running in self._running.values())
            generate = min(self._waiting, key=lambda each: held[each.owner])
            self._waiting.remove(generate)
            self._begin(generate, now)
        ready = [running for running in self._running.values() if running.has_step]
        if not ready:
            return None
        running = min(ready, key=lambda each: (self._owners.get(each.generate.owner, 0), each.sequence.used))
        prompt, first = running.generate.prompt, running.fed
        if first < len(prompt):
            running.fed = self._chunking.end(prompt, first)
            tokens = prompt[first : running.fed]
            running.sequence.computed.ends.append(running.fed)
        else:
            running.fed += 1
            tokens = [running.sampled[first - len(prompt)]]
        return self._plan(running, tokens, first)

    def _begin(self, generate: Generate, now: float) -> None:
        """Give ``generate`` a sequence, with those cells that it would compute the same way; the others are forgotten."""

        def reused(sequence: _Sequence) -> int:
            return self._chunking.reused(generate.prompt, sequence.computed) if generate.reuses else 0

        kept, _, sequence = max(
            ((reused(each), -each.used, each) for each in self._free), key=lambda candidate: candidate[:2]
        )
        self._free.remove(sequence)
        sequence.computed = Computed(generate.prompt, [end for end in sequence.computed.ends if end <= kept])
        self._running[generate.request] = _Running(
            generate=generate,
            sequence=sequence,
            started_s=now,
            sampled=list(generate.sampled),
            reused=kept,
            fed=kept,
            ops=[KvRemove(sequence.number, kept, -1)] if sequence.used else [],
        )

    def _release(self, request: int) -> None:
        self._free.append(self._running.pop(request).sequence)

    def commit(self, step: int, draw: Draw | None, now: float) -> list[GenerationEvent]:
        """Take back step ``step`` with what was sampled for it (None when it wanted no output, or nobody does any more)."""
        request, computed = self._in_flight.pop(step)
        running = self._running.get(request)
        if running is None:
            return []
        told: list[GenerationEvent] = []
        if running.reused:
            told.append(PromptProgress(request=request, tokens=running.reused, reused=running.reused))
            running.reused = 0
        if draw is not None:
            told += self._drawn(running, draw, now)
        elif computed < len(running.generate.prompt):
            told.append(PromptProgress(request=request, tokens=computed))
        return told

    def _drawn(self, running: _Running, draw: Draw, now: float) -> list[GenerationEvent]:
        request = running.generate.request
        if running.first_token_s is None:
            running.first_token_s = now
        if draw.error is not None:
            return [self._finish(running, "error", now, error=draw.error)]
        if draw.ends:
            return [self._finish(running, "stop", now)]
        running.sampled.append(draw.token)
        sampled = Sampled(
            request=request, token=draw.token, logprob=draw.logprob, top=draw.top, mirostat_mu=draw.mirostat_mu
        )
        if self._is_full(running.generate, len(running.sampled)):
            return [sampled, self._finish(running, "length", now)]
        return [sampled]

    def wants_draw(self, step: int) -> Generate | None:
        """The generation that step ``step`` belongs to, if it still wants a token."""
        request, _ = self._in_flight.get(step, (None, 0))
        running = self._running.get(request) if request is not None else None
        return running.generate if running is not None else None

    def _plan(self, running: _Running, tokens: list[int], first: int) -> PlannedStep:
        request, ops, running.ops = running.generate.request, running.ops, []
        step = PlannedStep(
            step=self._steps,
            request=request,
            tokens=tokens,
            positions=list(range(first, first + len(tokens))),
            wants_output=not running.has_step,
            ops=ops,
            sequence=running.sequence.number,
        )
        self._in_flight[step.step] = request, first + len(tokens)
        self._steps += 1
        running.sequence.used = self._owners[running.generate.owner] = self._steps
        return step

    def _is_full(self, generate: Generate, sampled: int) -> bool:
        """Whether ``sampled`` tokens are all that ``generate`` may have."""
        return sampled >= generate.max_tokens or len(generate.prompt) + sampled >= self._context

    def _finish(self, running: _Running, reason: str, now: float, *, error: str | None = None) -> Finished:
        first_token_s = running.first_token_s if running.first_token_s is not None else now
        self._release(running.generate.request)
        return _finished(
            running.generate,
            len(running.sampled),
            reason,
            error=error,
            prompt_s=first_token_s - running.started_s,
            decode_s=now - first_token_s,
        )


def _finished(
    generate: Generate, sampled: int, reason: str, *, prompt_s: float, decode_s: float, error: str | None = None
) -> Finished:
    return Finished(
        request=generate.request,
        reason=reason,
        error=error,
        prompt_tokens=len(generate.prompt),
        completion_tokens=sampled,
        prompt_s=prompt_s,
        decode_s=decode_s,
    )
