"""What the head's own ring process says besides answers and figures."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from types import SimpleNamespace

from halda import Plan, Window
from primad.daemon.head_ring import HeadRing
from primad.ring.messages import Pressed, RingEvent, Sampled

ALONE = Plan(
    rounds=1,
    route=(Window(device="desk", first=0, last=5, gpu_layers=0),),
    output_on_gpu=False,
    streaming=(),
    left_out=(),
)


class Says:
    """A ring process that says ``events``, and no more."""

    def __init__(self, *events: RingEvent) -> None:
        self._events = events

    async def events(self) -> AsyncIterator[RingEvent]:
        for event in self._events:
            yield event


def test_a_head_that_is_short_of_memory_is_told_of_and_goes_on():
    pressed: list[int] = []
    delivered: list[tuple[int, RingEvent]] = []
    broken: list[object] = []
    token = Sampled(request=1, token=7, logprob=None, top=())

    async def once() -> None:
        parts = SimpleNamespace(
            plan=ALONE,
            options=SimpleNamespace(epoch=5),
            deliver=lambda epoch, event: delivered.append((epoch, event)),
            on_pressed=pressed.append,
            on_broken=lambda *why: broken.append(why),
        )
        await HeadRing(parts)._attend(Says(Pressed(1 << 20), token), 1)

    asyncio.run(once())
    assert (pressed, delivered, broken) == ([1 << 20], [(5, token)], [])
