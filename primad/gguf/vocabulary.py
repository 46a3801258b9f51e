"""Whether two models read and write the same tokens."""

from __future__ import annotations

from typing import Final

from primad.errors import ModelError, printable
from primad.gguf.header import Header, Scalar

TOKENS: Final = "tokenizer.ggml.tokens"
_KINDS: Final = ("tokenizer.ggml.model", "tokenizer.ggml.pre")
MAX_MORE: Final = 128
"""Maximum number of additional tokens at the end of one vocabulary: models of one family are padded differently."""


def vocabulary_difference(one: Header, other: Header) -> str | None:
    """How the tokens of ``other`` differ from those of ``one``; None if each token is the same in both.

    Raises ``ModelError`` for a file without tokens.
    """
    for key in _KINDS:
        here, there = one.text(key, ""), other.text(key, "")
        if here != there:
            return f"its {key} is {there or 'not set'}, not {here or 'unset'}"
    ours, theirs = _tokens(one), _tokens(other)
    if abs(len(ours) - len(theirs)) > MAX_MORE:
        return f"it has {len(theirs)} tokens, not {len(ours)}"
    for token, (ours_is, theirs_is) in enumerate(zip(ours, theirs, strict=False)):
        if ours_is != theirs_is:
            return f"its token {token} is {printable(theirs_is)!r}, not {printable(ours_is)!r}"
    return None


def _tokens(header: Header) -> list[Scalar]:
    value = header.values.get(TOKENS)
    if value is None or not value.is_array:
        raise ModelError(f"{header.path}: has no {TOKENS}; the file is not a complete model")
    return value.items()
