"""By what the KV cells of a run of positions are known.

What a cell holds follows from all tokens up to it, from the model, and, in the last bits, from which rows were computed
together. So a *block*, the cells of positions ``start <= p < end`` of a sequence, is known by a digest over the block before
it, its tokens and the ends of the steps that computed them. Blocks make a chain: the key of the last one names all of them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import msgspec

KEY_HEX = 32
"""A key is so many lower-case hexadecimal digits."""


class KvBlock(msgspec.Struct, frozen=True, array_like=True):
    """Positions ``start <= p < end`` of a sequence, known by ``key``, behind the block ``before`` (empty: the first)."""

    key: str
    before: str
    start: int
    end: int


def block(root: str, before: KvBlock | None, tokens: Sequence[int], ends: Sequence[int]) -> KvBlock:
    """The block of ``tokens`` (at least one) behind ``before``, computed in steps that ended at positions ``ends``.

    ``root`` says whose cells they are: the model, the types of its cells, and, where prefixes are not shared, who asked.
    """
    start = before.end if before is not None else 0
    assert tokens
    body = msgspec.msgpack.encode((root, before.key if before is not None else "", start, list(tokens), list(ends)))
    key = hashlib.blake2b(body, digest_size=KEY_HEX // 2).hexdigest()
    return KvBlock(key=key, before=before.key if before is not None else "", start=start, end=start + len(tokens))
