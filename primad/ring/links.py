"""The ZeroMQ side of a ring process: one PULL for what arrives, one PUSH to the next device.

Both have high-water marks, so a slow device pushes back on the one before it instead of filling memory, and deadlines, so
nothing waits unbounded. A hidden state is a frame of its own: it is computed into one buffer, handed to ZeroMQ from
there, and on the other side given to llama.cpp from the frame it arrived in. ZeroMQ sets TCP_NODELAY on every connection.
"""

from __future__ import annotations

import logging
import time
from typing import Final

import numpy as np
import zmq

from primad.engine.protocol import Hidden
from primad.errors import ProtocolError, RingError
from primad.ring.messages import MAX_HEADER_BYTES, Limits, StaleEpochError, Step, decode_step, encode

logger = logging.getLogger(__name__)

HIGH_WATER_STEPS: Final = 64
SEND_TIMEOUT_S: Final = 30.0
LOG_INTERVAL_S: Final = 1.0
KEEPALIVE_IDLE_S: Final = 10


class Links:
    """The two sockets of a ring process. ``endpoint`` is where the device before it sends to."""

    def __init__(self, host: str, limits: Limits) -> None:
        self._limits = limits
        self._context = zmq.Context()
        self._push: zmq.Socket[bytes] | None = None
        self.pull = self._socket(zmq.PULL)
        self.pull.setsockopt(zmq.RCVHWM, HIGH_WATER_STEPS)
        self.pull.setsockopt(zmq.MAXMSGSIZE, max(MAX_HEADER_BYTES, limits.rows * limits.width * 4))
        try:
            self.pull.bind(f"tcp://{_bracketed(host)}:*")
        except zmq.ZMQError as exc:
            self.close()
            raise RingError(f"cannot listen for the ring on {host}: {exc.strerror}; check --host") from exc
        self.endpoint = self.pull.getsockopt_string(zmq.LAST_ENDPOINT)
        self.refused = 0
        self._logged_s = -LOG_INTERVAL_S

    def _socket(self, kind: int) -> zmq.Socket[bytes]:
        socket: zmq.Socket[bytes] = self._context.socket(kind)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.IPV6, 1)
        socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
        socket.setsockopt(zmq.TCP_KEEPALIVE_IDLE, KEEPALIVE_IDLE_S)
        return socket

    def connect(self, address: str) -> None:
        """Send to ``address`` from now on. Raises ``RingError`` when it is no ZeroMQ endpoint."""
        push = self._socket(zmq.PUSH)
        push.setsockopt(zmq.SNDHWM, HIGH_WATER_STEPS)
        push.setsockopt(zmq.SNDTIMEO, int(SEND_TIMEOUT_S * 1000))
        push.setsockopt(zmq.IMMEDIATE, 1)
        try:
            push.connect(address)
        except zmq.ZMQError as exc:
            push.close()
            raise RingError(f"cannot send to the next device at {address!r}: {exc.strerror}") from exc
        if self._push is not None:
            self._push.close()
        self._push = push

    def send(self, step: Step, hidden: Hidden) -> None:
        """Give a step to the next device. Raises ``RingError`` when it takes nothing for ``SEND_TIMEOUT_S``."""
        if self._push is None:
            raise RingError(f"step {step.step} arrived before this device knew its next device")
        try:
            self._push.send(encode(step), zmq.SNDMORE)
            self._push.send(hidden.data, copy=False)
        except zmq.Again as exc:
            raise RingError(f"the next device took no step for {SEND_TIMEOUT_S:g} s; it is gone or hangs") from exc

    def receive(self) -> tuple[Step, Hidden] | None:
        """The next step that has arrived, or None. A message that is no valid step is refused with a log line."""
        while True:
            try:
                frames = self.pull.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return None
            try:
                if len(frames) != 2:
                    raise ProtocolError(f"message of {len(frames)} frames; a step has 2")
                payload = frames[1].buffer
                step = decode_step(frames[0].buffer, payload.nbytes, self._limits)
            except StaleEpochError as exc:
                self.refused += 1
                logger.debug("dropped: %s", exc)
                continue
            except ProtocolError as exc:
                self.refuse(exc)
                continue
            return step, np.frombuffer(payload, np.float32).reshape(step.shape)

    def refuse(self, why: ProtocolError) -> None:
        """Count a message that is not used, with a log line at most every ``LOG_INTERVAL_S``."""
        self.refused += 1
        now = time.monotonic()
        if now - self._logged_s >= LOG_INTERVAL_S:
            self._logged_s = now
            logger.warning("refused a message on the ring (%d so far): %s", self.refused, why)

    def close(self) -> None:
        """Close both sockets; what was not sent yet is dropped."""
        if self._push is not None:
            self._push.close()
        self.pull.close()
        self._context.term()


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host
