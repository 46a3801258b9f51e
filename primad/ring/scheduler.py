"""Decides what each step computes: whose prompt rows, whose next token, which KV cells are forgotten.

``schedule -> the ring computes -> commit``. The scheduler sees no ring: it hands out ``PlannedStep`` steps in order
(the step log) and takes back what was sampled for each. One sequence generates at a time; others wait their turn. Time
is passed in.

Prompts are fed in chunks of at most ``rows`` rows. Chunks follow each other into the ring without waiting (up to
``depth`` in flight), since only the last one's output is needed; decode steps wait for the token before them.

A generation that an earlier epoch began comes with the tokens it has sampled already. They are fed one by one, as they were
fed then: llama.cpp computes a batch of several rows in another order than single rows, and its sums would differ in the
last bits. Like chunks they do not wait for each other.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Final

from primad.errors import RingError
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
    fed: int = 0
    """Tokens of prompt and ``sampled`` handed out."""
    first_token_s: float | None = None


class Scheduler:
    """The queue of generations and the one that runs. ``context`` and ``rows`` are the ring's."""

    def __init__(self, *, context: int, rows: int, depth: int) -> None:
        self._context = context
        self._rows = rows
        self._depth = depth
        self._waiting: deque[Generate] = deque()
        self._running: _Running | None = None
        self._ops: list[KvOp] = []
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
            self._free()
        else:
            self._waiting = deque(waiting for waiting in self._waiting if waiting.request != cancel.request)

    def next_step(self, now: float) -> PlannedStep | None:
        """The next step of the log, or None when the ring must answer first or there is nothing to do."""
        if self._drains or len(self._in_flight) >= self._depth:
            return None
        if self._running is None:
            if not self._waiting:
                return None
            generate = self._waiting.popleft()
            self._running = _Running(generate=generate, started_s=now, sampled=list(generate.sampled))
        running = self._running
        prompt, first = running.generate.prompt, running.fed
        total = len(prompt) + len(running.sampled)
        if first == total:
            return None
        tokens = prompt[first : first + self._rows] or [running.sampled[first - len(prompt)]]
        running.fed += len(tokens)
        return self._plan(tokens, first, wants_output=running.fed == total)

    def commit(self, step: int, draw: Draw | None, now: float) -> list[GenerationEvent]:
        """Take back step ``step`` with what was sampled for it (None when it wanted no output, or nobody does any more)."""
        request, computed = self._in_flight.pop(step)
        running = self._running
        if running is None or running.generate.request != request:
            return []
        if draw is None:
            is_told = computed < len(running.generate.prompt)
            return [PromptProgress(request=request, tokens=computed)] if is_told else []
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

    def _plan(self, tokens: list[int], first: int, *, wants_output: bool) -> PlannedStep:
        assert self._running is not None
        ops, self._ops = self._ops, []
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
        self._free()
        return _finished(
            running.generate,
            len(running.sampled),
            reason,
            error=error,
            prompt_s=first_token_s - running.started_s,
            decode_s=now - first_token_s,
        )

    def _free(self) -> None:
        self._running = None
        self._ops = [KvRemove(SEQUENCE, 0, -1)]


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
