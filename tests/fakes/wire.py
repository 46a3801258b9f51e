"""Arbitrary bytes and values from a stranger, and the allowed outcomes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hypothesis import strategies as st

from primad.errors import ProtocolError

anything = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(1 << 63), (1 << 64) - 1)
    | st.floats()
    | st.text(max_size=5)
    | st.binary(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=12,
)
"""Any value that msgpack has."""

numbers = st.one_of(st.integers(-2, 40), st.integers(-(1 << 63), (1 << 64) - 1))
"""Integers, many of them small."""


def outcome(decode: Callable[..., Any], *arguments: Any) -> Any:
    """The result of ``decode``, or the text of its ``ProtocolError``; other exceptions propagate."""
    try:
        return decode(*arguments)
    except ProtocolError as exc:
        return str(exc)


def assert_one_line(text: Any) -> None:
    """Check that ``text`` can be shown to people as it is."""
    assert isinstance(text, str)
    assert text.isprintable()
    assert len(text) < 500
