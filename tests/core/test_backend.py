"""Generations outlive rings: each resumes in the next ring and ends exactly once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from primad.api.answering.backend import ServedModel
from primad.errors import PromptTooLongError, RequestError, RingError
from primad.head.rings import backend as backend_module
from primad.head.rings.backend import A_MOMENT_S, MAX_RINGS, MAX_UNREAD, GoOn, RingBackend
from primad.kv import keys
from primad.kv.keys import KvBlock
from primad.ring.chunks import ChunkSize
from primad.ring.messages import (
    Cancel,
    Finished,
    Generate,
    GenerationEvent,
    KvKept,
    PromptProgress,
    RingCommand,
    Sampled,
)
from primad.ring.pictures import PictureRows
from tests.fakes.ring import GREEDY

SERVED = ServedModel(id="toy", created=1, context_tokens=4096, vocabulary=None)


class FakeRing:
    """A ring that records its commands."""

    def __init__(self, epoch: int) -> None:
        self.epoch = epoch
        self.reported: list[RingCommand] = []

    async def send(self, *commands: RingCommand) -> None:
        self.reported += commands

    async def status(self) -> dict[str, Any]:
        return {"epoch": self.epoch}

    @property
    def generates(self) -> list[Generate]:
        return [command for command in self.reported if isinstance(command, Generate)]


async def attach(backend: RingBackend, epoch: int) -> FakeRing:
    ring = FakeRing(epoch)
    await backend.attach(SERVED, epoch, ring.send, ring.status, f"serving {epoch}")
    return ring


def ask(backend: RingBackend, *prompt: int, tokens: int = 8, **options: Any) -> AsyncGenerator[GenerationEvent, None]:
    may_expire = options.pop("may_expire", True)
    asked = {"max_tokens": tokens, "sampling": GREEDY, "logprobs": None} | options
    return backend.generate(
        Generate(request=0, prompt=list(prompt or (1, 2)), sampled=[], **asked), may_expire=may_expire
    )


class Reader:
    """Reads one generation to its end."""

    def __init__(self, answer: AsyncGenerator[GenerationEvent, None]) -> None:
        self.events: list[GenerationEvent] = []
        self._answer = answer
        self.task = asyncio.create_task(self._read())

    async def _read(self) -> None:
        try:
            async for event in self._answer:
                self.events.append(event)
        finally:
            await self._answer.aclose()

    @property
    def tokens(self) -> list[int]:
        return [event.token for event in self.events if isinstance(event, Sampled)]

    @property
    def ends(self) -> list[Finished]:
        return [event for event in self.events if isinstance(event, Finished)]

    async def cancel(self) -> None:
        self.task.cancel()
        await asyncio.wait([self.task])


async def settled() -> None:
    """Let every task run until it waits."""
    for _ in range(5):
        await asyncio.sleep(0)


def sampled(request: int, token: int) -> Sampled:
    return Sampled(request=request, token=token, logprob=None, top=(), mirostat_mu=token / 7)


def finished(request: int) -> Finished:
    return Finished(
        request=request,
        reason="stop",
        error=None,
        prompt_tokens=2,
        completion_tokens=1,
        prompt_s=0,
        decode_s=0,
    )


async def test_a_generation_resumes_in_the_next_ring_with_its_sampled_tokens():
    backend = RingBackend()
    first = await attach(backend, 1)
    reader = Reader(ask(backend, 5, 6))
    await settled()
    (sent,) = first.generates
    assert (sent.prompt, sent.sampled) == ([5, 6], [])
    for token in (10, 11):
        backend.deliver(1, sampled(sent.request, token))
    backend.hold("forming the ring again")
    await settled()
    assert not reader.task.done()
    second = await attach(backend, 2)
    (again,) = second.generates
    assert (again.request, again.prompt, again.sampled, again.max_tokens) == (sent.request, [5, 6], [10, 11], 8)
    assert again.sampling.mirostat_mu == 11 / 7
    backend.deliver(2, sampled(sent.request, 12))
    backend.deliver(2, finished(sent.request))
    await reader.task
    assert reader.tokens == [10, 11, 12]
    assert [end.reason for end in reader.ends] == ["stop"]
    assert backend.generations == 0


async def test_generations_resume_in_the_order_in_which_they_arrived():
    backend = RingBackend()
    await attach(backend, 1)
    readers = [Reader(ask(backend, i + 1)) for i in range(4)]
    await settled()
    second = await attach(backend, 2)
    assert [each.prompt for each in second.generates] == [[1], [2], [3], [4]]
    for reader in readers:
        await reader.cancel()


async def test_generations_that_are_asked_for_at_once_come_to_the_ring_at_once():
    """All choices of a request arrive before the first one's prompt is computed."""
    backend, batches = RingBackend(), []

    async def send(*commands: RingCommand) -> None:
        batches.append([each.request for each in commands])

    await backend.attach(SERVED, 1, send, FakeRing(1).status, "serving")
    readers = [Reader(ask(backend, 1)) for _ in range(3)]
    await settled()
    assert batches == [[1, 2, 3]]
    gone = Reader(ask(backend, 1))
    last = Reader(ask(backend, 1))
    await asyncio.sleep(0)
    await gone.cancel()
    await settled()
    assert batches[1:] == [[5]], "a request cancelled before it was sent is neither sent nor cancelled"
    for reader in (*readers, last):
        await reader.cancel()


