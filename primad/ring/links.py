"""The ZeroMQ side of a ring process: one PULL for what arrives, one PUSH to the next device, both encrypted.

Every ring process makes its own key pair when it listens (CurveZMQ); the secret key never leaves the process. Only a
peer that knows the public key gets as far as a handshake, and of those only the previous device is admitted: libzmq
asks for each connection (ZAP, RFC 27), and the process's own loop replies, since handshakes are rare and a thread for
them would cost every hop. Requests that come before the sender is known wait for it, so it does not matter which device
of a ring is linked first.

Both sockets have high-water marks, so a slow device pushes back on the previous one instead of filling memory. A step
that the next device does not take yet is kept, one at a time, and nothing here ever blocks: the caller waits on
``watched``, together with all other events. A hidden state is a frame of its own: it is computed into one buffer and
handed to ZeroMQ from there, and on the other side given to llama.cpp from the frame it arrived in. ZeroMQ sets
TCP_NODELAY on every connection.

ZeroMQ's own thread may run on every core that the daemon may use. The process's first thread is bound to one, where
another ring process of this machine may be computing at the moment a step arrives.
"""

from __future__ import annotations

import logging
import math
import struct
import time
from typing import Final

import numpy as np
import zmq
from zmq.utils import z85

from primad.engine.protocol import Hidden
from primad.errors import NextDeviceError, ProtocolError, RingError, SenderError
from primad.ring.messages import MAX_HEADER_BYTES, MAX_PARTS, SENDER, Overdue, Skip, Step, StepLimits, decode_route
from primad.settings.timings import RingTimings
from primad.system.complaints import Complaints
from primad.system.processors import cores_of_parent
from primad.system.wire import encode

logger = logging.getLogger(__name__)

HIGH_WATER_STEPS: Final = 64
KEEPALIVE_IDLE_S: Final = 10
RECONNECT_MAX_S: Final = 1.0
CURVE_BYTES: Final = 33
"""Bytes that encryption adds to a frame: command name, nonce, flags and authenticator."""

_ZAP_ENDPOINT: Final = "inproc://zeromq.zap.01"
_ZAP_DOMAIN: Final = b"primad-ring"


