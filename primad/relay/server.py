"""The head's side of the relay: requests that devices relay to it are requests of its own HTTP application.

The application gets each as if the client had asked here, with the client's address, and marked as relayed: it comes
from another machine, whose device checked the host name. Keys, limits and errors are the application's. A device is
admitted by its key, like for layers; no header can claim what the connection proves.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final
from urllib.parse import unquote

import zmq
import zmq.asyncio
from starlette.types import ASGIApp, Message, Scope

from primad.api.http.access import machine_of
from primad.api.http.connection import BROKEN
from primad.api.http.guard import RELAYED
from primad.api.http.patience import BUSY
from primad.errors import ProtocolError
from primad.network.gate import sender_address, sender_key
from primad.network.relay_messages import (
    MAX_RELAY_BYTES,
    PIECE_BYTES,
    WINDOW_BYTES,
    BodyTaken,
    RelayAlive,
    RelayReply,
    RelayRequest,
    RequestLeft,
    RequestPart,
    ResponsePart,
    ResponseStart,
    cost_of,
    decode_relayed,
)
from primad.network.scopes import bare
from primad.network.sockets import listen
from primad.relay.window import SendWindow, pieces, send_now
from primad.system.complaints import Complaints
from primad.system.shares import Shares
from primad.system.tasks import Tasks
from primad.system.wire import encode
from primad.trust.identity import Identity

logger = logging.getLogger(__name__)

MAX_RELAYED: Final = 1024
"""Limit of concurrent requests; machines share them."""
LOOK_S: Final = 1.0
GRACE_S: Final = 1.0
"""How long an ending head waits for open responses."""


class RelayServer:
    """Serves ``app`` at ``port`` to devices whose key ``allows`` accepts. A device that is silent for ``gone_after_s``
    is gone. Raises ``ClusterError`` when it cannot listen on ``host``."""

    def __init__(
        self,
        context: zmq.asyncio.Context,
        host: str,
        identity: Identity,
        app: ASGIApp,
        *,
        allows: Callable[[str], bool],
        gone_after_s: float,
    ) -> None:
        self._app, self._allows, self._gone_after_s = app, allows, gone_after_s
        limits = {
            "max_bytes": MAX_RELAY_BYTES,
            "unsent": 0,
        }  # a larger message would be lost; windows bound what waits
        self._socket, self.port = listen(context, zmq.ROUTER, host, None, identity=identity, **limits)
        self._devices: dict[bytes, _Device] = {}
        """By connection, devices that had requests recently."""
        self._is_busy = asyncio.Event()
        self._places = Shares(MAX_RELAYED)
        self._tasks = Tasks()
        self._complaints = Complaints(logger)

    async def run(self) -> None:
        """Serve until cancelled; open responses have a moment to end."""
        watching = asyncio.create_task(self._watch())
        try:
            while True:
                await asyncio.sleep(0)  # a ready message is received without a pause
                peer, *frames = await self._socket.recv_multipart(copy=False)
                try:
                    self._hear(peer.bytes, frames)
                except ProtocolError as exc:
                    self._complaints.add("refused a message about relayed requests", exc)
        finally:
            watching.cancel()
            try:
                async with asyncio.timeout(GRACE_S):
                    await self._tasks.wait()
            except TimeoutError:
                await self._tasks.close()
            self._socket.close()

    def _hear(self, peer: bytes, frames: Sequence[zmq.Frame]) -> None:
        if len(frames) != 1:
            raise ProtocolError(f"message of {len(frames)} frames")
        if not self._allows(sender_key(frames[0])):
            raise ProtocolError("its sender is not trusted any more")
        message = decode_relayed(frames[0].buffer)
        device = self._devices.get(peer)
        if device is not None:
            device.heard_s = time.monotonic()
        match message:
            case RelayRequest():
                self._begin(peer, message, bare(sender_address(frames[0])))
            case RelayAlive(newest=newest, open=numbers):
                here = {} if device is None else device.open
                for number in here.keys() - set(numbers):
                    here[number].leave()
                self._send(peer, RelayAlive(newest=newest, open=sorted(here)))
            case _ if device is None or message.number not in device.open:
                return  # the request has ended meanwhile
            case RequestPart():
                device.open[message.number].put(message)
            case BodyTaken():
                device.open[message.number].window.give_back(message.size)
            case RequestLeft():
                device.open[message.number].leave()

    def _begin(self, peer: bytes, asked: RelayRequest, address: str) -> None:
        number, client = asked.number, asked.client or address
        device, machine = self._devices.setdefault(peer, _Device()), machine_of(client)
        if number <= device.newest:
            raise ProtocolError(f"the number {number} of a relayed request is not new")
        self._is_busy.set()
        device.newest = number
        if not self._places.has_room(machine):
            headers = [(b"content-type", b"application/json"), (b"retry-after", b"5")]
            self._send(peer, ResponseStart(number=number, status=503, headers=headers))
            self._send(peer, ResponsePart(number=number, data=BUSY, more=False))
            return
        self._places.take(machine)
        request = device.open[number] = _Request(number, lambda reply: self._send(peer, reply))
        self._tasks.start(self._serve(peer, device, request, scope_of(asked, client), machine))

    async def _serve(self, peer: bytes, device: _Device, request: _Request, scope: Scope, machine: str) -> None:
        try:
            await self._app({**scope, BROKEN: request.note_broken}, request.receive, request.send)
        finally:
            self._places.give_back(machine)
            del device.open[request.number]
            if not request.is_complete:
                self._send(peer, RelayAlive(newest=device.newest, open=sorted(device.open)))

    def _send(self, peer: bytes, reply: RelayReply) -> None:
        send_now(self._socket, [peer, encode(reply)])

    async def _watch(self) -> None:
        """End the requests of devices that went silent."""
        while True:
            await self._is_busy.wait()
            await asyncio.sleep(LOOK_S)
            for peer, device in list(self._devices.items()):
                if time.monotonic() - device.heard_s > self._gone_after_s:
                    for request in device.open.values():
                        request.leave()
                    if not device.open:
                        del self._devices[peer]
            if not self._devices:
                self._is_busy.clear()


class _Device:
    """A connection of a device that relays."""

    def __init__(self) -> None:
        self.open: dict[int, _Request] = {}
        self.newest = 0
        self.heard_s = time.monotonic()


class _Request:
    """One relayed request, as the application receives it and responds to it."""

    def __init__(self, number: int, reply: Callable[[RelayReply], None]) -> None:
        self.number, self.window = number, SendWindow()
        self.is_complete = False
        self._reply = reply
        self._parts: deque[RequestPart] = deque()
        self._waiting_bytes = 0
        self._changed = asyncio.Event()
        self._has_left = False
        self._broken = b""

    def put(self, part: RequestPart) -> None:
        """Add the next part of the body. Raises ``ProtocolError`` if the device exceeds its window."""
        self._waiting_bytes += cost_of(part.data)
        if self._waiting_bytes > WINDOW_BYTES:
            self.leave()
            raise ProtocolError("more of a relayed body is in flight than was allowed")
        self._parts.append(part)
        self._changed.set()

    def leave(self) -> None:
        """Note that the client is gone."""
        self._has_left = True
        self._changed.set()
        self.window.close()

    def note_broken(self, error: bytes) -> None:
        """Set ``error``, bytes that end this stream if the head goes away."""
        self._broken = error[:PIECE_BYTES]

    async def receive(self) -> Message:
        """Return the next message for the application."""
        while not self._parts and not self._has_left:
            self._changed.clear()
            await self._changed.wait()
        if self._has_left:
            return {"type": "http.disconnect"}
        part = self._parts.popleft()
        cost = cost_of(part.data)
        self._waiting_bytes -= cost
        self._reply(BodyTaken(number=self.number, size=cost))
        return {"type": "http.request", "body": part.data, "more_body": part.more}

    async def send(self, message: Message) -> None:
        """Relay a message of the application; waits for a client that reads slowly, and sends nothing to one that
        left."""
        if message["type"] == "http.response.start":
            headers = [(bytes(name), bytes(value)) for name, value in message.get("headers", ())]
            start = ResponseStart(number=self.number, status=message["status"], headers=headers, broken=self._broken)
            self._reply(start)
            return
        for data, more in pieces(message.get("body", b""), more=message.get("more_body", False)):
            if not await self.window.take(data):
                await asyncio.sleep(0)  # an application may keep sending until it notices
                return
            self._reply(ResponsePart(number=self.number, data=data, more=more))
            self.is_complete = not more


def scope_of(asked: RelayRequest, client: str) -> Scope:
    """The ASGI scope of a relayed request."""
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": asked.version,
        "method": asked.method,
        "scheme": "http",
        "path": unquote(asked.path.decode("ascii")),
        "raw_path": asked.path,
        "query_string": asked.query,
        "root_path": "",
        "headers": [(name.lower(), value) for name, value in asked.headers],
        "client": (client, 0),
        "server": None,
        RELAYED: True,
    }