async def test_late_events_of_an_older_ring_are_dropped():
    backend = RingBackend()
    first = await attach(backend, 1)
    reader = Reader(ask(backend))
    await settled()
    request = first.generates[0].request
    backend.deliver(1, sampled(request, 10))
    second = await attach(backend, 2)
    backend.deliver(1, sampled(request, 11))
    backend.deliver(1, finished(request))
    backend.deliver(2, sampled(request, 12))
    backend.hold("again")
    backend.deliver(2, sampled(request, 13))
    third = await attach(backend, 3)
    assert third.generates[0].sampled == [10, 12]
    backend.deliver(3, finished(request))
    await reader.task
    assert reader.tokens == [10, 12]
    assert len(second.generates) == 1


async def test_while_a_ring_hands_over_new_generations_wait_for_the_next():
    backend = RingBackend()
    first = await attach(backend, 1)
    old = Reader(ask(backend, 1))
    await settled()
    backend.hand_over()
    new = Reader(ask(backend, 2))
    await settled()
    assert [each.prompt for each in first.generates] == [[1]]
    backend.deliver(1, sampled(first.generates[0].request, 10))  # the ring's last steps complete
    second = await attach(backend, 2)
    assert [(each.prompt, each.sampled) for each in second.generates] == [([1], [10]), ([2], [])]
    third = Reader(ask(backend, 3))
    await settled()
    assert second.generates[-1].prompt == [3], "the hand-over is over"
    for reader in (old, new, third):
        await reader.cancel()


async def test_a_generation_that_is_over_is_not_sent_again_though_nobody_read_its_end():
    backend = RingBackend()
    first = await attach(backend, 1)
    answer = ask(backend)
    reading = asyncio.create_task(anext(answer))
    await settled()
    request = first.generates[0].request
    backend.deliver(1, sampled(request, 10))
    backend.deliver(1, finished(request))
    await reading
    second = await attach(backend, 2)
    backend.fail("no ring")
    assert second.reported == []
    assert await anext(answer) == finished(request)
    with pytest.raises(StopAsyncIteration):
        await anext(answer)


async def test_without_a_ring_to_wait_for_every_generation_ends_with_the_reason_and_new_ones_are_refused():
    backend = RingBackend()
    await attach(backend, 1)
    readers = [Reader(ask(backend)) for _ in range(3)]
    await settled()
    backend.hold("forming")
    backend.fail("the rest cannot hold the model")
    backend.fail("twice")
    for reader in readers:
        await reader.task
        assert [(end.reason, end.error) for end in reader.ends] == [("error", "the rest cannot hold the model")]
    with pytest.raises(RingError, match="the model cannot be served now: twice"):
        await anext(ask(backend))
    assert not backend.health().serving


async def test_while_a_ring_is_on_its_way_requests_are_taken_and_wait():
    backend = RingBackend()
    backend.describe("planning")
    with pytest.raises(RingError, match="planning"):
        await anext(ask(backend))
    backend.hold("forming")
    assert backend.health().serving
    assert await backend.status() == {}
    reader = Reader(ask(backend, 9))
    await settled()
    ring = await attach(backend, 4)
    assert await backend.status() == {"epoch": 4}
    assert [each.prompt for each in ring.generates] == [[9]]
    await reader.cancel()
    assert ring.reported[-1] == Cancel(ring.generates[0].request)