class Links:
    """The sockets of a ring process. The previous device sends to ``endpoint``; ``key`` is this process's public key.

    ``pull`` is readable when a step may have arrived, ``zap`` when ``admit`` is to be called. The next device is late
    when it has not taken a step within ``timings.send_timeout_s``.
    """

    def __init__(self, host: str, limits: StepLimits, *, timings: RingTimings = RingTimings()) -> None:
        assert timings.send_timeout_s > 0
        self._limits = limits
        self._timings = timings
        public, self._secret = zmq.curve_keypair()
        self._public = public
        self.key = public.decode()
        self._sender: str | None = None
        self._context = zmq.Context()
        for core in cores_of_parent():
            self._context.set(zmq.THREAD_AFFINITY_CPU_ADD, core)
        self._push: zmq.Socket[bytes] | None = None
        self._waiting: tuple[Step, Hidden, float] | None = None
        self._due_s = math.inf
        self.zap: zmq.Socket[bytes] = self._context.socket(zmq.REP)
        self.zap.setsockopt(zmq.LINGER, 0)
        self.zap.bind(_ZAP_ENDPOINT)
        self.pull = self._listening(host)
        self.endpoint = self.pull.getsockopt_string(zmq.LAST_ENDPOINT)
        self.refused = 0
        self._complaints = Complaints(logger, timings.log_every_s)

    def _listening(self, host: str) -> zmq.Socket[bytes]:
        pull = self._socket(zmq.PULL)
        pull.curve_server = True
        pull.curve_secretkey = self._secret
        pull.setsockopt(zmq.ZAP_DOMAIN, _ZAP_DOMAIN)
        pull.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
        pull.setsockopt(zmq.RCVHWM, HIGH_WATER_STEPS)
        max_bytes = max(MAX_HEADER_BYTES, MAX_PARTS * self._limits.rows * self._limits.width * 4)
        pull.setsockopt(zmq.MAXMSGSIZE, max_bytes + CURVE_BYTES)
        try:
            pull.bind(f"tcp://{_bracketed(host)}:*")
        except zmq.ZMQError as exc:
            pull.close()
            self.zap.close()
            self._context.term()
            raise RingError(f"cannot listen for the ring on {host}: {exc.strerror}; check --host") from exc
        return pull

    def _socket(self, kind: int) -> zmq.Socket[bytes]:
        socket: zmq.Socket[bytes] = self._context.socket(kind)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.IPV6, 1)
        socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
        socket.setsockopt(zmq.TCP_KEEPALIVE_IDLE, KEEPALIVE_IDLE_S)
        socket.setsockopt(zmq.HANDSHAKE_IVL, int(self._timings.handshake_timeout_s * 1000))
        return socket

    def connect(self, address: str, key: str, sender: str) -> None:
        """Send to ``address``, whose owner has the public key ``key``, and accept steps only from the owner of
        ``sender``.

        A waiting step goes to the new address. Raises ``RingError`` for an invalid ZeroMQ endpoint or key.
        """
        if not _is_key(sender):
            raise RingError("cannot take steps of the device before this one: its public key is invalid")
        if not _is_key(key):
            raise RingError(f"cannot send to the next device at {address!r}: its public key is invalid")
        push = self._socket(zmq.PUSH)
        push.setsockopt(zmq.SNDHWM, HIGH_WATER_STEPS)
        push.setsockopt(zmq.IMMEDIATE, 1)
        push.setsockopt(zmq.RECONNECT_IVL_MAX, int(RECONNECT_MAX_S * 1000))
        push.curve_serverkey = key.encode()
        push.curve_publickey, push.curve_secretkey = self._public, self._secret
        try:
            push.connect(address)
        except zmq.ZMQError as exc:
            push.close()
            raise NextDeviceError(f"cannot send to the next device at {address!r}: {exc.strerror}") from exc
        if self._push is not None:
            self._push.close()
        self._push = push
        self._sender = sender
        if self._waiting is not None:
            self._wait(*self._waiting[:2])

    @property
    def is_waiting(self) -> bool:
        """Whether a step waits to be taken by the next device; ``send`` must not be called then."""
        return self._waiting is not None

    def wait_s(self) -> float:
        """Seconds until ``overdue`` has something to report; infinity when no step waits."""
        return math.inf if self._waiting is None else max(0.0, self._due_s - time.monotonic())

    def overdue(self) -> Overdue | None:
        """The waiting step when it is late, at first and at each doubling of the wait; None otherwise."""
        now = time.monotonic()
        if self._waiting is None or now < self._due_s:
            return None
        step, _, since_s = self._waiting
        while self._due_s <= now:
            self._due_s += self._due_s - since_s
        return Overdue(step=step.step, waited_s=now - since_s)

    def _wait(self, step: Step, hidden: Hidden) -> None:
        since_s = time.monotonic()
        self._waiting, self._due_s = (step, hidden, since_s), since_s + self._timings.send_timeout_s

    def watched(self, *, receiving: bool) -> list[tuple[zmq.Socket[bytes], int]]:
        """The sockets and events to wait for (as ``zmq.zmq_poll`` takes them).

        Arriving steps are among them when ``receiving``.
        """
        watched: list[tuple[zmq.Socket[bytes], int]] = []
        if self._sender is not None:
            watched.append((self.zap, zmq.POLLIN))
        if receiving:
            watched.append((self.pull, zmq.POLLIN))
        if self._waiting is not None and self._push is not None:
            watched.append((self._push, zmq.POLLOUT))
        return watched

    def send(self, step: Step, hidden: Hidden) -> None:
        """Give a step to the next device, or keep it until ``flush`` can. Raises ``RingError`` before ``connect``."""
        assert self._waiting is None
        if self._push is None:
            raise RingError(f"step {step.step} arrived before this device knew its next device")
        if not self._send(step, hidden):
            self._wait(step, hidden)

    def overtake(self, skip: Skip) -> None:
        """Send ``skip`` to the next device if it takes it now: a lost one costs only time."""
        if self._push is not None and self._waiting is None:
            self._send(skip, np.empty(0, np.float32))

    def flush(self) -> bool:
        """Send the waiting step if the next device takes it now; return whether none waits any more."""
        if self._waiting is not None and self._send(*self._waiting[:2]):
            self._waiting = None
        return self._waiting is None

    def _send(self, message: Step | Skip, hidden: Hidden) -> bool:
        assert self._push is not None
        try:
            self._push.send(encode(message), zmq.SNDMORE | zmq.NOBLOCK)
            # If the connection ends between the two frames, ZeroMQ takes the first one back.
            self._push.send(hidden.data, zmq.NOBLOCK, copy=hidden.nbytes < zmq.COPY_THRESHOLD)
        except zmq.Again:
            return False
        return True

    def admit(self) -> None:
        """Reply to libzmq's requests to admit a connection; call this when ``watched`` reports some.

        A refusal has the code of a temporary failure: a device that got another sender's key first tries again.
        """
        while self._sender is not None:
            try:
                question = self.zap.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            version, number, *_, key = question
            is_sender = len(key) == 32 and z85.encode(key).decode() == self._sender
            reply = [b"200", b"", z85.encode(key)] if is_sender else [b"300", b"not the device before this one", b""]
            if not is_sender:
                self._complaints.add("refused a connection to the ring", "it is not the device before this one")
            self.zap.send_multipart([version, number, *reply, b""])

    def receive(self) -> tuple[Step, Hidden] | Skip | None:
        """Return the next message that has arrived, or None. Messages of other devices than the previous one are
        refused with a log line.

        Raises ``SenderError`` for an invalid message of the previous device. Keys and connections are new with each
        epoch, so a message of another epoch is not merely late.
        """
        while int(self.pull.get(zmq.EVENTS)) & zmq.POLLIN:  # faster than an error if there is nothing
            try:
                frames = [self.pull.recv(zmq.NOBLOCK, copy=False)]
                while frames[-1].more:  # a message of several frames is there as a whole
                    frames.append(self.pull.recv(zmq.NOBLOCK, copy=False))
            except zmq.Again:
                return None
            if frames[0].get("User-Id") != self._sender:
                self.refused += 1
                self._complaints.add("refused a message on the ring", "its device is no longer before this one")
                continue
            try:
                if len(frames) != 2:
                    raise ProtocolError(f"message of {len(frames)} frames; a step has 2")
                payload = frames[1].buffer
                message = decode_route(frames[0].buffer, payload.nbytes, self._limits)
            except ProtocolError as exc:
                raise SenderError(f"{SENDER} sent something that is not a step of this ring: {exc}") from exc
            if isinstance(message, Skip):
                return message
            return message, np.frombuffer(payload, np.float32).reshape(message.payload_shape)
        return None

    def close(self) -> None:
        """Close the sockets; unsent messages are dropped."""
        if self._push is not None:
            self._push.close()
        self.pull.close()
        self.zap.close()
        self._context.term()


def _is_key(text: str) -> bool:
    """Whether ``text`` can be a public key in Z85."""
    if len(text) != 40 or not text.isascii():
        return False
    try:
        z85.decode(text.encode())
    except (KeyError, ValueError, struct.error):
        return False
    return True


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host
