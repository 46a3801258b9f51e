"""From a text with a gap to the prompt that a model which was trained to fill in continues with what belongs there. Pure.

Such models have tokens of their own for it: behind the first of them stands what is before the gap, behind the second what
follows it, and the third asks for the middle. Files that lie beside it go in front, each by its name.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from primad.api.answering.backend import Vocabulary
from primad.errors import RequestError

_AFTER_SHARE: Final = 4
"""At most one of so many tokens are what follows the gap: what is before it says more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gap:
    """What follows a gap, and ``files`` beside it by name, with their texts; ``param`` is the field that says so."""

    after: str
    param: str
    files: tuple[tuple[str, str], ...] = ()


def fill_in_prompt(vocabulary: Vocabulary, before: Sequence[int] | str, gap: Gap, *, room: int) -> list[int]:
    """The prompt of at most ``room`` tokens for what stands in ``gap``, behind ``before``.

    Of texts that are longer what is nearest to the gap stays; files are left out whole, the first ones first. Raises
    ``RequestError`` where the model was not trained to fill in, or there is no room.
    """
    marks, param = vocabulary.fill_in, gap.param
    if marks is None:
        raise RequestError(
            f"'{param}': this model has no tokens to fill in with; serve a code model that was trained for it",
            param=param,
            code="unsupported_parameter",
        )
    begin = vocabulary.tokenize("", add_special=True, parse_special=False)[:1]
    left = room - len(begin) - 3
    if left < 1:
        raise RequestError(
            f"'{param}': with the answer it exceeds the available context size; ask for a shorter answer", param=param
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