async def test_health_is_well_for_a_moment_without_a_ring_and_again_once_something_is_computed():
    """A ring that computes nothing for waiting requests is no better than none."""
    now = 100.0
    backend = RingBackend(clock=lambda: now)

    def health() -> tuple[bool, bool]:
        return backend.health().serving, backend.health().taken

    assert health() == (False, False)
    first = await attach(backend, 1)
    reader = Reader(ask(backend, 5, 6))
    await settled()
    (sent,) = first.generates
    now += 1e6
    assert health() == (True, True), "a ring that has not broken is believed"
    for epoch in (2, 3):
        backend.hold("forming the ring again: bo sent nothing")
        now += A_MOMENT_S / 2
        assert health() == (True, True)
        await attach(backend, epoch)
    now += 1
    assert health() == (False, True)
    assert backend.health().detail == "no request makes progress: serving 3"
    waiting = Reader(ask(backend, 7))
    backend.deliver(2, sampled(sent.request, 9))
    assert health() == (False, True), "what an older ring said late"
    backend.deliver(3, sampled(sent.request, 10))
    assert health() == (True, True)
    await settled()
    backend.hold("forming the ring again: bo is gone")
    now += A_MOMENT_S + 1
    assert backend.health().detail == "no request makes progress: forming the ring again: bo is gone"
    await attach(backend, 4)
    assert health() == (False, True)
    for each in (reader, waiting):
        await each.cancel()
    assert health() == (True, True), "nobody waits for more than the warm-up pass has proved"
    backend.hold("again")
    now += A_MOMENT_S + 1
    backend.fail("there is no plan")
    assert (health(), backend.health().detail) == ((False, False), "there is no plan")
    await attach(backend, 5)
    assert health() == (True, True)


async def test_health_is_not_well_while_a_step_is_overdue_for_more_than_a_moment():
    """A stuck step is noticed after a while; until then the ring counts as intact."""
    now = 100.0
    backend = RingBackend(clock=lambda: now)
    ring = await attach(backend, 1)
    backend.overdue(1, 60.0)
    assert backend.health().serving, "nobody waits"
    reader = Reader(ask(backend, 5, 6))
    await settled()
    (sent,) = ring.generates
    backend.overdue(0, 60.0)
    assert backend.health().serving, "another ring's"
    backend.overdue(1, 1.0)
    assert backend.health().serving
    now += A_MOMENT_S
    backend.overdue(1, 1.0 + A_MOMENT_S)
    assert not backend.health().serving
    assert backend.health().detail == "no request makes progress: serving 1"
    backend.deliver(1, sampled(sent.request, 9))
    assert backend.health().serving
    await reader.cancel()


async def test_a_request_under_which_ring_after_ring_breaks_ends_and_others_that_progress_continue():
    backend = RingBackend()
    ring = await attach(backend, 1)
    poison, other = (Reader(ask(backend, number)) for number in (1, 2))
    await settled()
    spoilt, well = (each.request for each in ring.generates)
    backend.deliver(1, PromptProgress(request=spoilt, tokens=1))
    backend.hold("bo computed NaN")
    for epoch in range(2, 2 + MAX_RINGS):
        assert not poison.task.done()
        await attach(backend, epoch)
        backend.deliver(epoch, PromptProgress(request=spoilt, tokens=1))  # as before
        backend.deliver(epoch, sampled(well, epoch))
        backend.hold("bo computed NaN")
        await settled()
    (end,) = poison.ends
    assert end.error == f"{MAX_RINGS} rings in a row broke before this request made progress; bo computed NaN"
    assert not other.task.done()
    await other.cancel()


async def test_a_client_that_disconnects_cancels_in_the_ring_that_serves_then():
    backend = RingBackend()
    first = await attach(backend, 1)
    reader = Reader(ask(backend))
    await settled()
    second = await attach(backend, 2)
    await reader.cancel()
    request = first.generates[0].request
    assert [command for command in first.reported if isinstance(command, Cancel)] == []
    assert second.reported[-1] == Cancel(request)
    backend.deliver(2, sampled(request, 5))  # already in flight
    assert backend.generations == 0


