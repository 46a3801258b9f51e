"""Serve this device's layers and KV cache to devices that lack them: head and workers all do.

A requesting device has proven its key at the gate. Requests wait in a bounded queue per owner and are served in turns,
a few at a time, so that a greedy device delays only itself. Nothing is sent without a request. When a connection does
not accept data, everything after ``SEND_LIMIT`` chunks is dropped.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from typing import Final, Protocol

import zmq
import zmq.asyncio

from primad.errors import ClusterError, DiskError, ModelError, ProtocolError
from primad.kv.cells import Bytes
from primad.kv.store import KvStore
from primad.layers.rate_limit import TokenBucket
from primad.network.gate import sender_key
from primad.network.layer_messages import (
    CELLS_BYTES,
    MAX_REQUEST_BYTES,
    AskPresent,
    Cells,
    Chunk,
    Digests,
    FetchCells,
    FetchChunk,
    FetchDigests,
    NoChunk,
    Present,
    TransferReply,
    TransferRequest,
    decode_transfer,
)
from primad.network.sockets import listen
from primad.system.complaints import Complaints
from primad.system.shares import Turns
from primad.system.wire import encode
from primad.trust.identity import Identity

logger = logging.getLogger(__name__)

READS_AT_ONCE: Final = 3
REQUESTS_WAITING: Final = 32
"""Per device; a fetch has at most four in flight."""
COMPLAIN_EVERY_S: Final = 10.0
SEND_LIMIT: Final = 8
"""Maximum number of messages that wait for a connection to accept them."""


class LayerSource(Protocol):
    """A layer that can be served: ``gguf.layers.LayerCut`` and ``gguf.layer_file.StoredLayer``."""

    @property
    def size_bytes(self) -> int:
        """Bytes of its weights."""

    def tree(self) -> bytes:
        """The digests of its chunks. Raises ``PrimadError``."""

    def read(self, offset: int, size: int) -> bytes:
        """``size`` bytes of the weights from ``offset``. Raises ``PrimadError``."""


FindLayer = Callable[[str], LayerSource | None]
"""Return the layer of a digest, which may be any text, or None; called in threads."""


class LayerServer:
    """Serves on ``port`` the layers that ``find`` returns and the KV cells in ``cells``, at most ``bytes_per_s`` in total
    (None: no cap).

    ``allows`` checks at each request whether the sender's key is still trusted; by default every device that passed the
    gate is.
    Raises ``ClusterError`` when it cannot listen on ``host``.
    """

    def __init__(
        self,
        context: zmq.asyncio.Context,
        host: str,
        identity: Identity,
        find: FindLayer,
        *,
        cells: KvStore | None = None,
        bytes_per_s: float | None = None,
        allows: Callable[[str], bool] | None = None,
        complain_every_s: float = COMPLAIN_EVERY_S,
    ) -> None:
        limits = {"max_bytes": MAX_REQUEST_BYTES, "high_water": SEND_LIMIT}
        self._socket, self.port = listen(context, zmq.ROUTER, host, None, identity=identity, **limits)
        self._find = find
        self._cells = cells
        self._allows = allows
        self._bucket = TokenBucket(bytes_per_s)
        self._complaints = Complaints(logger, complain_every_s)
        self._questions = _Line()
        self._fetches = _Line()

    async def run(self) -> None:
        """Serve until cancelled."""
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._serve(self._questions))
                for _ in range(READS_AT_ONCE):
                    group.create_task(self._serve(self._fetches))
                await self._receive()
        finally:
            self._socket.close()

    async def _receive(self) -> None:
        while True:
            await asyncio.sleep(0)  # ``recv`` does not yield while messages wait: one busy device would delay all
            peer, *frames = await self._socket.recv_multipart(copy=False)
            try:
                key, request = self._judge(frames)
            except ProtocolError as exc:
                self._complain(exc)
                continue
            line = self._questions if isinstance(request, AskPresent) else self._fetches
            if not line.put(key, peer.bytes, request):
                self._complain(f"more than {REQUESTS_WAITING} requests of one device at a time")

    def _judge(self, frames: Sequence[zmq.Frame]) -> tuple[str, TransferRequest]:
        if len(frames) != 1:
            raise ProtocolError(f"{len(frames)} frames that are no request")
        key = sender_key(frames[0])
        if self._allows is not None and not self._allows(key):
            raise ProtocolError("its sender is not trusted any more")
        request = decode_transfer(frames[0].buffer)
        if not isinstance(request, TransferRequest):
            raise ProtocolError(f"a {type(request).__name__} that was not requested")
        return key, request

    def _complain(self, why: object) -> None:
        self._complaints.add("refused a message on the layer link", why)

    async def _serve(self, line: _Line) -> None:
        while True:
            await self._reply(*await line.wait_next())  # which leaves no chunk in this frame while it waits

    async def _reply(self, peer: bytes, request: TransferRequest) -> None:
        try:
            reply, data = await asyncio.to_thread(self._answer, request)
        except ProtocolError as exc:
            self._complain(exc)
            return
        if (wait_s := self._bucket.take(len(data), time.monotonic())) > 0:
            await asyncio.sleep(wait_s)
        frames = [peer, encode(reply), data] if data else [peer, encode(reply)]
        await self._socket.send_multipart(frames, copy=False)

    def _answer(self, request: TransferRequest) -> tuple[TransferReply, Bytes]:
        if isinstance(request, AskPresent):
            return Present(held=[self._find(digest) is not None for digest in request.digests]), b""
        if isinstance(request, FetchCells):
            return self._cells_for(request)
        digest = request.digest
        offset = request.offset if isinstance(request, FetchChunk) else None
        layer = self._find(digest)
        if layer is None:
            return NoChunk(digest=digest, offset=offset, reason="this device does not have the layer"), b""
        try:
            if isinstance(request, FetchDigests):
                return Digests(digest=digest, tree=layer.tree()), b""
            return Chunk(digest=digest, offset=request.offset), _read(layer, request)
        except (ModelError, ClusterError) as exc:
            return NoChunk(digest=digest, offset=offset, reason=str(exc)), b""

    def _cells_for(self, request: FetchCells) -> tuple[Cells, Bytes]:
        """The parts that fit, estimated by the size of those before; parts that the disk refuses count as missing."""
        sizes, data = list[int](), bytearray()
        for key in request.keys:
            try:
                part = self._cells.part(key, request.first, request.last) if self._cells is not None else None
            except DiskError as exc:
                self._complain(exc)
                part = None
            begin = 0 if sizes else request.offset
            sizes.append(len(part or b""))
            data += memoryview(part or b"")[begin : begin + CELLS_BYTES - len(data)]
            if len(data) + max(sizes) > CELLS_BYTES:
                break
        return Cells(sizes=sizes), data


def _read(layer: LayerSource, request: FetchChunk) -> bytes:
    if request.offset >= layer.size_bytes:
        raise ProtocolError(f"request for {request.size} bytes at {request.offset} of a layer of {layer.size_bytes}")
    return layer.read(request.offset, min(request.size, layer.size_bytes - request.offset))


class _Line:
    """Waiting requests, and their senders."""

    def __init__(self) -> None:
        self._turns = Turns[tuple[bytes, TransferRequest]]()
        self._count = asyncio.Semaphore(0)

    def put(self, key: str, peer: bytes, request: TransferRequest) -> bool:
        """Queue ``request`` for its turn; return False, and drop it, if that device has too many waiting."""
        if self._turns.waiting(key) >= REQUESTS_WAITING:
            return False
        self._turns.add(key, (peer, request))
        self._count.release()
        return True

    async def wait_next(self) -> tuple[bytes, TransferRequest]:
        await self._count.acquire()
        return self._turns.next()
