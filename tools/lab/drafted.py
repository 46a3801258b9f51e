"""What drafts won: questions, answers with and without drafts, what is wanted of that, and how it is shown."""

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


CODE: Final = """def settle(orders, prices):
    total = 0
    for order in orders:
        price = prices.get(order.name)
        if price is None:
            raise KeyError(f"no price for {order.name}")
        total += price * order.count
    return total


def refund(orders, prices):
    total = 0
    for order in orders:
        price = prices.get(order.name)
        if price is None:
            raise KeyError(f"no price for {order.name}")
        total -= price * order.count
    return total
"""
REPORT: Final = (
    "The ferry from Harlow leaves the northern pier at half past six on weekdays and at eight on Sundays. Tickets are sold "
    "in the wooden house beside the pier, which opens twenty minutes earlier. Bicycles travel free of charge, but dogs need "
    "a ticket of their own. When the wind is stronger than seven, the ferry stays in the harbour and a bus takes its place."
)
STORY: Final = (
    "Once upon a time an old clockmaker found a small brass key in the snow. Tell what happened then, at length."
)


def _chat(question: str, begun: str = "") -> str:
    return f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n{begun}"


QUESTIONS: Final[Mapping[str, str]] = {
    "code": _chat(f"Write this code again without any change:\n```\n{CODE}```", "```\ndef settle(orders"),
    "chat": _chat(f"{REPORT}\n\nWrite this text again, word for word.", "The ferry from"),
    "story": _chat(STORY),
}


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
            name = f"{each.model}, {each.case}, {each.question}, {each.way}"
            faster = f"{name}: tokens/s, of those without"
            if each.way == AS_SERVED:
                yield Figure(what=faster, values=each.rounds, at_least=AT_LEAST.get(case) if repeats else 0.97)
                yield Figure(what=f"{name}: time to the first token", values=each.first_rounds, at_most=1.05)
            elif each.way == "wrong model" and not repeats:
                yield Figure(what=faster, values=each.rounds, at_least=0.95)
            elif each.way == "model" and case == "far":
                yield Figure(what=faster, values=each.rounds, at_least=2.0 if each.question != "random" else 0.97)
