"""The ring's sockets accept every valid step of the previous device, and fail on any other message from it."""

from __future__ import annotations

import contextlib
import math
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import msgspec
import numpy as np
import pytest
import zmq

from primad.errors import RingError, SenderError
from primad.ring import links as ring_links
from primad.ring.links import Links
from primad.ring.messages import MAX_HEADER_BYTES, PROTOCOL, Skip, Step, StepLimits
from primad.settings.timings import RingTimings
from primad.system.processors import cores_of_parent
from primad.system.wire import encode

LIMITS = StepLimits(ring=9, epoch=2, windows=frozenset({1}), width=4, rows=8, context=64, sequences=2)
PATIENCE_MS = 180_000


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


class Sender:
    """The key pair of a ZeroMQ peer that sends whatever it likes."""

    def __init__(self) -> None:
        public, self.secret = zmq.curve_keypair()
        self.key = public.decode()

    @contextmanager
    def to(self, links: Links, **options: object) -> Iterator[zmq.Socket[bytes]]:
        """A socket connected to ``links``; ``options`` override its own."""
        with zmq.Context() as context, context.socket(zmq.PUSH) as push:
            push.setsockopt(zmq.LINGER, 0)
            push.setsockopt(zmq.IPV6, 1)
            push.setsockopt(zmq.SNDTIMEO, PATIENCE_MS)
            curve = {"curve_publickey": self.key.encode(), "curve_secretkey": self.secret, "curve_serverkey": links.key}
            for name, value in (curve | options).items():
                if value is not None:
                    setattr(push, name, value.encode() if isinstance(value, str) else value)
            push.connect(links.endpoint)
            yield push


BEFORE = Sender()
"""The device before ``receiver``."""
NOBODY = Sender().key
"""A key that no device has."""


def with_sender(links: Links, sender: str = BEFORE.key) -> Links:
    """``links`` that takes steps from ``sender`` and has no next device."""
    links.connect("tcp://127.0.0.1:1", NOBODY, sender)
    return links


@pytest.fixture
def receiver() -> Iterator[Links]:
    made = with_sender(Links("127.0.0.1", LIMITS, timings=RingTimings(log_every_s=0.0)))
    yield made
    made.close()


@contextmanager
def opened(**timings: float) -> Iterator[Links]:
    """Further links."""
    made = Links("127.0.0.1", LIMITS, timings=RingTimings(**timings))
    try:
        yield made
    finally:
        made.close()


def stranger(to: Links) -> AbstractContextManager[zmq.Socket[bytes]]:
    """A ZeroMQ peer that sends whatever it likes with the key of the device before ``receiver``."""
    return BEFORE.to(to)


def turn(*all_links: Links, timeout_ms: int) -> bool:
    """Serve ``all_links`` as their processes would; returns whether a step arrived."""
    watched = [entry for links in all_links for entry in links.watched(receiving=True)]
    wait_s = min(timeout_ms / 1000, *(links.wait_s() for links in all_links), math.inf)
    ready = [socket for socket, _ in zmq.zmq_poll(watched, math.ceil(wait_s * 1000))]
    for links in all_links:
        if links.zap in ready:
            links.admit()
        links.flush()
    return any(links.pull in ready for links in all_links)


def wait_step(links: Links, *others: Links) -> tuple[Step, np.ndarray]:
    """The next step; ``others`` are served meanwhile."""
    deadline = time.monotonic() + PATIENCE_MS / 1000
    while time.monotonic() < deadline:
        turn(links, *others, timeout_ms=PATIENCE_MS)
        received = links.receive()
        if received is not None:
            return received
    raise AssertionError("no step came")


def assert_nothing_arrives(links: Links, *others: Links, within_ms: int = 400) -> None:
    """Assert that no step arrives in time; the proof is only as good as the time is long."""
    deadline = time.monotonic() + within_ms / 1000
    while (left := deadline - time.monotonic()) > 0:
        turn(links, *others, timeout_ms=math.ceil(left * 1000))
        assert links.receive() is None


