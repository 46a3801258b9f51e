"""Fetch layers by content, concurrently from all devices that hold them.

Each source reports which of the layers it holds and has a few requests in flight, so faster sources deliver more
(``layers/chunk_queue.py``). Every chunk is compared with the layer's tree and the tree with the layer's digest, so no
source can put anything else into the cache. A source that dies, stalls or sends wrong bytes is dropped; the others
continue. Chunks that arrived stay in the cache when the fetch ends early, and are not sent again.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager
from typing import Final, TypeVar

from primad.errors import ClusterError, ProtocolError, printable
from primad.gguf.layers import LayerRef, chunk_size, is_chunk_of, is_tree_of
from primad.gguf.windows import ModelCutter
from primad.layers.cache import LayerCache
from primad.layers.chunk_queue import TREE, ChunkId, ChunkQueue
from primad.layers.partial import PartialLayer
from primad.layers.rate_limit import TokenBucket
from primad.layers.source_link import SourceError, SourceLink, Transfers, reach
from primad.network.contacts import Contact
from primad.network.layer_messages import (
    CHUNK_BYTES,
    Chunk,
    Digests,
    FetchChunk,
    FetchDigests,
    NoChunk,
    TransferMessage,
)
from primad.system.tasks import in_thread, to_its_end

logger = logging.getLogger(__name__)

UNDER_WAY: Final = 4
"""Concurrent requests to one source."""
UNDER_WAY_TOTAL: Final = 16
"""Concurrent requests to all sources together; this bounds the memory of a fetch, in chunks."""
MAX_SOURCES: Final = 64

_Answer = TypeVar("_Answer")


async def fetch_layers(
    transfers: Transfers,
    sources: Sequence[Contact],
    refs: Sequence[LayerRef],
    cache: LayerCache,
    progress: Callable[[int], None],
) -> None:
    """Fetch the layers ``refs`` into ``cache``.

    ``progress`` is called first with the bytes that an earlier fetch left, then with bytes as they arrive; the sum is
    the size of ``refs``. Cancelling waits for one chunk to be written. Raises ``ClusterError`` that names the layers and the
    reasons when no source is left that has the missing parts, ``DiskError`` when this device's disk refuses them.
    """
    async with cache.turn:
        if wanted := await missing_layers(cache, refs, progress):
            async with begun(cache, wanted) as parts:
                await _Fetch(transfers, sources, parts, cache, progress).run()


@asynccontextmanager
async def begun(
    cache: LayerCache, refs: Iterable[LayerRef], *, hashed: bool = True
) -> AsyncIterator[dict[str, PartialLayer]]:
    """By name, the partial layer of each of ``refs``, to add chunks; makes room for the rest. As ``LayerCache.part``."""
    with ExitStack() as stack:
        parts: dict[str, PartialLayer] = {
            ref.digest: await in_thread(stack.enter_context, cache.part(ref, hashed=hashed)) for ref in refs
        }
        await in_thread(cache.make_room, sum(part.ref.file_bytes - part.present_bytes for part in parts.values()))
        yield parts


async def missing_layers(
    cache: LayerCache, refs: Iterable[LayerRef], present: Callable[[int], None] = lambda _: None
) -> list[LayerRef]:
    """The ``refs`` that are not complete in ``cache``, each once; ``present`` is called with the size of every complete
    one.

    Stopping waits for one chunk to be hashed.
    """
    missing = []
    for ref in dict.fromkeys(refs):
        if await hash_in_thread(cache.has, ref):
            present(ref.size_bytes)
        else:
            missing.append(ref)
    return missing


async def held_by_any(transfers: Transfers, sources: Sequence[Contact], digests: Sequence[str]) -> set[str]:
    """The layers of ``digests`` that at least one of ``sources`` holds; an unreachable source holds none."""

    async def ask(source: Contact) -> list[str]:
        try:
            async with reach(transfers, source, digests) as (_, held):
                return held
        except (SourceError, ProtocolError) as exc:
            logger.info("%s is not asked for layers: %s", source.device, exc)
            return []

    answers = await asyncio.gather(*map(ask, sources[:MAX_SOURCES]))
    return {digest for held in answers for digest in held}


async def hash_in_thread(function: Callable[..., _Answer], *arguments: object) -> _Answer:
    """As ``in_thread``, for a function that hashes a layer and takes a stop as its last argument. Cancelling waits for one
    chunk only."""
    stop = threading.Event()
    return await to_its_end(asyncio.to_thread(function, *arguments, stop.is_set), stop.set)


async def hash_layers(
    cutter: ModelCutter, layers: Sequence[int], progress: Callable[[int], None] = lambda _: None
) -> None:
    """Hash the ``layers`` that have no known hash, and save the hashes; ``progress`` gets the number done."""
    for done, layer in enumerate(layers):
        progress(done)
        await hash_in_thread(cutter.ref, layer)
    progress(len(layers))
    if cutter.digests is not None:
        cutter.digests.save()


class _Fetch:
    """One fetch: the layers begun, and the sources that have not failed."""

    def __init__(
        self,
        transfers: Transfers,
        sources: Sequence[Contact],
        parts: Mapping[str, PartialLayer],
        cache: LayerCache,
        progress: Callable[[int], None],
    ) -> None:
        self._transfers, self._parts, self._cache, self._progress = transfers, parts, cache, progress
        self._sources = {source.key: source for source in sources[:MAX_SOURCES]}
        under_way = max(1, min(UNDER_WAY, UNDER_WAY_TOTAL // max(1, len(self._sources))))
        self._queue = ChunkQueue(self._sources, under_way)
        self._bucket = TokenBucket(transfers.bytes_per_s)
        self._unfinished = set(parts)
        self._changed = asyncio.Event()
        self._reasons: dict[str, str] = {}

    async def run(self) -> None:
        """Fetch until all is here. Raises ``ClusterError``, of the disk too."""
        try:
            async with asyncio.TaskGroup() as group:
                self._group = group
                self._resume()
                tasks = [group.create_task(self._download(source)) for source in self._sources.values()]
                while self._unfinished and not self._queue.unavailable():
                    await self._changed.wait()
                for task in tasks:
                    task.cancel()
        except ExceptionGroup as failed:
            raise failed.exceptions[0] from None
        if self._unfinished:
            raise self._unavailable()

    def _wake(self) -> None:
        """Wake sources that wait for pieces to request."""
        self._changed.set()
        self._changed = asyncio.Event()

    def _resume(self) -> None:
        for digest, part in self._parts.items():
            if part.tree is None:
                self._queue.add(digest, [TREE])
                continue
            self._progress(part.present_bytes)
            lacking = part.lacking()
            self._queue.add(digest, lacking)
            if not lacking:
                self._group.create_task(self._finish(part))

    async def _download(self, source: Contact) -> None:
        """Ask ``source`` for pieces until cancelled or until it fails."""
        key, silence_s = source.key, self._transfers.timings.silence_timeout_s
        try:
            async with reach(self._transfers, source, list(self._parts)) as (link, held):
                self._queue.holds(key, held)
                self._wake()
                while True:
                    await self._ask(key, link)
                    if self._queue.under_way(key):
                        await self._take_in(key, *await link.answer(silence_s))
                    else:
                        await self._changed.wait()
        except (SourceError, ProtocolError) as exc:
            self._queue.drop(key)
            self._reasons[key] = str(exc)
            logger.warning("no more layers are fetched from %s: %s", source.device, exc)
        self._wake()

    async def _ask(self, key: str, link: SourceLink) -> None:
        while (piece := self._queue.take(key)) is not None:
            digest, number = piece
            if number == TREE:
                await link.ask(FetchDigests(digest=digest))
                continue
            size = chunk_size(self._parts[digest].ref.size_bytes, number)
            if (wait_s := self._bucket.take(size, time.monotonic())) > 0:
                await asyncio.sleep(wait_s)
            await link.ask(FetchChunk(digest=digest, offset=number * CHUNK_BYTES, size=size))

    async def _take_in(self, key: str, message: TransferMessage, data: memoryview | None) -> None:
        """Handle a message from the source ``key``. Raises ``SourceError``, ``ProtocolError`` or ``DiskError``."""
        match message:
            case Digests(digest=digest, tree=tree) if data is None:
                piece = self._expect(key, digest, TREE)
                part = self._parts[digest]
                if not is_tree_of(tree, digest, part.ref.size_bytes):
                    raise SourceError(f"sent digests of chunks that are not those of layer {digest[:12]}")
                self._queue.arrived(key, piece)
                await in_thread(self._cache.begin, part, tree)
                self._queue.add(digest, part.lacking())
                self._wake()
            case Chunk(digest=digest, offset=offset) if data and offset % CHUNK_BYTES == 0:
                piece = self._expect(key, digest, offset // CHUNK_BYTES)
                part = self._parts[digest]
                assert part.tree is not None
                if not await in_thread(is_chunk_of, data, part.tree, piece.number):
                    raise SourceError(f"sent bytes that are not those of layer {digest[:12]}")
                self._queue.arrived(key, piece)
                complete = await in_thread(self._cache.write, part, piece.number, data)
                self._progress(len(data))
                if complete:
                    self._group.create_task(self._finish(part))
            case NoChunk(digest=digest, offset=offset, reason=reason) if data is None:
                piece = self._expect(key, digest, TREE if offset is None else offset // CHUNK_BYTES)
                self._reasons[key] = f"cannot give layer {digest[:12]}: {reason}"
                self._queue.refused(key, piece)
                self._wake()
            case _:
                raise ProtocolError(f"replied with a {type(message).__name__} that was not asked for")

    def _expect(self, key: str, digest: str, number: int) -> ChunkId:
        piece = ChunkId(digest, number)
        if not self._queue.is_asked(key, piece):
            raise ProtocolError(f"replied with a different piece than requested: {printable(digest[:12])}")
        return piece

    async def _finish(self, part: PartialLayer) -> None:
        """Flush and name a complete layer while others are fetched."""
        await in_thread(self._cache.finish, part)
        self._unfinished.discard(part.ref.digest)
        self._wake()

    def _unavailable(self) -> ClusterError:
        lost = self._queue.unavailable()
        names = ", ".join(digest[:12] for digest in lost[:3]) + (f" and {len(lost) - 3} more" if len(lost) > 3 else "")
        reasons = [
            f"{source.device} {self._reasons.get(key, 'does not have it')}" for key, source in self._sources.items()
        ]
        why = printable("; ".join(reasons), 600) or "no device was named that has it"
        return ClusterError(f"layer {names} cannot be fetched: {why}")
