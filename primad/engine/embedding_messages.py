"""What the head and its embedding process say to each other, in frames of msgpack; vectors are float32, little-endian."""

from __future__ import annotations

import msgspec


class LoadEmbedder(msgspec.Struct, frozen=True, kw_only=True, tag="load"):
    """Load the model file ``path`` for so many compute ``threads``; answered with ``EmbedderReady``."""

    path: str
    threads: int


class CheckTexts(msgspec.Struct, frozen=True, kw_only=True, tag="check"):
    """Whether all texts, or lists of token ids, can be embedded; answered with ``TextsChecked``.

    What is too long is cut if ``cuts``, and else refused.
    """

    texts: list[str | list[int]]
    cuts: bool


class EmbedText(msgspec.Struct, frozen=True, kw_only=True, tag="embed"):
    """Embed one of them; answered with ``EmbeddedText``."""

    text: str | list[int]
    cuts: bool


class EmbedderReady(msgspec.Struct, frozen=True, kw_only=True, tag="ready"):
    """Vectors have ``width`` numbers, a text at most ``max_text_tokens``; the process holds so many ``bytes``."""

    width: int
    max_text_tokens: int
    bytes: int


class TextsChecked(msgspec.Struct, frozen=True, kw_only=True, tag="checked"):
    """The tokens of all texts together, of those that will be computed."""

    tokens: int


class EmbeddedText(msgspec.Struct, frozen=True, kw_only=True, tag="embedded"):
    """The vector, of length 1."""

    vector: bytes


class TextRefused(msgspec.Struct, frozen=True, kw_only=True, tag="refused"):
    """What is wrong with the text ``index``."""

    index: int
    error: str


class EmbedderFailed(msgspec.Struct, frozen=True, tag="failed"):
    """What llama.cpp cannot do."""

    error: str


EmbeddingTask = LoadEmbedder | CheckTexts | EmbedText
EmbeddingReply = EmbedderReady | TextsChecked | EmbeddedText | TextRefused | EmbedderFailed
