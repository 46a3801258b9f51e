"""Messages about layers: valid ones arrive unchanged, others are refused with one line."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from primad.errors import ProtocolError
from primad.network.layer_messages import (
    MAX_ASKED,
    AskPresent,
    Chunk,
    Digests,
    FetchChunk,
    FetchDigests,
    NoChunk,
    Present,
    decode_transfer,
)
from primad.system.wire import encode
from primad.trust.identity import new_identity

DIGEST = "ab" * 32
KEY = new_identity().public
MESSAGES = [
    AskPresent(digests=[DIGEST, "cd" * 32]),
    Present(held=[True, False]),
    FetchDigests(digest=DIGEST),
    Digests(digest=DIGEST, tree=bytes(range(64))),
    FetchChunk(digest=DIGEST, offset=4 << 20, size=4 << 20),
    Chunk(digest=DIGEST, offset=0),
    NoChunk(digest=DIGEST, offset=0, reason="gone"),
    NoChunk(digest=DIGEST, offset=None, reason="gone"),
]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_a_message_comes_through_as_it_was(message):
    assert decode_transfer(encode(message)) == message
    assert decode_transfer(memoryview(encode(message))) == message


@settings(deadline=None)
@given(st.binary(max_size=200))
def test_any_bytes_are_a_message_or_one_clear_error(data):
    error = ""
    try:
        decode_transfer(data)
    except ProtocolError as exc:
        error = str(exc)
    assert "\n" not in error


@pytest.mark.parametrize(
    "kind", [AskPresent(digests=[""] * (MAX_ASKED + 1)), Present(held=[True] * (MAX_ASKED + 1))], ids=repr
)
def test_too_many_layers_at_once_are_refused(kind):
    with pytest.raises(ProtocolError, match="of length <= 4096"):
        decode_transfer(encode(kind))


def test_the_reason_of_a_refusal_is_fit_to_be_shown():
    received = decode_transfer(encode(NoChunk(digest=DIGEST, offset=0, reason="\x1b[2J\nno")))
    assert isinstance(received, NoChunk)
    assert received.reason == "\\x1b[2J\\nno"
