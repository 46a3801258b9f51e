"""Drafts of a smaller model, computed in a separate process while the ring computes earlier tokens.

Nothing waits for the process. It works ahead of the completion as far as it gets, and sends all of its drafts each
time: whatever crosses on the way, they are of use as far as the completion continues as drafted. Where it has no draft
yet, prompt lookup is used instead. It follows one completion at a time, the newest.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Final

from primad.ring.speculation.drafter import DraftToken, HeldShare
from primad.ring.speculation.lookup import PromptLookup
from primad.ring.speculation.messages import Drafted, DraftText, DraftTokens, TextTask
from primad.ring.speculation.tree import TreeNode, at_path, behind, below, child, first_path

_LEVELS: Final = 10
_WEIGHT: Final = 3.0
_SURER: Final = 0.1
"""How much surer a looked-up token must be to replace another draft of the model."""
_SURE_ALONE: Final = 0.7
"""How sure a looked-up token must be to replace a draft that is still being computed."""


class ModelDrafters:
    """Makes the drafters of completions; ``notify`` gives a task to the process, ``heard`` takes its drafts.

    Unless its work ``overlaps`` with the ring's, the process gets a text only when a step waits for it.
    """

    def __init__(self, notify: Callable[[TextTask], None], *, overlaps: bool = True) -> None:
        self._notify, self._overlaps = notify, overlaps
        self._number = 0
        self._latest: ModelDrafter | None = None
        self._is_over = False
        self._shares = [HeldShare((level + 0.5) / _LEVELS * _WEIGHT, _WEIGHT) for level in range(_LEVELS)]

    def __call__(self, prompt: Sequence[int]) -> ModelDrafter:
        if self._latest is not None:
            self._latest.is_followed = False
        self._number += 1
        self._latest = ModelDrafter(prompt, self._number, self._notify, self._shares, overlaps=self._overlaps)
        self._latest.is_followed = not self._is_over
        return self._latest

    def heard(self, drafted: Drafted) -> None:
        """Take drafts from the process."""
        if drafted.number == self._number and self._latest is not None:
            self._latest.heard(drafted)

    def end(self) -> None:
        """The process is gone, or not there yet."""
        self._is_over = True
        if self._latest is not None:
            self._latest.is_followed = False

    def move(self, notify: Callable[[TextTask], None]) -> None:
        """Switch to another process, which has no texts yet."""
        self._notify, self._is_over = notify, False
        if self._latest is not None:
            self._latest.move(notify)


class ModelDrafter:
    """Drafts for a completion of ``prompt``, text ``number`` of the process, which computes only what it is asked for.

    ``shares`` count how often drafts were accepted, by how sure the model was.
    """

    def __init__(
        self,
        prompt: Sequence[int],
        number: int,
        notify: Callable[[TextTask], None],
        shares: list[HeldShare],
        *,
        overlaps: bool = True,
    ) -> None:
        self._overlaps = overlaps
        self._lookup = PromptLookup(prompt)
        self._text = list(prompt)
        self._number, self._notify, self._shares = number, notify, shares
        self._reported = 0
        """Tokens of the text that were sent to the process."""
        self._has_read = False
        self._draft_s: float | None = None
        self._nodes: list[TreeNode] = []
        """Drafts of the model that may follow the text."""
        self.is_followed = True

    def heard(self, drafted: Drafted) -> None:
        """Take drafts from the process."""
        self._has_read, self._draft_s = True, drafted.draft_s
        parents = drafted.parents or range(-1, len(drafted.tokens) - 1)
        nodes = [
            TreeNode(DraftToken(token=token, sure=sure), parent)
            for token, sure, parent in zip(drafted.tokens, drafted.sures, parents, strict=True)
        ]
        if (at := at_path(nodes, self._text[drafted.known :])) is not None:
            self._nodes = below(nodes, at)

    def move(self, notify: Callable[[TextTask], None]) -> None:
        """Switch to another process, which has no text yet."""
        self._notify, self._reported, self._has_read, self.is_followed = notify, 0, False, True
        self._nodes = []

    def took(self, token: int) -> None:
        self._lookup.took(token)
        self._text.append(token)
        for each in behind(self._nodes, -1):
            self._share(each).count(held=each.token == token)
        at = child(self._nodes, -1, token)
        self._nodes = [] if at is None else below(self._nodes, at)

    def propose(self, drafts: Sequence[int]) -> DraftToken | None:
        found = self._lookup.propose(drafts)
        if not self.is_followed:
            return found
        if self._overlaps or not self._has_read:
            self._notify_text()
        at = at_path(self._nodes, drafts)
        draft_tokens = [] if at is None else behind(self._nodes, at)
        if not draft_tokens:
            return found if found is not None and found.sure >= _SURE_ALONE else None
        sure = self._share(draft_tokens[0]).sure
        return (
            found
            if found is not None and found.sure > sure + _SURER
            else DraftToken(token=draft_tokens[0].token, sure=sure)
        )

    def looked_up(self, drafts: Sequence[int]) -> DraftToken | None:
        return self._lookup.propose(drafts)

    @property
    def draft_s(self) -> float | None:
        return self._draft_s

    def others(self, drafts: Sequence[int]) -> Sequence[DraftToken]:
        at = at_path(self._nodes, drafts) if self.is_followed else None
        draft_tokens = [] if at is None else behind(self._nodes, at)  # a looked-up token may have replaced the first
        return [DraftToken(token=each.token, sure=self._share(each).sure) for each in draft_tokens]

    @property
    def own_s(self) -> float:
        return 0.0

    def awaits(self, maximum: int, alpha: float) -> bool:
        path = first_path(self._nodes)
        if not (self.is_followed and self._has_read) or len(path) >= maximum:
            return False
        looked_up = self._lookup.propose([])
        if not path and looked_up is not None and looked_up.sure >= _SURE_ALONE:
            return False
        self._notify_text()
        return math.prod(self._share(self._nodes[node].draft_token).sure for node in path) >= alpha

    @property
    def works(self) -> bool:
        return self.is_followed and self._has_read and self._reported == len(self._text)

    def _notify_text(self) -> None:
        if not self._reported:
            self._notify(DraftText(number=self._number, tokens=self._text.copy()))
        elif self._reported < len(self._text):
            self._notify(DraftTokens(self._text[self._reported :], self._reported))
        self._reported = len(self._text)

    def _share(self, draft_token: DraftToken) -> HeldShare:
        return self._shares[min(int(draft_token.sure * _LEVELS), _LEVELS - 1)]
