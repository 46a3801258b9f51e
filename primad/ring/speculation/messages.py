"""What the head's ring process and a draft process say to each other, on a private socket pair."""

from __future__ import annotations

from typing import Annotated, Final

import msgspec
from msgspec import Meta

from primad.errors import ProtocolError
from primad.ring.speculation.drafter import MAX_ROOM

MAX_REPORTED: Final = 8 * MAX_ROOM
"""Drafts behind one text, those in place of others among them."""
MAX_UNREPORTED_BYTES: Final = 1 << 20
"""A draft process may be so far behind, as while it loads; then it is as good as gone."""
MAX_TEXT_TOKENS: Final = 1 << 20
MAX_DRAFT_S: Final = 3600.0
"""No draft takes longer on any device that drafts."""

TextTokens = Annotated[list[int], Meta(max_length=MAX_TEXT_TOKENS)]


class DraftModel(msgspec.Struct, frozen=True, kw_only=True, tag="model"):
    """The first message: draft with the model file ``path``, which has so many ``layers`` and ``bytes`` of weights, on so
    many ``threads``, ``maximum`` tokens at most in texts of at most ``context``. Its process takes ``memory_bytes``.

    On a device that has no model file ``path`` is the metadata, and the weights are in the layer ``files``; it then has so
    many tokens in its ``vocabulary``. Until ``first`` tokens are drafted behind each other nothing is in their place.
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
    """From now on draft how ``tokens`` go on, which are text ``number``."""

    number: int
    tokens: TextTokens


class DraftTokens(msgspec.Struct, frozen=True, tag="tokens"):
    """They go on with ``tokens``, behind the first ``known`` of them; what does not was lost on its way before."""

    tokens: TextTokens
    known: int


class Drafted(msgspec.Struct, frozen=True, kw_only=True, tag="drafted"):
    """What may come behind the first ``known`` tokens of text ``number``: each of ``tokens`` behind that at the place which
    ``parents`` says (-1: the text), so sure behind that; without ``parents`` each behind the one before.

    A parent comes before those behind it, the likeliest of them first. The latest one took ``draft_s``; None where that was
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
"""What a process that has its model is told."""


def check_drafted(drafted: Drafted, vocabulary: int) -> None:
    """Judge what another device drafts. Raises ``ProtocolError`` where that is no draft of one of so many tokens."""
    count = len(drafted.tokens)
    well_formed = count <= MAX_REPORTED and len(drafted.sures) == count and len(drafted.parents) in (0, count)
    if not well_formed or drafted.known < 0 or any(not -1 <= a < i for i, a in enumerate(drafted.parents)):
        raise ProtocolError("drafts that do not belong to each other")
    pairs = zip(drafted.tokens, drafted.sures, strict=True)
    if not all(0 <= token < vocabulary and 0 <= sure <= 1 for token, sure in pairs):
        raise ProtocolError(f"a draft that is none of {vocabulary} tokens, or surer than sure")
    if drafted.draft_s is not None and not 0 <= drafted.draft_s <= MAX_DRAFT_S:
        raise ProtocolError("a draft that took no time that there is")