def flush(links: Links, *others: Links) -> None:
    """Wait until ``links`` has sent everything."""
    deadline = time.monotonic() + PATIENCE_MS / 1000
    while links.is_waiting:
        assert time.monotonic() < deadline, "nothing takes the step"
        turn(links, *others, timeout_ms=PATIENCE_MS)


def test_a_step_arrives_as_it_was_sent():
    with opened() as receiver, opened() as sender:
        receiver.connect("tcp://127.0.0.1:1", NOBODY, sender.key)
        sender.connect(receiver.endpoint, receiver.key, NOBODY)
        for number in range(3):
            sender.send(a_step(number), hidden() + number)
            flush(sender, receiver)
        for number in range(3):
            step, content = wait_step(receiver)
            assert step == a_step(number)
            assert content.dtype == np.float32
            assert np.array_equal(content, hidden() + number)
        assert receiver.receive() is None
        assert receiver.refused == 0


def test_a_step_without_tokens_arrives():
    with opened() as receiver, opened() as sender:
        receiver.connect("tcp://127.0.0.1:1", NOBODY, sender.key)
        sender.connect(receiver.endpoint, receiver.key, NOBODY)
        sender.send(a_step(0, rows=0), hidden(0))
        step, content = wait_step(receiver, sender)
        assert (step.rows, content.shape) == (0, (0, 4))


def test_the_largest_step_that_the_limits_allow_arrives():
    limits = msgspec.structs.replace(LIMITS, width=1 << 17)
    receiver, sender = (Links("127.0.0.1", limits) for _ in range(2))
    try:
        receiver.connect("tcp://127.0.0.1:1", NOBODY, sender.key)
        sender.connect(receiver.endpoint, receiver.key, NOBODY)
        content = np.ones((8, 1 << 17), np.float32)
        assert content.nbytes > MAX_HEADER_BYTES
        sender.send(msgspec.structs.replace(a_step(0, rows=8), shape=content.shape), content)
        assert np.array_equal(wait_step(receiver, sender)[1], content)
    finally:
        receiver.close()
        sender.close()


def test_a_received_step_can_be_sent_on():
    with opened() as receiver, opened() as middle, opened() as sender:
        sender.connect(middle.endpoint, middle.key, NOBODY)
        middle.connect(receiver.endpoint, receiver.key, sender.key)
        receiver.connect("tcp://127.0.0.1:1", NOBODY, middle.key)
        sender.send(a_step(), hidden())
        middle.send(*wait_step(middle, sender))
        assert np.array_equal(wait_step(receiver, middle)[1], hidden())


# ---- permitted senders ----------------------------------------------------------------------------------------------


def test_every_opening_has_a_key_of_its_own():
    with opened() as one, opened() as other:
        assert one.key != other.key
        assert len(one.key) == len(other.key) == 40


def test_a_device_that_connects_before_it_is_known_gets_in_once_it_is():
    for_ever = 1000.0  # nobody gives up and retries
    with opened(handshake_timeout_s=for_ever) as receiver, opened(handshake_timeout_s=for_ever) as sender:
        sender.connect(receiver.endpoint, receiver.key, NOBODY)
        sender.send(a_step(), hidden())
        assert sender.is_waiting
        assert_nothing_arrives(receiver, sender)
        receiver.connect("tcp://127.0.0.1:1", NOBODY, sender.key)
        assert wait_step(receiver, sender)[0] == a_step()


def test_a_refused_device_gets_in_once_it_is_the_previous_one(receiver):
    with opened() as sender:
        sender.connect(receiver.endpoint, receiver.key, NOBODY)
        sender.send(a_step(), hidden())
        assert_nothing_arrives(receiver, sender)
        receiver.connect("tcp://127.0.0.1:1", NOBODY, sender.key)
        assert wait_step(receiver, sender)[0] == a_step()


def test_a_connected_device_is_refused_once_it_is_no_longer_the_previous_one(receiver):
    with stranger(receiver) as push, opened() as sender:
        push.send_multipart(VALID)
        assert wait_step(receiver)[0] == a_step()
        receiver.connect("tcp://127.0.0.1:1", NOBODY, sender.key)
        push.send_multipart(VALID)
        deadline = time.monotonic() + PATIENCE_MS / 1000
        while receiver.refused == 0 and time.monotonic() < deadline:
            turn(receiver, timeout_ms=PATIENCE_MS)
            assert receiver.receive() is None
        sender.connect(receiver.endpoint, receiver.key, NOBODY)
        sender.send(a_step(5), hidden())
        assert wait_step(receiver, sender)[0] == a_step(5)
        assert receiver.refused == 1


