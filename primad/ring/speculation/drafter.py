"""Who drafts the next tokens of an answer, and how a ring computes them ahead."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol

MAX_ROOM: Final = 16
"""Rows of one answer that are in a ring at once: of drafts that hold four times in five hardly one in 28 is behind more."""


MAX_SURE: Final = 0.99
"""However often drafts held, the next one need not."""
_FADES: Final = 0.97


@dataclass(frozen=True, slots=True, kw_only=True)
class Drafting:
    """How drafts are computed: ``block`` rows a step as long as fewer than ``room`` such steps are in the ring, and up to
    ``rows`` rows in one step where that pays better than one row each: a ring pass has time for ``ring_passes`` steps of one
    row at most, one behind the other (None: for ``room``). A step of n rows takes ``costs[n - 1]`` times as long as one of a
    single row; of more rows nothing is known. What turns out wrong is skipped on its way if the ring ``skips``. Unless it
    ``adapts`` no measured time counts: the confidence that is needed and the costs stay as they are, and drafts go on where
    they win nothing. The rows of one step may be a tree with so many ``branches`` beside its main path, each in a sequence
    of its own. A model drafts while the ring computes if that ``overlaps``, or else only while a step waits for it.
    """

    room: int = 1
    block: int = 1
    rows: int = 1
    costs: tuple[float, ...] = (1.0,)
    skips: bool = True
    adapts: bool = True
    branches: int = 0
    overlaps: bool = True
    ring_passes: float | None = None

    @property
    def rows_per_pass(self) -> float:
        """How many rows follow each other in a ring pass: one that waits gives no more of them."""
        return max(1.0, self.room if self.ring_passes is None else min(self.ring_passes, self.room))

    @property
    def states(self) -> int:
        """How many states are kept in front of drafts in steps of their own, where layers have one; of blocks in front of
        the next token as well."""
        return self.room + (self.block > 1) if self.room > 1 else 0

    def rate_ahead(self, share: float, draft: float = 0.0) -> float:
        """Tokens in the time of a ring pass if the ``share`` of drafts holds and rows follow each other: behind one
        that did not the ring fills anew. The head computes each ``draft`` in so much of a ring pass.
        """
        rows = 1 / (1 / self.rows_per_pass + draft)
        right = 1 / (1 - min(share, MAX_SURE))
        return right * rows / (rows + right - 1)

    def __post_init__(self) -> None:
        assert 1 <= self.room <= MAX_ROOM
        assert 1 <= self.block <= self.rows
        assert self.block == 1 or (self.room > 1 and not self.branches)
        assert self.branches >= 0
        assert all(cost > 0 for cost in self.costs)


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftToken:
    """``token`` may come next; ``sure`` is how often such drafts hold, from 0 to 1."""

    token: int
    sure: float


@dataclass(slots=True)
class HeldShare:
    """How often drafts held, of late."""

    held: float
    tries: float

    @property
    def sure(self) -> float:
        """Of one like these."""
        return self.held / self.tries

    def count(self, *, held: bool) -> None:
        """One more, which ``held`` or did not."""
        self.held = self.held * _FADES + held
        self.tries = self.tries * _FADES + 1


class Drafter(Protocol):
    """Drafts for one answer. It is told each token of it, whether it was drafted or not, and learns from that."""

    def took(self, token: int) -> None:
        """``token`` is the next one of the text for certain."""

    @property
    def works(self) -> bool:
        """Whether it computes something for this answer, be any draft of it on its way or not: once it has read the text."""

    def propose(self, drafts: Sequence[int]) -> DraftToken | None:
        """What may follow the text and ``drafts`` behind it; None where nothing comes to mind."""

    def looked_up(self, drafts: Sequence[int]) -> DraftToken | None:
        """The same, as far as it costs nothing."""

    def others(self, drafts: Sequence[int]) -> Sequence[DraftToken]:
        """What else may follow them."""

    @property
    def draft_s(self) -> float | None:
        """How long it takes for a draft that is worth waiting for, in seconds; None where none is, or nobody knows."""

    @property
    def own_s(self) -> float:
        """How long ``propose`` takes for a draft that it computes itself, in seconds; 0: it looks for it elsewhere."""

    def awaits(self, maximum: int, alpha: float) -> bool:
        """Whether more drafts come soon behind the text: fewer than ``maximum`` are there, which hold in a larger share than
        ``alpha`` all together.
        """