async def test_a_request_cancelled_while_requests_move_to_the_next_ring_is_not_computed_there():
    backend = RingBackend()
    await attach(backend, 1)
    readers = [Reader(ask(backend)) for _ in range(2)]
    await settled()
    ring, takes = FakeRing(2), asyncio.Event()

    async def send(command: RingCommand) -> None:
        await ring.send(command)
        await takes.wait()

    attaching = asyncio.create_task(backend.attach(SERVED, 2, send, ring.status, "serving"))
    await settled()
    assert len(ring.generates) == 1
    readers[1].task.cancel()
    await settled()
    takes.set()
    await attaching
    await asyncio.wait([readers[1].task])
    assert [each.request for each in ring.generates] == [1]
    await readers[0].cancel()


async def test_a_prompt_that_does_not_fit_the_next_ring_ends_with_an_error():
    backend = RingBackend()
    await attach(backend, 1)
    long, short = Reader(ask(backend, *range(1, 9))), Reader(ask(backend, 1, 2))
    await settled()
    second = FakeRing(2)
    narrow = replace(SERVED, context_tokens=8)
    await backend.attach(narrow, 2, second.send, second.status, "serving")
    await settled()
    assert [each.prompt for each in second.generates] == [[1, 2]]
    assert [end.error for end in long.ends] == ["the prompt exceeds the available context size, which is now 8"]
    with pytest.raises(PromptTooLongError):
        await anext(ask(backend, *range(1, 9)))
    await short.cancel()


async def test_a_ring_that_restarts_a_prompt_repeats_no_progress_event():
    backend = RingBackend()
    await attach(backend, 1)
    reader = Reader(ask(backend, *range(1, 9)))
    await settled()
    for tokens in (2, 4):
        backend.deliver(1, PromptProgress(request=1, tokens=tokens))
    await attach(backend, 2)
    for tokens in (2, 4, 6):
        backend.deliver(2, PromptProgress(request=1, tokens=tokens))
    backend.deliver(2, finished(1))
    await asyncio.wait([reader.task])
    assert [event.tokens for event in reader.events if isinstance(event, PromptProgress)] == [2, 4, 6]


async def test_a_full_queue_refuses_with_429():
    backend = RingBackend(max_waiting=2)
    await attach(backend, 1)
    readers = [Reader(ask(backend)) for _ in range(2)]
    await settled()
    with pytest.raises(RequestError) as refused:
        await anext(ask(backend))
    assert (refused.value.status, refused.value.code) == (429, "queue_full")
    await readers[0].cancel()
    third = Reader(ask(backend))
    await settled()
    for reader in (readers[1], third):
        assert not reader.task.done()
        await reader.cancel()


async def test_a_caller_that_fills_the_queue_locks_no_other_out():
    backend = RingBackend(max_waiting=4)
    ring = await attach(backend, 1)
    readers = [Reader(ask(backend, owner="greedy")) for _ in range(9)]
    readers += [Reader(ask(backend, owner=str(other))) for other in range(20)]
    await settled()
    owners = [each.owner for each in ring.generates]
    assert owners == ["greedy"] * 4 + [str(other) for other in range(20)]
    assert {each.task.done() for each in readers[4:9]} == {True}
    for reader in readers:
        await reader.cancel()
    assert all(each.task.cancelled() or isinstance(each.task.exception(), RequestError) for each in readers)


async def test_further_choices_of_an_admitted_request_are_not_refused():
    backend = RingBackend(max_waiting=1)
    ring = await attach(backend, 1)
    readers = [Reader(ask(backend, may_expire=number == 0)) for number in range(3)]
    await settled()
    assert len(ring.generates) == 3
    with pytest.raises(RequestError, match="waiting already"):
        await anext(ask(backend))
    for reader in readers:
        await reader.cancel()


async def test_requests_have_their_places_while_kept_cells_are_looked_for():
    backend, looked = RingBackend(max_waiting=1), asyncio.Event()
    await attach(backend, 1)

    async def find(*_: Any) -> tuple[str, list[KvBlock]]:
        await looked.wait()
        return "", []

    backend.find_blocks = find
    first = Reader(ask(backend))
    await settled()
    with pytest.raises(RequestError, match="waiting already"):
        await anext(ask(backend))
    await first.cancel()
    second = Reader(ask(backend))
    await settled()
    assert not second.task.done()
    await second.cancel()


