"""Status queries to the devices of a ring: bounded in time, and shared by all who ask at the same time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import NoReturn

from halda import Plan, Window
from primad.errors import ClusterError
from primad.head.rings.ring import HeadRing
from primad.planning.forecast import Forecast
from primad.ring.messages import Finished, MemoryStatus, Report, RingCommand, RingEvent, Status
from primad.settings.timings import HeadTimings, Timings
from tests.fakes.planning import model

PLAN = Plan(
    rounds=1,
    route=tuple(
        Window(device=name, first=first, last=first + 5, gpu_layers=0)
        for name, first in (("desk", 0), ("lap", 5), ("nas", 10), ("desk", 15))
    ),
    output_on_gpu=False,
    streaming=(),
    left_out=(),
)
PATIENCE_S = 180
MEMORY = MemoryStatus(
    resident=3,
    streamed=2,
    streams_output=False,
    read_ahead_bytes=20,
    resident_bytes=30,
    streamed_bytes=20,
    read_bytes=400,
    stall_s=0.1,
    pressure="calm",
)


def status(steps: int) -> Status:
    return Status(
        steps=steps, rows=0, compute_s=0, hop_s=[], rss_bytes=steps, private_bytes=1, refused=0, memory=MEMORY
    )


def finished(request: int) -> Finished:
    return Finished(
        request=request,
        reason="stop",
        error=None,
        prompt_tokens=9,
        completion_tokens=1,
        prompt_s=1.0,
        decode_s=0.0,
    )


class FakeProcess:
    """Answers ``Report`` with the number of its reports, once it may."""

    def __init__(self) -> None:
        self.reports = 0
        self.requested = asyncio.Event()
        self.may_reply = asyncio.Event()
        self.may_reply.set()
        self.events_: asyncio.Queue[Status] = asyncio.Queue()

    async def send(self, command: RingCommand) -> None:
        assert isinstance(command, Report)
        self.reports += 1
        self.requested.set()
        await self.may_reply.wait()
        self.events_.put_nowait(status(self.reports))

    async def listen(self, handle: Callable[[RingEvent], None]) -> NoReturn:
        while True:
            handle(await self.events_.get())

    async def close(self) -> None:
        """Nothing to end."""


class FakePart:
    """A worker that answers, stays silent, or has a broken link."""

    def __init__(self, answer: Status | ClusterError | None) -> None:
        self.answer = answer
        self.requested = 0
        self.waited_for = asyncio.Event()
        self.others: list[FakePart] = []
        self.given_up = False
        self.is_later = False
        """Whether another one had been given up before this one was queried."""

    async def wait_status(self) -> SimpleNamespace:
        self.requested += 1
        self.is_later = any(other.given_up for other in self.others)
        self.waited_for.set()
        match self.answer:
            case None:
                try:
                    await asyncio.Event().wait()
                finally:
                    self.given_up = True
            case ClusterError() as error:
                raise error
        return SimpleNamespace(status=self.answer, daemon_rss_bytes=9)

    async def release(self) -> None:
        """Nothing to release."""


class Lab:
    """A formed ring of a head and two workers."""

    def __init__(self, lap: FakePart, nas: FakePart, timings: HeadTimings) -> None:
        inputs = SimpleNamespace(
            forecast=Forecast.of(PLAN, model(), None, context_tokens=64),
            epoch=5,
            devices=SimpleNamespace(links=SimpleNamespace(between=lambda names: [])),
            node=SimpleNamespace(
                timings=Timings(head=timings),
                workspace=SimpleNamespace(kv=SimpleNamespace(expect=lambda _, of: None)),
            ),
            listener=SimpleNamespace(deliver=lambda epoch, event: None),
        )
        self.ring, self.process = HeadRing(inputs), FakeProcess()
        self.lap, self.nas = lap, nas
        lap.others, nas.others = [nas], [lap]
        self.ring._process, self.ring._workers = self.process, {"lap": lap, "nas": nas}
        self._attending = asyncio.create_task(self.ring._attend_own(self.process, SimpleNamespace(windows=[0, 1])))

    async def close(self) -> None:
        self._attending.cancel()
        await self.ring.close()


@asynccontextmanager
async def in_lab(
    lap: Status | ClusterError | None, nas: Status | ClusterError | None, **timings: float
) -> AsyncIterator[Lab]:
    async with asyncio.timeout(PATIENCE_S):
        here = Lab(FakePart(lap), FakePart(nas), HeadTimings(**timings))
        yield here
        await here.close()


async def test_every_device_is_in_the_status():
    async with in_lab(status(4), status(8)) as here:
        printed = await here.ring.status()
        assert (printed["epoch"], printed["rounds"], printed["predicted"]) == (5, 1, None)
        assert [(each["name"], each["ring"]["steps"]) for each in printed["devices"]] == [
            ("desk", 1),
            ("lap", 4),
            ("nas", 8),
        ]
        assert [each["memory"]["bytes_read_per_token"] for each in printed["devices"]] == [800, 100, 50]
        assert printed["devices"][1]["daemon_rss_bytes"] == 9


async def test_concurrent_status_requests_share_one_query_of_the_devices():
    async with in_lab(status(4), status(8)) as here:
        here.process.may_reply.clear()
        requests = [asyncio.create_task(here.ring.status()) for _ in range(50)]
        await asyncio.sleep(0)
        requests[0].cancel()  # its client left; the others keep waiting
        await here.process.requested.wait()
        here.process.may_reply.set()
        replies = await asyncio.gather(*requests[1:])
        assert all(answer == replies[0] for answer in replies)
        assert (here.process.reports, here.lap.requested, here.nas.requested) == (1, 1, 1)
        assert requests[0].cancelled()
        await here.ring.status()
        assert (here.process.reports, here.lap.requested) == (2, 2)


async def test_silent_devices_cost_one_patience_together():
    async with in_lab(None, None, status_timeout_s=0.5) as here:
        here.process.may_reply.clear()
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        requests = asyncio.create_task(here.ring.status())
        for asked in (here.process.requested, here.lap.waited_for, here.nas.waited_for):
            await asked.wait()
        printed = await requests
        assert not any(part.is_later for part in (here.lap, here.nas)), "they are queried at the same time"
        assert loop.time() - began_s >= 0.5
        assert [each["ring"] for each in printed["devices"]] == [None, None, None]
        assert {value for each in printed["devices"] for value in each["memory"].values()} == {None}


async def test_a_silent_device_computes_while_a_request_is_open():
    """A ring process replies between steps, and a prompt chunk may take long. A broken link is no computation."""
    async with in_lab(None, ClusterError("it takes nothing"), status_timeout_s=0.05) as here:
        here.ring._open_requests.add(7)
        printed = await here.ring.status()
        assert [each["computes"] for each in printed["devices"]] == [False, True, False]
        here.ring._hear(finished(7), 2)
        printed = await here.ring.status()
        assert [each["computes"] for each in printed["devices"]] == [False, False, False]


async def test_a_device_whose_link_broke_leaves_the_others_their_figures():
    async with in_lab(ClusterError("it takes nothing"), status(8)) as here:
        printed = await here.ring.status()
        assert [each["ring"] is None for each in printed["devices"]] == [False, True, False]


async def test_a_late_status_is_not_the_reply_to_the_next_query():
    async with in_lab(status(4), status(8), status_timeout_s=0.2) as here:
        await here.ring.status()
        here.ring._status.put_nowait(status(1000))
        assert (await here.ring.status())["devices"][0]["ring"]["steps"] == 2


async def test_the_status_of_a_closing_ring_is_empty():
    async with in_lab(status(4), None) as here:
        requests = asyncio.create_task(here.ring.status())
        await here.process.requested.wait()
        await here.ring.close()
        assert await requests == {}
