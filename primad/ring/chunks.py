"""Where the chunks of a prompt end, and which of its tokens were computed before.

The last bits of a chunk's result depend on which tokens are computed together. So the end of a chunk depends only on
the tokens up to it: prompts with a common prefix have the same chunks in that prefix, and each would compute them bit
for bit like the other. The next ring may have chunks of another size; a request in progress keeps the size that its
prompt was computed with (``ChunkSize``).

A chunk ends after ``rows`` tokens, or once it has ``minimum`` of them before a token that begins something: in a chat
each message begins with one. So the next turn computes only what is new, and the completion before it, which was
decoded token by token. The rows of a picture are in chunks of their own, all of them in one where they attend to later
rows.

Other requests wait while a chunk is computed. Where llama.cpp computes a chunk bit for bit the same in pieces, it is
cut into pieces that take no longer than the other requests' tokens (``Pieces``). A prompt that comes alone is computed
in whole chunks, and so is a short one: in pieces it would take several times as long, to save the others a moment. The
beginning of a chunk can then be reused as well, since its pieces are the same as in another chunk with that beginning.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from primad.ring.pictures import looks_ahead, run_end, text_end


@dataclass(frozen=True, slots=True, kw_only=True)
class Pieces:
    """While n generations decode, a chunk is computed in pieces of ``rows[n - 1]`` rows, the last of which may have
    more.

    All are multiples of ``multiple``, and the last piece is no smaller. With more generations than entries the last
    entry holds. After ``twice`` tokens of context a row takes twice as long as the first (None: all take the same), and
    a piece has half as many rows. Once a prompt has at most ``short`` rows left, they are one piece.
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
        """Rows of a piece after ``first`` tokens of context, while ``writing`` generations decode."""
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

    They are computed in ``pieces`` while other generations decode, or else whole. A step may have ``step_rows`` (0: as
    a chunk).
    """

    rows: int
    minimum: int
    begins: Callable[[int], bool]
    pieces: Pieces | None = None
    step_rows: int = 0

    def of(self, size: ChunkSize | None) -> Chunking:
        """Chunks of ``size`` instead, if it is known and a step may have that many rows."""
        own = ChunkSize(rows=self.rows, minimum=self.minimum)
        if size is None or size == own or size.rows > max(self.rows, self.step_rows):
            return self
        return replace(self, rows=size.rows, minimum=size.minimum)

    def piece(self, first: int, end: int, until: int, writing: int) -> int:
        """The end of the next piece of a chunk that ends at ``end``, in a prompt that ends at ``until``; the tokens
        before ``first`` are computed already."""
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
        """Number of tokens of ``prompt`` in chunks that were computed ``before``, or in the first pieces of one.

        It is the whole prompt only if that is allowed (``is_whole``): the next token is sampled from the logits of its
        last row.
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
        """Rows of the chunk of ``prompt`` from ``first`` to ``end`` that can be reused from the chunk there ``before``:
        a multiple, with enough rows after it in both."""
        if self.pieces is None or looks_ahead(prompt[first]):
            return 0
        multiple, was_end = self.pieces.multiple, before.end_behind(first)
        maximum = min(end, was_end) - multiple - first
        rows = next((row for row in range(maximum) if prompt[first + row] != before.prompt[first + row]), maximum)
        return max(0, rows) // multiple * multiple

    def begun(self, prompt: Sequence[int], ends: Sequence[int], cells: int) -> int:
        """The end of the chunk of ``prompt`` in which its first ``cells`` tokens end, after the chunks that end at
        ``ends``; 0: in no chunk."""
        first = ends[-1] if ends else 0
        return self.end(prompt, first) if cells > first else 0

    def common(self, prompt: Sequence[int], other: Sequence[int]) -> int:
        """Number of tokens of ``prompt`` in chunks that ``other``, in chunks of that size, has as well; never all."""
        found = 0
        while found < len(other) and (end := self.end(prompt, found)) < len(prompt):
            if self.end(other, found) != end or prompt[found:end] != other[found:end]:
                break
            found = end
        return found


@dataclass(slots=True)
class Computed:
    """The computed chunks of ``prompt``, by their ends."""

    prompt: Sequence[int] = ()
    ends: list[int] = field(default_factory=list)

    def end_behind(self, first: int) -> int:
        """The end of the chunk that contains the tokens after ``first``; ``first`` if no chunk does."""
        place = bisect_right(self.ends, first)
        return self.ends[place] if place < len(self.ends) else first
