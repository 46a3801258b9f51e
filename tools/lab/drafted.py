"""What drafts won: answers with and without them, what is wanted of that, and how it is shown."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from tools.lab.figures import Figure, Row, number

AS_SERVED: Final = "as served"
COPIES: Final = ("code", "chat")
"""Answers to these questions repeat their prompts."""
AT_LEAST: Final = {"two": 1.4, "streams": 2.5, "far": 2.0}
"""Times the tokens a second, where an answer repeats its prompt."""
FAR: Final = "4 devices, 10 ms"
"""The far ring of which so much is wanted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftedCompletion:
    """``next_s`` is the mean time from token to token, ``late_s`` that of the latest one in twenty."""

    tokens: list[int]
    first_s: float
    next_s: float
    late_s: float
    drafted: int
    accepted: int


@dataclass(kw_only=True)
class Drafted(Row):
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
        return statistics.median(self.rounds)

    @property
    def rounds(self) -> tuple[float, ...]:
        """The same, round by round."""
        return tuple(a.next_s / b.next_s for a, b in zip(self.without, self.with_, strict=True))

    @property
    def first_rounds(self) -> tuple[float, ...]:
        """So many times the time to the first token, round by round."""
        return tuple(b.first_s / a.first_s for a, b in zip(self.without, self.with_, strict=True))

    @property
    def is_same(self) -> bool:
        """Whether all texts are those without."""
        return all(a.tokens == b.tokens for a, b in zip(self.without, self.with_, strict=True))

    @property
    def accepted(self) -> float | None:
        """Of what was drafted."""
        drafted = sum(each.drafted for each in self.with_)
        return sum(each.accepted for each in self.with_) / drafted if drafted else None

    def heading(self) -> str:
        return f"{self.model}, {self.case}"

    def cells(self) -> Mapping[str, str]:
        off, on = (statistics.median(1 / each.next_s for each in of) for of in (self.without, self.with_))
        late = (1e3 * statistics.median(each.late_s for each in of) for of in (self.without, self.with_))
        return {
            "question": self.question,
            "drafts": self.way,
            "tok/s\noff, on": f"{off:.1f}, {on:.1f}",
            "times": number(self.times, ".2f"),
            "first\ntimes": number(statistics.median(self.first_rounds), ".2f"),
            "late ms\noff, on": ", ".join(f"{each:.0f}" for each in late),
            "right": number(self.accepted, ".0%", ""),
            "skip": f"{self.skipped:.0%}",
            "text": "same" if self.is_same else "DIFFERS",
        }

    @classmethod
    def figures(cls, rows: Sequence[Drafted]) -> Iterator[Figure]:
        """The ratios that are asked for."""
        for each in rows:
            case, repeats = each.case.partition(",")[0], each.question in COPIES
            if case == "far" and FAR not in each.case:
                continue  # nothing is expected of other rings
            name = f"{each.model}, {each.case}, {each.question}, {each.way}"
            faster = f"{name}: tokens/s, of those without"
            if each.way == AS_SERVED:
                yield Figure(what=faster, values=each.rounds, at_least=AT_LEAST.get(case) if repeats else 0.97)
                yield Figure(what=f"{name}: time to the first token", values=each.first_rounds, at_most=1.05)
            elif each.way == "wrong model" and not repeats:
                yield Figure(what=faster, values=each.rounds, at_least=0.95)
            elif each.way == "model" and case == "far":
                yield Figure(what=faster, values=each.rounds, at_least=2.0 if each.question != "random" else 0.97)
                for plain in rows:
                    key = (each.case, each.model, each.question, "one step")
                    if (plain.case, plain.model, plain.question, plain.way) == key:
                        what = f"{name}: tokens/s, of synchronous ones"
                        yield Figure(what=what, values=(each.times / plain.times,), at_least=1.5)
