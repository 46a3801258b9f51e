"""A draft model's view of one text: its tokens, the drafts after them, and how many of both are computed.

It works ahead until it gets new tokens, as in LLMCad (Xu et al., 2023) on several branches: its next row goes to the
draft that is most likely accepted together with all before it, either the first draft at its place or another one that
is likely enough. Drafts stay as long as the text continues along them, by a first draft or another. The first path
follows the text in the text's sequence; each other path is in a copy of that sequence, which shares its cells. So it
never takes more memory than the room of one sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Final

import numpy as np
from numpy.typing import NDArray

from primad.engine.protocol import LogitsWindow, Rows
from primad.ring.speculation.drafter import MAX_ROOM, DraftToken
from primad.ring.speculation.messages import Drafted
from primad.ring.speculation.tree import OPENS_AT

LIKELY: Final = 3
"""Most tokens reported for one place; unlikely ones are left out."""
_NEAR: Final = 16.0
"""A token whose logit is this far below the best comes next once in some million cases."""
PART_ROWS: Final = 64
"""Rows of a prompt that are computed before new messages are checked."""
POOL: Final = 3
"""Branches at a time, besides the first path."""


@dataclass(slots=True, eq=False)
class _Node:
    """A draft that is accepted, with all before it, in the ``share`` of cases, ``depth`` tokens after the text; None:
    the text.

    It is computed in ``sequence``, or not yet (None). Once computed, ``behind`` has the tokens that may follow, the
    likeliest first.
    """

    draft_token: DraftToken | None = None
    parent: _Node | None = None
    share: float = 1.0
    depth: int = 0
    sequence: int | None = None
    behind: list[_Node] = field(default_factory=list)

    @property
    def is_followed(self) -> bool:
        """Whether its sequence has a row after it."""
        return any(each.sequence == self.sequence for each in self.behind)


class DraftBranches:
    """Drafts up to ``maximum`` consecutive tokens with ``window``, a whole model, whose only sequence has room for
    ``context`` tokens, and half as many on up to ``branches`` branches, once the first path has ``first`` drafts."""

    def __init__(
        self, window: LogitsWindow, *, context: int, maximum: int = MAX_ROOM, branches: int = 0, first: int = 0
    ) -> None:
        self._window, self._context, self._maximum, self._first = window, context, maximum, first
        self._free = list(range(branches, 0, -1))
        self._number = 0
        self._text: list[int] = []
        self._computed = 0
        """Computed tokens of the text, in the sequence of ``_root``."""
        self._root = _Node(sequence=0)
        self._last_row = 0

    @property
    def known(self) -> int:
        """Number of known tokens of the text."""
        return len(self._text)

    def begin(self, number: int, tokens: Sequence[int]) -> None:
        """Switch to text ``number``."""
        pairs = zip(self._text[: self._computed], tokens, strict=False)
        same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        self._number, self._text = number, list(tokens)
        self._forget(same)

    def took(self, token: int) -> None:
        """Take ``token``, the next one of the text."""
        found = next(
            (each for each in self._root.behind if each.draft_token is not None and each.draft_token.token == token),
            None,
        )
        self._text.append(token)
        if found is None or found.sequence is None:
            self._forget(len(self._text) - 1)
            return
        self._let_go({each.sequence for each in _all(self._root)} - {each.sequence for each in _all(found)})
        self._computed = len(self._text)
        for node in _all(found):
            node.share, node.depth = node.share / found.share if node is not found else 1.0, node.depth - 1
        found.draft_token = found.parent = None
        self._root = found

    def _forget(self, cells: int) -> None:
        """Drop all drafts; keep at most ``cells`` cells of the text."""
        own = self._root.sequence
        assert own is not None
        self._let_go({each.sequence for each in _all(self._root)} - {own})
        self._root = _Node(sequence=own)
        self._computed = min(self._computed, cells)
        self._window.kv_remove(own, self._computed, -1)

    def _let_go(self, sequences: set[int | None]) -> None:
        for number in sequences:
            if number is not None:
                self._window.kv_remove(number, 0, -1)
                self._free.append(number)

    @property
    def has_work(self) -> bool:
        """Whether ``work`` has something to compute."""
        return bool(self._text) and self._next() is not None

    def _next(self) -> _Node | None:
        """The node to compute next: the text, or the draft most likely accepted together with all before it."""
        if not self._root.behind:
            return self._root if len(self._text) < self._context else None
        draft_tokens, main = _all(self._root)[1:], self._main()
        computed = [node for node in draft_tokens if node.sequence is not None]
        if len(self._text) + len(computed) + 1 >= self._context:
            return None
        aside = sum(node not in main for node in computed)
        found = [
            node
            for node in draft_tokens
            if node.sequence is None
            and (len(main) < self._maximum if node in main else aside < self._maximum // 2 and node.share >= OPENS_AT)
            and (self._free or self._goes_on(node))
        ]
        if len(main) < self._first and main[-1] in found:
            return main[-1]
        return max(found, key=lambda node: node.share, default=None)

    def _main(self) -> list[_Node]:
        """The first path, which ends with a draft that is not computed."""
        found, node = list[_Node](), self._root
        while node.behind:
            node = node.behind[0]
            found.append(node)
        return found

    def _goes_on(self, node: _Node) -> bool:
        """Whether ``node`` can be computed in its parent's sequence; the first path continues there."""
        parent = node.parent
        assert parent is not None
        if parent.sequence is None or parent.is_followed:
            return False
        return node is parent.behind[0] or not (parent is self._root or parent in self._main())

    def work(self) -> Drafted | None:
        """Compute some rows; return the drafts after the text once there is a new one."""
        node = self._next()
        assert node is not None
        if node is self._root:
            if not self._compute_text():
                return None
        else:
            assert node.draft_token is not None
            assert node.parent is not None
            place = len(self._text) + node.depth - 1
            node.sequence = self._sequence_for(node, node.parent, place)
            self._compute([node.draft_token.token], place, node.sequence, is_last=True)
        first, *others = likely(self._window.logits(self._last_row))
        for draft_token in [first, *(each for each in others if each.sure >= OPENS_AT)]:
            node.behind.append(_Node(draft_token, node, node.share * draft_token.sure, node.depth + 1))
        return self._drafted()

    def _sequence_for(self, node: _Node, parent: _Node, cells: int) -> int:
        assert parent.sequence is not None
        if self._goes_on(node):
            return parent.sequence
        number = self._free.pop()
        self._window.kv_copy(parent.sequence, number, cells)
        return number

    def _compute_text(self) -> bool:
        """Compute a part of the text; return whether it is computed to its end."""
        if self._computed == len(self._text):  # its last row is computed, but its logits are gone
            self._forget(len(self._text) - 1)
        part = self._text[self._computed :][:PART_ROWS]
        is_last = self._computed + len(part) == len(self._text)
        assert self._root.sequence is not None
        self._compute(part, self._computed, self._root.sequence, is_last=is_last)
        self._computed += len(part)
        return is_last

    def _compute(self, tokens: Sequence[int], first: int, sequence: int, *, is_last: bool) -> None:
        rows = len(tokens)
        self._window.forward(
            Rows(
                content=np.array(tokens, np.int32),
                positions=range(first, first + rows),
                sequences=[[sequence]] * rows,
                outputs=[is_last and row == rows - 1 for row in range(rows)],
            )
        )
        self._last_row = rows - 1

    def _drafted(self) -> Drafted:
        nodes = _all(self._root)[1:]
        places = {id(node): place for place, node in enumerate(nodes)}
        draft_tokens = [node.draft_token for node in nodes if node.draft_token is not None]
        return Drafted(
            number=self._number,
            known=len(self._text),
            tokens=[draft_token.token for draft_token in draft_tokens],
            sures=[draft_token.sure for draft_token in draft_tokens],
            parents=[places.get(id(node.parent), -1) for node in nodes],
        )


def _all(root: _Node) -> list[_Node]:
    """``root`` and all nodes below it, parents before children, the first path before others."""
    found = [root]
    for node in root.behind:
        found += _all(node)
    return found


def likely(logits: NDArray[np.float32]) -> list[DraftToken]:
    """The most likely tokens, best first; fewer where hardly any other comes next.

    Searching only near tokens takes 0.1 ms with 150,000 tokens, if few are near; searching all takes 1.3 ms.
    """
    near = np.flatnonzero(logits >= logits.max() - _NEAR)
    if len(near) > LIKELY:
        near = near[np.argpartition(-logits[near], LIKELY - 1)[:LIKELY]]
    found = near[np.argsort(-logits[near], kind="stable")]
    total = np.exp(logits - logits[found[0]]).sum(dtype=np.float64)
    return [DraftToken(token=int(i), sure=float(np.exp(float(logits[i] - logits[found[0]])) / total)) for i in found]