async def test_a_request_is_refused_if_its_ring_ends_while_kept_cells_are_looked_for():
    backend, looked = RingBackend(), asyncio.Event()
    await attach(backend, 1)

    async def find(*_: Any) -> tuple[str, list[KvBlock]]:
        await looked.wait()
        return "", []

    backend.find_blocks = find
    short, long = Reader(ask(backend)), Reader(ask(backend, *range(99)))
    await settled()
    ring = FakeRing(2)
    await backend.attach(replace(SERVED, context_tokens=99), 2, ring.send, ring.status, "serving 2")
    looked.set()
    await settled()
    assert long.task.done(), "it does not fit the new context"
    with pytest.raises(PromptTooLongError):
        await long.task
    assert [len(each.prompt) for each in ring.generates] == [2]
    await short.cancel()
    looked.clear()
    late = Reader(ask(backend))
    await settled()
    backend.fail("no devices are left")
    looked.set()
    await settled()
    assert late.task.done(), "it would wait until a device comes"
    with pytest.raises(RingError, match="no devices are left"):
        await late.task
    assert backend.generations == 0


@pytest.mark.parametrize(("logprobs", "maximum"), [(None, MAX_UNREAD), (20, MAX_UNREAD // 21)])
async def test_a_client_that_reads_too_slowly_gets_an_error_and_is_cancelled(logprobs, maximum):
    backend = RingBackend()
    ring = await attach(backend, 1)
    answer = ask(backend, tokens=10 * MAX_UNREAD, logprobs=logprobs)
    first = asyncio.create_task(anext(answer))
    await settled()
    for token in range(maximum):
        backend.deliver(1, sampled(1, token))
    assert isinstance(await first, Sampled)
    for token in range(2):
        backend.deliver(1, sampled(1, token))
    with pytest.raises(RequestError, match="read too slowly"):
        await anext(answer)
    assert ring.reported[-1] == Cancel(1)
    assert backend.generations == 0


async def test_an_answer_that_ends_with_as_much_unread_as_may_be_is_read_to_its_end():
    backend = RingBackend()
    await attach(backend, 1)
    answer = ask(backend, tokens=10 * MAX_UNREAD)
    first = asyncio.create_task(anext(answer))
    await settled()
    for token in range(MAX_UNREAD):
        backend.deliver(1, sampled(1, token))
    backend.deliver(1, finished(1))
    await first
    assert len([event async for event in answer]) == MAX_UNREAD


async def test_one_that_has_not_begun_in_time_is_refused_and_cancelled():
    backend = RingBackend(max_wait_s=0.0)
    ring = await attach(backend, 1)
    with pytest.raises(RequestError, match=r"waited 0 s, .* for others; try again later") as refused:
        await anext(ask(backend))
    assert (refused.value.status, refused.value.code) == (429, "waited_too_long")
    (generate,) = ring.generates
    assert generate.reports_begin
    assert ring.reported[-1] == Cancel(generate.request)
    assert backend.generations == 0


async def test_the_next_ring_gets_the_rows_of_pictures_too():
    backend = RingBackend()
    first = await attach(backend, 1)
    rows = [PictureRows(1, 2, bytes(16))]
    reader = Reader(ask(backend, 5, -7, -9, pictures=rows))
    await settled()
    backend.hold("forming the ring again")
    second = await attach(backend, 2)
    assert [(each.prompt, each.pictures) for each in (*first.generates, *second.generates)] == [([5, -7, -9], rows)] * 2
    backend.deliver(2, finished(second.generates[0].request))
    await reader.task


async def test_pictures_of_one_caller_leave_room_for_those_of_others(monkeypatch):
    monkeypatch.setattr(backend_module, "MAX_PICTURE_BYTES", 64)
    backend = RingBackend()
    ring = await attach(backend, 1)
    rows = [PictureRows(1, 2, bytes(20))]
    running = Reader(ask(backend, 5, -7, -9, pictures=rows, owner="a"))
    await settled()
    with pytest.raises(RequestError, match="images of your requests") as refused:
        await anext(ask(backend, 5, -7, -9, pictures=rows, owner="a"))
    assert refused.value.status == 429
    others = [Reader(ask(backend, 5, -7, -9, pictures=rows, owner="b")), Reader(ask(backend, 5, owner="a"))]
    await settled()
    for sent in ring.generates:
        backend.deliver(1, finished(sent.request))
    for each in (running, *others):
        await each.task


async def test_a_request_that_waited_for_devices_too_long_gets_the_reason():
    backend = RingBackend(max_wait_s=0.0)
    backend.hold("a device is gone")
    with pytest.raises(RingError, match="a device is gone"):
        await anext(ask(backend))


class BeginningRing(FakeRing):
    """Starts every generation at once."""

    async def send(self, *commands: RingCommand) -> None:
        await super().send(*commands)
        for command in commands:
            if isinstance(command, Generate):
                self.backend.deliver(self.epoch, PromptProgress(request=command.request, tokens=0))

    def __init__(self, epoch: int, backend: RingBackend) -> None:
        super().__init__(epoch)
        self.backend = backend


async def test_a_request_that_has_begun_continues_however_long_it_takes():
    backend = RingBackend(max_wait_s=0.0)
    ring = BeginningRing(1, backend)
    await backend.attach(SERVED, 1, ring.send, ring.status, "serving")
    reader = Reader(ask(backend))
    await settled()
    backend.hold("a device is gone")
    await settled()
    await attach(backend, 2)
    backend.deliver(2, sampled(1, 7))
    backend.deliver(2, finished(1))
    await asyncio.wait([reader.task])
    assert (reader.tokens, len(reader.ends)) == ([7], 1)
    assert reader.events[0] == sampled(1, 7), "that it began is nobody else's business"


async def test_one_that_may_not_expire_waits_on():
    backend = RingBackend(max_wait_s=0.0)
    ring = await attach(backend, 1)
    more = ask(backend, 1, may_expire=False)
    readers = [Reader(more), Reader(ask(backend))]
    await asyncio.wait([readers[1].task])
    assert isinstance(readers[1].task.exception(), RequestError)
    assert not readers[0].task.done()
    assert not ring.generates[0].reports_begin
    await readers[0].cancel()


OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.sampled_from(["attach", "hold", "fail", "hand over", "ask"]), st.just(0), st.just(0)),
        st.tuples(st.sampled_from(["token", "end", "cancel"]), st.integers(0, 5), st.integers(0, 1)),
    ),
    max_size=40,
)


