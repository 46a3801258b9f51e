"""The parts taken of a growing JSON object are always a prefix of valid JSON, and complete in the end."""

from __future__ import annotations

import json
from typing import Any

import pydantic_core
import pytest
from hypothesis import given
from hypothesis import strategies as st

from primad.api.answering.calls.json_text import MAX_DEPTH, JsonText

TEXTS = st.lists(
    st.one_of(st.text(max_size=4), st.sampled_from(["\\", '"', "\n", "\x00", "😀", "{", "</a>"])), max_size=4
)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXTS.map("".join),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS.map("".join), inner, max_size=3),
    max_leaves=8,
)
OBJECTS = st.dictionaries(st.text(max_size=4), VALUES, max_size=4)


def take(pieces: list[str]) -> tuple[list[str], str, JsonText]:
    """What was taken of each piece and at the end, the rest, and the reader."""
    reader, held, taken = JsonText(), "", []
    for number, piece in enumerate([*pieces, ""]):
        held += piece
        added, count = reader.take(held, is_last=number == len(pieces))
        taken.append(added)
        held = held[count:]
    return taken, held, reader


def split(text: str, data: st.DataObject) -> list[str]:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    return [text[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]


@given(
    value=OBJECTS,
    ascii_only=st.booleans(),
    indent=st.sampled_from([None, 2]),
    after=st.text(max_size=3),
    data=st.data(),
)
def test_an_object_is_taken_as_it_is_written(value: dict[str, Any], ascii_only, indent, after, data):
    text = json.dumps(value, ensure_ascii=ascii_only, indent=indent)
    for pieces in ([text + after], list(text + after), split(text + after, data)):
        taken, left, reader = take(pieces)
        assert ("".join(taken), left, reader.is_whole) == (text, after, True)


BITS = [
    "{",
    "}",
    "[",
    "]",
    ",",
    ":",
    '"',
    '"a"',
    "\\",
    "\\u",
    "d83d",
    "\\ud83d",
    "\\ude00",
    "tru",
    "e",
    "-",
    "1",
    ".",
    "0",
    "NaN",
    " ",
]


@given(
    text=st.lists(st.one_of(st.sampled_from(BITS), st.text(max_size=2)), max_size=14).map(
        lambda bits: "{" + "".join(bits)
    ),
    data=st.data(),
)
def test_the_text_taken_is_always_a_prefix_of_an_object(text, data):
    whole, left, reader = take([text])
    for pieces in (list(text), split(text, data)):
        taken, rest, again = take(pieces)
        assert ("".join(taken), rest, again.is_whole) == ("".join(whole), left, reader.is_whole)
        printed = ""
        for piece in taken[:-1]:
            printed += piece
            assert not printed or isinstance(pydantic_core.from_json(printed, allow_partial=True), dict)
    if reader.is_whole:
        assert isinstance(json.loads("".join(whole)), dict)
    assert reader.is_whole or reader.is_wrong or not left


@pytest.mark.parametrize(
    ("text", "taken"),
    [
        ('{"a": "x\ny"}', '{"a": "x\\ny"}'),
        (r'{"a": "\ud83d"}', '{"a": "?"}'),
        (r'{"a": "\ude00\ud83d\ude00"}', r'{"a": "?\ud83d\ude00"}'),
        (r'{"a": "\u12', r'{"a": "\u12'),
        ('{"a": 1e', '{"a": 1e'),
        ('{"a": Na', '{"a": '),
        ('{"a": 1e999}', '{"a": '),
        (f'{{"a": {"9" * 5000}}}', '{"a": '),
        ('{"a" 1}', '{"a" '),
        ("{'a': 1}", "{"),
        ('{"a": [' + "[" * 500, '{"a": ' + "[" * (MAX_DEPTH - 1)),
        ('{"a": 1,}', '{"a": 1,'),
    ],
)
def test_where_it_ends(text, taken):
    assert "".join(take([text])[0]) == "".join(take(list(text))[0]) == taken
