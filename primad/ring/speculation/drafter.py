"""The interface of drafters, and how a ring computes their drafts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol

MAX_ROOM: Final = 16
"""Rows of one completion in flight in a ring: with an acceptance of 80 % hardly one in 28 is after more drafts."""


MAX_SURE: Final = 0.99
"""However often drafts were accepted, the next one may fail."""
_FADES: Final = 0.97


@dataclass(frozen=True, slots=True, kw_only=True)
class Drafting:
    """How drafts are computed: ``block`` rows a step as long as fewer than ``room`` such steps are in the ring, and up
    to ``rows`` rows in one step where that pays better than one row each: a ring pass has time for at most
    ``ring_passes`` consecutive steps of one row (None: for ``room``). A step of n rows takes ``costs[n - 1]`` times as
    long as one of a single row; costs of more rows are unknown. Drafts that turn out wrong are skipped on their way if
    the ring ``skips``. Unless it ``adapts`` no measured time is used: the required confidence and the costs stay as
    they are, and drafting continues even where it gains nothing. The rows of one step may be a tree with up to
    ``branches`` branches besides its main path, each in its own sequence. A model drafts while the ring computes if
    that ``overlaps``, or else only while a step waits for it."""

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
        """How many consecutive rows fit in a ring pass: a row that waits does not add to them."""
        return max(1.0, self.room if self.ring_passes is None else min(self.ring_passes, self.room))

    @property
    def states(self) -> int:
        """Number of states kept before drafts in speculative steps, where layers have states; with blocks also before
        the next token."""
        return self.room + (self.block > 1) if self.room > 1 else 0

    def rate_ahead(self, share: float, draft: float = 0.0) -> float:
        """Tokens per ring pass if the ``share`` of drafts is accepted and rows follow each other: after a rejected
        draft the ring has to fill again. The head computes each draft itself in ``draft`` ring passes."""
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
    """``token`` may come next; ``sure`` is how often such drafts are accepted, from 0 to 1."""

    token: int
    sure: float


@dataclass(slots=True)
class HeldShare:
    """Recent share of accepted drafts."""

    held: float
    tries: float

    @property
    def sure(self) -> float:
        """The expected acceptance of the next such draft."""
        return self.held / self.tries

    def count(self, *, held: bool) -> None:
        """Count one more draft, accepted if it ``held``."""
        self.held = self.held * _FADES + held
        self.tries = self.tries * _FADES + 1


class Drafter(Protocol):
    """Drafts for one completion. It gets every token of it, drafted or not, and learns from that."""

    def took(self, token: int) -> None:
        """Take ``token``, the next one of the text for certain."""

    @property
    def works(self) -> bool:
        """Whether it computes something for this completion, whether or not any draft of it is in flight: once it has
        read the text."""

    def propose(self, drafts: Sequence[int]) -> DraftToken | None:
        """Return a draft to follow the text and ``drafts``; None if it has none."""

    def looked_up(self, drafts: Sequence[int]) -> DraftToken | None:
        """Return the same, if it costs nothing."""

    def others(self, drafts: Sequence[int]) -> Sequence[DraftToken]:
        """Return alternatives to it."""

    @property
    def draft_s(self) -> float | None:
        """Seconds per draft that is worth waiting for; None if there is none, or it is unknown."""

    @property
    def own_s(self) -> float:
        """Seconds that ``propose`` takes for a draft that it computes itself; 0: drafts come from elsewhere."""

    def awaits(self, maximum: int, alpha: float) -> bool:
        """Whether more drafts come soon after the text: there are fewer than ``maximum``, and all of them together are
        accepted with a probability above ``alpha``."""
