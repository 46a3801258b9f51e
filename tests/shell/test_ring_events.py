"""Events of a ring process are handled as they arrive, in order, however the stream is split."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from primad.daemon.ring_process import MAX_ARRIVED, _Events
from primad.errors import ProtocolError
from primad.ring.messages import Loading, RingBroken, RingEvent
from primad.system.children.channel import LENGTH, MAX_FRAME_BYTES, Frames, frame

EVENTS = [Loading(number) for number in range(5)]


class Link(asyncio.Transport):
    """Records whether it is being read."""

    reads = True

    def pause_reading(self) -> None:
        self.reads = False

    def resume_reading(self) -> None:
        self.reads = True


def events() -> tuple[_Events, Link]:
    made, link = _Events(asyncio.StreamReader()), Link()
    made.connection_made(link)
    return made, link


async def rest(of: _Events) -> list[RingEvent]:
    """The events not yet handled when the process is gone."""
    of.eof_received()
    left = []
    while (body := await of.next()) is not None:
        left.append(body)
    return left


@given(st.lists(st.binary(max_size=40)), st.lists(st.integers(1, 30), min_size=1))
def test_frames_are_the_same_however_they_are_cut(bodies, sizes):
    printed, frames, found = b"".join(LENGTH.pack(len(each)) + each for each in bodies), Frames(), list[bytes]()
    while printed:
        size = sizes[len(found) % len(sizes)]
        found += frames.feed(printed[:size])
        printed = printed[size:]
    assert found == bodies


async def test_wanted_events_are_delivered_at_once_but_not_before_waiting_ones():
    made, _ = events()
    received = list[RingEvent]()
    made.data_received(frame(EVENTS[0]))

    def handle(event: RingEvent) -> bool:
        received.append(event)
        return event != EVENTS[3]

    made.hear = handle
    made.data_received(frame(EVENTS[1]))
    assert not received, "one waits still"
    assert [await made.next() for _ in EVENTS[:2]] == EVENTS[:2]
    made.data_received(b"".join(map(frame, EVENTS[2:])))
    assert received == EVENTS[2:4], "the last one waits after one that nobody wanted"
    assert await rest(made) == EVENTS[3:]


async def test_an_exception_of_the_handler_is_raised_to_the_reader_and_ends_delivery():
    made, _ = events()
    received = list[RingEvent]()

    def handle(event: RingEvent) -> bool:
        received.append(event)
        raise ZeroDivisionError

    made.hear = handle
    made.data_received(frame(EVENTS[0]))
    made.data_received(frame(EVENTS[1]))
    with pytest.raises(ZeroDivisionError):
        await made.next()
    assert received == EVENTS[:1]


async def test_an_end_is_read_and_not_delivered_and_garbage_after_it_is_an_error():
    made, _ = events()
    made.hear = lambda _: True
    made.data_received(frame(RingBroken("it broke", None)))
    made.data_received(LENGTH.pack(3) + b"abc")
    assert await made.next() == RingBroken("it broke", None)
    with pytest.raises(ProtocolError):
        await made.next()


async def test_a_frame_that_is_too_large_is_an_error_and_allocates_nothing():
    made, _ = events()
    made.data_received(LENGTH.pack(MAX_FRAME_BYTES + 1))
    with pytest.raises(ProtocolError):
        await made.next()


async def test_a_ring_process_without_a_reader_is_not_read():
    made, link = events()
    for _ in range(MAX_ARRIVED):
        assert link.reads
        made.data_received(frame(EVENTS[0]))
    assert not link.reads
    for _ in range(MAX_ARRIVED):
        await made.next()
    assert link.reads
