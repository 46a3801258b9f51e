"""Simulate drafts that are verified in steps of their own, several of which are in the ring at the same time.

A step may be a block of several tokens, the next token's step too. A block costs less than as many single steps, and
the head drafts longer before each one. Where layers have a state, the accepted tokens of a block are computed again if
another step followed it.

Each draft is accepted with probability ``share`` if all drafts before it were. After a rejected draft the ring
restarts: devices finish what they are computing and drop what waits. The head finishes a window before it takes a step
that came back, so a draft that it starts too early delays the deciding token. That delay depends on where the windows
are, so it is simulated.
"""

from __future__ import annotations

import random
from collections import defaultdict
from dataclasses import replace
from heapq import heappop, heappush
from itertools import count
from typing import Final

from halda.evaluate import route_s
from halda.instance import Instance
from halda.plan import Plan
from halda.play import hops_of

TOKENS: Final = 400


def tokens_ahead(
    plan: Plan, instance: Instance, room: int, share: float, *, block: int = 1, draft_s: float = 0.0
) -> float:
    """Return tokens per second with at most ``room`` steps of ``block`` tokens of one request in the ring. The head
    computes each draft in ``draft_s``."""
    return _Played(plan, instance, room, share, block, draft_s).tokens_per_s()


class _Played:
    """The steps in flight, the next token's first. Dropped steps are in none of the lists."""

    def __init__(self, plan: Plan, instance: Instance, room: int, share: float, block: int, draft_s: float) -> None:
        hosts = {instance.devices[m].device: here for here in instance.processors for m in here}
        self._hosts = [hosts[window.device] for window in plan.route]
        hops = hops_of(plan, instance)
        self._hops_s = [sum(hops[window.device][1:]) for window in plan.route]
        self._seconds = route_s(plan, replace(instance, decode_rows=block))
        self._block, self._draft_s, self._has_state = block, draft_s, instance.model.is_recurrent
        self._known: dict[int, int] = {}
        """Known tokens of each step, that is, tokens before its first draft."""
        self._room, self._share, self._random = room, share, random.Random(1)
        self._numbers, self._events = count(), list[tuple[float, int, int, bool]]()
        self._flight: list[int] = []
        self._waits: dict[tuple[int, ...], list[tuple[int, int]]] = defaultdict(list)
        self._busy: set[tuple[int, ...]] = set()

    def tokens_per_s(self) -> float:
        now, tokens = 0.0, 0
        self._begin(now)
        while tokens < TOKENS:
            now, step, stop, leaves = heappop(self._events)
            host = self._hosts[stop]
            if leaves:
                self._busy.discard(host)
                tokens += self._leave(now, step, stop)
            else:
                self._waits[host].append((stop, -step))
            self._serve(host, now)
        return tokens / now

    def _begin(self, now: float, known: int = 1) -> None:
        """Start a step whose first ``known`` tokens are not drafts."""
        self._flight = [next(self._numbers)]
        self._known[self._flight[0]] = known
        heappush(self._events, (now, self._flight[0], 0, False))

    def _leave(self, now: float, step: int, stop: int) -> int:
        """Move the step on from ``stop`` and return the number of tokens that this yields."""
        if step not in self._flight:
            return 0
        if stop + 1 < len(self._hosts):
            stays = self._hosts[stop] == self._hosts[stop + 1]
            heappush(self._events, (now + (0.0 if stays else self._hops_s[stop]), step, stop + 1, False))
            return 0
        self._flight.remove(step)
        known = self._known.pop(step)
        held, drafts = 0, self._block - known
        while held < drafts and self._holds():
            held += 1
        if held < drafts:
            self._begin(now, known + held + 1 if self._has_state and self._flight else 1)
        elif not self._flight or not self._holds():
            self._begin(now)
        return held + 1

    def _holds(self) -> bool:
        return self._random.random() < self._share

    def _serve(self, host: tuple[int, ...], now: float) -> None:
        """Start the waiting step that is furthest along; the head starts a draft when it is otherwise idle."""
        self._waits[host] = waits = [each for each in self._waits[host] if -each[1] in self._flight]
        if host in self._busy:
            return
        if waits:
            waits.remove(found := max(waits))
            stop, step = found[0], -found[1]
        elif host == self._hosts[0] and len(self._flight) < self._room and self._has_left(now):
            stop, step = 0, next(self._numbers)
            self._known[step] = 1
            self._flight.append(step)
        else:
            return
        self._busy.add(host)
        took_s = self._seconds[stop]
        if stop == 0:
            took_s += self._draft_s * (self._block - self._known[step] + (step != self._flight[0]))
        heappush(self._events, (now + took_s, step, stop, True))

    def _has_left(self, now: float) -> bool:
        """Whether no step is about to reach the head at time ``now``."""
        return all(at > now or self._hosts[stop] != self._hosts[0] or leaves for at, _, stop, leaves in self._events)
