"""The relaying device's connection to one head: its open requests, and whether the head still has them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from typing import Final

import zmq
import zmq.asyncio
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send
from zmq.utils.monitor import recv_monitor_message

from primad.api.http.access import machine_of
from primad.api.http.connection import unless
from primad.errors import ProtocolError, RingError
from primad.network.relay_messages import (
    MAX_OPEN,
    MAX_RELAY_BYTES,
    BodyTaken,
    RelayAlive,
    RelayedMessage,
    RelayRequest,
    RequestLeft,
    RequestPart,
    ResponsePart,
    ResponseStart,
    cost_of,
    decode_relay_reply,
)
from primad.network.sockets import bound_socket, endpoint, monitored, open_socket
from primad.relay.place import HeadPlace
from primad.relay.window import SendWindow, pieces, send_now
from primad.system.complaints import Complaints
from primad.system.wire import encode
from primad.trust.identity import Identity

logger = logging.getLogger(__name__)

ALIVE_S: Final = 1.0
_REFUSED_AFTER: Final = 2
"""Number of refused connections in a row after which the head's process counts as ended."""
_WATCHED: Final = (
    zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED
)


class _Open:
    """A request that the head has: its waiting replies, and the room for its body."""

    def __init__(self) -> None:
        self.replies: asyncio.Queue[ResponseStart | ResponsePart | None] = asyncio.Queue()
        """None: no more will come. Windows bound what waits."""
        self.window = SendWindow()

    def end(self) -> None:
        """End the request, which the head does not have any more."""
        self.replies.put_nowait(None)
        self.window.close()


class HeadLink:
    """Relays requests to the head at ``place``. Once it is ``broken`` it takes no more; use another."""

    def __init__(self, context: zmq.asyncio.Context, identity: Identity, place: HeadPlace) -> None:
        self.place, self.broken = place, ""
        self._open: dict[int, _Open] = {}
        self._newest = 0
        self._heard_s = 0.0
        self._is_busy = asyncio.Event()
        self._complaints = Complaints(logger)
        self._socket = open_socket(context, zmq.DEALER, identity=identity, server=place.key)
        bound_socket(self._socket, MAX_RELAY_BYTES, 0)  # windows bound what waits
        self._monitor = monitored(self._socket, _WATCHED)
        self._socket.connect(endpoint(place.address, place.port))
        self._tasks = [asyncio.create_task(work) for work in (self._hear(), self._watch(), self._keep_alive())]

    async def carry(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Relay a request. Raises ``RingError`` if the head goes away before its response begins; a stream that has
        begun ends with an error in its own form. Raises ``ClientDisconnect`` if the client leaves."""
        if len(self._open) >= MAX_OPEN:
            raise RingError(f"too many requests wait for the head {self.place.name}; try again later")
        if not self._open:
            self._heard_s = time.monotonic()
        number = self._newest = self._newest + 1
        request = self._open[number] = _Open()
        self._is_busy.set()
        try:
            self._send(_request(number, scope))
            await unless(self._ask(number, request, receive), self._respond(number, request, send))
        except BaseException:
            self._send(RequestLeft(number=number))
            raise
        finally:
            del self._open[number]

    async def _ask(self, number: int, request: _Open, receive: Receive) -> None:
        """Pass the body on. Raises ``ClientDisconnect`` when the client leaves."""
        while (message := await receive())["type"] == "http.request":
            for data, more in pieces(message.get("body", b""), more=message.get("more_body", False)):
                if await request.window.take(data):
                    self._send(RequestPart(number=number, data=data, more=more))
        raise ClientDisconnect

    async def _respond(self, number: int, request: _Open, send: Send) -> None:
        start: ResponseStart | None = None
        while (reply := await request.replies.get()) is not None:
            if isinstance(reply, ResponseStart):
                start = reply
                await send({"type": "http.response.start", "status": reply.status, "headers": reply.headers})
                continue
            await send({"type": "http.response.body", "body": reply.data, "more_body": reply.more})
            if not reply.more:
                return
            self._send(BodyTaken(number=number, size=cost_of(reply.data)))
        if start is None:
            raise RingError(f"{self.broken or f'the head {self.place.name} dropped this request'}; try again later")
        if start.broken:  # without it the connection ends, with an incomplete body
            await send({"type": "http.response.body", "body": start.broken, "more_body": False})

    async def _hear(self) -> None:
        while True:
            frames = await self._socket.recv_multipart()
            self._heard_s = time.monotonic()
            try:
                if len(frames) != 1:
                    raise ProtocolError(f"message of {len(frames)} frames")
                reply = decode_relay_reply(frames[0])
            except ProtocolError as exc:
                self._complaints.add("refused a message of the head about relayed requests", exc)
                continue
            if isinstance(reply, RelayAlive):
                known = set(reply.open)
                for number, request in self._open.items():
                    if number <= reply.newest and number not in known:
                        request.end()
            elif (found := self._open.get(reply.number)) is None:
                continue
            elif isinstance(reply, BodyTaken):
                found.window.give_back(reply.size)
            else:
                found.replies.put_nowait(reply)

    async def _keep_alive(self) -> None:
        """Compare the open requests with the head's; costs nothing while there are none."""
        while True:
            await self._is_busy.wait()
            await asyncio.sleep(ALIVE_S)
            if time.monotonic() - self._heard_s > self.place.gone_after_s and self._open:
                self.end(f"the head {self.place.name} does not respond")
                return
            if self._open:
                self._send(RelayAlive(newest=self._newest, open=sorted(self._open)))
            else:
                self._is_busy.clear()

    async def _watch(self) -> None:
        """End open requests when the connection breaks; without any the connection is made again."""
        is_made, refused, head = False, 0, f"the head {self.place.name}"
        while True:
            event = (await recv_monitor_message(self._monitor))["event"]
            refused = refused + 1 if event == zmq.EVENT_CLOSED else 0
            if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
                self.end(f"{head} does not let this device in; pair the two again ('primad pair')")
            elif event == zmq.EVENT_DISCONNECTED and is_made and self._open:
                self.end(f"the connection to {head} broke")
            elif refused >= _REFUSED_AFTER and self._open:
                self.end(f"{head} is not there")
            is_made = event == zmq.EVENT_HANDSHAKE_SUCCEEDED

    def _send(self, message: RelayedMessage) -> None:
        send_now(self._socket, [encode(message)])

    def end(self, why: str) -> None:
        """End all open requests."""
        self.broken = self.broken or why
        for request in self._open.values():
            request.end()

    async def close(self, why: str) -> None:
        """End all open requests, and the connection."""
        self.end(why)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        with contextlib.suppress(zmq.ZMQError):
            self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close()


def _request(number: int, scope: Scope) -> RelayRequest:
    client = (scope.get("client") or ("",))[0]
    return RelayRequest(
        number=number,
        method=scope["method"],
        path=scope["raw_path"],
        query=scope["query_string"],
        headers=[(bytes(name), bytes(value)) for name, value in scope["headers"]],
        client=machine_of(client),
        version=scope["http_version"],
    )
