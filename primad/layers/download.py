"""Draw layers from the hub that a model lies on, chunk by chunk over a few connections, into the cache.

A device asks the hub itself; where it has no way there, or is let in no further, it asks the head, which passes on what it
reads and keeps nothing. A chunk that does not come is asked for again, later and later, and what arrived stays. Nobody can
compare a chunk with anything: what comes is what the hub, in its encrypted connection, says is the revision that the head
looked at. The digest of the whole layer is compared where somebody has fetched it before.
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
"""Connections at a time; each has a chunk in memory."""
TRIES: Final = 7
"""A chunk that did not come so often in a row, over a minute, does not come that way."""


async def download_layers(
    hub_routes: HubRoutes,
    layers: Sequence[WantedLayer],
    cache: LayerCache,
    progress: Callable[[int], None],
    downloaded: Callable[[str, str, bytes], None],
) -> None:
    """Have ``layers`` in ``cache``.

    ``progress`` is told bytes as they arrive, and first those that are here; ``downloaded`` the name of the origin, the
    digest and the tree of each layer when it is whole. Cancelling waits for one chunk to be written. Raises
    ``ClusterError`` with the reasons when nobody gives a chunk, or when a layer is not what it was where it was fetched
    before; ``DiskError`` when this device's disk does not take it.
    """
    refs = [LayerRef(layer.origin.name, layer.ref.size_bytes, layer.ref.tensors) for layer in layers]
    async with cache.turn, begun(cache, refs, hashed=False) as parts:
        await _Download(hub_routes, layers, parts, cache, progress, downloaded).run()


class _Download:
    """What is lacking, and who gives it: the ways that have not failed."""

    def __init__(
        self,
        hub_routes: HubRoutes,
        layers: Sequence[WantedLayer],
        parts: Mapping[str, PartialLayer],
        cache: LayerCache,
        progress: Callable[[int], None],
        downloaded: Callable[[str, str, bytes], None],
    ) -> None:
        self.makers = hub_routes.makers([layer.origin.name for layer in layers])
        self.again_s = hub_routes.transfers.timings.hub_again_s
        self.way = 0
        self.came = False
        self.reasons: list[str] = []
        self._layers = {layer.origin.name: layer for layer in layers}
        self._parts, self._cache = parts, cache
        self._progress, self._drawn = progress, downloaded
        self._bucket = TokenBucket(hub_routes.transfers.bytes_per_s)
        self._lacking: deque[tuple[str, int]] = deque()

    async def run(self) -> None:
        """Draw until all is here. Raises as ``download_layers``."""
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
        lane = _Lane(self)
        try:
            while self._lacking:
                await self._take(lane, *self._lacking.popleft())
        finally:
            await lane.close()

    async def _take(self, lane: _Lane, name: str, number: int) -> None:
        layer, part = self._layers[name], self._parts[name]
        size = chunk_size(layer.ref.size_bytes, number)
        if (wait_s := self._bucket.take(size, time.monotonic())) > 0:
            await asyncio.sleep(wait_s)
        data = await lane.chunk(layer, number)
        complete = await in_thread(self._cache.write, part, number, data)
        self._progress(size)
        if complete:
            await self._finish(name)

    async def _finish(self, name: str) -> None:
        """Flush and name a layer that is complete; one that is not what it was before is not kept."""
        layer, part = self._layers[name], self._parts[name]
        if layer.is_hashed and part.digest != layer.ref.digest:
            digest = part.digest
            try:
                await in_thread(part.discard)
            except OSError as exc:
                raise DiskError(f"{part.path}: cannot be removed: {exc.strerror or exc}") from exc
            raise ClusterError(
                f"layer {layer.ref.digest[:12]} came as {digest[:12]}: another device fetched other bytes, so one of "
                "the two was not given what the hub has; 'primad rm' the model on the head and serve it anew"
            )
        digest, tree = part.digest, part.tree
        await in_thread(self._cache.finish, part)
        assert tree is not None
        self._drawn(name, digest, tree)

    def gives_up(self, way: int, reason: str) -> None:
        """The way number ``way`` leads nowhere: all lanes take the next one. Raises as ``check``."""
        if self.way == way:
            logger.info("no more layers are drawn from there: %s", reason)
            self.reasons.append(reason)
            self.way += 1
        self.check()

    def check(self) -> None:
        """Raises ``ClusterError`` where no way is left."""
        if self.way >= len(self.makers):
            why = printable("; ".join(dict.fromkeys(self.reasons)), 500)
            raise ClusterError(f"layers cannot be fetched: {why}")


class _Lane:
    """One connection, by whatever way is open."""

    def __init__(self, draw: _Download) -> None:
        self._download = draw
        self._way = -1
        self._chunk_source: ChunkSource | None = None

    async def chunk(self, layer: WantedLayer, number: int) -> bytes:
        """A chunk, from whoever gives it. Raises ``ClusterError`` where nobody does."""
        tries = 0
        while True:
            chunk_source = await self._current()
            try:
                data = await chunk_source.chunk(layer, number)
            except HubError as exc:
                tries += 1
                # A way that never gave anything is none: a device without a way out is not to try for a minute.
                if not exc.again or tries >= TRIES or not (self._download.came or self._is_last):
                    self._download.gives_up(self._way, f"{chunk_source.name}: {exc}")
                    tries = 0
                else:
                    await asyncio.sleep(max(exc.wait_s, self._download.again_s * 2 ** (tries - 1)))
                continue
            self._download.came = True
            return data

    @property
    def _is_last(self) -> bool:
        return self._way == len(self._download.makers) - 1

    async def _current(self) -> ChunkSource:
        if self._chunk_source is None or self._way != self._download.way:
            await self.close()
            self._download.check()
            self._way = self._download.way
            self._chunk_source = self._download.makers[self._way]()
        return self._chunk_source

    async def close(self) -> None:
        """Close it."""
        chunk_source, self._chunk_source = self._chunk_source, None
        if chunk_source is not None:
            await chunk_source.close()
