"""Which metadata the cutter rewrites, and each of its keys made wrong once.

Windows that equal the whole say little of a key that nothing computed with. So each key that differs between the model
and a window is made wrong in the windows: where they still equal the whole it was not exercised. A key that windows do
without is put back; where that changes nothing llama.cpp ignores it, which is what leaving it out says.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

from primad.gguf.architectures.table import SUPPORTED
from primad.gguf.header import Header, Scalar, Value, array_value, scalar_value
from primad.gguf.windows import window_metadata

KeyChange = Callable[[dict[str, Value], int, int], None]
"""Changes the metadata of the window of the layers from the first number to before the second."""


def nothing(values: dict[str, Value], first: int, last: int) -> None:
    """A ``KeyChange`` that changes nothing."""


def rewritten(header: Header, cuts: Sequence[int]) -> dict[str, bool]:
    """The keys that differ between the model and a window between ``cuts``, and whether one at least has it still.

    Raises ``ModelError`` for cuts that the architecture's rules refuse.
    """
    found: dict[str, bool] = {}
    for first, last in pairwise(cuts):
        values = window_metadata(header, first, last)
        for key in sorted({*values, *filter(lambda key: is_own(header, key), header.values)}):
            if is_own(header, key) and values.get(key) != header.values.get(key):
                found[key] = found.get(key, False) or key in values
    return found


def is_own(header: Header, key: str) -> bool:
    """Whether ``key`` is one of the architecture's, and not of the file or the tokenizer."""
    name = header.text("general.architecture")
    return key.startswith(f"{name}.") or (name in SUPPORTED and key in SUPPORTED[name].by_layer)


def made_wrong(header: Header, key: str) -> KeyChange:
    """Makes ``key`` wrong in every window in which it differs from the model's."""

    def change(values: dict[str, Value], first: int, last: int) -> None:
        own, value = header.values.get(key), values.get(key)
        if value == own:
            return
        if value is None:
            assert own is not None
            values[key] = own
        elif own is not None and not own.is_array and not value.is_array:
            values[key] = own
        else:
            values[key] = _other(value)

    return change


def _other(value: Value) -> Value:
    """A value of the same kind, and of as many items, each of them another one."""
    if value.is_array:
        return array_value(value.item_type, [_other_item(item) for item in value.items()])
    return scalar_value(value.type, _other_item(value.scalar()))


def _other_item(item: Scalar) -> Scalar:
    match item:
        case bool():
            return not item
        case str():
            return "none"
        case float():
            return 1.5 * item + 0.25 if abs(item) < 1e30 else 1.0
        case _:
            return item + 1 if item < 100 else item - 1
