"""List the metadata keys that the cutter rewrites, and corrupt each of them once.

Windows that equal the whole prove little about a key that no computation used. So each key that differs between the
model and a window is corrupted in the windows: if they still equal the whole, the key was not exercised. A key that
windows omit is put back; if that changes nothing, llama.cpp ignores it, as omitting it implies.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

from primad.gguf.architectures.table import SUPPORTED
from primad.gguf.header import Header, Scalar, Value, array_value, scalar_value
from primad.gguf.windows import window_metadata

KeyChange = Callable[[dict[str, Value], int, int], None]
"""Changes the metadata of the window of the layers from the first number up to, but excluding, the second."""


def nothing(values: dict[str, Value], first: int, last: int) -> None:
    """A ``KeyChange`` that changes nothing."""


def rewritten(header: Header, cuts: Sequence[int]) -> dict[str, bool]:
    """Return the keys that differ between the model and a window between ``cuts``, and whether at least one window
    keeps each.

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
    """Whether ``key`` belongs to the architecture, and not to the file or the tokenizer."""
    name = header.text("general.architecture")
    return key.startswith(f"{name}.") or (name in SUPPORTED and key in SUPPORTED[name].by_layer)


def made_wrong(header: Header, key: str) -> KeyChange:
    """Return a change that corrupts ``key`` in every window in which it differs from the model's."""

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
    """Return a value of the same kind and number of items in which each item differs."""
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
