"""Ship layer files by content: a device that has layers answers chunk requests, one that lacks some asks for them.

The asking side keeps a few requests under way and hashes as it writes; a layer appears in its cache only when the digest is
right. Nothing is sent that was not asked for, so nobody's memory fills.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Final

import zmq
import zmq.asyncio

from primad.cluster.messages import CHUNK_BYTES, Chunk, FetchChunk, NoChunk, TransferMessage, decode_transfer
from primad.cluster.sockets import listen, open_socket
from primad.errors import ClusterError, ModelError, ProtocolError, printable
from primad.gguf.cache import LayerCache
from primad.gguf.layers import LayerCut, LayerRef
from primad.ring.messages import encode

logger = logging.getLogger(__name__)

REQUESTS_UNDER_WAY: Final = 4
CHUNK_TIMEOUT_S: Final = 20.0

FindLayer = Callable[[str], LayerCut | None]


class LayerServer:
    """Answers chunk requests for the layers that ``find`` knows by digest."""

    def __init__(self, context: zmq.asyncio.Context, host: str, find: FindLayer) -> None:
        self._socket, self.port = listen(context, zmq.ROUTER, host, None)
        self._find = find

    async def run(self) -> None:
        """Serve until cancelled."""
        try:
            while True:
                peer, *frames = await self._socket.recv_multipart()
                try:
                    reply = await self._answer(frames)
                except ProtocolError as exc:
                    logger.warning("refused a message on the layer link: %s", exc)
                    continue
                await self._socket.send_multipart([peer, *reply])
        finally:
            self._socket.close()

    async def _answer(self, frames: Sequence[bytes]) -> list[bytes]:
        request = decode_transfer(frames[0]) if len(frames) == 1 else None
        if not isinstance(request, FetchChunk):
            raise ProtocolError(f"{len(frames)} frames that are no chunk request")
        digest, offset = request.digest, request.offset
        cut = self._find(digest)
        if cut is None:
            return [encode(NoChunk(digest=digest, offset=offset, reason="this device does not have the layer"))]
        if not 0 <= offset < cut.size_bytes or not 0 < request.size <= CHUNK_BYTES:
            raise ProtocolError(f"request for {request.size} bytes at {offset} of a layer of {cut.size_bytes}")
        try:
            data = await asyncio.to_thread(cut.read, offset, min(request.size, cut.size_bytes - offset))
        except ModelError as exc:
            return [encode(NoChunk(digest=digest, offset=offset, reason=str(exc)))]
        return [encode(Chunk(digest=digest, offset=offset)), data]


async def fetch_layers(
    context: zmq.asyncio.Context,
    source: str,
    refs: Sequence[LayerRef],
    cache: LayerCache,
    progress: Callable[[int], None],
) -> None:
    """Fetch the layers ``refs`` from the endpoint ``source`` into ``cache``; ``progress`` is told bytes as they arrive.

    Raises ``ClusterError`` when the source does not have one, goes silent, or sends bytes that are not the layer's.
    """
    socket = open_socket(context, zmq.DEALER)
    try:
        try:
            socket.connect(source)
        except zmq.ZMQError as exc:
            raise ClusterError(f"layers cannot be fetched from {printable(source)!r}: {exc.strerror}") from exc
        for ref in refs:
            with cache.writing(ref) as writer:
                asked = 0
                while writer.written < ref.size_bytes:
                    while asked < ref.size_bytes and asked - writer.written < REQUESTS_UNDER_WAY * CHUNK_BYTES:
                        request = FetchChunk(digest=ref.digest, offset=asked, size=CHUNK_BYTES)
                        await socket.send(encode(request))
                        asked += CHUNK_BYTES
                    data = await _chunk(socket, ref, writer.written, source)
                    await asyncio.to_thread(writer.write, data)
                    progress(len(data))
                await asyncio.to_thread(writer.finish)
    finally:
        socket.close()


async def _chunk(socket: zmq.asyncio.Socket, ref: LayerRef, offset: int, source: str) -> bytes:
    try:
        async with asyncio.timeout(CHUNK_TIMEOUT_S):
            frames = await socket.recv_multipart()
    except TimeoutError as exc:
        raise ClusterError(f"{source} sent nothing of layer {ref.digest[:12]} for {CHUNK_TIMEOUT_S:g} s") from exc
    message: TransferMessage = decode_transfer(frames[0])
    match message:
        case Chunk(digest=ref.digest, offset=at) if at == offset and len(frames) == 2 and frames[1]:
            return frames[1]
        case NoChunk(digest=ref.digest, reason=reason):
            raise ClusterError(f"{source} cannot give layer {ref.digest[:12]}: {reason}")
        case _:
            raise ProtocolError(f"{source} answered with another chunk than the one that was asked for")
