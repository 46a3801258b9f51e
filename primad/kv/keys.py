"""How the KV cells of a run of positions are identified.

The contents of a cell follow from all tokens up to it, from the model, and, in the last bits, from which rows were
computed together. So a *block*, the cells of positions ``start <= p < end`` of a sequence, is identified by a digest
over the block before it, its tokens and the ends of the steps that computed them. Blocks make a chain: the key of the
last one names all of them.

Some layers have one state of all earlier tokens, instead of cells or in addition to them. A block of cells may be
followed by a block with that state, which has no positions. It is not a link of the chain: cells follow cells, whether
there is a state or not.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence

import msgspec

KEY_HEX = 32
"""Number of lower-case hexadecimal digits of a key."""


class KvBlock(msgspec.Struct, frozen=True, array_like=True):
    """Positions ``start <= p < end`` of a sequence, with key ``key``, after the block ``before`` (empty: the first).

    Without positions it is the state after the cells of ``before``.
    """

    key: str
    before: str
    start: int
    end: int

    @property
    def is_state(self) -> bool:
        """Whether it has a state instead of cells."""
        return self.start == self.end


def block(root: str, before: KvBlock | None, tokens: Sequence[int], ends: Sequence[int]) -> KvBlock:
    """The block of ``tokens`` (at least one) after ``before``, computed in steps that ended at positions ``ends``.

    ``root`` identifies whose cells they are: the model, the types of its cells, and the owner where prefixes are not
    shared.
    """
    start = before.end if before is not None else 0
    assert tokens
    body = msgspec.msgpack.encode((root, before.key if before is not None else "", start, list(tokens), list(ends)))
    key = hashlib.blake2b(body, digest_size=KEY_HEX // 2).hexdigest()
    return KvBlock(key=key, before=before.key if before is not None else "", start=start, end=start + len(tokens))


def state_behind(cells: KvBlock) -> KvBlock:
    """The block of the state after ``cells``."""
    body = msgspec.msgpack.encode(("state", cells.key))
    key = hashlib.blake2b(body, digest_size=KEY_HEX // 2).hexdigest()
    return KvBlock(key=key, before=cells.key, start=cells.end, end=cells.end)


def last_cells(chain: Sequence[KvBlock]) -> KvBlock | None:
    """The last block of ``chain`` that is not a state."""
    return next((each for each in reversed(chain) if not each.is_state), None)


def follows(chain: Sequence[KvBlock], block: KvBlock) -> bool:
    """Whether ``block`` is the next one of ``chain``, or the state after its last cells."""
    if block.is_state and chain and chain[-1].is_state:
        return False
    last = last_cells(chain)
    before = ("", 0) if last is None else (last.key, last.end)
    return (block.before, block.start) == before


def is_chain(blocks: Iterable[KvBlock]) -> bool:
    """Whether each of ``blocks`` follows those before it, from position 0 on."""
    chain: list[KvBlock] = []
    for each in blocks:
        if not follows(chain, each):
            return False
        chain.append(each)
    return True


def up_to_lacking(chain: Iterable[KvBlock], is_held: Callable[[KvBlock], bool]) -> list[KvBlock]:
    """The blocks of ``chain`` that are held, up to the first missing cells: a state may be missing."""
    found = []
    for each in chain:
        if is_held(each):
            found.append(each)
        elif not each.is_state:
            break
    return found


def to_go_on_from(chain: Sequence[KvBlock]) -> list[KvBlock]:
    """``chain`` up to its last state."""
    end = next((place for place in range(len(chain), 0, -1) if chain[place - 1].is_state), 0)
    return list(chain[:end])
