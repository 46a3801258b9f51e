"""What became of drafts in one ring."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Tally:
    """Of ``drafted`` rows ``accepted`` were the next token, and ``skipped`` were not computed to the end.

    ``lap_s`` is how long the rows of all tokens were on their way together, ``decode_s`` how long answers waited for them.
    """

    drafted: int = 0
    accepted: int = 0
    skipped: int = 0
    lap_s: float = 0.0
    decode_s: float = 0.0

    def count(self, lap_s: float, gap_s: float) -> None:
        """A token came whose row was out for so long, so long after the token before it."""
        self.lap_s += lap_s
        self.decode_s += gap_s

    @property
    def tokens_a_lap(self) -> float:
        """How many tokens an answer has in the time in which one row goes round: one without drafts."""
        return self.lap_s / self.decode_s if self.decode_s > 0 else 1.0
