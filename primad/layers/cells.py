"""Fetch missing KV blocks into this device's store, from all devices that may have them.

A reply has several small blocks, or a piece of a large one. Received data is checked like a file (``kv/cells.py``) and
must belong to the requested block; a source that sends anything else, or is silent, is left out. Blocks that do not
arrive in time are missing, which costs only the time to compute them again.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import accumulate
from typing import Final

from primad.errors import DiskError, ProtocolError
from primad.kv.cells import MAX_STATE_BYTES, CellsError
from primad.kv.keys import KvBlock
from primad.kv.store import KvStore
from primad.layers.fetch import MAX_SOURCES
from primad.layers.rate_limit import TokenBucket
from primad.layers.source_link import SourceError, SourceLink, Transfers, reach
from primad.network.contacts import Contact
from primad.network.layer_messages import MAX_CELLS_ASKED, Cells, FetchCells
from primad.system.tasks import in_thread

logger = logging.getLogger(__name__)

LayerRuns = Sequence[tuple[int, int]]
"""Layers ``first <= layer < last`` each, numbered as in the whole model."""

_CELLS_AT_ONCE: Final = 256
"""Positions times layers per request."""
_MAX_CELL_BYTES: Final = 64 << 10
"""Maximum bytes of one cell's keys and values in one layer, for any known model."""
_STATES_AT_ONCE: Final = 1
"""Layers of a recurrent state per request; each may have megabytes."""
_INDEX_BYTES: Final = 1 << 20


class CellsFetcher:
    """Fetches blocks into ``store``."""

    def __init__(self, transfers: Transfers, store: KvStore) -> None:
        self.transfers, self.store = transfers, store
        self.bucket = TokenBucket(transfers.bytes_per_s)

    async def hold(
        self,
        blocks: Sequence[KvBlock],
        layers: LayerRuns,
        sources: Sequence[Contact],
        timeout_s: float,
        *,
        verify: bool,
    ) -> list[bool]:
        """Whether all ``layers`` of each block are in the store, at most ``timeout_s`` after the request.

        With ``verify`` existing blocks are read, and fetched again if they are damaged.
        """
        lacking = await in_thread(lacking_layers, self.store, blocks, layers, verify)
        if lacking and sources:
            with suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    await _Fetch(self, {block.key: block for block in blocks}, lacking).run(sources[:MAX_SOURCES])
        return [block.key not in lacking for block in blocks]


def bits_of(layers: Iterable[int]) -> int:
    """A set of layers as the bits of a number: one of 1,024 takes 160 bytes, and there may be 16,384 blocks."""
    bits = 0
    for layer in layers:
        bits |= 1 << layer
    return bits


def _runs(bits: int) -> Iterator[range]:
    while bits:
        yield (run := first_run(bits))
        bits &= ~bits_of(run)


def first_run(bits: int) -> range:
    """The first run of layers in ``bits``; empty for none."""
    first = max(0, (bits & -bits).bit_length() - 1)
    behind = ~(bits >> first)
    return range(first, first + (behind & -behind).bit_length() - 1)


def lacking_layers(store: KvStore, blocks: Iterable[KvBlock], layers: LayerRuns, verify: bool) -> dict[str, int]:
    """By key, the ``layers`` of ``blocks`` that are missing in ``store`` (bits); complete blocks are left out."""
    lacking: dict[str, int] = {}
    wanted = 0
    for first, last in layers:
        wanted |= (1 << last) - (1 << first)
    runs = list(_runs(wanted))
    for block in blocks:
        try:
            here = store.layers(block.key)
            if verify and here:
                for run in runs:
                    store.read(block.key, run.start, run.stop)  # removes damaged blocks
                here = store.layers(block.key)
        except DiskError as exc:
            logger.warning("KV cells that are kept cannot be looked at: %s", exc)
            here = frozenset()
        if missing := wanted & ~bits_of(here):
            lacking[block.key] = missing
    return lacking


@dataclass(frozen=True, slots=True)
class _Asked:
    """A request to a source: blocks, and which of their layers."""

    keys: list[str]
    layers: range


