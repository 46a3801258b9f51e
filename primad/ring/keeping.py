"""Which parts of the KV cache are kept as which blocks, and when a block is no longer needed.

A chunk of a prompt becomes a block once its last row is in the step log, and so does every run of ``rows`` rows of a
completion, sampled or recomputed. The operation that keeps it is put at the start of the next step: then each window
has computed the block, and no other generation has used its sequence yet. A block is reported as kept once that step is
back, and as forgotten when no sequence has it any more.

Where layers have a recurrent state, which exists only for the latest row, it is kept in the same way right after the
block that ends there. A chain resumes from the last state that all devices have, so the latest ones are needed: at the
end of a prompt there are three at once, and the last one may not be copied yet. Earlier ones are forgotten; a cache may
still have them.

Pieces of a chunk, and tokens of a known completion that are computed several at a time, have the same bits as the whole
chunk and as single rows, so they give the same blocks.
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
from primad.ring.messages import Generate, KvBegun, KvForgotten, KvKeep, KvKept, KvNews

STATES_OF_CHAIN: Final = 3
"""How many states of a chain, the latest, are needed."""
STATES_BROUGHT: Final = 2
"""How many states are sent to devices that lack them: the latest, and one more in case that cannot be had."""


def prompt_blocks(chunking: Chunking, prompt: Sequence[int], root: str) -> list[KvBlock]:
    """The blocks of ``prompt``, one per chunk, as saved under ``root``. A new generation may use all but the last."""
    return list(_prompt_blocks(chunking, prompt, root))


def _prompt_blocks(chunking: Chunking, prompt: Sequence[int], root: str) -> Iterator[KvBlock]:
    last, end = None, 0
    while (first := end) < len(prompt):
        end = chunking.end(prompt, first)
        last = block_of(root, last, prompt[first:end], (end,))
        yield last


def without_old_states(chain: Sequence[KvBlock]) -> list[KvBlock]:
    """``chain`` with only the states that a new generation may begin with."""
    old = {each.key for each in [each for each in chain if each.is_state][:-STATES_BROUGHT]}
    return [each for each in chain if each.key not in old]


@dataclass(frozen=True, slots=True)
class Usable:
    """The part of a generation that need not be computed: its first ``blocks``, of which the first ``chunks`` are this
    ring's chunks.

    Chunks of the ring that computed the other blocks may have ended elsewhere.
    """

    blocks: list[KvBlock]
    chunks: int

    @property
    def end(self) -> int:
        """Number of cells that are in blocks."""
        return self.blocks[-1].end if self.blocks else 0


def usable(chunking: Chunking, generate: Generate, *, needs_state: bool = False) -> Usable:
    """Return which of ``generate.blocks`` may be used; where the model ``needs_state``, up to the last state.

    Without a sampled token only whole chunks count, and never the whole prompt: the first token is sampled from the
    logits of the last chunk. A request in progress resumes from its own KV cache, except for the last token that is
    known.
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
    """The blocks of one KV sequence from its first cell on, saved or about to be; ``root`` is empty where nothing is
    saved.

    The first ``reported`` were reported as those of ``request``, the latest generation that had the sequence.
    """

    request: int = 0
    root: str = ""
    blocks: list[KvBlock] = field(default_factory=list)
    reported: int = 0

    @property
    def end(self) -> int:
        """Number of cells that are in blocks."""
        return self.blocks[-1].end if self.blocks else 0

    def before(self, end: int, root: str) -> list[KvBlock]:
        """Its blocks of positions before ``end`` that do not belong to another ``root``."""
        return [each for each in self.blocks if each.end <= end] if self.root == root else []


class Keeping:
    """The blocks of all chains, and the steps with the operations that keep them."""

    def __init__(self) -> None:
        self._having: Counter[str] = Counter()
        """By key: the number of chains and leases that have it."""
        self._waiting: dict[str, KvKeep] = {}
        self._out: dict[int, list[str]] = {}
        """By step: the keys that it saves, until it is back."""
        self._held: set[str] = set()
        self._forgotten: dict[str, None] = {}
        self._begun: list[str] = []
        """Keys that steps keep and that are in no news yet."""

    @property
    def is_waiting(self) -> bool:
        """Whether the next step has something to save."""
        return bool(self._waiting)

    def lease(self, generate: Generate) -> None:
        """Hold the blocks that ``generate`` brings for as long as it exists."""
        for each in generate.blocks:
            self._need(each)
            self._held.add(each.key)

    def end_lease(self, generate: Generate) -> None:
        """Release the blocks of ``generate``, which is over."""
        self._drop(generate.blocks)

    def begin(self, chain: Chain, generate: Generate, blocks: Sequence[KvBlock], *, reported: bool) -> None:
        """Make ``chain`` that of ``generate``, with ``blocks`` that it has already; ``reported`` says whether the head
        knows of them."""
        before, chain.request, chain.root = chain.blocks, generate.request, generate.root
        chain.blocks, chain.reported = list(blocks), len(blocks) if reported else 0
        for each in blocks:
            self._need(each)
        self._drop(before)

    def cut(self, chain: Chain, ends: Sequence[int]) -> None:
        """Let ``chain`` keep its blocks up to the first that ends at none of ``ends``."""
        blocks = list(takewhile(lambda each: each.end in ends, chain.blocks))
        dropped, chain.blocks = chain.blocks[len(blocks) :], blocks
        chain.reported = min(chain.reported, len(blocks))
        self._drop(dropped)

    def add(self, chain: Chain, sequence: int, tokens: Sequence[int], ends: Sequence[int]) -> None:
        """Add the next block of ``chain``, which the steps handed out so far compute in ``sequence``."""
        self._add(chain, sequence, block_of(chain.root, last_cells(chain.blocks), tokens, ends))

    def add_state(self, chain: Chain, sequence: int) -> None:
        """Save the state of ``sequence``, which is at the end of ``chain``."""
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
        if block.key in self._forgotten:  # not reported yet: it is held
            del self._forgotten[block.key]
            self._held.add(block.key)

    def _drop(self, blocks: Iterable[KvBlock]) -> None:
        for key in (each.key for each in blocks):
            self._having[key] -= 1
            if not self._having[key]:
                self._waiting.pop(key, None)
                self._forget(key)

    def _forget(self, key: str) -> None:
        """Release block ``key``, which nothing needs. One that is still being kept is reported when that is done."""
        del self._having[key]
        if key in self._held:
            self._held.remove(key)
            self._forgotten[key] = None

    def hand_out(self, step: int) -> list[KvKeep]:
        """The operations with which ``step`` begins, to keep blocks."""
        ops, self._waiting = list(self._waiting.values()), {}
        if ops:
            self._out[step] = [op.block.key for op in ops]
            self._begun += self._out[step]
        return ops

    def back(self, step: int) -> None:
        """Note that ``step`` passed all windows."""
        for key in self._out.pop(step, ()):
            self._held.add(key)
            if not self._having[key]:
                self._forget(key)

    def news(self, chains: Iterable[Chain]) -> list[KvNews]:
        """Return the keys that steps keep, the unreported blocks of ``chains``, and the keys of forgotten blocks."""
        reported: list[KvNews] = []
        if self._begun:
            reported.append(KvBegun(keys=self._begun))
            self._begun = []
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
