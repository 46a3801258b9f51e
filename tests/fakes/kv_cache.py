"""Synthetic KV data that encodes its layer and position."""

from __future__ import annotations

from collections.abc import Iterable

from primad.kv.cells import LayerCells
from primad.kv.keys import KvBlock


def cells_of(block: KvBlock, layers: Iterable[int], cell_bytes: int, salt: int = 0) -> list[LayerCells]:
    """KV data of ``block``: per token, keys and values take ``cell_bytes`` each, an even number; ``salt`` varies it."""
    rows = block.end - block.start
    return [
        LayerCells(
            layer=layer,
            start=block.start,
            end=block.end,
            key_type=1,
            value_type=1,
            keys=bytes([layer, block.start % 124]) * (rows * cell_bytes // 2),
            values=bytes([layer + 1 + salt]) * (rows * cell_bytes),
        )
        for layer in layers
    ]
