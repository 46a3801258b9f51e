"""Messages between the head's ring process and a draft process, on a private socket pair."""

from __future__ import annotations

from typing import Annotated, Final

import msgspec
from msgspec import Meta

from primad.errors import ProtocolError
from primad.ring.speculation.drafter import MAX_ROOM

MAX_REPORTED: Final = 8 * MAX_ROOM
"""Limit of drafts after one text, including alternatives."""
MAX_UNREPORTED_BYTES: Final = 1 << 20
"""How far a draft process may be behind, for instance while it loads; beyond that it counts as gone."""
MAX_TEXT_TOKENS: Final = 1 << 20
MAX_DRAFT_S: Final = 3600.0
"""No draft takes longer on any device that drafts."""

TextTokens = Annotated[list[int], Meta(max_length=MAX_TEXT_TOKENS)]


class DraftModel(msgspec.Struct, frozen=True, kw_only=True, tag="model"):
    """The first message: draft with the model file ``path``, which has ``layers`` layers and ``bytes`` of weights, on
    ``threads`` threads, at most ``maximum`` tokens, in texts of at most ``context`` tokens. Its process takes
    ``memory_bytes``.

    On a device without the model file, ``path`` is the metadata and the weights are in the layer ``files``;
    ``vocabulary`` is then its number of tokens. Alternatives are drafted only after ``first`` consecutive tokens are.
    """

    path: str
    layers: int
    bytes: int
    memory_bytes: int
    threads: int
    context: int
    maximum: int = MAX_ROOM
    files: tuple[str, ...] = ()
    vocabulary: int = 0
    first: int = 0


class DraftText(msgspec.Struct, frozen=True, kw_only=True, tag="text"):
    """Draft the continuation of ``tokens``, which are text ``number``, from now on."""

    number: int
    tokens: TextTokens


class DraftTokens(msgspec.Struct, frozen=True, tag="tokens"):
    """The text continues with ``tokens`` after its first ``known``; if these do not match, a message before was
    lost."""

    tokens: TextTokens
    known: int


class Drafted(msgspec.Struct, frozen=True, kw_only=True, tag="drafted"):
    """Drafts after the first ``known`` tokens of text ``number``: each of ``tokens`` follows the draft whose place is
    in ``parents`` (-1: the text), with confidence ``sures`` given that draft; without ``parents`` each follows the one
    before.

    A parent comes before its children, the likeliest child first. The latest draft took ``draft_s``; None if that was
    not measured.
    """

    number: int
    known: int
    tokens: Annotated[list[int], Meta(max_length=MAX_REPORTED)]
    sures: Annotated[list[float], Meta(max_length=MAX_REPORTED)]
    draft_s: float | None = None
    parents: Annotated[list[int], Meta(max_length=MAX_REPORTED)] = []


DraftTask = DraftModel | DraftText | DraftTokens
TextTask = DraftText | DraftTokens
"""Messages for a process that has its model."""


def check_drafted(drafted: Drafted, vocabulary: int) -> None:
    """Check drafts of another device. Raises ``ProtocolError`` unless they are drafts of a model with ``vocabulary``
    tokens."""
    count = len(drafted.tokens)
    well_formed = count <= MAX_REPORTED and len(drafted.sures) == count and len(drafted.parents) in (0, count)
    if not well_formed or drafted.known < 0 or any(not -1 <= a < i for i, a in enumerate(drafted.parents)):
        raise ProtocolError("drafts whose lists do not match")
    pairs = zip(drafted.tokens, drafted.sures, strict=True)
    if not all(0 <= token < vocabulary and 0 <= sure <= 1 for token, sure in pairs):
        raise ProtocolError(f"a draft that is not one of {vocabulary} tokens, or has no probability from 0 to 1")
    if drafted.draft_s is not None and not 0 <= drafted.draft_s <= MAX_DRAFT_S:
        raise ProtocolError("a draft whose time is negative or too long")
