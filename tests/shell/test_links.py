"""The ring's sockets refuse what is no step, say so, and let every valid step through."""

from __future__ import annotations

import logging
import socket
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec
import numpy as np
import pytest
import zmq

from primad.errors import RingError
from primad.ring import links as links_module
from primad.ring.links import Links
from primad.ring.messages import MAX_HEADER_BYTES, PROTOCOL, Limits, Step, encode

LIMITS = Limits(ring=9, epoch=2, windows=frozenset({1}), width=4, rows=8, context=64, sequences=2)
PATIENCE_MS = 10_000


def a_step(number: int = 0, rows: int = 2) -> Step:
    return Step(
        protocol=PROTOCOL,
        ring=9,
        epoch=2,
        step=number,
        window=1,
        dtype="f32",
        shape=(rows, 4),
        positions=list(range(rows)),
        sequences=[[0]] * rows,
        outputs=[False] * rows,
        ops=[],
    )


def hidden(rows: int = 2) -> np.ndarray:
    return np.arange(rows * 4, dtype=np.float32).reshape(rows, 4)


VALID = [encode(a_step()), hidden().tobytes()]


@pytest.fixture
def receiver(monkeypatch) -> Iterator[Links]:
    monkeypatch.setattr(links_module, "LOG_INTERVAL_S", 0.0)
    made = Links("127.0.0.1", LIMITS)
    yield made
    made.close()


@contextmanager
def stranger(to: Links) -> Iterator[zmq.Socket[bytes]]:
    """A ZeroMQ peer that sends what it likes."""
    with zmq.Context() as context, context.socket(zmq.PUSH) as push:
        push.setsockopt(zmq.LINGER, 0)
        push.setsockopt(zmq.SNDTIMEO, PATIENCE_MS)
        push.connect(to.endpoint)
        yield push


def wait_step(links: Links) -> tuple[Step, np.ndarray]:
    """The next valid step; refuses what comes before it."""
    while True:
        assert links.pull.poll(PATIENCE_MS), "no step came"
        received = links.receive()
        if received is not None:
            return received


def test_a_step_arrives_as_it_was_sent(receiver):
    sender = Links("127.0.0.1", LIMITS)
    try:
        sender.connect(receiver.endpoint)
        for number in range(3):
            sender.send(a_step(number), hidden() + number)
        for number in range(3):
            step, content = wait_step(receiver)
            assert step == a_step(number)
            assert content.dtype == np.float32
            assert np.array_equal(content, hidden() + number)
        assert receiver.receive() is None
        assert receiver.refused == 0
    finally:
        sender.close()


def test_a_step_without_rows_arrives(receiver):
    sender = Links("127.0.0.1", LIMITS)
    try:
        sender.connect(receiver.endpoint)
        sender.send(a_step(0, rows=0), hidden(0))
        step, content = wait_step(receiver)
        assert (step.rows, content.shape) == (0, (0, 4))
    finally:
        sender.close()


def test_a_received_step_can_be_sent_on(receiver):
    middle, sender = Links("127.0.0.1", LIMITS), Links("127.0.0.1", LIMITS)
    try:
        sender.connect(middle.endpoint)
        middle.connect(receiver.endpoint)
        sender.send(a_step(), hidden())
        middle.send(*wait_step(middle))
        assert np.array_equal(wait_step(receiver)[1], hidden())
    finally:
        sender.close()
        middle.close()


REFUSED = {
    "nothing": [b""],
    "one frame": [VALID[0]],
    "three frames": [*VALID, b"more"],
    "two empty frames": [b"", b""],
    "random bytes": [bytes(range(256)), bytes(32)],
    "a cut header": [VALID[0][:-1], VALID[1]],
    "a longer header": [VALID[0] + b"\x00", VALID[1]],
    "frames exchanged": [VALID[1], VALID[0]],
    "a cut payload": [VALID[0], VALID[1][:-1]],
    "a longer payload": [VALID[0], VALID[1] + b"\x00"],
    "an empty payload": [VALID[0], b""],
    "another width": [encode(msgspec.structs.replace(a_step(), shape=(4, 2))), VALID[1]],
    "another type": [encode(msgspec.structs.replace(a_step(), dtype="f64")), VALID[1]],
    "another window": [encode(msgspec.structs.replace(a_step(), window=2)), VALID[1]],
    "a later protocol": [encode(msgspec.structs.replace(a_step(), protocol=99)), VALID[1]],
    "too many rows": [encode(a_step(0, rows=9)), hidden(9).tobytes()],
    "nested without end": [b"\x91" * 50_000, b""],
    "a length without content": [b"\x9c\xa4step" + b"\xdd\xff\xff\xff\xff", b""],
}


