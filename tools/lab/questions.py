"""Questions whose answers repeat their prompts, or do not."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

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
