"""Detokenisation: however tokens are split, the result is the whole text, cut at the stop string completed first."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from primad.api.answering.text import MAX_WAITING, Placed, Transcript

ALPHABET = "ab€😀\n"
texts = st.text(alphabet=ALPHABET, max_size=24)
stops = st.lists(st.text(alphabet=ALPHABET, min_size=1, max_size=4), max_size=4)
cuts = st.lists(st.integers(0, 60), max_size=20)
raw_bytes = st.lists(
    st.sampled_from([b"a", b"\xe2", b"\x82", b"\xac", b"\xf0\x9f", b"\x98\x80", b"\xff"]), max_size=12
).map(b"".join)


def split(data: bytes, cuts: list[int]) -> list[bytes]:
    """``data`` in pieces, some of them empty."""
    edges = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    return [data[start:end] for start, end in pairwise(edges)]


def write(pieces: list[bytes], stops: list[str]) -> tuple[str, list[Placed[int]], bool]:
    transcript: Transcript[int] = Transcript(stops)
    text, placed = "", []
    for number, piece in enumerate(pieces):
        released = transcript.feed(piece, number)
        text += released.text
        placed += released.entries
        assert all(entry.start_chars < len(text) for entry in released.entries)
        if transcript.stopped:
            return text, placed, True
    released = transcript.finish()
    return text + released.text, [*placed, *released.entries], transcript.stopped


def cut_at_first_stop(text: str, stops: list[str]) -> tuple[str, bool]:
    """The naive algorithm: append one character at a time until a stop string is complete."""
    for end in range(1, len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            return text[: end - max(map(len, complete))], True
    return text, False


@given(texts.map(str.encode) | raw_bytes, stops, cuts)
def test_any_split_gives_the_text_cut_at_the_first_stop(data, stops, cuts):
    text, _, stopped = write(split(data, cuts), stops)
    assert (text, stopped) == cut_at_first_stop(data.decode("utf-8", "replace"), stops)


@given(texts, stops, cuts)
def test_entries_are_the_tokens_that_begin_in_the_text(text, stops, cuts):
    pieces = split(text.encode(), cuts)
    kept, placed, stopped = write(pieces, stops)
    starts, begun = [], 0
    for piece in pieces:
        # A token starts at the character that contains its first byte.
        starts.append(len(text.encode()[:begun].decode("utf-8", "ignore")))
        begun += len(piece)
    expected = [Placed(number, start) for number, start in enumerate(starts) if not stopped or start < len(kept)]
    assert placed == expected


@given(raw_bytes, cuts)
def test_text_that_was_sent_never_changes(data, cuts):
    transcript: Transcript[None] = Transcript([])
    text, whole = "", data.decode("utf-8", "replace")
    for piece in split(data, cuts):
        text += transcript.feed(piece, None).text
        assert whole.startswith(text)
    assert text + transcript.finish().text == whole


def test_a_character_waits_for_its_last_byte():
    transcript: Transcript[int] = Transcript([])
    emoji = "😀".encode()
    assert [transcript.feed(emoji[i : i + 1], i).text for i in range(4)] == ["", "", "", "😀"]


def test_an_unfinished_character_is_replaced_only_at_the_end():
    transcript: Transcript[int] = Transcript([])
    assert transcript.feed("😀".encode()[:3], 0).text == ""
    assert transcript.finish().text == "\ufffd"


def test_a_token_after_bytes_that_were_no_character_begins_after_them():
    transcript: Transcript[str] = Transcript(["x"])
    transcript.feed(b"\xf0\x9f", "broken")
    released = transcript.feed(b"x", "stop")
    assert (released.text, [placed.entry for placed in released.entries]) == ("\ufffd", ["broken"])


def test_text_is_held_back_only_while_it_could_be_a_stop_string():
    transcript: Transcript[int] = Transcript(["###"])
    fed = [transcript.feed(piece, 0).text for piece in (b"a#", b"#", b"b", b"c")]
    assert fed == ["a", "", "##b", "c"]


def test_text_that_is_held_back_is_flushed_at_the_end():
    transcript: Transcript[int] = Transcript(["###"])
    assert transcript.feed(b"a##", 0).text == "a"
    assert transcript.finish().text == "##"


def test_the_stop_string_that_is_complete_first_wins():
    assert write([b"abcd"], ["abcd", "bc"])[0] == "a"
    assert write([b"abcd"], ["bc", "abc"])[0] == ""


def test_a_stop_string_can_end_in_the_replacement_of_the_last_bytes():
    assert write([b"a\xf0"], ["\ufffd"]) == ("a", [Placed(0, 0)], True)


def test_special_tokens_have_entries_and_no_text():
    text, placed, _ = write([b"a", b"", b"b"], [])
    assert text == "ab"
    assert [(entry.entry, entry.start_chars) for entry in placed] == [(0, 0), (1, 1), (2, 1)]


@pytest.mark.parametrize("begun", [b"", b"a"], ids=["nothing held", "held"])
def test_tokens_without_text_do_not_wait_for_some_without_end(begun):
    transcript: Transcript[int] = Transcript(["ab"])
    transcript.feed(begun, 0)
    reported = [entry.entry for token in range(3 * MAX_WAITING) for entry in transcript.feed(b"", token).entries]
    assert reported[-1] >= 2 * MAX_WAITING - 2
    assert len(transcript.finish().entries) <= MAX_WAITING


def test_nothing_is_fed_after_the_end():
    transcript: Transcript[int] = Transcript(["b"])
    transcript.feed(b"ab", 0)
    with pytest.raises(AssertionError):
        transcript.feed(b"c", 1)