INTRUDERS = {
    "without encryption": {"curve_publickey": None, "curve_secretkey": None, "curve_serverkey": None},
    "with a password": {
        "curve_publickey": None,
        "curve_secretkey": None,
        "curve_serverkey": None,
        "plain_username": b"primad",
        "plain_password": b"primad",
    },
    "with another server in mind": {"curve_serverkey": NOBODY},
    "with a key of its own": dict(zip(("curve_publickey", "curve_secretkey"), zmq.curve_keypair(), strict=True)),
    "with the public key of the sender and another secret": {"curve_secretkey": zmq.curve_keypair()[1]},
}


@pytest.mark.parametrize("options", INTRUDERS.values(), ids=INTRUDERS.keys())
def test_an_intruder_gets_no_step_through_and_disturbs_nobody(receiver, options):
    with BEFORE.to(receiver, **options) as intruder, stranger(receiver) as push:
        with contextlib.suppress(zmq.Again):  # until its own buffer is full
            for _ in range(2000):
                intruder.send_multipart([encode(a_step(66)), VALID[1]], zmq.NOBLOCK)
        assert_nothing_arrives(receiver)
        push.send_multipart(VALID)
        assert wait_step(receiver)[0] == a_step()
        assert_nothing_arrives(receiver, within_ms=100)
    assert receiver.refused == 0


def test_nothing_on_the_wire_is_readable():
    """A relay between two links sees neither header nor hidden states in plain text."""
    for_ever = {"handshake_timeout_s": 1000.0}  # the relay forwards only one connection
    with opened(**for_ever) as receiver, opened(**for_ever) as sender, socket.socket() as door:
        door.bind(("127.0.0.1", 0))
        door.listen(1)
        receiver.connect("tcp://127.0.0.1:1", NOBODY, sender.key)
        sender.connect(f"tcp://127.0.0.1:{door.getsockname()[1]}", receiver.key, NOBODY)
        seen: list[bytes] = []
        relay = threading.Thread(target=pass_on, args=(door, receiver.endpoint, seen))
        relay.start()
        content = np.full((2, 4), 1234.5, np.float32)
        sender.send(a_step(), content)
        assert np.array_equal(wait_step(receiver, sender)[1], content)
        sender.close()
        relay.join(PATIENCE_MS / 1000)
        wire = b"".join(seen)
        assert len(wire) > len(VALID[0]) + content.nbytes
        assert VALID[0][:12] not in wire
        assert content.tobytes()[:8] not in wire


def pass_on(door: socket.socket, endpoint: str, seen: list[bytes]) -> None:
    """Relay one connection, both ways, until either end closes it."""
    near, _ = door.accept()
    with near, socket.create_connection(("127.0.0.1", int(endpoint.rsplit(":", 1)[1]))) as far:
        while True:
            for end in select.select([near, far], [], [], PATIENCE_MS / 1000)[0]:
                data = end.recv(1 << 16)
                if not data:
                    return
                seen.append(data)
                (far if end is near else near).sendall(data)


def test_silent_connections_are_closed_and_keep_nobody_out(receiver):
    port = int(receiver.endpoint.rsplit(":", 1)[1])
    with contextlib.ExitStack() as stack:
        silent = [
            stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_MS / 1000))
            for _ in range(200)
        ]
        push = stack.enter_context(stranger(receiver))
        push.send_multipart(VALID)
        assert wait_step(receiver)[0] == a_step()
        for one in silent:
            while one.recv(4096):  # the greeting, then the end
                continue


KEYS = ["", "x", "x" * 39, "x" * 41, " " * 40, "é" * 40, "#" * 40]