@pytest.mark.parametrize("frames", REFUSED.values(), ids=REFUSED.keys())
def test_what_is_no_step_is_refused_with_a_line_and_the_next_step_comes_through(receiver, caplog, frames):
    with caplog.at_level(logging.WARNING, "primad.ring.links"), stranger(receiver) as push:
        push.send_multipart(frames)
        push.send_multipart(VALID)
        step, content = wait_step(receiver)
    assert step == a_step()
    assert np.array_equal(content, hidden())
    assert receiver.refused == 1
    (record,) = caplog.records
    assert record.getMessage().startswith("refused a message on the ring (1 so far): ")
    assert len(record.getMessage()) < 500


@pytest.mark.parametrize("changes", [{"epoch": 1}, {"epoch": 3}, {"ring": 8}])
def test_a_stale_step_is_dropped_and_counted_in_silence(receiver, caplog, changes):
    with caplog.at_level(logging.INFO, "primad.ring.links"), stranger(receiver) as push:
        push.send_multipart([encode(msgspec.structs.replace(a_step(), **changes)), VALID[1]])
        push.send_multipart(VALID)
        wait_step(receiver)
    assert receiver.refused == 1
    assert caplog.records == []


def test_many_refusals_are_one_line(caplog, monkeypatch):
    monkeypatch.setattr(links_module, "LOG_INTERVAL_S", 1e9)
    receiver = Links("127.0.0.1", LIMITS)
    try:
        with caplog.at_level(logging.WARNING, "primad.ring.links"), stranger(receiver) as push:
            for _ in range(50):
                push.send_multipart([b"garbage"])
            push.send_multipart(VALID)
            wait_step(receiver)
        assert receiver.refused == 50
        assert len(caplog.records) == 1
    finally:
        receiver.close()


@pytest.mark.parametrize("at", [0, 1])
def test_an_oversized_message_never_arrives_and_others_do(receiver, at):
    frames = list(VALID)
    frames[at] = bytes(MAX_HEADER_BYTES + 1)
    with stranger(receiver) as hostile, stranger(receiver) as push:
        hostile.send_multipart(frames)
        push.send_multipart(VALID)
        assert wait_step(receiver)[0] == a_step()
        assert receiver.receive() is None


@pytest.mark.parametrize(
    "garbage",
    [
        b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
        bytes(64),
        b"\xff" * 4096,
        b"\xff\x00\x00\x00\x00\x00\x00\x00\x01\x7f\x03\x00" + b"\xff" * 200,
    ],
)
def test_raw_bytes_on_the_port_disturb_nobody(receiver, garbage):
    port = int(receiver.endpoint.rsplit(":", 1)[1])
    with socket.create_connection(("127.0.0.1", port), timeout=10) as raw, stranger(receiver) as push:
        raw.sendall(garbage)
        push.send_multipart(VALID)
        assert wait_step(receiver)[0] == a_step()
        assert receiver.receive() is None


def test_a_step_before_the_next_device_is_known_breaks_the_ring(receiver):
    with pytest.raises(RingError, match="step 4 arrived before this device knew its next device"):
        receiver.send(a_step(4), hidden())


@pytest.mark.parametrize("address", ["", "nonsense", "tcp://", "tcp://x:y", "http://127.0.0.1:1"])
def test_an_address_that_is_none_breaks_the_ring(receiver, address):
    with pytest.raises(RingError, match="cannot send to the next device at"):
        receiver.connect(address)


def test_a_next_device_that_takes_nothing_breaks_the_ring(receiver, monkeypatch):
    monkeypatch.setattr(links_module, "SEND_TIMEOUT_S", 0.05)
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen(1)
        receiver.connect(f"tcp://127.0.0.1:{silent.getsockname()[1]}")
        with pytest.raises(RingError, match=r"took no step for 0\.05 s; it is gone or hangs"):
            receiver.send(a_step(), hidden())


def test_the_next_device_may_change(receiver):
    other, sender = Links("127.0.0.1", LIMITS), Links("127.0.0.1", LIMITS)
    try:
        for number, target in enumerate((other, receiver)):
            sender.connect(target.endpoint)
            sender.send(a_step(number), hidden())
            assert wait_step(target)[0].step == number
    finally:
        sender.close()
        other.close()


@pytest.mark.parametrize("host", ["192.0.2.1", "no such host"])
def test_an_address_of_another_machine_cannot_be_listened_on(host):
    with pytest.raises(RingError, match=rf"cannot listen for the ring on {host}: .*; check --host"):
        Links(host, LIMITS)


def test_ipv6_is_listened_on_where_the_machine_has_it():
    if not socket.has_ipv6:
        pytest.skip("no IPv6")
    with socket.socket(socket.AF_INET6) as probe:
        try:
            probe.bind(("::1", 0))
        except OSError:
            pytest.skip("no IPv6 loopback")
    receiver = Links("::1", LIMITS)
    try:
        with zmq.Context() as context, context.socket(zmq.PUSH) as push:
            push.setsockopt(zmq.IPV6, 1)
            push.setsockopt(zmq.LINGER, 0)
            push.connect(receiver.endpoint)
            push.send_multipart(VALID)
            assert wait_step(receiver)[0] == a_step()
    finally:
        receiver.close()
