"""What ``tools/bench hybrids`` found of a model whose layers partly keep a state, and what is wanted of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from tools.lab.figures import Figure, Row, by_round

SECOND: Final = "TTFT of the second turn"
AGAIN: Final = "TTFT of it asked again"
RIGHT: Final = "tokens/s with MTP, 7 of 10 right"
RANDOM: Final = "tokens/s with MTP, random"
TURN: Final = 0.2
"""Of the first turn's TTFT at most."""
PAUSE: Final = 1.5
"""Late in a response, of that early in it at most."""
FASTER: Final = {1: 1.3, 2: 1.6}
"""With drafts of which 7 of 10 hold, by devices: so many times the tokens/s at least."""
SAME: Final = 0.97
"""With drafts that do not hold."""


class HybridRow(Row):
    """Run by run ``found``, and what stood ``beside`` it. ``is_same``: so are all texts that must be."""

    columns = "case, devices, what, beside=beside it:.4g, found=measured:.4g"

    def heading(self) -> str:
        return str(self.model)

    def remarks(self) -> Iterator[str]:
        if self.note:
            yield f"{self.case}, {self.devices} devices, {self.what}: {self.note}"

    def failures(self) -> Sequence[str]:
        return () if self.is_same else [f"{self.case}, {self.devices} devices, {self.what}: the text DIFFERS"]

    @classmethod
    def figures(cls, rows: Sequence[HybridRow]) -> Iterator[Figure]:
        for row in rows:
            at_least, at_most = _wanted(row)
            what = f"{row.model}, {row.case}, {row.devices} devices: {row.what}"
            ratios = tuple(by_round(row.found, row.beside))
            yield Figure(what=what, values=ratios, at_least=at_least, at_most=at_most)


def _wanted(row: HybridRow) -> tuple[float | None, float | None]:
    """At least and at most."""
    if row.case == "mtp":
        return (FASTER.get(row.devices) if row.what == RIGHT else SAME), None
    return None, {"turn": TURN, "pause": PAUSE}.get(row.case)
