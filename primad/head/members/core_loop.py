"""Runs one membership core: passes it every event and the time, and has its decisions carried out."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Final

from primad.membership import types
from primad.membership.news import news
from primad.membership.step import step, wake_at

_MAX_EVENTS: Final = 10_000
NEWS_KEPT: Final = 100


@dataclass(slots=True)
class Epochs:
    """The ``latest`` epoch of all cores of a head: no two rings share an epoch, whichever model they serve."""

    latest: int = 0


class CoreLoop:
    """``carry_out`` gets the core's effects in order; ``decided`` is called after all effects of an event, with the
    state and the time.

    ``state`` is None until ``run`` begins.
    """

    def __init__(
        self,
        epochs: Epochs,
        carry_out: Callable[[types.Effect], None],
        decided: Callable[[types.State, float], None] = lambda *_: None,
    ) -> None:
        self._epochs, self._carry_out, self._decided = epochs, carry_out, decided
        self._events: asyncio.Queue[types.Event] = asyncio.Queue(_MAX_EVENTS)
        self.state: types.State | None = None
        self.news: deque[dict[str, Any]] = deque(maxlen=NEWS_KEPT)

    def post(self, event: types.Event) -> None:
        """Post an event; the core handles events in order."""
        self._events.put_nowait(event)

    async def run(self, state: types.State) -> None:
        """Pass every event to the core, which begins with ``state``, until cancelled."""
        loop = asyncio.get_running_loop()
        # Named devices have been welcomed already: they must be known before the core checks whether all are present.
        event: types.Event = types.Tick() if self._events.empty() else self._events.get_nowait()
        while True:
            now = loop.time()
            before = state
            state, effects = step(replace(state, epoch=self._epochs.latest), event, now)
            self.state, self._epochs.latest = state, state.epoch
            for each in news(before, state, effects):
                self.news.append({"at_s": time.time(), "kind": str(each.kind), "text": each.text})
            for effect in effects:
                self._carry_out(effect)
            self._decided(state, now)
            wake = wake_at(state, now)  # overdue timers have fired by now
            event = types.Tick()
            with suppress(TimeoutError):
                async with asyncio.timeout_at(wake):
                    event = await self._events.get()
