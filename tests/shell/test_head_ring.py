"""What the head's own ring process says besides answers and figures."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from types import SimpleNamespace

import pytest

from halda import Plan, Window
from primad.daemon import head_ring
from primad.daemon.head_ring import HeadRing
from primad.errors import RingError
from primad.ring.messages import Drained, Opened, Pressed, Report, RingCommand, RingEvent, Sampled, Serving, Status

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

    async def send(self, command: RingCommand) -> None:
        """It takes no command, and whoever has one for it waits."""
        await asyncio.Future()

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


def test_what_is_said_when_nobody_waits_for_it_any_more_is_no_trouble():
    """Forming was cancelled, and the process not ended yet."""

    async def once() -> None:
        ring = HeadRing(SimpleNamespace())
        for wanted in (ring._own, ring._serving, ring._drained):
            wanted.cancel()
        await ring._attend(Says(Opened("tcp://127.0.0.1:1", "key"), Serving(), Drained()), 1)

    asyncio.run(once())


class Answers:
    """A worker's part, or the head's own process, whose ring process has computed so many steps when it is asked."""

    def __init__(self, *steps: int) -> None:
        self._steps = list(steps)
        self.ring: HeadRing | None = None

    def status(self) -> Status:
        values = dict.fromkeys(Status.__struct_fields__, 0) | {"steps": self._steps.pop(0)}
        return Status(**values)

    async def wait_status(self) -> SimpleNamespace:
        return SimpleNamespace(status=self.status(), daemon_rss_bytes=0)

    async def send(self, command: RingCommand) -> None:
        assert isinstance(command, Report)
        if self._steps:
            self.ring._status.put_nowait(self.status())


@pytest.mark.parametrize(
    ("own", "lap", "is_lost"),
    [
        ((7, 7), (4, 4), True),
        ((7, 7), (4, 5), False),  # it goes on
        ((7, 8), (4, 4), False),
        ((7,), (4, 4), False),  # the head computes and does not answer
    ],
)
def test_a_step_that_nobody_has_is_lost(own, lap, is_lost, monkeypatch):
    """All answer, and nobody has computed anything since they were asked before: the ring is formed anew at once."""
    monkeypatch.setattr(head_ring, "OVERDUE_ANSWER_S", 0.1)

    async def once() -> None:
        ring = HeadRing(SimpleNamespace(plan=ALONE, options=SimpleNamespace(epoch=5)))
        ring._process = Answers(*own)
        ring._process.ring = ring
        ring._workers = {"lap": Answers(*lap)}
        await ring._find_fault(12, head_ring.LOST_S / 2)
        if is_lost:
            with pytest.raises(RingError, match=r"step 12 is out for 4\.0 s, and no device has it"):
                await ring._find_fault(12, head_ring.LOST_S)
        else:
            await ring._find_fault(12, head_ring.LOST_S)

    asyncio.run(once())


def test_who_has_a_command_for_a_ring_that_breaks_is_not_kept_waiting():
    """The process takes nothing, as one that was stopped; whoever hands over to the next ring must go on."""

    async def once() -> None:
        ring = HeadRing(SimpleNamespace(plan=ALONE, options=SimpleNamespace(epoch=5), on_broken=lambda *_: None))
        ring._process = Says()
        sending = asyncio.create_task(ring.send(Report()))
        await asyncio.sleep(0)
        assert not sending.done()
        ring._break(RingError("the head's ring process was stopped"))
        async with asyncio.timeout(10):
            await sending

    asyncio.run(once())