class _Fetch:
    """One fetch: the parts of ``blocks`` that are ``lacking``, less those that have arrived."""

    def __init__(self, fetcher: CellsFetcher, blocks: dict[str, KvBlock], lacking: dict[str, int]) -> None:
        self._fetcher, self._blocks, self._lacking = fetcher, blocks, lacking
        self._asked: set[str] = set()
        self._changed = asyncio.Event()

    async def run(self, sources: Sequence[Contact]) -> None:
        """Fetch until everything is here, or no source has the rest."""
        async with asyncio.TaskGroup() as group:
            for source in sources:
                group.create_task(self._download(source))

    async def _download(self, source: Contact) -> None:
        """Request blocks from ``source`` until it has no more of the missing ones, or fails.

        Received blocks are stored while the next are in transfer.
        """
        refused: dict[str, int] = {}
        keeping: asyncio.Task[None] | None = None
        try:
            async with reach(self._fetcher.transfers, source) as (link, _):
                while asked := await self._take(refused):
                    try:
                        came = await self._ask(link, asked)
                    except BaseException:
                        self._let_go(asked)
                        raise
                    before, keeping = keeping, asyncio.create_task(self._keep(asked, came, refused))
                    if before is not None:
                        await before
                if keeping is not None:
                    await keeping
        except (SourceError, ProtocolError, CellsError) as exc:
            logger.info("no more KV cells are fetched from %s: %s", source.device, exc)
        except DiskError as exc:
            logger.warning("KV cells of %s cannot be kept: %s", source.device, exc)
        finally:
            if keeping is not None:
                keeping.cancel()
                await asyncio.gather(keeping, return_exceptions=True)

    def _let_go(self, asked: _Asked) -> None:
        """Forget a request: its blocks have arrived or are missing."""
        self._asked.difference_update(asked.keys)
        self._changed.set()
        self._changed = asyncio.Event()

    def _wanted(self, key: str, refused: Mapping[str, int]) -> range:
        """The first run of a block's missing layers, without those that were ``refused``; empty for none."""
        block = self._blocks[key]
        count = _STATES_AT_ONCE if block.is_state else max(1, _CELLS_AT_ONCE // (block.end - block.start))
        return first_run(self._lacking.get(key, 0) & ~refused.get(key, 0))[:count]

    async def _take(self, refused: Mapping[str, int]) -> _Asked | None:
        """The next blocks to request, all missing the same layers; None at the end. Waits for other sources."""
        while True:
            taken, layers, is_over = list[str](), range(0), True
            for key in self._lacking:
                wanted = range(0) if taken and key in self._asked else self._wanted(key, refused)
                is_over = is_over and not wanted
                if not wanted or key in self._asked or wanted != (layers := layers or wanted):
                    continue
                taken.append(key)
                if len(taken) == MAX_CELLS_ASKED:
                    break
            if taken:
                self._asked.update(taken)
                return _Asked(taken, layers)
            if is_over:
                return None
            await self._changed.wait()

    async def _ask(self, link: SourceLink, asked: _Asked) -> list[memoryview]:
        """The data received for each of the leading blocks, empty for a block that the source lacks.

        Raises ``SourceError``, ``ProtocolError``.
        """
        sizes, data = await self._request(link, asked.keys, asked.layers, 0)
        at = sum(sizes[:-1])
        if at > len(data):
            raise ProtocolError("sent fewer bytes of KV cells than it announced, and only the last block may be cut")
        while (got := len(data) - at) < sizes[-1]:  # the rest of a block that is larger than a reply
            again, more = await self._request(link, [asked.keys[len(sizes) - 1]], asked.layers, got)
            if again != sizes[-1:] or not more:
                raise SourceError("does not give the rest of KV cells that it began to give")
            data += more
        ends = list(accumulate(sizes))
        return [memoryview(data)[end - size : end] for end, size in zip(ends, sizes, strict=True)]

    async def _keep(self, asked: _Asked, came: list[memoryview], refused: dict[str, int]) -> None:
        """Store the received data. Raises ``SourceError``, ``CellsError``, ``DiskError``."""
        try:
            parts = []
            for key, part in zip(asked.keys, came, strict=False):
                if part:
                    parts.append((self._blocks[key], part))
                else:
                    refused[key] = refused.get(key, 0) | bits_of(asked.layers)
            for (block, _), new in zip(parts, await in_thread(self._put, parts, asked.layers), strict=True):
                before = range(asked.layers.start, new.start)  # a source sends the first layers that it has
                refused[block.key] = refused.get(block.key, 0) | bits_of(before)
                self._lacking[block.key] &= ~bits_of(new)
                if not self._lacking[block.key]:
                    del self._lacking[block.key]
        finally:
            self._let_go(asked)

    def _put(self, parts: Iterable[tuple[KvBlock, memoryview]], asked: range) -> list[range]:
        """Put ``parts`` into the store; return the layers of each, all of which were ``asked`` for."""
        return [self._fetcher.store.add_part(block, part, asked) for block, part in parts]

    async def _request(
        self, link: SourceLink, keys: list[str], layers: range, offset: int
    ) -> tuple[list[int], bytearray]:
        """Sizes of the parts of the leading ``keys``, and the received bytes."""
        await link.ask(FetchCells(keys=keys, first=layers.start, last=layers.stop, offset=offset))
        reply, data = await link.answer(self._fetcher.transfers.timings.silence_timeout_s)
        if not isinstance(reply, Cells) or len(reply.sizes) > len(keys):
            raise ProtocolError(f"replied with a {type(reply).__name__} that was not asked for")
        for key, size in zip(keys, reply.sizes, strict=False):
            rows = self._blocks[key].end - self._blocks[key].start
            each_bytes = rows * _MAX_CELL_BYTES if rows else 2 * MAX_STATE_BYTES
            if not 0 <= size <= _INDEX_BYTES + len(layers) * each_bytes:
                raise ProtocolError(f"announces {size} bytes for {rows} KV cells in {len(layers)} layers")
        came = bytearray(data if data is not None else b"")
        if len(came) > sum(reply.sizes) - offset:
            raise ProtocolError("sent more than it was asked for")
        if (wait_s := self._fetcher.bucket.take(len(came), time.monotonic())) > 0:
            await asyncio.sleep(wait_s)
        return reply.sizes, came
