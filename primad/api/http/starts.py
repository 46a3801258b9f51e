"""Decides which request begins next when many arrive together: a limited number per turn of the event loop.

A thousand connections with a request each took a turn of half a second, and a health check waits for several turns. The
newest connections go first, and machines take turns, so an occasional request is served while other machines send
without end. Next come connections that were answered before, in order, and those whose requests come in many small
parts.

Plain health checks, which take about 10 to 20 us, go before all of these. Machines take turns for them too, and if more
arrive than one turn answers, a few other requests begin all the same.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from typing import Final, Protocol

from primad.api.http.turns import TURN_S
from primad.system.shares import Turns

MAX_STARTS: Final = 8
"""Limit per turn of the loop. A request takes some tenths of a millisecond, mostly in the next turn, but one whose body
comes in many parts takes milliseconds, so a turn also ends after ``TURN_S``."""
MAX_CHECKS: Final = 64
"""Limit of health checks per turn of the loop."""
BESIDE_CHECKS: Final = 2
"""Limit of other requests in a turn that leaves health checks waiting."""
_OTHERS_EVERY: Final = 4
"""One of this many starts goes to a connection that was answered before, if one waits."""


class Starting(Protocol):
    """A connection with a request to begin."""

    loop: asyncio.AbstractEventLoop

    def begin(self) -> None:
        """Begin the request."""


class Starts:
    """Connections that wait for their turn to begin a request."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._new: dict[str, list[Starting]] = {}
        """Connections by machine, the newest last; the machine whose turn it is comes first."""
        self._others: deque[Starting] = deque()
        self._checks: Turns[Starting] = Turns()
        self._waiting: set[Starting] = set()
        self._begun = self._checked = 0
        self._is_due = False

    def __contains__(self, connection: Starting) -> bool:
        return connection in self._waiting

    def ready(self, connection: Starting, machine: str, *, is_new: bool, is_check: bool = False) -> None:
        """Let ``connection`` begin, now or in its turn; ``is_check``: its request is a plain health check."""
        if not self._is_due:
            self._is_due = True
            connection.loop.call_soon(self._turn, connection.loop)
        if connection in self._waiting:
            return
        if is_check and not self._checks and self._checked < MAX_CHECKS:
            self._checked += 1
            connection.begin()
            return
        if not is_check and not self._waiting and self._begun < MAX_STARTS:
            self._begun += 1
            connection.begin()
            return
        self._waiting.add(connection)
        if is_check:
            self._checks.add(machine, connection)
        elif is_new:
            self._new.setdefault(machine, []).append(connection)
        else:
            self._others.append(connection)

    def forget(self, connection: Starting) -> None:
        """Drop ``connection``, which is gone."""
        self._waiting.discard(connection)

    def _turn(self, loop: asyncio.AbstractEventLoop) -> None:
        was_idle, self._begun, self._checked = not (self._begun or self._checked), 0, 0
        while self._checks and self._checked < MAX_CHECKS:
            self._checked += self._begin(self._checks.next())
        maximum = BESIDE_CHECKS if self._checks else MAX_STARTS
        until_s = self._clock() + TURN_S
        while self._begun < maximum and self._clock() < until_s and (connection := self._next()) is not None:
            self._begun += self._begin(connection)
        self._is_due = not was_idle or bool(self._begun or self._checked)
        if self._is_due:
            loop.call_soon(self._turn, loop)

    def _begin(self, connection: Starting) -> bool:
        """Begin the request of ``connection``; return whether it was still there."""
        if connection not in self._waiting:
            return False
        self._waiting.remove(connection)
        connection.begin()
        return True

    def _next(self) -> Starting | None:
        if self._others and (not self._new or self._begun % _OTHERS_EVERY == _OTHERS_EVERY - 1):
            return self._others.popleft()
        if not self._new:
            return None
        machine = next(iter(self._new))
        waiting = self._new.pop(machine)
        connection = waiting.pop()
        if waiting:
            self._new[machine] = waiting
        return connection
