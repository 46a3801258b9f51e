"""The KV replication of a head's daemon in one variable: it notes kept blocks, and has them moved and forgotten."""

from __future__ import annotations

from collections.abc import Iterable

from primad.kv.keys import KvBlock, follows, up_to_lacking
from primad.ring.keeping import without_old_states
from primad.ring.messages import Generate, KvForgotten, KvKept
from tests.fakes.kv_writer import FakeKvWriter
from tests.fakes.ring import FakeRing


class FakeReplica:
    """The chains of unfinished generations."""

    def __init__(self) -> None:
        self.chains: dict[int, list[KvBlock]] = {}

    def note(self, event: KvKept | KvForgotten, kv_writers: Iterable[FakeKvWriter]) -> None:
        """Apply an event of the ring whose devices have ``kv_writers``."""
        match event:
            case KvKept(request=request, blocks=blocks):
                assert blocks
                if request in self.chains:
                    chain = [each for each in self.chains[request] if each.end <= blocks[0].start]
                    for each in blocks:
                        assert follows(chain, each), "not the next of its chain"
                        chain.append(each)
                    self.chains[request] = without_old_states(chain)
            case KvForgotten(keys=keys):
                for request, chain in self.chains.items():
                    self.chains[request] = [each for each in chain if not (each.is_state and each.key in keys)]
                leased = {each.key for chain in self.chains.values() for each in chain}
                for kv_writer in kv_writers:
                    kv_writer.forget(set(keys) - leased)

    def give(self, generate: Generate) -> None:
        """Submit ``generate``, with its blocks, to the ring."""
        self.chains[generate.request] = list(generate.blocks)

    def move(self, ring: FakeRing, others: Iterable[FakeKvWriter]) -> None:
        """Switch to ``ring``: its devices get missing blocks from each other and ``others``; chains end at gaps."""
        kv_writers, sources = ring.kv_writers, [*ring.kv_writers, *others]
        for request, chain in self.chains.items():
            for kv_writer, layers in zip(kv_writers, ring.layers, strict=True):
                for each in chain:
                    kv_writer.fetch(each.key, layers, sources)
            devices = list(zip(kv_writers, ring.layers, strict=True))
            self.chains[request] = up_to_lacking(
                chain,
                lambda each, devices=devices: all(kv_writer.holds(each.key, layers) for kv_writer, layers in devices),
            )
        needed = {each.key for chain in self.chains.values() for each in chain}
        for kv_writer in kv_writers:
            kv_writer.forget(kv_writer.cells.keys() - needed)
