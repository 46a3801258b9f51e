"""Where a sequence can go back to if its cells cannot be cut: the positions after which the windows keep a state.

Some layers have one state of all earlier tokens, which is updated from row to row. So the next turn of a chat can only
continue where a state was kept. States are kept where that is likely: after a whole prompt, since it may be asked
again; before its last two chunks, since a message begins there and the next turn, or an edited version of the same one,
is the same up to it; and at intervals of a long prompt.

States take memory, 60 to 230 MB each for a model of 27 billion weights, so there are few: the oldest of the sequence
with the most is replaced first, those after whole prompts before others. Only the head decides that, and every window
does it with the same steps.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from primad.ring.chunks import Chunking
from primad.ring.messages import StateKeep, StateRestore

EVERY_TOKENS: Final = 4096
"""Interval in a long prompt: a change in its middle costs at most this many tokens computed again."""
_NEW: Final = -1
"""The number of a checkpoint that has none yet."""


@dataclass(slots=True)
class _Checkpoint:
    sequence: int
    end: int
    used: int
    is_whole: bool
    """Whether it is after a whole prompt."""


class Checkpoints:
    """The states that are kept, by number: at most ``count``. With 0 sequences can be cut anywhere, and none is
    kept."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._kept: dict[int, _Checkpoint] = {}

    @property
    def are_needed(self) -> bool:
        """Whether a sequence can go back only to a kept state."""
        return self._count > 0

    def last(self, sequence: int, end: int) -> int:
        """The last of the first ``end`` positions to which ``sequence`` can go back; 0: it starts over."""
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
        """Keep the state at ``end`` of ``sequence``, where ``step`` computed a chunk to; ``is_whole``: it ends the
        prompt."""
        self._kept[_NEW] = _Checkpoint(sequence, end, step, is_whole)
        free = next((i for i in range(self._count) if i not in self._kept), None)
        number = self._first_to_go() if free is None else free
        if number == _NEW:
            del self._kept[_NEW]
            return []
        self._kept[number] = self._kept.pop(_NEW)
        return [StateKeep(sequence, number, end)]

    def restore(self, sequence: int, end: int, step: int, *, target: int | None = None) -> StateRestore:
        """Restore ``sequence``, or a ``target`` with its cells, to position ``end``, where a state of ``sequence`` was
        kept."""
        number = next(i for i, each in self._kept.items() if (each.sequence, each.end) == (sequence, end))
        self._kept[number].used = step
        return StateRestore(sequence if target is None else target, number, end)

    def cut(self, sequence: int, end: int) -> None:
        """Forget states of ``sequence`` after its first ``end`` positions, where it has other tokens now."""
        gone = [i for i, each in self._kept.items() if each.sequence == sequence and each.end > end]
        for number in gone:
            del self._kept[number]

    def _first_to_go(self) -> int:
        """The number of the state to give up."""
        held = Counter(each.sequence for each in self._kept.values())
        return min(
            self._kept,
            key=lambda i: (-held[self._kept[i].sequence], not self._kept[i].is_whole, self._kept[i].used),
        )