@given(OPERATIONS)
async def test_every_generation_ends_exactly_once_whatever_happens(operations):
    """Each token comes once and in order, from the ring serving at the time; each ring resumes where the last ended."""
    backend, epoch, ring = RingBackend(), 0, None
    readers: list[Reader] = []
    requests: dict[int, list[int]] = {}
    rings: list[FakeRing] = []
    token = 100
    for what, which, late in operations:
        match what:
            case "attach":
                epoch += 1
                ring = await attach(backend, epoch)
                rings.append(ring)
                for generate in ring.generates:
                    assert generate.sampled == requests[generate.request]
            case "hold":
                backend.hold("held")
                ring = None
            case "fail":
                backend.fail("failed")
                ring = None
            case "hand over" if ring is not None:
                backend.hand_over()
            case "ask" if backend.health().taken:
                readers.append(Reader(ask(backend, tokens=100)))
                requests[len(readers)] = []
            case "token":
                token += 1
                before = len(readers[which].events) if which < len(readers) else 0
                backend.deliver(epoch - late, sampled(which + 1, token))
                await settled()
                if which < len(readers) and len(readers[which].events) > before:
                    assert late == 0, "an older ring was heard"
                    requests[which + 1].append(token)
            case "end":
                backend.deliver(epoch - late, finished(which + 1))
            case "cancel" if which < len(readers) and not readers[which].task.done():
                await readers[which].cancel()
                if ring is not None and not readers[which].ends:
                    assert ring.reported[-1] == Cancel(which + 1)
        await settled()
    backend.fail("the end")
    await settled()
    for number, reader in enumerate(readers, 1):
        assert reader.task.done()
        assert len(reader.ends) == (0 if reader.task.cancelled() else 1)
        assert reader.tokens == requests[number]
        assert reader.events[-1:] == reader.ends[-1:] or reader.task.cancelled()
    assert backend.generations == 0
    for each in rings:
        sent = [generate.request for generate in each.generates]
        assert len(sent) == len(set(sent)), "a ring was given a generation twice"


