"""Decides what each step computes: whose prompt rows, whose next token, which KV cells are forgotten.

``schedule -> the ring computes -> commit``. The scheduler sees no ring: it hands out ``PlannedStep`` steps in order
(the step log) and takes back what was sampled for each. One sequence generates at a time; others wait their turn. Time
is passed in.

Prompts are fed in chunks (``chunks.py``). Chunks follow each other into the ring without waiting (up to ``depth`` in
flight), since only the last one's output is needed; decode steps wait for the token before them. The cells of a prompt stay
when its generation is over: of the next one's prompt only what follows the chunks that both have is computed.

A generation that an earlier epoch began comes with the tokens it has sampled already. They are fed one by one, as they were
fed then: llama.cpp computes a batch of several rows in another order than single rows, and its sums would differ in the
last bits. Like chunks they do not wait for each other.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Final

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

SEQUENCE: Final = 0
"""The KV sequence of the one generation that runs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedStep:
    """One step before it is computed: row ``i`` is ``tokens[i]`` at ``positions[i]``; the last may want an output."""

    step: int
    request: int
    tokens: list[int]
    positions: list[int]
    wants_output: bool
    ops: list[KvOp]


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
class _Running:
    """The generation that holds the sequence."""

    generate: Generate
    started_s: float
    sampled: list[int]
    """All tokens after the prompt, those of earlier epochs first."""
    reused: int
    """Tokens of the prompt whose cells were there."""
    fed: int
    """Tokens of prompt and ``sampled`` handed out, or there."""
    is_told: bool = False
    """Whether it was said how many are reused."""
    first_token_s: float | None = None


class Scheduler:
    """The queue of generations and the one that runs. ``context`` is the ring's."""

    def __init__(self, *, context: int, chunking: Chunking, depth: int) -> None:
        self._context = context
        self._chunking = chunking
        self._depth = depth
        self._waiting: deque[Generate] = deque()
        self._running: _Running | None = None
        self._computed: Computed | None = None
        """What the cells of the sequence hold, besides an answer; None before the first step."""
        self._in_flight: dict[int, tuple[int, int]] = {}
        """By step its request, and how many tokens are computed behind it."""
        self._steps = 0
        self._drains = False

    @property
    def running(self) -> Generate | None:
        """The generation that holds the sequence."""
        return self._running.generate if self._running is not None else None

    @property
    def in_flight(self) -> int:
        """Steps handed out and not yet committed."""
        return len(self._in_flight)

    @property
    def is_idle(self) -> bool:
        """Whether there is nothing to compute and nothing to wait for."""
        return self._running is None and not self._waiting and not self._in_flight

    @property
    def is_drained(self) -> bool:
        """Whether ``drain`` was called and every step is back."""
        return self._drains and not self._in_flight

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
        if self._running is not None and self._running.generate.request == cancel.request:
            self._running = None
        else:
            self._waiting = deque(waiting for waiting in self._waiting if waiting.request != cancel.request)

    def next_step(self, now: float) -> PlannedStep | None:
        """The next step of the log, or None when the ring must answer first or there is nothing to do."""
        if self._drains or len(self._in_flight) >= self._depth:
            return None
        ops: list[KvOp] = []
        if self._running is None:
            if not self._waiting:
                return None
            self._running, ops = self._begin(self._waiting.popleft(), now)
        running = self._running
        prompt, first = running.generate.prompt, running.fed
        if first == len(prompt) + len(running.sampled):
            return None
        if first < len(prompt):
            running.fed = self._chunking.end(prompt, first)
            tokens = prompt[first : running.fed]
            assert self._computed is not None
            self._computed.ends.append(running.fed)
        else:
            running.fed += 1
            tokens = [running.sampled[first - len(prompt)]]
        return self._plan(tokens, first, ops, wants_output=running.fed == len(prompt) + len(running.sampled))

    def _begin(self, generate: Generate, now: float) -> tuple[_Running, list[KvOp]]:
        """Give ``generate`` the sequence, with those cells that it would compute the same way; the others are forgotten."""
        before = self._computed
        reused = self._chunking.reused(generate.prompt, before) if before is not None and generate.reuses else 0
        kept = [end for end in before.ends if end <= reused] if before is not None else []
        self._computed = Computed(generate.prompt, kept)
        running = _Running(generate=generate, started_s=now, sampled=list(generate.sampled), reused=reused, fed=reused)
        return running, [KvRemove(SEQUENCE, reused, -1)] if before is not None else []

    def commit(self, step: int, draw: Draw | None, now: float) -> list[GenerationEvent]:
        """Take back step ``step`` with what was sampled for it (None when it wanted no output, or nobody does any more)."""
        request, computed = self._in_flight.pop(step)
        running = self._running
        if running is None or running.generate.request != request:
            return []
        reused = [] if running.is_told else self._tell_reused(running)
        if draw is None:
            is_within = computed < len(running.generate.prompt)
            return [*reused, PromptProgress(request=request, tokens=computed)] if is_within else [*reused]
        return [*reused, *self._drawn(running, draw, now)]

    @staticmethod
    def _tell_reused(running: _Running) -> list[GenerationEvent]:
        running.is_told = True
        if not running.reused:
            return []
        return [PromptProgress(request=running.generate.request, tokens=running.reused, reused=running.reused)]

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
        running = self._running
        request, _ = self._in_flight.get(step, (None, 0))
        if running is None or request != running.generate.request:
            return None
        return running.generate

    def _plan(self, tokens: list[int], first: int, ops: list[KvOp], *, wants_output: bool) -> PlannedStep:
        assert self._running is not None
        request = self._running.generate.request
        step = PlannedStep(
            step=self._steps,
            request=request,
            tokens=tokens,
            positions=list(range(first, first + len(tokens))),
            wants_output=wants_output,
            ops=ops,
        )
        self._in_flight[step.step] = request, first + len(tokens)
        self._steps += 1
        return step

    def _is_full(self, generate: Generate, sampled: int) -> bool:
        """Whether ``sampled`` tokens are all that ``generate`` may have."""
        return sampled >= generate.max_tokens or len(generate.prompt) + sampled >= self._context

    def _finish(self, running: _Running, reason: str, now: float, *, error: str | None = None) -> Finished:
        first_token_s = running.first_token_s if running.first_token_s is not None else now
        self._running = None
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
