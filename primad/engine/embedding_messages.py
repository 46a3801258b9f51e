"""Messages between the head and its embedding process, in frames of msgpack; vectors are little-endian float32."""

from __future__ import annotations

import msgspec


class LoadEmbedder(msgspec.Struct, frozen=True, kw_only=True, tag="load"):
    """Load the model file ``path`` with this number of compute ``threads``; answered with ``EmbedderReady``."""

    path: str
    threads: int


class CheckTexts(msgspec.Struct, frozen=True, kw_only=True, tag="check"):
    """Check whether all texts, or lists of token ids, can be embedded; answered with ``TextsChecked``.

    Texts that are too long are cut if ``cuts``, else refused.
    """

    texts: list[str | list[int]]
    cuts: bool


class EmbedText(msgspec.Struct, frozen=True, kw_only=True, tag="embed"):
    """Embed one text; answered with ``EmbeddedText``."""

    text: str | list[int]
    cuts: bool


class EmbedderReady(msgspec.Struct, frozen=True, kw_only=True, tag="ready"):
    """Vectors have ``width`` numbers, a text at most ``max_text_tokens``; the process uses ``bytes`` of memory."""

    width: int
    max_text_tokens: int
    bytes: int


class TextsChecked(msgspec.Struct, frozen=True, kw_only=True, tag="checked"):
    """Number of tokens of all texts together, after cutting."""

    tokens: int


class EmbeddedText(msgspec.Struct, frozen=True, kw_only=True, tag="embedded"):
    """The vector, of length 1."""

    vector: bytes


class TextRefused(msgspec.Struct, frozen=True, kw_only=True, tag="refused"):
    """Why the text at ``index`` is refused."""

    index: int
    error: str


class EmbedderFailed(msgspec.Struct, frozen=True, tag="failed"):
    """What llama.cpp failed at."""

    error: str


EmbeddingTask = LoadEmbedder | CheckTexts | EmbedText
EmbeddingReply = EmbedderReady | TextsChecked | EmbeddedText | TextRefused | EmbedderFailed
