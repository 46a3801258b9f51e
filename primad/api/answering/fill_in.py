"""Makes the prompt to fill a gap in a text, for a model that was trained to do it. Pure.

Such models have special tokens: the text before the gap follows the first, the text after it the second, and the third
asks for the middle. Other files come first, each with its name.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from primad.api.answering.backend import Vocabulary
from primad.errors import RequestError

_AFTER_SHARE: Final = 4
"""At most one in this many tokens follows the gap: the text before it is more informative."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gap:
    """The text after a gap, and other ``files`` by name, with their texts; ``param`` is the request's field."""

    after: str
    param: str
    files: tuple[tuple[str, str], ...] = ()


def fill_in_prompt(vocabulary: Vocabulary, before: Sequence[int] | str, gap: Gap, *, room: int) -> list[int]:
    """Return the prompt of at most ``room`` tokens to fill ``gap`` after ``before``.

    Of longer texts the part nearest to the gap is kept; files are dropped whole, the first ones first. Raises
    ``RequestError`` if the model was not trained to fill in, or there is no room.
    """
    marks, param = vocabulary.fill_in, gap.param
    if marks is None:
        raise RequestError(
            f"'{param}': this model has no fill-in-the-middle (FIM) tokens; serve a code model that has them",
            param=param,
            code="unsupported_parameter",
        )
    begin = vocabulary.tokenize("", add_special=True, parse_special=False)[:1]
    left = room - len(begin) - 3
    if left < 1:
        raise RequestError(
            f"'{param}': with the response it exceeds the available context size; ask for a shorter response",
            param=param,
        )
    head = before if not isinstance(before, str) else _plain(vocabulary, before)
    tail = _plain(vocabulary, gap.after)
    tail = tail[: max(left // _AFTER_SHARE, left - len(head))]
    head = list(head)[-(left - len(tail)) :] if left > len(tail) else []
    left -= len(head) + len(tail)
    beside: list[int] = []
    for name, content in reversed(gap.files):
        text = _plain(vocabulary, f"{name}\n{content}\n")
        tokens = [*([] if marks.file is None else [marks.file]), *text]
        if len(tokens) > left:
            break
        beside, left = tokens + beside, left - len(tokens)
    return [*begin, *beside, marks.before, *head, marks.after, *tail, marks.middle]


def _plain(vocabulary: Vocabulary, text: str) -> list[int]:
    return vocabulary.tokenize(text, add_special=False, parse_special=False)
