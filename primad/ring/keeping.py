"""Which cells of the log are kept, as which blocks, and when nothing needs them any more.

A chunk of a prompt is a block once its last row is in the log, and so is every run of ``rows`` rows of an answer, drawn or
computed again. The operation that keeps it goes in front of the next step: then each window has computed it, and nobody has
had its sequence since. A block is told as kept once that step is back, and as forgotten when no sequence has it any more.

Where layers have a state, which only the latest row has, it is kept in the same way right behind the block that ends there.
A chain goes on from the last one that all devices have, so the latest of them are needed: where a prompt ends there are
three at once, and the last one may not be copied yet. Those before are forgotten; a cache may have them still.

Pieces of a chunk, and rows of a known answer that are computed some at a time, have the bits of the whole and of single
rows: they make the same blocks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Final

from primad.kv.keys import KvBlock, last_cells, state_behind, to_go_on_from
from primad.kv.keys import block as block_of
from primad.ring.chunks import Chunking
from primad.ring.messages import Generate, KvForgotten, KvKeep, KvKept

STATES_OF_CHAIN: Final = 3
"""So many of its states are needed, the latest."""
STATES_BROUGHT: Final = 2
"""So many are brought to devices that lack them: the latest, and one if that is not to be had."""


def prompt_blocks(chunking: Chunking, prompt: Sequence[int], root: str) -> list[KvBlock]:
    """The blocks of ``prompt``, one a chunk, as they are kept under ``root``. A new generation may have all but the last."""
    return list(_prompt_blocks(chunking, prompt, root))


def _prompt_blocks(chunking: Chunking, prompt: Sequence[int], root: str) -> Iterator[KvBlock]:
    last, end = None, 0
    while (first := end) < len(prompt):
        end = chunking.end(prompt, first)
        last = block_of(root, last, prompt[first:end], (end,))
        yield last


def without_old_states(chain: Sequence[KvBlock]) -> list[KvBlock]:
    """``chain`` with the states that a new generation may begin with."""
    old = {each.key for each in [each for each in chain if each.is_state][:-STATES_BROUGHT]}
    return [each for each in chain if each.key not in old]


@dataclass(frozen=True, slots=True)
class Usable:
    """What of a generation need not be computed: its first ``blocks``, of which the first ``chunks`` are this ring's chunks.

    Those of the ring that computed them may have ended elsewhere.
    """

    blocks: list[KvBlock]
    chunks: int

    @property
    def end(self) -> int:
        """The cells that are in blocks."""
        return self.blocks[-1].end if self.blocks else 0


def usable(chunking: Chunking, generate: Generate, *, needs_state: bool = False) -> Usable:
    """What of ``generate.blocks`` may be used; where it ``needs_state``, up to one.

    Without a token of its answer only whole chunks, never all: what follows is drawn from the logits of the last one. An
    answer that was begun goes on with its own cells, but for that of the last token that is known.
    """
    given, prompt = generate.blocks, generate.prompt
    cells = [each for each in given if not each.is_state]
    pairs = zip(cells, _prompt_blocks(chunking, prompt, generate.root), strict=False) if generate.root else ()
    same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
    if not generate.root or not (generate.sampled or generate.reuses):
        return Usable([], 0)
    last = len(prompt) + len(generate.sampled) - 1
    if not generate.sampled:
        last = min(last, cells[same - 1].end if same else 0)
    found = list(takewhile(lambda each: each.end <= last, given))
    found = to_go_on_from(found) if needs_state else found
    return Usable(found, min(same, sum(not each.is_state for each in found)))


@dataclass(slots=True)
class Chain:
    """The blocks of one KV sequence from its first cell on, kept or about to be; ``root`` is empty where none are.

    ``reported`` of them were told as those of ``request``, the latest generation that had the sequence.
    """

    request: int = 0
    root: str = ""
    blocks: list[KvBlock] = field(default_factory=list)
    reported: int = 0

    @property
    def end(self) -> int:
        """The cells that are in blocks."""
        return self.blocks[-1].end if self.blocks else 0

    def before(self, end: int, root: str) -> list[KvBlock]:
        """Its blocks of positions before ``end``, which are none of another ``root``."""
        return [each for each in self.blocks if each.end <= end] if self.root == root else []


class Keeping:
    """Which blocks there are in all chains, and where the operations that keep them are."""

    def __init__(self) -> None:
        self._having: Counter[str] = Counter()
        """By key: how many chains and leases have it."""
        self._waiting: dict[str, KvKeep] = {}
        self._out: dict[int, list[str]] = {}
        """By step: what it keeps, until it is back."""
        self._held: set[str] = set()
        self._forgotten: dict[str, None] = {}

    @property
    def is_waiting(self) -> bool:
        """Whether the next step has something to keep."""
        return bool(self._waiting)

    def lease(self, generate: Generate) -> None:
        """What ``generate`` brings is held, and needed as long as there is ``generate``."""
        for each in generate.blocks:
            self._need(each)
            self._held.add(each.key)

    def end_lease(self, generate: Generate) -> None:
        """``generate`` is over."""
        self._drop(generate.blocks)

    def begin(self, chain: Chain, generate: Generate, blocks: Sequence[KvBlock], *, reported: bool) -> None:
        """``chain`` is that of ``generate`` now and has ``blocks`` already, which need not be ``reported``, or must."""
        before, chain.request, chain.root = chain.blocks, generate.request, generate.root
        chain.blocks, chain.reported = list(blocks), len(blocks) if reported else 0
        for each in blocks:
            self._need(each)
        self._drop(before)

    def cut(self, chain: Chain, ends: Sequence[int]) -> None:
        """``chain`` goes on to have its blocks up to the first that ends at none of ``ends``."""
        blocks = list(takewhile(lambda each: each.end in ends, chain.blocks))
        dropped, chain.blocks = chain.blocks[len(blocks) :], blocks
        chain.reported = min(chain.reported, len(blocks))
        self._drop(dropped)

    def add(self, chain: Chain, sequence: int, tokens: Sequence[int], ends: Sequence[int]) -> None:
        """The next block of ``chain`` is computed in ``sequence``, by the steps handed out so far."""
        self._add(chain, sequence, block_of(chain.root, last_cells(chain.blocks), tokens, ends))

    def add_state(self, chain: Chain, sequence: int) -> None:
        """``sequence`` is where ``chain`` ends: keep its state."""
        before = last_cells(chain.blocks)
        if before is None or chain.blocks[-1].is_state:
            return
        self._add(chain, sequence, state_behind(before))
        old = [each for each in chain.blocks if each.is_state][:-STATES_OF_CHAIN]
        for each in old:
            chain.reported -= chain.blocks.index(each) < chain.reported
            chain.blocks.remove(each)
        self._drop(old)

    def _add(self, chain: Chain, sequence: int, found: KvBlock) -> None:
        chain.blocks.append(found)
        self._need(found)
        is_out = any(found.key in keys for keys in self._out.values())
        if not is_out and found.key not in self._held:
            self._waiting.setdefault(found.key, KvKeep(sequence, found))

    def _need(self, block: KvBlock) -> None:
        self._having[block.key] += 1
        if block.key in self._forgotten:  # which nobody was told yet: it is held
            del self._forgotten[block.key]
            self._held.add(block.key)

    def _drop(self, blocks: Iterable[KvBlock]) -> None:
        for key in (each.key for each in blocks):
            self._having[key] -= 1
            if not self._having[key]:
                self._waiting.pop(key, None)
                self._forget(key)

    def _forget(self, key: str) -> None:
        """Nothing needs block ``key``. One that is on its way to be kept is told when that is done."""
        del self._having[key]
        if key in self._held:
            self._held.remove(key)
            self._forgotten[key] = None

    def hand_out(self, step: int) -> list[KvKeep]:
        """What ``step`` keeps before anything else."""
        ops, self._waiting = list(self._waiting.values()), {}
        if ops:
            self._out[step] = [op.block.key for op in ops]
        return ops

    def back(self, step: int) -> None:
        """``step`` was in all windows."""
        for key in self._out.pop(step, ()):
            self._held.add(key)
            if not self._having[key]:
                self._forget(key)

    def news(self, chains: Iterable[Chain]) -> list[KvKept | KvForgotten]:
        """What was not told yet of ``chains``, and of those that had blocks before."""
        reported: list[KvKept | KvForgotten] = []
        for chain in chains:
            if chain.reported == len(chain.blocks):
                continue
            blocks = list(takewhile(lambda each: each.key in self._held, chain.blocks[chain.reported :]))
            if blocks:
                chain.reported += len(blocks)
                reported.append(KvKept(request=chain.request, blocks=blocks))
        if self._forgotten:
            reported.append(KvForgotten(keys=list(self._forgotten)))
            self._forgotten = {}
        return reported
