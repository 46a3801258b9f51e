"""Decides what each step computes: whose prompt rows, whose next token, which KV cells are forgotten.

``schedule -> the ring computes -> commit``. The scheduler sees no ring: it hands out ``Planned`` steps in order (the step
log) and takes back what was drawn for each. One sequence generates at a time; others wait their turn. Time is passed in.

Prompts are fed in chunks of at most ``rows`` rows. Chunks follow each other into the ring without waiting (up to
``depth`` in flight), since only the last one's output is needed; decode steps wait for the token before them.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Final

from primad.ring.messages import Cancel, Finished, Generate, KvOp, KvRemove, Sampled

SEQUENCE: Final = 0
"""The KV sequence of the one generation that runs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """One step before it is computed: row ``i`` is ``tokens[i]`` at ``positions[i]``; the last may want an output."""

    step: int
    request: int
    tokens: list[int]
    positions: list[int]
    wants_output: bool
    ops: list[KvOp]


@dataclass(frozen=True, slots=True, kw_only=True)
class Draw:
    """The token that was drawn for a step: ``ends`` when it ends the generation; ``top`` as in ``Sampled``."""

    token: int
    ends: bool
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


@dataclass(slots=True)
class _Running:
    """The generation that holds the sequence."""

    generate: Generate
    started_s: float
    fed: int = 0
    """Prompt tokens handed out."""
    drawn: list[int] = field(default_factory=list)
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
        self._in_flight: dict[int, int] = {}
        self._steps = 0

    @property
    def in_flight(self) -> int:
        """Steps handed out and not yet committed."""
        return len(self._in_flight)

    @property
    def is_idle(self) -> bool:
        """Whether there is nothing to compute and nothing to wait for."""
        return self._running is None and not self._waiting and not self._in_flight

    def submit(self, generate: Generate) -> None:
        """Queue a generation. Its prompt has at least one token and fits the context with one token to spare."""
        assert 0 < len(generate.prompt) < self._context
        assert generate.max_tokens > 0
        self._waiting.append(generate)

    def cancel(self, cancel: Cancel) -> None:
        """Forget a generation, wherever it is; what is in flight for it is dropped when it comes back."""
        if self._running is not None and self._running.generate.request == cancel.request:
            self._free()
        else:
            self._waiting = deque(waiting for waiting in self._waiting if waiting.request != cancel.request)

    def next_step(self, now: float) -> Planned | None:
        """The next step of the log, or None when the ring must answer first or there is nothing to do."""
        if len(self._in_flight) >= self._depth:
            return None
        if self._running is None:
            if not self._waiting:
                return None
            self._running = _Running(generate=self._waiting.popleft(), started_s=now)
        running = self._running
        prompt = running.generate.prompt
        if running.fed < len(prompt):
            tokens = prompt[running.fed : running.fed + self._rows]
            first = running.fed
            running.fed += len(tokens)
            return self._plan(tokens, first, wants_output=running.fed == len(prompt))
        if running.generate.request in self._in_flight.values() or not running.drawn:
            return None
        return self._plan([running.drawn[-1]], len(prompt) + len(running.drawn) - 1, wants_output=True)

    def commit(self, step: int, draw: Draw | None, now: float) -> list[Sampled | Finished]:
        """Take back step ``step`` with what was drawn for it (None when it wanted no output, or nobody does any more)."""
        request = self._in_flight.pop(step)
        running = self._running
        if draw is None or running is None or running.generate.request != request:
            return []
        if running.first_token_s is None:
            running.first_token_s = now
        if draw.ends:
            return [self._finish(running, "stop", now)]
        running.drawn.append(draw.token)
        sampled = Sampled(request=request, token=draw.token, logprob=draw.logprob, top=draw.top)
        generate = running.generate
        total = len(generate.prompt) + len(running.drawn)
        if len(running.drawn) >= generate.max_tokens or total >= self._context:
            return [sampled, self._finish(running, "length", now)]
        return [sampled]

    def wants_draw(self, step: int) -> Generate | None:
        """The generation that step ``step`` belongs to, if it still wants a token."""
        running = self._running
        if running is None or self._in_flight.get(step) != running.generate.request:
            return None
        return running.generate

    def _plan(self, tokens: list[int], first: int, *, wants_output: bool) -> Planned:
        assert self._running is not None
        ops, self._ops = self._ops, []
        request = self._running.generate.request
        step = Planned(
            step=self._steps,
            request=request,
            tokens=tokens,
            positions=list(range(first, first + len(tokens))),
            wants_output=wants_output,
            ops=ops,
        )
        self._in_flight[step.step] = request
        self._steps += 1
        return step

    def _finish(self, running: _Running, reason: str, now: float) -> Finished:
        first_token_s = running.first_token_s if running.first_token_s is not None else now
        finished = Finished(
            request=running.generate.request,
            reason=reason,
            error=None,
            prompt_tokens=len(running.generate.prompt),
            completion_tokens=len(running.drawn),
            prompt_s=first_token_s - running.started_s,
            decode_s=now - first_token_s,
        )
        self._free()
        return finished

    def _free(self) -> None:
        self._running = None
        self._ops = [KvRemove(SEQUENCE, 0, -1)]
