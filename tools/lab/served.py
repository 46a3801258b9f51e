"""What servers gave that were asked over HTTP with several answers at once, and the ratios that are wanted.

``tools/bench serve`` has primad's rings alone, ``http`` llama-server beside them.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Final

from tools.lab.figures import Figure, Row, by_round, late

PRIMAD: Final = "primad"
TOGETHER: Final = 1.7
"""Four answers of a ring of two machines, of one of it."""
OF_LLAMA: Final = {1: 0.97, 2: 0.95, 3: 0.9}
"""Of llama-server's tokens a second of one answer, by processes."""


@dataclass(kw_only=True)
class Served(Row):
    """A system of so many devices, and so many streams: what each run gave; waits of all runs, seconds. Devices are machines
    where they share nothing; for a table ``where`` says so, and ``plan`` their layers."""

    columns: ClassVar[str] = "system, devices=n, where, plan, streams, tokens_per_s=all tok/s:.1f, first_s=first ms:ms"

    model: str
    system: str = PRIMAD
    devices: int
    streams: int
    where: str = ""
    plan: str = ""
    tokens_per_s: list[float] = field(default_factory=list)
    first_s: list[float] = field(default_factory=list)
    next_s: list[float] = field(default_factory=list)

    def heading(self) -> str:
        return self.model

    def cells(self) -> Mapping[str, str]:
        if not self.next_s:
            return super().cells()
        waits = f"{1e3 * statistics.median(self.next_s):.0f} ({1e3 * late(self.next_s):.0f})"
        return {**super().cells(), "next token\nms (95 %)": waits}

    def of(self, other: Served) -> tuple[float, ...]:
        """How many times the tokens of ``other``, of runs of the same round."""
        return tuple(by_round(self.tokens_per_s, other.tokens_per_s))

    def is_like(self, row: Served, **differs: object) -> bool:
        """Whether this is ``row`` but for what differs."""
        keys = ("model", "system", "devices", "streams")
        return all(getattr(self, key) == differs.get(key, getattr(row, key)) for key in keys)

    @classmethod
    def figures(cls, rows: Sequence[Served]) -> Iterator[Figure]:
        """Of primad's: the best of the other systems in the same round, one answer, one device."""
        for row in (row for row in rows if row.system == PRIMAD):
            what = f"{row.model}: ring of {row.devices}, {row.streams} streams, of"
            others = [
                each
                for each in rows
                if each.system != PRIMAD and (each.model, each.streams) == (row.model, row.streams)
            ]
            if others:
                best = max(others, key=lambda each: statistics.median(each.tokens_per_s))
                first = min(others, key=lambda each: statistics.median(each.first_s))
                minimum = OF_LLAMA.get(row.devices) if row.streams == 1 else None
                yield Figure(what=f"{what} the best other server: tokens/s", values=row.of(best), at_least=minimum)
                waits = tuple(by_round(row.first_s, first.first_s))
                yield Figure(what=f"{what} the best other server: time to the first token", values=waits)
            one = next((each for each in rows if each.is_like(row, streams=1)), None)
            if one is not None and row.streams > 1:
                is_judged = (row.devices, row.streams) == (2, 4) and not others  # those share cores
                yield Figure(
                    what=f"{what} one stream of it", values=row.of(one), at_least=TOGETHER if is_judged else None
                )
            alone = next((each for each in rows if each.is_like(row, devices=1, streams=1)), None)
            if alone is not None and row.devices == 2 and row.streams > 1 and not others:
                values = tuple(each / row.devices for each in row.of(alone))
                yield Figure(what=f"{what} {row.devices} x one device with one", values=values, at_least=0.9)
