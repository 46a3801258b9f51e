"""What drafts won: answers with and without them, what is wanted of that, and how it is shown."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Final

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

AS_SERVED: Final = "as served"
COPIES: Final = ("code", "chat")
"""Answers to these questions repeat their prompts."""
AT_LEAST: Final = {"two": 1.4, "streams": 2.5, "far": 2.0}
"""Times the tokens a second, where an answer repeats its prompt."""
FAR: Final = "4 devices, 10 ms"
"""The far ring of which so much is wanted."""

out = Console(highlight=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftedCompletion:
    """``next_s`` is the mean time from token to token, ``late_s`` that of the latest one in twenty."""

    tokens: list[int]
    first_s: float
    next_s: float
    late_s: float
    drafted: int
    accepted: int


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptCompletion:
    """What a model answered to prompt ``number`` in ``maximum`` tokens: with single rows the tokens ``off``, and ``on``."""

    model: str
    number: int
    maximum: int
    off: list[int]
    on: DraftedCompletion


@dataclass(kw_only=True)
class Drafted:
    """One way of drafting and one question, run by run: without drafts and with."""

    case: str
    model: str
    way: str
    question: str
    without: list[DraftedCompletion] = field(default_factory=list)
    with_: list[DraftedCompletion] = field(default_factory=list)
    skipped: float = 0.0
    """Of all that this way drafted, for all questions."""

    @property
    def times(self) -> float:
        """So many times the tokens a second."""
        return statistics.median(a.next_s / b.next_s for a, b in zip(self.without, self.with_, strict=True))

    @property
    def first_times(self) -> float:
        """So many times the time to the first token."""
        return statistics.median(b.first_s / a.first_s for a, b in zip(self.without, self.with_, strict=True))

    @property
    def is_same(self) -> bool:
        """Whether all texts are those without."""
        return all(a.tokens == b.tokens for a, b in zip(self.without, self.with_, strict=True))

    @property
    def accepted(self) -> float | None:
        """Of what was drafted."""
        drafted = sum(each.drafted for each in self.with_)
        return sum(each.accepted for each in self.with_) / drafted if drafted else None


@dataclass(kw_only=True)
class Differing:
    """Answers beside those without drafts: of how many the text is another one, and where it first is.

    ``first_at`` are those places, in tokens; ``drafted`` and ``accepted`` count rows of all steps of up to ``rows``.
    """

    model: str
    rows: int
    answers: int = 0
    tokens: int = 0
    drafted: int = 0
    accepted: int = 0
    first_at: list[int] = field(default_factory=list)

    def count(self, off: Sequence[int], on: DraftedCompletion) -> None:
        """One more answer, the tokens without drafts and what there is with."""
        self.answers += 1
        self.tokens += len(on.tokens)
        self.drafted += on.drafted
        self.accepted += on.accepted
        pairs = zip(off, on.tokens, strict=False)
        same = next((place for place, (a, b) in enumerate(pairs) if a != b), min(len(off), len(on.tokens)))
        if list(off) != on.tokens:
            self.first_at.append(same)

    def __str__(self) -> str:
        where = f", first behind {statistics.median(self.first_at):.0f} tokens (median)" if self.first_at else ""
        return (
            f"{self.model}, steps of up to {self.rows} rows: {len(self.first_at)} of {self.answers} answers differ{where}; "
            f"{self.accepted} of {self.tokens} tokens were drafted"
        )


def wanted(rows: Sequence[Drafted]) -> list[dict[str, Any]]:
    """The ratios that are asked for, and what they are."""
    found: list[dict[str, Any]] = []

    def want(what: str, value: float, *, minimum: float | None = None, maximum: float | None = None) -> None:
        found.append({"what": what, "value": value, "at_least": minimum, "at_most": maximum})

    for each in rows:
        case, repeats = each.case.partition(",")[0], each.question in COPIES
        if case == "far" and FAR not in each.case:
            continue  # nothing is expected of other rings
        name = f"{each.model}, {each.case}, {each.question}, {each.way}"
        if each.way == AS_SERVED:
            minimum = AT_LEAST.get(case) if repeats else 0.97
            want(f"{name}: tokens/s, of those without", each.times, minimum=minimum)
            want(f"{name}: time to the first token", each.first_times, maximum=1.05)
        elif each.way == "wrong model" and not repeats:
            want(f"{name}: tokens/s, of those without", each.times, minimum=0.95)
        elif each.way == "model" and case == "far":
            want(f"{name}: tokens/s, of those without", each.times, minimum=2.0 if each.question != "random" else 0.97)
            for plain in rows:
                key = (each.case, each.model, each.question, "one step")
                if (plain.case, plain.model, plain.question, plain.way) == key:
                    want(f"{name}: tokens/s, of synchronous ones", each.times / plain.times, minimum=1.5)
    return found


def show(rows: Sequence[Drafted]) -> None:
    """Print the rows, a table a case, and what is wanted."""
    for title in dict.fromkeys(f"{row.model}, {row.case}" for row in rows):
        table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
        table.add_column("question", no_wrap=True)
        table.add_column("drafts", no_wrap=True)
        for column in ("tok/s\noff, on", "times", "first\ntimes", "late ms\noff, on", "right", "skip", "text"):
            table.add_column(column, no_wrap=True, justify="right")
        for row in rows:
            if f"{row.model}, {row.case}" == title:
                table.add_row(*_cells(row))
        out.print(table)
    for each in wanted(rows):
        bound = f"at least {each['at_least']}" if each["at_least"] is not None else f"at most {each['at_most']}"
        out.print(f"{each['what']}: {each['value']:.2f} (wanted: {bound})")


def _cells(row: Drafted) -> list[str]:
    off, on = (statistics.median(1 / each.next_s for each in of) for of in (row.without, row.with_))
    late = (1e3 * statistics.median(each.late_s for each in of) for of in (row.without, row.with_))
    return [
        row.question,
        row.way,
        f"{off:.1f}, {on:.1f}",
        f"{row.times:.2f}",
        f"{row.first_times:.2f}",
        ", ".join(f"{each:.0f}" for each in late),
        "" if row.accepted is None else f"{row.accepted:.0%}",
        f"{row.skipped:.0%}",
        "same" if row.is_same else "DIFFERS",
    ]


def plain_data(rows: Sequence[Drafted]) -> list[dict[str, Any]]:
    """For ``--json``."""
    return [*map(asdict, rows), *wanted(rows)]
