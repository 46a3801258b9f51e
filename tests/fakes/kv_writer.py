"""A KV writer in memory that detects blocks kept again with other bytes, requested in part, or outside a chain."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from primad.kv.cells import CellShape, LayerCells
from primad.kv.keys import KvBlock


class FakeKvWriter:
    """The blocks that one device holds, by key and layer."""

    def __init__(self) -> None:
        self.shapes: list[CellShape] = []
        self.blocks: dict[str, KvBlock] = {}
        self.cells: dict[str, dict[int, LayerCells]] = {}
        self.kept: list[str] = []
        """The key of every block received, once per window."""
        self.loaded: list[str] = []
        """The key of every chain found."""
        self.flushes = 0

    def keep(self, block: KvBlock, cells: Sequence[LayerCells]) -> None:
        assert self.blocks.setdefault(block.key, block) == block, "one key names two blocks"
        held = self.cells.setdefault(block.key, {})
        assert cells, "a block without layers"
        for each in cells:
            assert (each.start, each.end) == (block.start, block.end), "cells of other positions than their block's"
            assert held.setdefault(each.layer, each) == each, f"block {block.key} was computed with other bytes before"
        self.kept.append(block.key)

    def chain(self, key: str, first: int, last: int) -> list[list[LayerCells]]:
        found: list[list[LayerCells]] = []
        before = key
        while before:
            held = self.cells.get(before, {})
            if not held.keys() >= set(range(first, last)):
                return []
            found.append([held[layer] for layer in range(first, last)])
            before = self.blocks[before].before
        self.loaded.append(key)
        return found[::-1]

    def flush(self) -> bool:
        self.flushes += 1
        return True

    def holds(self, key: str, layers: Iterable[int]) -> bool:
        """Whether it has ``layers`` of a block."""
        return self.cells.get(key, {}).keys() >= set(layers)

    def fetch(self, key: str, layers: Iterable[int], others: Iterable[FakeKvWriter]) -> None:
        """Get missing ``layers`` of a block from the ``others``, as far as they have them."""
        for other in others:
            found = {layer: other.cells.get(key, {}).get(layer) for layer in layers}
            held = {layer: cells for layer, cells in found.items() if cells is not None}
            if held:
                self.blocks[key] = other.blocks[key]
                self.cells.setdefault(key, {}).update(held)

    def forget(self, keys: Collection[str]) -> None:
        for key in keys:
            self.cells.pop(key, None)
            self.blocks.pop(key, None)
