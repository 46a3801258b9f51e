"""What ``tools/bench serve`` found of each system, and the ratios that are wanted."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Final

from tools.lab.figures import Figure, Row, by_round, late

PRIMAD: Final = "primad"
ONE_BATCH: Final = "llama.cpp, one batch"
"""All answers in one process and one step, as llama-server has them."""
RPC: Final = "llama.cpp, RPC"
TOGETHER: Final = 1.7
"""Four answers of a ring of two, of one of it."""


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
        """Ratios of those systems that were run."""

        def found(row: Served, **differs: object) -> Served | None:
            return next((each for each in rows if each.is_like(row, **differs)), None)

        for row in (row for row in rows if row.system == PRIMAD):
            what = f"{row.model}: ring of {row.devices}, {row.streams} streams, of"
            for system, minimum in ((ONE_BATCH, 0.9), (RPC, 1.5)) if (row.devices, row.streams) == (3, 4) else ():
                for other in rows:
                    if (other.model, other.system, other.streams) == (row.model, system, 4):
                        yield Figure(what=f"{what} {system}", values=row.of(other), at_least=minimum)
            one = found(row, streams=1)
            if one is not None and row.streams > 1:
                together = TOGETHER if (row.devices, row.streams) == (2, 4) else None
                yield Figure(what=f"{what} one stream of it", values=row.of(one), at_least=together)
            alone = found(row, devices=1, streams=1)
            if alone is not None and row.devices == 2 and row.streams > 1:  # others share cores
                values = tuple(each / row.devices for each in row.of(alone))
                yield Figure(what=f"{what} {row.devices} x one device with one", values=values, at_least=0.9)
