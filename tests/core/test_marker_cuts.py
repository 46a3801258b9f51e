"""A long text is cut before markers without changing its tokens."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from primad.engine.marker_cuts import pieces

MARKERS = ("<|a|>", "<|a|><|b|>", "b|><|a", "\n\n")
PARTS = (*MARKERS, "<|", "|>", "x", " ", "\n", "é")


def read(text: str) -> list[str]:
    """``text`` as llama.cpp partitions it: by each marker in turn, longest first, at its first occurrence."""
    parts = [text]
    for marker in sorted(MARKERS, key=len, reverse=True):
        split: list[str] = []
        for part in parts:
            if part in MARKERS:
                split.append(part)
                continue
            while marker in part:
                left, _, part = part.partition(marker)
                split += [left, marker] if left else [marker]
            split += [part] if part else []
        parts = split
    return parts


@given(text=st.lists(st.sampled_from(PARTS), max_size=30).map("".join), size=st.integers(1, 6))
def test_the_pieces_of_a_text_are_read_as_the_whole(text, size):
    cut = list(pieces(text, MARKERS, size))
    assert "".join(cut) == text
    assert all(piece.startswith(MARKERS) for piece in cut[1:])
    assert [part for piece in cut for part in read(piece)] == read(text)


def test_a_text_is_cut_where_its_markers_are():
    assert list(pieces("<|a|>xxxx" * 4, ("<|a|>",), 9)) == ["<|a|>xxxx"] * 2 + ["<|a|>xxxx" * 2]
    assert list(pieces("x" * 99, ("<|a|>",), 9)) == ["x" * 99]
