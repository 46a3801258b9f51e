"""Where the chunks of a prompt end, and what of a prompt was computed before.

What a chunk computes depends, in the last bits, on which rows are computed together. So the end of a chunk depends on the
tokens up to it alone: prompts that begin alike have the same chunks as far as they are alike, and what one of them has
computed the other would compute, bit for bit. The next ring may have chunks of another size; an answer that was begun goes
on with those that its prompt was computed in (``ChunkSize``).

A chunk ends after ``rows`` tokens, or once it has ``minimum`` of them before a token that begins something: in a chat each
message begins with one. So the next turn computes what is new, and the answer before it, which was computed row by row.
A picture's rows are in chunks of their own, all of them in one where they look ahead.

Other answers wait for a chunk. Where llama.cpp computes a chunk bit for bit the same in pieces, it is cut into some that
take no longer than the others' tokens do (``Pieces``): a prompt that comes alone is computed in whole chunks, and so is a
short one, for which all others would wait a moment, and it itself several times as long in pieces. There the beginning of a
chunk is found again as well: its pieces are what they were in another chunk that began alike.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from primad.ring.pictures import looks_ahead, run_end, text_end


@dataclass(frozen=True, slots=True, kw_only=True)
class Pieces:
    """While n generations write, a chunk is computed in pieces of ``rows[n - 1]`` rows, the last of which may have more.

    All are multiples of ``multiple``, and the last piece is no smaller. For more generations than are listed the last holds.
    Behind ``twice`` tokens a row takes twice as long as the first (None: all take the same), and a piece has half of them.
    What is left of a prompt is one piece once it has no more than ``short`` rows.
    """

    multiple: int
    rows: tuple[int, ...]
    twice: int | None = None
    short: int = 0

    def __post_init__(self) -> None:
        assert self.multiple >= 1
        assert self.rows
        assert all(rows > 0 and rows % self.multiple == 0 for rows in self.rows)
        assert self.twice is None or self.twice > 0
        assert self.short >= 0

    def of(self, first: int, writing: int) -> int:
        """Rows of a piece behind ``first`` tokens while so many write."""
        rows = self.rows[min(writing, len(self.rows)) - 1]
        if self.twice is not None:
            rows = rows * self.twice // (self.twice + first) // self.multiple * self.multiple
        return max(rows, self.multiple)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkSize:
    """Chunks of at most ``rows`` tokens, and of at least ``minimum`` before a token that begins something."""

    rows: int
    minimum: int

    def __post_init__(self) -> None:
        assert 1 <= self.minimum <= self.rows


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunking:
    """Chunks of at most ``rows`` tokens, and of at least ``minimum`` before a token that ``begins`` something.

    They are computed in ``pieces`` beside other generations, or whole. A step may have ``step_rows`` (0: as a chunk).
    """

    rows: int
    minimum: int
    begins: Callable[[int], bool]
    pieces: Pieces | None = None
    step_rows: int = 0

    def of(self, size: ChunkSize | None) -> Chunking:
        """Chunks of ``size`` instead, if it is known and a step may have as many rows."""
        own = ChunkSize(rows=self.rows, minimum=self.minimum)
        if size is None or size == own or size.rows > max(self.rows, self.step_rows):
            return self
        return replace(self, rows=size.rows, minimum=size.minimum)

    def piece(self, first: int, end: int, until: int, writing: int) -> int:
        """The end of the next piece of a chunk up to ``end``, of a prompt up to ``until``; what is before ``first`` is
        computed."""
        if self.pieces is None or not writing or until - first <= self.pieces.short:
            return end
        last = first + self.pieces.of(first, writing)
        return last if last + self.pieces.multiple <= end else end

    def end(self, prompt: Sequence[int], first: int) -> int:
        """The end of the chunk of ``prompt`` that begins with token ``first``."""
        last = min(first + self.rows, len(prompt))
        if prompt[first] < 0:
            end = run_end(prompt, first)
            return end if looks_ahead(prompt[first]) else min(last, end)
        last = text_end(prompt, first, last)
        return next((at for at in range(first + self.minimum, last) if self.begins(prompt[at])), last)

    def reused(self, prompt: Sequence[int], before: Computed, *, is_whole: bool = False) -> int:
        """How many tokens of ``prompt`` are in chunks that were computed ``before``, or in the first pieces of one.

        All only if a prompt may be there whole (``is_whole``): what follows the last one is drawn from its logits.
        """
        end = found = 0
        while end < len(prompt):
            end = self.end(prompt, end)
            is_last = end == len(prompt) and not (is_whole and prompt == before.prompt)
            if is_last or before.end_behind(found) != end or prompt[found:end] != before.prompt[found:end]:
                return found + self._pieces_of_both(prompt, before, found, end)
            found = end
        return found

    def _pieces_of_both(self, prompt: Sequence[int], before: Computed, first: int, end: int) -> int:
        """Rows of the chunk of ``prompt`` from ``first`` to ``end`` that were rows of the chunk there ``before``, and are a
        multiple with enough rows behind them in both."""
        if self.pieces is None or looks_ahead(prompt[first]):
            return 0
        multiple, was_end = self.pieces.multiple, before.end_behind(first)
        maximum = min(end, was_end) - multiple - first
        rows = next((row for row in range(maximum) if prompt[first + row] != before.prompt[first + row]), maximum)
        return max(0, rows) // multiple * multiple

    def begun(self, prompt: Sequence[int], ends: Sequence[int], cells: int) -> int:
        """The end of the chunk of ``prompt`` in which the first ``cells`` end, behind the chunks to ``ends``; 0: in none."""
        first = ends[-1] if ends else 0
        return self.end(prompt, first) if cells > first else 0

    def common(self, prompt: Sequence[int], other: Sequence[int]) -> int:
        """How many tokens of ``prompt`` are in chunks that ``other``, in chunks of that size, has as well; never all."""
        found = 0
        while found < len(other) and (end := self.end(prompt, found)) < len(prompt):
            if self.end(other, found) != end or prompt[found:end] != other[found:end]:
                break
            found = end
        return found


@dataclass(slots=True)
class Computed:
    """The chunks of ``prompt`` that are computed, by their ends."""

    prompt: Sequence[int] = ()
    ends: list[int] = field(default_factory=list)

    def end_behind(self, first: int) -> int:
        """The end of the chunk in which the rows behind ``first`` are; ``first`` if they are in none."""
        place = bisect_right(self.ends, first)
        return self.ends[place] if place < len(self.ends) else first
