"""Shared by a worker's services besides windows: they use only spare memory, and fetch their files like layers."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Final

import zmq.asyncio

from primad.daemon.layer_files import lease_layers
from primad.daemon.node import Node
from primad.errors import ClusterError
from primad.gguf.layers import LayerRef
from primad.layers.fetch import fetch_layers, missing_layers
from primad.network.contacts import Contact
from primad.settings.quantities import show_bytes
from primad.system.memory import memory

LOOK_S: Final = 1.0
"""How often memory is checked."""
TIGHT_SHARE: Final = 0.03
"""Share of all memory: with less of it free, the owner needs what the services use."""


async def check_room(takes_bytes: int) -> None:
    """Raise ``ClusterError`` if using ``takes_bytes`` would leave too little memory free."""
    found = await asyncio.to_thread(memory)
    if found.available_bytes < takes_bytes + TIGHT_SHARE * found.total_bytes:
        takes, free = show_bytes(takes_bytes), show_bytes(found.available_bytes)
        raise ClusterError(f"its {takes} do not fit the {free} that are free there")


async def until_memory_is_short() -> None:
    """Wait until memory is short, then raise ``ClusterError``."""
    while True:
        await asyncio.sleep(LOOK_S)
        found = await asyncio.to_thread(memory)
        if found.available_bytes < TIGHT_SHARE * found.total_bytes:
            raise ClusterError("memory is short on this device")


async def bring_layers(
    node: Node, context: zmq.asyncio.Context, number: int, layers: Sequence[LayerRef], sources: list[Contact]
) -> None:
    """Fetch ``layers`` into the cache, for load ``number``. Raises ``PrimadError``."""
    place, unique = node.workspace, {ref.digest: ref for ref in layers}
    lease_layers(place, number, layers)
    if missing := await missing_layers(place.cache, unique.values()):
        await fetch_layers(node.transfers(context), sources, missing, place.cache, lambda _: None)
    place.cache.touch(set(unique))
