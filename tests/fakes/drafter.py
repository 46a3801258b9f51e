"""A drafter without drafts: the default methods for a test's own drafter."""

from __future__ import annotations

from collections.abc import Sequence

from primad.ring.speculation.drafter import DraftToken


class Nothing:
    """Never has a draft, and none is awaited."""

    works = False
    draft_s: float | None = None
    own_s = 0.0

    def __init__(self, prompt: Sequence[int] = ()) -> None:
        """Ignores the prompt."""

    def took(self, token: int) -> None:
        """Ignores the token."""

    def propose(self, drafts: Sequence[int]) -> DraftToken | None:
        return None

    def looked_up(self, drafts: Sequence[int]) -> DraftToken | None:
        return None

    def others(self, drafts: Sequence[int]) -> Sequence[DraftToken]:
        return ()

    def awaits(self, maximum: int, alpha: float) -> bool:
        return False
