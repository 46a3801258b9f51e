"""Log-probabilities of tokens in the two forms of OpenAI's API. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Final

import msgspec

from primad.api.answering.backend import TokenPieces
from primad.api.answering.text import Placed
from primad.api.dialects.openai.shapes import ChatLogprobs, CompletionLogprobs, TokenLogprob, TopLogprob
from primad.ring.messages import Sampled

IMPOSSIBLE: Final = -9999.0
"""OpenAI's value for an impossible token: JSON has no minus infinity."""


def chat_logprobs(tokens: Sequence[Placed[Sampled]], vocabulary: TokenPieces) -> ChatLogprobs:
    """The tokens in chat form."""
    return ChatLogprobs(content=[_chat_entry(token.entry, vocabulary) for token in tokens])


def encoded_chat(tokens: Iterable[Placed[Sampled]], vocabulary: TokenPieces) -> Iterator[bytes]:
    """Yield the tokens in chat form one by one, as JSON."""
    return (msgspec.json.encode(_chat_entry(token.entry, vocabulary)) for token in tokens)


def completion_logprobs(tokens: Sequence[Placed[Sampled]], vocabulary: TokenPieces) -> CompletionLogprobs:
    """The tokens in completion form; the sampled token is always among its alternatives."""
    return CompletionLogprobs(
        tokens=[token_text(token.entry.token, vocabulary) for token in tokens],
        token_logprobs=[_logprob(token.entry) for token in tokens],
        top_logprobs=[_alternatives(token.entry, vocabulary) for token in tokens],
        text_offset=[token.start_chars for token in tokens],
    )


def encoded_completion(tokens: Sequence[Placed[Sampled]], vocabulary: TokenPieces) -> dict[str, Iterator[bytes]]:
    """Return the lists of the completion form by name, each yielding its items one by one as JSON."""
    encode = msgspec.json.encode
    return {
        "tokens": (encode(token_text(token.entry.token, vocabulary)) for token in tokens),
        "token_logprobs": (encode(_logprob(token.entry)) for token in tokens),
        "top_logprobs": (encode(_alternatives(token.entry, vocabulary)) for token in tokens),
        "text_offset": (encode(token.start_chars) for token in tokens),
    }


def token_text(token: int, vocabulary: TokenPieces) -> str:
    """Return a token as text: its characters, ``bytes:\\xf0\\x9f`` if it is not whole characters, or a special token's
    name."""
    piece = vocabulary.piece(token)
    if not piece:
        return vocabulary.name(token)
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in piece)


def _chat_entry(sampled: Sampled, vocabulary: TokenPieces) -> TokenLogprob:
    return TokenLogprob(
        token=token_text(sampled.token, vocabulary),
        logprob=_logprob(sampled),
        bytes=list(vocabulary.piece(sampled.token)),
        top_logprobs=[
            TopLogprob(
                token=token_text(token, vocabulary),
                logprob=max(logprob, IMPOSSIBLE),
                bytes=list(vocabulary.piece(token)),
            )
            for token, logprob in sampled.top
        ],
    )


def _alternatives(sampled: Sampled, vocabulary: TokenPieces) -> dict[str, float]:
    best_first = (*sampled.top, (sampled.token, _logprob(sampled)))
    alternatives: dict[str, float] = {}
    for token, logprob in best_first:
        alternatives.setdefault(token_text(token, vocabulary), max(logprob, IMPOSSIBLE))
    return alternatives


def _logprob(sampled: Sampled) -> float:
    assert sampled.logprob is not None, "the backend left out a log-probability that was asked for"
    return max(sampled.logprob, IMPOSSIBLE)