# ---- KV cache --------------------------------------------------------------------------------------------------------


def chain(*ends: int, root: str = "root") -> list[KvBlock]:
    blocks: list[KvBlock] = []
    for end in ends:
        before = blocks[-1] if blocks else None
        start = before.end if before is not None else 0
        blocks.append(keys.block(root, before, range(start, end), [end]))
    return blocks


async def test_the_next_ring_gets_the_blocks_that_it_holds_and_the_chain_continues_from_there():
    backend = RingBackend()
    await attach(backend, 1)
    reader = Reader(ask(backend, 1, 2))
    await settled()
    for token in range(6):
        backend.deliver(1, sampled(1, token))
    blocks = chain(2, 4, 6)
    assert backend.kept(1, KvKept(request=1, blocks=blocks[:1])) == 2
    backend.kept(1, KvKept(request=1, blocks=blocks[1:]))
    backend.kept(7, KvKept(request=1, blocks=chain(2, root="that of another ring")))
    assert backend.chains() == {1: blocks}
    assert backend.tokens_again({1: blocks[:2]}) == (4, 3)
    backend.hold("lost")
    ring = FakeRing(2)
    held = GoOn(root=lambda owner: f"root of {owner!r}", blocks={1: blocks[:2]}, max_replayed=3)
    await backend.attach(SERVED, 2, ring.send, ring.status, "serving 2", held)
    (sent,) = ring.generates
    assert (sent.root, sent.blocks, sent.replays_rows) == ("root of ''", blocks[:2], True)
    others = chain(2, 4, 5, 7)
    backend.kept(2, KvKept(request=1, blocks=others[2:]))
    assert backend.chains() == {1: others}
    await reader.cancel()
    assert backend.chains() == {}
    assert backend.kept(2, KvKept(request=1, blocks=blocks[:1])) == 2


@pytest.mark.parametrize(("maximum", "by_rows"), [(None, True), (4, True), (3, False)])
async def test_rows_are_computed_one_by_one_as_long_as_they_are_not_too_many(maximum, by_rows):
    backend = RingBackend()
    await attach(backend, 1)
    reader = Reader(ask(backend, *range(100)))
    await settled()
    for token in range(5):
        backend.deliver(1, sampled(1, token))
    ring = FakeRing(2)
    await backend.attach(
        SERVED, 2, ring.send, ring.status, "", GoOn(root=lambda _: "", blocks={}, max_replayed=maximum)
    )
    assert ring.generates[0].replays_rows == by_rows
    await reader.cancel()


async def test_an_answer_that_was_begun_keeps_its_chunks_and_the_others_have_those_of_the_next_ring():
    backend, sent = RingBackend(), []
    sizes = [ChunkSize(rows=rows, minimum=rows) for rows in (512, 128, 64)]
    readers = list[Reader]()
    for epoch, size in enumerate(sizes, 1):
        ring = FakeRing(epoch)
        cells = GoOn(root=lambda _: "", blocks={}, max_replayed=None, chunks=size)
        await backend.attach(SERVED, epoch, ring.send, ring.status, "", cells)
        sent.append([(each.request, each.chunks) for each in ring.generates])
        readers.append(Reader(ask(backend, epoch)))
        await settled()
        if epoch == 1:
            backend.deliver(1, sampled(1, 7))
    assert sent == [[], [(1, sizes[0])], [(1, sizes[0]), (2, sizes[2])]]
    for reader in readers:
        await reader.cancel()


async def test_stored_blocks_of_a_prompt_go_with_it_unless_the_ring_changed_meanwhile():
    backend, found = RingBackend(), asyncio.Event()
    blocks = chain(1)

    async def find(prompt: list[int], owner: str) -> tuple[str, list[KvBlock]]:
        await found.wait()
        return "root", blocks

    backend.find_blocks = find
    first = await attach(backend, 1)
    readers = [Reader(ask(backend, 1, 2))]
    found.set()
    await settled()
    assert (first.generates[0].root, first.generates[0].blocks) == ("root", blocks)
    found.clear()
    readers.append(Reader(ask(backend, 1, 2)))
    await settled()
    second = await attach(backend, 2)
    found.set()
    await settled()
    assert second.generates[-1].blocks == []
    for reader in readers:
        await reader.cancel()
