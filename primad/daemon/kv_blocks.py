"""The KV blocks that this device holds for a head: those of its own windows, and copies of another device's."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from typing import Final

import zmq.asyncio

from primad.daemon.node import Node
from primad.errors import DiskError
from primad.layers.cells import CellsFetcher
from primad.network.messages import KvHold

logger = logging.getLogger(__name__)

EVICT_EVERY_S: Final = 10.0
"""The limit of a cache is held so often, besides when other devices' cells come."""
MAX_HELD: Final = 1 << 18
"""Blocks: of 256 answers of 100,000 tokens, 100 tokens each."""


class HeldBlocks:
    """Blocks that somebody needs. Where the owner has a cache, others stay until there is no room for them."""

    def __init__(self, node: Node, context: zmq.asyncio.Context) -> None:
        self.store = node.workspace.kv
        self._held: set[str] = set()
        self._evict_at_s = 0.0
        self._fetcher = CellsFetcher(node.transfers(context), self.store)

    async def hold(self, hold: KvHold) -> list[bool]:
        """Hold the blocks of ``hold``, and say of which all layers are here, ``timeout_s`` later at the latest."""
        keys = [block.key for block in hold.blocks]
        if len(self._held.union(keys)) > MAX_HELD:
            logger.warning("KV cells of %d more blocks are not held: %d are the most", len(keys), MAX_HELD)
            return [False] * len(keys)
        self._held.update(keys)
        self.store.lease("held", self._held)
        held = await self._fetcher.hold(hold.blocks, hold.layers, hold.sources, hold.timeout_s, verify=hold.verify)
        gone = [key for key in keys if key not in self._held]
        if gone and self.store.limit_bytes is None:  # forgotten while they were on their way; a cache has room for them
            await self._do(self.store.forget, gone)
        await self._do(self.store.touch, keys)
        return held

    async def forget(self, keys: Sequence[str], *, lasting: bool) -> None:
        """Nobody needs ``keys`` any more; where they are ``lasting`` and there is a cache, they may stay."""
        self._held.difference_update(keys)
        self.store.lease("held", self._held)
        if self.store.limit_bytes is None or not lasting:
            await self._do(self.store.forget, keys)
        elif time.monotonic() >= self._evict_at_s:  # looks at every file
            self._evict_at_s = time.monotonic() + EVICT_EVERY_S
            await self._do(self.store.evict)

    async def clear(self) -> None:
        """There is no head any more that needs anything."""
        await self.forget(sorted(self._held), lasting=True)
        if self.store.limit_bytes is None:
            await self._do(self.store.clear)

    async def _do(self, work: Callable[..., None], *arguments: object) -> None:
        """Do ``work`` with the store in a thread. A disk that refuses costs no more than what is on it."""
        try:
            await asyncio.to_thread(work, *arguments)
        except DiskError as exc:
            logger.warning("%s", exc)
