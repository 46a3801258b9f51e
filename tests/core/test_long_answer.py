"""A long response equals its one-piece JSON, but is built and sent in parts."""

from __future__ import annotations

from typing import Any

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from primad.api.http.long_response import PIECE_BYTES, LongResponse

LISTS = st.lists(st.lists(st.integers() | st.text(max_size=3), max_size=5), max_size=3)


async def sent(lists: list[list[Any]], text: str) -> list[bytes]:
    """The pieces of a response with ``lists`` and ``text``."""
    pieces: list[bytes] = []

    async def send(message: Any) -> None:
        pieces.append(message.get("body", b""))

    long = LongResponse()
    reported = [{"list": await long.list_of(map(msgspec.json.encode, each)), "text": text} for each in lists]
    response = long.response(reported)
    await response({"type": "http"}, None, send)  # type: ignore[arg-type]
    assert response.headers["content-length"] == str(sum(map(len, pieces)))
    return pieces


@given(LISTS, st.text(max_size=3))
async def test_lists_are_where_they_belong(lists, text):
    assert b"".join(await sent(lists, text)) == msgspec.json.encode([{"list": each, "text": text} for each in lists])


async def test_a_long_response_is_sent_in_pieces():
    item = "x" * 1000
    pieces = await sent([[item] * 500], "")
    assert max(map(len, pieces)) <= PIECE_BYTES + len(item) + 3
