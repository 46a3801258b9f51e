"""Which messages of a conversation that became too long for the context are left out: the oldest ones. Pure."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Sequence
from typing import Final

from primad.api.dialects.openai.chat_fields import Message

_TOLD: Final = ("system", "developer")
_LEAST_SHARE: Final = 4
"""At least one of so many tokens of the context is left for an answer that says no limit."""


def answer_room(context_tokens: int, limit: int | None) -> int:
    """How many tokens are to be left for an answer of at most ``limit``: never more than half of the context."""
    return min(context_tokens // _LEAST_SHARE if limit is None else limit, context_tokens // 2)


def shifted(messages: Sequence[Message], fits: Callable[[list[Message]], bool]) -> list[Message]:
    """``messages`` without as few of the oldest exchanges as makes it ``fits``.

    An exchange begins with a user's message, so that calls keep their results. What the system says stays, and the last
    exchange in any case.
    """
    starts = [i for i, message in enumerate(messages) if message.role == "user"]

    def without(count: int) -> list[Message]:
        first = starts[count] if count else 0
        return [message for i, message in enumerate(messages) if i >= first or message.role in _TOLD]

    count = bisect.bisect_left(range(max(len(starts) - 1, 0)), True, key=lambda count: fits(without(count)))
    return without(count) if starts else list(messages)
