"""The prompt of a fill-in-the-middle model: its tokens around prefix and suffix, within the available room."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from primad.api.answering.backend import FillInTokens
from primad.api.answering.fill_in import Gap, fill_in_prompt
from primad.errors import RequestError
from tests.fakes.backend import BOS, ByteVocabulary

BEFORE, AFTER, MIDDLE, FILE = 1, 2, 3, 4
FILLS = ByteVocabulary(fill_in=FillInTokens(before=BEFORE, after=AFTER, middle=MIDDLE, file=FILE))


def gap(after: str, *files: tuple[str, str]) -> Gap:
    return Gap(after=after, param="suffix", files=files)


def test_the_gap_lies_between_prefix_and_suffix():
    found = fill_in_prompt(FILLS, "ab", gap("cd"), room=100)
    assert found == [BOS, BEFORE, *b"ab", AFTER, *b"cd", MIDDLE]
    assert fill_in_prompt(FILLS, [97, 98], gap("cd"), room=100) == found


def test_markers_in_texts_are_text():
    assert FILLS.tokenize("</s>", add_special=False, parse_special=False) == list(b"</s>")
    assert fill_in_prompt(FILLS, "</s>", gap(""), room=100) == [BOS, BEFORE, *b"</s>", AFTER, MIDDLE]


def test_files_stand_in_front_by_name():
    found = fill_in_prompt(FILLS, "ab", gap("", ("one", "1"), ("two", "2")), room=100)
    assert found == [BOS, FILE, *b"one\n1\n", FILE, *b"two\n2\n", BEFORE, *b"ab", AFTER, MIDDLE]
    assert fill_in_prompt(FILLS, "ab", gap("", ("one", "1"), ("two", "2")), room=14) == [
        BOS,
        FILE,
        *b"two\n2\n",
        BEFORE,
        *b"ab",
        AFTER,
        MIDDLE,
    ]


@given(before=st.text("ab", max_size=60), after=st.text("cd", max_size=60), room=st.integers(5, 80))
def test_the_text_nearest_to_the_gap_stays(before, after, room):
    found = fill_in_prompt(FILLS, before, gap(after), room=room)
    assert len(found) <= room
    assert found[:2] == [BOS, BEFORE]
    assert found[-1] == MIDDLE
    at = found.index(AFTER)
    kept, follows = bytes(found[2:at]).decode(), bytes(found[at + 1 : -1]).decode()
    assert before.endswith(kept)
    assert after.startswith(follows)
    if len(before) + len(after) + 4 <= room:
        assert (kept, follows) == (before, after)
    else:
        assert len(found) == room
        assert len(follows) <= max((room - 4) // 4, room - 4 - len(before))


def test_a_model_that_was_not_trained_to_fill_in_is_named():
    with pytest.raises(RequestError, match="'suffix': this model has no fill-in-the-middle"):
        fill_in_prompt(ByteVocabulary(), "a", gap("b"), room=100)
    with pytest.raises(RequestError, match="exceeds the available context size"):
        fill_in_prompt(FILLS, "a", gap("b"), room=4)
