"""The control link: the worker listens, the head connects. Carries messages of ``cluster/messages.py`` and nothing else.

A message that cannot be read is refused with a log line; the link and the process live on.
"""

from __future__ import annotations

import asyncio
import logging

import zmq
import zmq.asyncio

from primad.cluster.messages import (
    GONE_AFTER_S,
    HeadMessage,
    WorkerMessage,
    decode_from_head,
    decode_from_worker,
)
from primad.cluster.sockets import endpoint, listen, open_socket
from primad.errors import ClusterError, ProtocolError
from primad.ring.messages import encode

logger = logging.getLogger(__name__)


class WorkerEnd:
    """Where a worker hears heads. Each head is known by the ``peer`` bytes that its messages come with."""

    def __init__(self, context: zmq.asyncio.Context, host: str, port: int | None, preferred: int) -> None:
        self._socket, self.port = listen(context, zmq.ROUTER, host, port, preferred)

    async def receive(self) -> tuple[bytes, HeadMessage]:
        """The next message of any head."""
        while True:
            peer, *frames = await self._socket.recv_multipart()
            try:
                if len(frames) != 1:
                    raise ProtocolError(f"message of {len(frames)} frames; a control message has 1")
                return peer, decode_from_head(frames[0])
            except ProtocolError as exc:
                logger.warning("refused a message on the control link: %s", exc)

    async def send(self, peer: bytes, message: WorkerMessage) -> None:
        """Answer the head ``peer``; nothing happens when it is gone."""
        await self._socket.send_multipart([peer, encode(message)])

    def close(self) -> None:
        """Stop listening."""
        self._socket.close()


class HeadEnd:
    """The head's link to one worker at ``host:port``. Raises ``ClusterError`` for what is no address."""

    def __init__(self, context: zmq.asyncio.Context, host: str, port: int) -> None:
        self.host, self.port = host, port
        self._socket = open_socket(context, zmq.DEALER)
        try:
            self._socket.connect(endpoint(host, port))
        except zmq.ZMQError as exc:
            self._socket.close()
            raise ClusterError(f"{host} is no address to connect to: {exc.strerror}") from exc

    @property
    def address(self) -> str:
        """``host:port`` for people."""
        return f"{self.host}:{self.port}"

    async def send(self, message: HeadMessage) -> None:
        """Tell the worker something. Raises ``ClusterError`` when nothing leaves for ``GONE_AFTER_S``."""
        try:
            async with asyncio.timeout(GONE_AFTER_S):
                await self._socket.send(encode(message))
        except TimeoutError as exc:
            raise ClusterError(f"the device at {self.address} takes no messages") from exc

    async def receive(self, timeout_s: float = GONE_AFTER_S) -> WorkerMessage:
        """The worker's next message.

        Raises ``ClusterError`` when none comes for ``timeout_s``; while the head pings, that means that it is gone.
        """
        while True:
            try:
                async with asyncio.timeout(timeout_s):
                    frames = await self._socket.recv_multipart()
            except TimeoutError as exc:
                raise ClusterError(f"the device at {self.address} has not answered for {timeout_s:g} s") from exc
            try:
                if len(frames) != 1:
                    raise ProtocolError(f"message of {len(frames)} frames; a control message has 1")
                return decode_from_worker(frames[0])
            except ProtocolError as exc:
                logger.warning("refused a message of the device at %s: %s", self.address, exc)

    def close(self) -> None:
        """Close the link."""
        self._socket.close()