@pytest.mark.parametrize("key", KEYS)
def test_an_invalid_key_breaks_the_ring(receiver, key):
    with pytest.raises(
        RingError, match=r"cannot send to the next device at 'tcp://127\.0\.0\.1:1': its public key is invalid"
    ):
        receiver.connect("tcp://127.0.0.1:1", key, NOBODY)
    with pytest.raises(RingError, match="cannot take steps of the device before this one"):
        receiver.connect("tcp://127.0.0.1:1", NOBODY, key)


# ---- valid messages -------------------------------------------------------------------------------------------------


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
    "an older epoch": [encode(msgspec.structs.replace(a_step(), epoch=1)), VALID[1]],
    "a later epoch": [encode(msgspec.structs.replace(a_step(), epoch=3)), VALID[1]],
    "another ring": [encode(msgspec.structs.replace(a_step(), ring=8)), VALID[1]],
    "a skip of another epoch": [encode(Skip(protocol=PROTOCOL, ring=9, epoch=1, steps=[1])), b""],
    "a skip of nothing": [encode(Skip(protocol=PROTOCOL, ring=9, epoch=2, steps=[])), b""],
    "a length without content": [b"\x9c\xa4step" + b"\xdd\xff\xff\xff\xff", b""],
}


@pytest.mark.parametrize("frames", REFUSED.values(), ids=REFUSED.keys())
def test_an_invalid_step_breaks_the_ring_with_the_previous_device_at_fault(receiver, frames):
    with stranger(receiver) as push:
        push.send_multipart(frames)
        with pytest.raises(
            SenderError, match="the device before this one sent something that is not a step of this ring: "
        ) as caught:
            wait_step(receiver)
    assert len(str(caught.value)) < 500


OVERSIZED = """
import os, sys, zmq
endpoint, key, public, secret, frames = sys.argv[1:]
push = zmq.Context().socket(zmq.PUSH)
push.curve_publickey, push.curve_secretkey, push.curve_serverkey = public.encode(), secret.encode(), key.encode()
events = push.get_monitor_socket(zmq.EVENT_DISCONNECTED)
push.connect(endpoint)
push.send_multipart([bytes(int(size)) for size in frames.split(",")])
print("cut off" if events.poll(10_000) else "not cut off", flush=True)
os._exit(0)
"""
"""A sender in a process of its own: libzmq may abort one that is cut off within a multipart message."""


@pytest.mark.parametrize("at", [0, 1])
def test_an_oversized_message_never_arrives_and_others_do(receiver, at):
    sizes = [len(frame) for frame in VALID]
    sizes[at] = MAX_HEADER_BYTES + 1
    command = [sys.executable, "-c", OVERSIZED, receiver.endpoint, receiver.key, BEFORE.key, BEFORE.secret.decode()]
    with subprocess.Popen([*command, ",".join(map(str, sizes))], stdout=subprocess.PIPE) as hostile:
        deadline = time.monotonic() + 2 * PATIENCE_MS / 1000
        while hostile.poll() is None and time.monotonic() < deadline:
            turn(receiver, timeout_ms=50)
            assert receiver.receive() is None
        hostile.kill()
        assert hostile.stdout is not None
        assert hostile.stdout.read() == b"cut off\n" or hostile.wait() == -signal.SIGABRT
    with stranger(receiver) as push:
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
    with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_MS / 1000) as raw, stranger(receiver) as push:
        raw.sendall(garbage)
        push.send_multipart(VALID)
        assert wait_step(receiver)[0] == a_step()
        assert receiver.receive() is None


def test_a_step_before_the_next_device_is_known_breaks_the_ring():
    with opened() as links, pytest.raises(RingError, match="step 4 arrived before this device knew its next device"):
        links.send(a_step(4), hidden())


@pytest.mark.parametrize("address", ["", "nonsense", "tcp://", "tcp://x:y", "http://127.0.0.1:1"])
def test_an_invalid_address_breaks_the_ring(receiver, address):
    with pytest.raises(RingError, match="cannot send to the next device at"):
        receiver.connect(address, NOBODY, NOBODY)


