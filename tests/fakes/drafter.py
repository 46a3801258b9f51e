"""A drafter to which nothing comes to mind: what a test's own leaves out."""

from __future__ import annotations

from collections.abc import Sequence

from primad.ring.speculation.drafter import Guess


class Nothing:
    """Has no guess, and none is awaited."""

    works = False
    guess_s: float | None = None

    def __init__(self, prompt: Sequence[int] = ()) -> None:
        """Looks at nothing."""

    def took(self, token: int) -> None:
        """Learns nothing."""

    def guess(self, drafts: Sequence[int]) -> Guess | None:
        return None

    def looked_up(self, drafts: Sequence[int]) -> Guess | None:
        return None

    def others(self, drafts: Sequence[int]) -> Sequence[Guess]:
        return ()

    def awaits(self, most: int, alpha: float) -> bool:
        return False
