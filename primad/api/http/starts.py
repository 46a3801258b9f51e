"""Which request begins next where many come at once: some at a turn of the loop.

A thousand connections with a request each took a turn of half a second, and a health check waits for some turns. Who has
just come is first, and machines take turns: so one that asks now and then is heard while others ask without end. Health
checks go before all of them, every other time: who comes without end is always newer. Behind
those are connections that were answered before, each in its turn, and those whose requests come in many small parts.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from typing import Final, Protocol

from primad.api.http.turns import TURN_S

MAX_STARTS: Final = 8
"""At one turn of the loop; each takes some tenths of a millisecond, most of them in the next turn, and one whose body
comes in many parts takes milliseconds, so a turn ends after ``TURN_S`` too."""
_OTHERS_EVERY: Final = 4
"""One of so many is of a connection that was answered before, if one waits."""


class Starting(Protocol):
    """A connection that has something to begin."""

    loop: asyncio.AbstractEventLoop

    def begin(self) -> None:
        """Begin it."""


class Starts:
    """Connections that wait for their turn to begin a request."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._new: dict[str, list[Starting]] = {}
        """By machine, the newest last; the machine whose turn it is first."""
        self._others: deque[Starting] = deque()
        self._checks: deque[Starting] = deque()
        self._waiting: set[Starting] = set()
        self._begun = 0
        self._is_due = False

    def __contains__(self, connection: Starting) -> bool:
        return connection in self._waiting

    def ready(self, connection: Starting, machine: str, *, is_new: bool, is_check: bool = False) -> None:
        """Let ``connection`` begin, now or in its turn; ``is_check``: it asks for health."""
        if not self._is_due:
            self._is_due = True
            connection.loop.call_soon(self._turn, connection.loop)
        if connection in self._waiting:
            return
        if not self._waiting and self._begun < MAX_STARTS:
            self._begun += 1
            connection.begin()
            return
        self._waiting.add(connection)
        if is_check:
            self._checks.append(connection)
        elif is_new:
            self._new.setdefault(machine, []).append(connection)
        else:
            self._others.append(connection)

    def forget(self, connection: Starting) -> None:
        """It is gone."""
        self._waiting.discard(connection)

    def _turn(self, loop: asyncio.AbstractEventLoop) -> None:
        was_idle, self._begun = not self._begun, 0
        until_s = self._clock() + TURN_S
        while self._begun < MAX_STARTS and self._clock() < until_s and (connection := self._next()) is not None:
            if connection in self._waiting:
                self._waiting.remove(connection)
                self._begun += 1
                connection.begin()
        self._is_due = not was_idle or bool(self._begun)
        if self._is_due:
            loop.call_soon(self._turn, loop)

    def _next(self) -> Starting | None:
        if self._checks and (self._begun % 2 == 0 or not (self._others or self._new)):
            return self._checks.popleft()
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
