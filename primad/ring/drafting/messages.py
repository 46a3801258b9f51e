"""What the head's ring process and a process that guesses say to each other, on a private socket pair."""

from __future__ import annotations

import msgspec

from primad.ring.drafting.drafter import MOST_ROOM


class DraftModel(msgspec.Struct, frozen=True, kw_only=True, tag="model"):
    """The first message: guess with the model file ``path``, which has so many ``layers`` and ``bytes`` of weights, on so
    many ``threads``, ``most`` tokens at most in texts of at most ``context``. Its process takes ``memory_bytes``.
    """

    path: str
    layers: int
    bytes: int
    memory_bytes: int
    threads: int
    context: int
    most: int = MOST_ROOM


class DraftText(msgspec.Struct, frozen=True, kw_only=True, tag="text"):
    """From now on guess how ``tokens`` go on, which are text ``number``."""

    number: int
    tokens: list[int]


class DraftTokens(msgspec.Struct, frozen=True, tag="tokens"):
    """They go on with ``tokens``."""

    tokens: list[int]


class Drafted(msgspec.Struct, frozen=True, kw_only=True, tag="drafted"):
    """Behind the first ``known`` tokens of text ``number`` may come all of ``tokens``, each so sure behind the others.

    The latest one took ``guess_s``; None where that was not measured. In place of each of ``tokens`` may come ``others``,
    with how sure each of them is.
    """

    number: int
    known: int
    tokens: list[int]
    sures: list[float]
    guess_s: float | None = None
    others: list[list[tuple[int, float]]] = []


DraftTask = DraftModel | DraftText | DraftTokens