def test_a_next_device_that_accepts_nothing_is_reported_late_repeatedly():
    with socket.socket() as silent, opened(send_timeout_s=0.05) as sender:
        silent.bind(("127.0.0.1", 0))
        silent.listen(1)
        sender.connect(f"tcp://127.0.0.1:{silent.getsockname()[1]}", NOBODY, NOBODY)
        assert sender.wait_s() == math.inf
        began_s = time.monotonic()
        sender.send(a_step(), hidden())
        left_s, now_s = sender.wait_s(), time.monotonic()
        assert 0 <= left_s <= 0.05
        assert left_s > 0 or now_s - began_s >= 0.05
        waits = []
        while len(waits) < 3:
            overdue = sender.overdue()
            if overdue is not None:
                assert overdue.step == 0
                waits.append(overdue.waited_s)
            turn(sender, timeout_ms=PATIENCE_MS)
        assert waits[0] >= 0.05
        assert waits[1] >= 0.1
        assert waits[2] >= 0.2
        assert sender.is_waiting


def test_the_next_device_may_change():
    with opened() as first, opened() as second, opened() as sender:
        for number, target in enumerate((first, second)):
            target.connect("tcp://127.0.0.1:1", NOBODY, sender.key)
            sender.connect(target.endpoint, target.key, NOBODY)
            sender.send(a_step(number), hidden())
            assert wait_step(target, sender)[0].step == number


def test_a_waiting_step_goes_to_the_new_next_device():
    with opened() as receiver, opened(send_timeout_s=60) as sender:
        receiver.connect("tcp://127.0.0.1:1", NOBODY, sender.key)
        sender.connect("tcp://127.0.0.1:1", NOBODY, NOBODY)
        sender.send(a_step(7), hidden())
        assert sender.is_waiting
        sender.connect(receiver.endpoint, receiver.key, NOBODY)
        assert wait_step(receiver, sender)[0] == a_step(7)
        assert not sender.is_waiting


def test_only_sockets_with_work_are_polled():
    with opened() as links:
        assert links.watched(receiving=False) == []
        assert links.watched(receiving=True) == [(links.pull, zmq.POLLIN)]
        with_sender(links)
        assert links.watched(receiving=False) == [(links.zap, zmq.POLLIN)]
        links.send(a_step(), hidden())
        assert [events for _, events in links.watched(receiving=False)] == [zmq.POLLIN, zmq.POLLOUT]


@pytest.mark.parametrize("host", ["192.0.2.1", "no such host"])
def test_an_address_of_another_machine_cannot_be_listened_on(host):
    with pytest.raises(RingError, match=rf"cannot listen for the ring on {host}: .*; check --host"):
        Links(host, LIMITS)


def test_ipv6_is_listened_on_if_the_machine_has_it():
    if not socket.has_ipv6:
        pytest.skip("no IPv6")
    with socket.socket(socket.AF_INET6) as probe:
        try:
            probe.bind(("::1", 0))
        except OSError:
            pytest.skip("no IPv6 loopback")
    receiver = with_sender(Links("::1", LIMITS))
    try:
        with BEFORE.to(receiver) as push:
            push.send_multipart(VALID)
            assert wait_step(receiver)[0] == a_step()
    finally:
        receiver.close()


def threads() -> set[int]:
    return {int(each.name) for each in Path("/proc/self/task").iterdir()}


@pytest.mark.skipif(sys.platform != "linux", reason="threads are bound to cores on Linux")
def test_the_thread_that_sends_and_receives_is_not_bound_to_the_core_of_the_first_one(monkeypatch):
    allowed = os.sched_getaffinity(0)
    monkeypatch.setattr(ring_links, "cores_of_parent", lambda: tuple(allowed))
    before = threads()
    os.sched_setaffinity(0, {min(allowed)})
    try:
        made = Links("127.0.0.1", LIMITS)
        started = threads() - before
        assert started
        until = time.monotonic() + PATIENCE_MS / 1000
        while any(os.sched_getaffinity(thread) != allowed for thread in started):  # each moves when it starts
            assert time.monotonic() < until
            os.sched_yield()
        made.close()
    finally:
        os.sched_setaffinity(0, allowed)


@pytest.mark.skipif(sys.platform != "linux", reason="as above")
def test_the_cores_of_the_process_that_started_this_one_are_known():
    assert set(cores_of_parent()) == os.sched_getaffinity(os.getppid())
