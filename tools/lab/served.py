"""Results of servers queried over HTTP with concurrent requests, and the wanted ratios.

``tools/bench serve`` has only primad's rings, ``http`` compares llama-server.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Final

from tools.lab.figures import Figure, Row, by_round, late

PRIMAD: Final = "primad"
TOGETHER: Final = 1.7
"""Wanted throughput of a ring of two machines with four concurrent requests, relative to one request."""
OF_LLAMA: Final = {1: {1: 0.97, 2: 0.95, 3: 0.9}, 4: {1: 0.95, 2: 0.95, 3: 0.9}}
"""Wanted tokens/s relative to llama-server, by concurrent requests and processes."""
FIRST_OF_LLAMA: Final = 1.2
"""Maximum TTFT relative to llama-server, with several requests."""
AUTO: Final = "auto"
RIGHT: Final = 1.05
"""A choice is right if its requests take at most this many times the time of the other's."""


@dataclass(kw_only=True)
class Served(Row):
    """A system with a number of devices and streams, and the results of each run; waits of all runs, and whole
    requests, in seconds. Devices are machines if they share nothing; for a table ``where`` says so, and ``plan`` their
    layers. It has ``extra_buffers`` (on, off or auto), if these are compared."""

    columns: ClassVar[str] = (
        "system, extra_buffers=extra buffers, devices=n, where, plan, streams, tokens_per_s=all tok/s:.1f, "
        "first_s=first ms:ms, whole_s=request ms:ms"
    )

    model: str
    system: str = PRIMAD
    devices: int
    streams: int
    where: str = ""
    plan: str = ""
    extra_buffers: str = ""
    tokens_per_s: list[float] = field(default_factory=list)
    first_s: list[float] = field(default_factory=list)
    whole_s: list[float] = field(default_factory=list)
    next_s: list[float] = field(default_factory=list)

    def heading(self) -> str:
        return self.model

    def cells(self) -> Mapping[str, str]:
        if not self.next_s:
            return super().cells()
        waits = f"{1e3 * statistics.median(self.next_s):.0f} ({1e3 * late(self.next_s):.0f})"
        return {**super().cells(), "next token\nms (95 %)": waits}

    def of(self, other: Served) -> tuple[float, ...]:
        """Return the ratio to the throughput of ``other``, for runs of the same round."""
        return tuple(by_round(self.tokens_per_s, other.tokens_per_s))

    def is_like(self, row: Served, **differs: object) -> bool:
        """Whether this equals ``row`` in its setup, except in what differs."""
        keys = ("model", "system", "devices", "streams", "extra_buffers")
        return all(getattr(self, key) == differs.get(key, getattr(row, key)) for key in keys)

    @property
    def what(self) -> str:
        """The row in words."""
        buffers = f", extra buffers {self.extra_buffers}" if self.extra_buffers else ""
        return f"{self.model}: ring of {self.devices}, {self.streams} streams{buffers}, of"

    @classmethod
    def figures(cls, rows: Sequence[Served]) -> Iterator[Figure]:
        """Yield figures of primad's rows: relative to other systems in the same round, to one request, to one
        device."""
        for row in (row for row in rows if row.system == PRIMAD):
            others = [
                each
                for each in rows
                if each.system != PRIMAD and (each.model, each.streams) == (row.model, row.streams)
            ]
            if others:
                yield from _of_others(row, others)
            if row.extra_buffers == AUTO:
                yield from _of_choices(
                    row, [each for each in rows if each.is_like(row, extra_buffers=each.extra_buffers)]
                )
            one = next((each for each in rows if each.is_like(row, streams=1)), None)
            if one is not None and row.streams > 1:
                is_judged = (row.devices, row.streams) == (2, 4) and not others  # those share cores
                yield Figure(
                    what=f"{row.what} one stream of it", values=row.of(one), at_least=TOGETHER if is_judged else None
                )
            alone = next((each for each in rows if each.is_like(row, devices=1, streams=1)), None)
            if alone is not None and row.devices == 2 and row.streams > 1 and not others:
                values = tuple(each / row.devices for each in row.of(alone))
                yield Figure(what=f"{row.what} {row.devices} x one device with one", values=values, at_least=0.9)


def _of_others(row: Served, others: Sequence[Served]) -> Iterator[Figure]:
    """Yield ``row`` relative to the other server with the same extra buffers; with its own choice, relative to the
    fastest."""
    minimum = OF_LLAMA.get(row.streams, {}).get(row.devices)
    like = [each for each in others if each.extra_buffers == row.extra_buffers]
    if not like:
        best = min(others, key=lambda each: statistics.median(each.whole_s))
        maximum = None if minimum is None else 1 / minimum
        values = tuple(by_round(row.whole_s, best.whole_s))
        yield Figure(what=f"{row.what} the best other server: a request's time", values=values, at_most=maximum)
        return
    yield Figure(what=f"{row.what} the other server: tokens/s", values=row.of(like[0]), at_least=minimum)
    yield Figure(
        what=f"{row.what} the other server: time to the first token",
        values=tuple(by_round(row.first_s, like[0].first_s)),
        at_most=FIRST_OF_LLAMA if row.streams > 1 else None,
    )


def _of_choices(row: Served, choices: Sequence[Served]) -> Iterator[Figure]:
    """Yield the automatic choice of extra buffers relative to the better of both settings."""
    given = [each for each in choices if each.extra_buffers != AUTO]
    if len(given) > 1:
        best = min(given, key=lambda each: statistics.median(each.whole_s))
        values = tuple(by_round(row.whole_s, best.whole_s))
        yield Figure(
            what=f"{row.what} extra buffers {best.extra_buffers}: a request's time", values=values, at_most=RIGHT
        )
