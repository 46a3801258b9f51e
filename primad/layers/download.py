"""Download layers from a model's hub into the cache, chunk by chunk over a few connections.

A device asks the hub itself. If the hub is unreachable or limits the device, it asks the head, which relays chunks and
stores none. A chunk that does not arrive is requested again at growing intervals, and arrived chunks are kept. Single
chunks cannot be verified: the device trusts what the hub sends, over an encrypted connection, for the revision that the
head saw. The digest of the whole layer is compared if any device has fetched it before.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from primad.errors import ClusterError, DiskError, printable
from primad.gguf.hub_ranges import HubError
from primad.gguf.layers import LayerRef, chunk_size
from primad.layers.cache import LayerCache
from primad.layers.fetch import begun
from primad.layers.partial import PartialLayer
from primad.layers.rate_limit import TokenBucket
from primad.layers.sources import ChunkSource, HubRoutes, WantedLayer
from primad.system.tasks import in_thread

logger = logging.getLogger(__name__)

LANES: Final = 4
"""Concurrent connections; each has a chunk in memory."""
TRIES: Final = 7
"""After this many failures of a chunk in a row, over a minute, its source is given up."""


async def download_layers(
    hub_routes: HubRoutes,
    layers: Sequence[WantedLayer],
    cache: LayerCache,
    progress: Callable[[int], None],
    downloaded: Callable[[str, str, bytes], None],
) -> None:
    """Download the missing ``layers`` into ``cache``.

    ``progress`` is called first with the bytes that are here, then with bytes as they arrive; ``downloaded`` with the
    origin's name, the digest and the tree of each complete layer. Cancelling waits for one chunk to be written.
    Raises ``ClusterError`` with the reasons when no source gives a chunk, or when a layer differs from an earlier
    fetch; ``DiskError`` when this device's disk refuses it.
    """
    refs = [LayerRef(layer.origin.name, layer.ref.size_bytes, layer.ref.tensors) for layer in layers]
    async with cache.turn, begun(cache, refs, hashed=False) as parts:
        await _Download(hub_routes, layers, parts, cache, progress, downloaded).run()


class _Download:
    """The missing chunks, and the sources that have not failed."""

    def __init__(
        self,
        hub_routes: HubRoutes,
        layers: Sequence[WantedLayer],
        parts: Mapping[str, PartialLayer],
        cache: LayerCache,
        progress: Callable[[int], None],
        downloaded: Callable[[str, str, bytes], None],
    ) -> None:
        self._makers = hub_routes.makers([layer.origin.name for layer in layers])
        self._again_s = hub_routes.transfers.timings.hub_again_s
        self._way = 0
        self._came = False
        self._reasons: list[str] = []
        self._layers = {layer.origin.name: layer for layer in layers}
        self._parts, self._cache = parts, cache
        self._progress, self._drawn = progress, downloaded
        self._bucket = TokenBucket(hub_routes.transfers.bytes_per_s)
        self._lacking: deque[tuple[str, int]] = deque()

    async def run(self) -> None:
        """Download until all layers are complete. Raises as ``download_layers``."""
        for name, part in self._parts.items():
            if part.tree is None:
                await in_thread(self._cache.begin, part)
            self._progress(part.present_bytes)
            lacking = part.lacking()
            self._lacking += [(name, number) for number in lacking]
            if not lacking:
                await self._finish(name)
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(min(LANES, len(self._lacking))):
                    group.create_task(self._run_lane())
        except ExceptionGroup as failed:
            raise failed.exceptions[0] from None

    async def _run_lane(self) -> None:
        """Fetch over one connection at a time, from the current source, until no chunk is missing or no source is left."""
        while self._lacking:
            way = self._way
            if way == len(self._makers):
                why = printable("; ".join(dict.fromkeys(self._reasons)), 500)
                raise ClusterError(f"layers cannot be fetched: {why}")
            source = self._makers[way]()
            try:
                while self._lacking and way == self._way:
                    await self._take(source, way, *self._lacking.popleft())
            finally:
                await source.close()

    async def _take(self, source: ChunkSource, way: int, name: str, number: int) -> None:
        layer, part = self._layers[name], self._parts[name]
        size = chunk_size(layer.ref.size_bytes, number)
        if (wait_s := self._bucket.take(size, time.monotonic())) > 0:
            await asyncio.sleep(wait_s)
        data = await self._chunk(source, way, layer, number)
        if data is None:
            self._lacking.appendleft((name, number))
            return
        complete = await in_thread(self._cache.write, part, number, data)
        self._progress(size)
        if complete:
            await self._finish(name)

    async def _chunk(self, source: ChunkSource, way: int, layer: WantedLayer, number: int) -> bytes | None:
        """A chunk; None if source number ``way`` fails, so that all lanes change to the next one."""
        tries = 0
        while way == self._way:
            try:
                data = await source.chunk(layer, number)
            except HubError as exc:
                tries += 1
                # A source that never gave anything is dropped: a device without a route to the hub must not try for a
                # minute.
                if exc.again and tries < TRIES and (self._came or way == len(self._makers) - 1):
                    await asyncio.sleep(max(exc.wait_s, self._again_s * 2 ** (tries - 1)))
                elif way == self._way:
                    self._reasons.append(f"{source.name}: {exc}")
                    logger.info("no more layers are downloaded from there: %s", self._reasons[-1])
                    self._way += 1
            else:
                self._came = True
                return data
        return None

    async def _finish(self, name: str) -> None:
        """Flush and name a complete layer; remove it if its digest differs from an earlier fetch."""
        layer, part = self._layers[name], self._parts[name]
        if layer.is_hashed and part.digest != layer.ref.digest:
            digest = part.digest
            try:
                await in_thread(part.discard)
            except OSError as exc:
                raise DiskError(f"{part.path}: cannot be removed: {exc.strerror or exc}") from exc
            raise ClusterError(
                f"layer {layer.ref.digest[:12]} came as {digest[:12]}: another device fetched other bytes, so one of "
                "the two was not given what the hub has; 'primad rm' the model on the head and serve it again"
            )
        digest, tree = part.digest, part.tree
        await in_thread(self._cache.finish, part)
        assert tree is not None
        self._drawn(name, digest, tree)
