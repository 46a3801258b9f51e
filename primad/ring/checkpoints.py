"""Where a sequence can go back to if its cells cannot be cut: behind which of its positions the windows keep a state.

Some layers remember one state of all tokens before, which goes on from row to row. So the next turn of a chat can go on only
where a state was kept. States are kept where that is likely: behind a whole prompt, since it may be asked again; before its
last two chunks, since a message begins there and the next turn, or the same one written anew, is alike up to it; and behind
every so many tokens of a long prompt.

States take memory, 60 to 230 MB each for a model of 27 billion weights, so there are few: the oldest of the sequence
that has most goes for another one, those behind whole prompts first. Only the head decides that, and every window does it
with the same steps.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from primad.ring.chunks import Chunking
from primad.ring.messages import StateKeep, StateRestore

EVERY_TOKENS: Final = 4096
"""Of a long prompt: computing so many again is what a change in its middle costs at most."""
_NEW: Final = -1
"""The number of one that has none yet."""


@dataclass(slots=True)
class _Checkpoint:
    sequence: int
    end: int
    used: int
    is_whole: bool
    """It is behind a whole prompt."""


class Checkpoints:
    """The states that are kept, by number: at most ``count``. With 0 sequences can be cut anywhere, and none is kept."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._kept: dict[int, _Checkpoint] = {}

    @property
    def are_needed(self) -> bool:
        """Whether a sequence goes back only to where a state of it was kept."""
        return self._count > 0

    def last(self, sequence: int, end: int) -> int:
        """Up to which of its first ``end`` positions ``sequence`` can go back; 0: it begins anew."""
        return max(
            (each.end for each in self._kept.values() if each.sequence == sequence and each.end <= end), default=0
        )

    def is_place(self, sequence: int, chunking: Chunking, prompt: Sequence[int], end: int) -> bool:
        """Whether a state is worth keeping where a chunk of ``prompt`` ends at ``end`` in ``sequence``."""
        left = end
        for _ in range(2):
            left = chunking.end(prompt, left) if left < len(prompt) else left
        is_far = end - self.last(sequence, end) >= EVERY_TOKENS
        return self.are_needed and (left >= len(prompt) or is_far)

    def keep(self, sequence: int, end: int, step: int, *, is_whole: bool) -> list[StateKeep]:
        """``step`` computed a chunk up to ``end`` in ``sequence``, its whole prompt or not: keep the state of there."""
        self._kept[_NEW] = _Checkpoint(sequence, end, step, is_whole)
        free = next((i for i in range(self._count) if i not in self._kept), None)
        number = self._first_to_go() if free is None else free
        if number == _NEW:
            del self._kept[_NEW]
            return []
        self._kept[number] = self._kept.pop(_NEW)
        return [StateKeep(sequence, number, end)]

    def restore(self, sequence: int, end: int, step: int, *, target: int | None = None) -> StateRestore:
        """Have ``sequence``, or a ``target`` with its cells, end behind ``end``, where a state of ``sequence`` was kept."""
        number = next(i for i, each in self._kept.items() if (each.sequence, each.end) == (sequence, end))
        self._kept[number].used = step
        return StateRestore(sequence if target is None else target, number, end)

    def cut(self, sequence: int, end: int) -> None:
        """``sequence`` has other tokens behind its first ``end``."""
        gone = [i for i, each in self._kept.items() if each.sequence == sequence and each.end > end]
        for number in gone:
            del self._kept[number]

    def _first_to_go(self) -> int:
        """The one that is given up."""
        held = Counter(each.sequence for each in self._kept.values())
        return min(
            self._kept,
            key=lambda i: (-held[self._kept[i].sequence], not self._kept[i].is_whole, self._kept[i].used),
        )
