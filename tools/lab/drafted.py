"""The gain of drafts: prompts, completions with and without drafts, the wanted ratios, and the table."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from primad.api.answering.backend import SamplingDefaults
from primad.api.dialects.openai.free_samplers import MAX_TEMPERATURE
from primad.engine.protocol import GREEDY, Sampling
from tools.lab.figures import Compared

AS_SERVED: Final = "as served"
DEVICES: Final = {"two": 2, "streams": 1, "far": 4}
COPIES: Final = ("code", "chat")
"""Completions of these prompts repeat parts of the prompt."""
AT_LEAST: Final = {"two": 1.4, "streams": 2.5, "far": 2.0}
"""Wanted ratio of tokens/s, where a completion repeats its prompt."""
FREE_TEXT: Final = {"two": 1.1}
"""The same for a whole story, which repeats itself now and then."""


CODE: Final = """def settle(orders, prices, stock):
    total = 0
    for order in orders:
        price = prices.get(order.name)
        if price is None:
            raise KeyError(f"no price for {order.name}")
        if order.count > stock.get(order.name, 0):
            raise ValueError(f"not enough of {order.name} in stock")
        stock[order.name] -= order.count
        total += price * order.count
        if order.count >= 10:
            total -= price
    for name, count in stock.items():
        if count == 0:
            print(f"{name} is sold out")
    return total
"""
"""A small model's continuation of this repeats nothing."""
REPORT: Final = (
    "The ferry from Harlow leaves the northern pier at half past six on weekdays and at eight on Sundays. Tickets are sold "
    "in the wooden house beside the pier, which opens twenty minutes earlier. Bicycles travel free of charge, but dogs need "
    "a ticket of their own. When the wind is stronger than seven, the ferry stays in the harbour and a bus takes its place."
)
STORIES: Final = (
    "Once upon a time an old clockmaker found a small brass key in the snow. Tell what happened then, at length.",
    "A lighthouse keeper hears a piano at night, though nobody else lives on the island. Tell what she finds.",
    "Write about a market where people sell the hours that they do not need, and about a boy who buys one.",
    "Two sisters cross a desert with a mule that knows the way. Tell their third day, from dawn to dusk.",
)
"""Each round has another one, since the amount of repetition in a story is random."""


def _chat(question: str, begun: str = "") -> str:
    return f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n{begun}"


QUESTIONS: Final[Mapping[str, Sequence[str]]] = {
    "code": [_chat(f"Write this code again without any change:\n```\n{CODE}```", "```\ndef settle(orders")],
    "chat": [_chat(f"{REPORT}\n\nWrite this text again, word for word.", "The ferry from")],
    "story": [_chat(story) for story in STORIES],
}
"""Prompts by round, in rotation."""
SHAPING: Final = ("temperature", "top_k", "top_p", "min_p")
USUAL: Final = msgspec.structs.replace(GREEDY, **{name: getattr(SamplingDefaults(), name) for name in SHAPING})
"""Sampling of clients without options: with greedy sampling a small model soon repeats a story's last sentence."""
RANDOM: Final = msgspec.structs.replace(GREEDY, temperature=MAX_TEMPERATURE)
"""Sampling from a model's own distribution; a text may repeat itself, and then its drafts are accepted."""


def samplers(sampling: Sampling) -> dict[str, Any]:
    """Return the server options of ``sampling``: by default a server cuts off unlikely tokens."""
    return {name: getattr(sampling, name) for name in (*SHAPING, "seed")}


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftedCompletion:
    """``next_s`` is the mean time between tokens, ``late_s`` that of the latest one in twenty."""

    tokens: list[int]
    first_s: float
    next_s: float
    late_s: float
    drafted: int
    accepted: int


def compared(
    model: str,
    case: str,
    question: str,
    way: str,
    without: Sequence[DraftedCompletion],
    drafted: Sequence[DraftedCompletion],
    skipped: float,
) -> Iterator[Compared]:
    """Yield one drafting method and one prompt, run by run: without drafts and with; ``skipped`` is the method's share
    of skipped drafts over all prompts."""
    tokens = sum(each.drafted for each in drafted)
    held = (
        f"{tokens} drafts, {sum(each.accepted for each in drafted) / tokens:.0%} right, " if tokens else "no drafts, "
    )
    late_ms = [f"{1e3 * statistics.median(each.late_s for each in of):.0f}" for of in (without, drafted)]
    name = case.partition(",")[0]
    what: dict[str, Any] = {"model": model, "case": case, "devices": DEVICES[name]}
    is_same = all(a.tokens == b.tokens for a, b in zip(without, drafted, strict=True))
    yield Compared(
        **what,
        what=f"{question}, {way}: tokens/s, of those without",
        found=[1 / each.next_s for each in drafted],
        beside=[1 / each.next_s for each in without],
        at_least=_wanted(name, question, way),
        is_same=is_same,
        note=f"{held}{skipped:.0%} skipped, late tokens after {', '.join(late_ms)} ms",
    )
    if way == AS_SERVED:
        yield Compared(
            **what,
            what=f"{question}, {way}: time to the first token",
            found=[each.first_s for each in drafted],
            beside=[each.first_s for each in without],
            at_most=1.05,
            is_same=is_same,
        )


def _wanted(case: str, question: str, way: str) -> float | None:
    """Return the minimum ratio of tokens/s."""
    repeats = question in COPIES
    if way == AS_SERVED:
        if repeats:
            return AT_LEAST.get(case)
        return FREE_TEXT.get(case, 0.97) if question == "story" else 0.97
    if way == "model" and case == "far":
        return 2.0 if question != "random" else 0.97
    return 0.95 if way == "wrong model" and not repeats else None
