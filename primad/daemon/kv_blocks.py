"""The KV blocks that this device holds for a head: those of its own windows, and replicas of another device's
blocks."""

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
"""Interval at which a cache is reduced to its limit, in addition to when KV cache of other devices arrives."""
MAX_HELD: Final = 1 << 18
"""Number of blocks: 256 requests of 100,000 tokens have this many blocks of about 100 tokens."""


class HeldBlocks:
    """The needed blocks. If the owner has a cache, other blocks stay until there is no room for them."""

    def __init__(self, node: Node, context: zmq.asyncio.Context) -> None:
        self.store = node.workspace.kv
        self._held: set[str] = set()
        self._evict_at_s = 0.0
        self._fetcher = CellsFetcher(node.transfers(context), self.store)

    async def hold(self, hold: KvHold) -> list[bool]:
        """Hold the blocks of ``hold``; return, after ``timeout_s`` at the latest, for each whether all its layers are
        here."""
        keys = [block.key for block in hold.blocks]
        if len(self._held.union(keys)) > MAX_HELD:
            logger.warning("the KV cache of %d more blocks is not held: the maximum is %d blocks", len(keys), MAX_HELD)
            return [False] * len(keys)
        self._held.update(keys)
        self.store.lease("held", self._held)
        held = await self._fetcher.hold(hold.blocks, hold.layers, hold.sources, hold.timeout_s, verify=hold.verify)
        gone = [key for key in keys if key not in self._held]
        if gone and self.store.limit_bytes is None:  # forgotten while being fetched; a cache has room for them
            await self._do(self.store.forget, gone)
        await self._do(self.store.touch, keys)
        return held

    async def forget(self, keys: Sequence[str], *, lasting: bool) -> None:
        """Forget ``keys``, which are not needed any more; if they are ``lasting`` and there is a cache, they may
        stay."""
        self._held.difference_update(keys)
        self.store.lease("held", self._held)
        if self.store.limit_bytes is None or not lasting:
            await self._do(self.store.forget, keys)
        elif time.monotonic() >= self._evict_at_s:  # looks at every file
            self._evict_at_s = time.monotonic() + EVICT_EVERY_S
            await self._do(self.store.evict)

    async def clear(self) -> None:
        """Forget everything, as no head needs it any more."""
        await self.forget(sorted(self._held), lasting=True)
        if self.store.limit_bytes is None:
            await self._do(self.store.clear)

    async def _do(self, work: Callable[..., None], *arguments: object) -> None:
        """Do ``work`` with the store in a thread. A disk error costs no more than the data on the disk."""
        try:
            await asyncio.to_thread(work, *arguments)
        except DiskError as exc:
            logger.warning("%s", exc)
