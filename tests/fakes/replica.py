"""What the head's daemon does about KV cells, in one variable: it notes what is kept, has it moved, and has it forgotten."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise

from primad.kv.keys import KvBlock
from primad.ring.messages import Generate, KvForgotten, KvKept
from tests.fakes.kv_writer import FakeKvWriter
from tests.fakes.ring import FakeRing


class FakeReplica:
    """The chains of the generations that are not over."""

    def __init__(self) -> None:
        self.chains: dict[int, list[KvBlock]] = {}

    def note(self, event: KvKept | KvForgotten, shelves: Iterable[FakeKvWriter]) -> None:
        """Do what follows from an event of the ring whose devices have ``shelves``."""
        match event:
            case KvKept(request=request, blocks=blocks):
                assert blocks
                assert all(each.before == before.key and each.start == before.end for before, each in pairwise(blocks))
                if request in self.chains:
                    known = self.chains[request]
                    behind = [each for each in known if each.end <= blocks[0].start]
                    assert (behind[-1].key if behind else "") == blocks[0].before, "not the next of its chain"
                    self.chains[request] = [*behind, *blocks]
            case KvForgotten(keys=keys):
                leased = {each.key for chain in self.chains.values() for each in chain}
                for kv_writer in shelves:
                    kv_writer.forget(set(keys) - leased)

    def give(self, generate: Generate) -> None:
        """``generate`` is for the ring now, with the blocks that it brings."""
        self.chains[generate.request] = list(generate.blocks)

    def move(self, ring: FakeRing, others: Iterable[FakeKvWriter]) -> None:
        """``ring`` is new: its devices get what they lack from each other and from ``others``; what is lacking is cut."""
        shelves, sources = ring.shelves, [*ring.shelves, *others]
        for request, chain in self.chains.items():
            for kv_writer, layers in zip(shelves, ring.layers, strict=True):
                for each in chain:
                    kv_writer.fetch(each.key, layers, sources)
            held = [
                all(kv_writer.holds(each.key, layers) for kv_writer, layers in zip(shelves, ring.layers, strict=True))
                for each in chain
            ]
            self.chains[request] = chain[: held.index(False) if False in held else None]
        needed = {each.key for chain in self.chains.values() for each in chain}
        for kv_writer in shelves:
            kv_writer.forget(kv_writer.cells.keys() - needed)
