"""Chunk ends depend only on the tokens before them; prompts with a common prefix share its computation."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from primad.ring.chunks import Chunking, ChunkSize, Computed, Pieces

FEW = st.lists(st.integers(0, 9), min_size=1, max_size=60)
REST = st.lists(st.integers(0, 9), max_size=60)
"""What follows a prefix; empty if one prompt is a prefix of the other."""


def chunking(rows: int = 8, minimum: int = 3) -> Chunking:
    return Chunking(rows=rows, minimum=minimum, begins=lambda token: token == 0)


def ends(of: Chunking, prompt: list[int]) -> list[int]:
    found = [of.end(prompt, 0)]
    while found[-1] < len(prompt):
        found.append(of.end(prompt, found[-1]))
    return found


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ([1] * 20, [8, 16, 20]),
        ([0, 1, 1, 1, 0, 1], [4, 6]),
        ([0, 1, 0, 1, 1, 0, 1], [5, 7]),
        ([1] * 8 + [0], [8, 9]),
        ([0] * 5, [3, 5]),
    ],
    ids=["rows", "a message", "one too short", "at the end", "each begins"],
)
def test_a_chunk_ends_after_its_rows_or_before_a_message(prompt, expected):
    assert ends(chunking(), prompt) == expected


@given(FEW, REST, REST, st.integers(1, 12), st.integers(1, 12))
def test_prompts_with_a_common_prefix_have_the_same_chunks_in_it(common, one, other, rows, minimum):
    of = chunking(rows, min(rows, minimum))
    first, second = common + one, common + other
    assert [end for end in ends(of, first) if end < len(common)] == [
        end for end in ends(of, second) if end < len(common)
    ]


@given(FEW, REST, REST, st.integers(1, 12), st.integers(1, 12))
@example([1] * 8, [], [1], 8, 3)
def test_the_common_part_of_two_prompts_is_whole_chunks_of_both(common, one, other, rows, minimum):
    of = chunking(rows, min(rows, minimum))
    first, second = common + one, common + other
    found = of.common(first, second)
    in_both = [end for end in ends(of, first)[:-1] if end in ends(of, second) and first[:end] == second[:end]]
    assert found == max(in_both, default=0)


@given(FEW, REST, REST, st.integers(1, 12), st.integers(1, 12), st.integers(0, 20))
def test_reused_tokens_were_computed_in_the_same_chunks(common, one, other, rows, minimum, done):
    of = chunking(rows, min(rows, minimum))
    before, prompt = common + one, common + other
    computed = ends(of, before)[:done]
    reused = of.reused(prompt, Computed(before, computed))
    assert reused < len(prompt)
    assert prompt[:reused] == before[:reused]
    assert {end for end in ends(of, prompt) if end <= reused} == {end for end in computed if end <= reused}
    assert not reused or reused in computed
    more = [end for end in ends(of, prompt)[:-1] if end > reused]
    assert not more or more[0] not in computed or prompt[: more[0]] != before[: more[0]]


@given(FEW, REST, REST, st.integers(1, 12), st.integers(1, 12), st.integers(0, 20), st.integers(1, 4))
def test_the_first_pieces_of_a_chunk_are_reused_where_enough_rows_follow_them(
    common, one, other, rows, minimum, done, multiple
):
    whole = chunking(rows, min(rows, minimum))
    of = replace(whole, pieces=Pieces(multiple=multiple, rows=(multiple,)))
    before, prompt = common + one, common + other
    computed = Computed(before, ends(of, before)[:done])
    reused, first = of.reused(prompt, computed), whole.reused(prompt, computed)
    assert prompt[:reused] == before[:reused]
    assert (reused - first) % multiple == 0
    end = of.end(prompt, first) if prompt else 0
    if reused > first:
        was_end = min(each for each in computed.ends if each > first)
        assert min(end, was_end) - reused >= multiple
        assert of.begun(prompt, [each for each in computed.ends if each <= reused], reused) == end
    elif computed.ends and computed.ends[-1] > first < len(prompt):
        was_end = min(each for each in computed.ends if each > first)
        more = first + multiple
        assert more + multiple > min(end, was_end) or prompt[:more] != before[:more], "there was no more"


def test_the_next_turn_of_a_chat_reuses_all_but_the_last_words_of_the_turn_before():
    of = Chunking(rows=512, minimum=64, begins=lambda token: token == 0)
    turn = [0] + [7] * 400 + [0, 9, 9]
    assert of.reused(turn + [5] * 300 + [0] + [3] * 20, Computed(turn, ends(of, turn))) == 401


def test_the_same_prompt_computes_its_last_chunk_again():
    of = chunking()
    prompt = [1] * 20
    assert of.reused(prompt, Computed(prompt, ends(of, prompt))) == 16


def test_chunks_of_another_size_are_not_reused_even_where_both_end():
    prompt = list(range(20))
    in_fours = Computed(prompt, [4, 8, 12, 16])
    assert chunking(8, 8).reused(prompt, in_fours) == 0
    assert chunking(4, 4).reused(prompt, in_fours) == 16
    assert chunking(4, 4).reused(prompt, Computed(prompt, [4, 12, 16])) == 4


def test_a_request_resumes_with_its_earlier_chunk_size_if_a_step_has_room_for_it():
    own = Chunking(rows=8, minimum=4, begins=lambda _: False, step_rows=16)
    larger = ChunkSize(rows=16, minimum=16)
    assert own.of(None) is own
    assert (own.of(larger).rows, own.of(larger).minimum) == (16, 16)
    assert own.of(ChunkSize(rows=32, minimum=32)) is own
