"""Image rows in a prompt: their ids, their chunks, and which are reused."""

from __future__ import annotations

from itertools import product

import pytest
from msgspec.structs import replace

from primad.cli.serve import EndpointOptions, image_tokens
from primad.engine.pictures.messages import EmbeddedRun, EncodedPicture, TokenRun
from primad.engine.protocol import GREEDY
from primad.errors import ConfigError
from primad.kv.keys import block
from primad.ring.chunks import Chunking, Computed, Pieces
from primad.ring.grouping import Batching
from primad.ring.messages import Generate
from primad.ring.pictures import PictureRows, content_of, longest_run, picture_ids, placed, rope_of, run_end
from primad.ring.scheduler.scheduler import Scheduler
from primad.ring.scheduler.state import SampledToken, SchedulerState

CHUNKING = Chunking(rows=8, minimum=8, begins=lambda _: False, pieces=Pieces(multiple=2, rows=(2,)), step_rows=16)
TEXT = list(range(1, 7))


def ids(name, rows, *, ahead, run=0):
    return picture_ids(name, run, rows, looks_ahead=ahead)


def chunks_of(prompt):
    ends = [0]
    while ends[-1] < len(prompt):
        ends.append(CHUNKING.end(prompt, ends[-1]))
    return ends[1:]


def test_ids_are_below_zero_and_known_by_file_run_and_row():
    found = ids("a", 12, ahead=True)
    assert all(-(2**31) <= each < 0 for each in found)
    assert found == ids("a", 12, ahead=True)
    for other in (ids("b", 12, ahead=True), ids("a", 12, ahead=True, run=1), ids("a", 12, ahead=False)):
        assert not set(found) & set(other)


def test_a_run_ends_where_text_or_another_begins():
    prompt = [*TEXT, *ids("a", 5, ahead=False), *ids("a", 5, ahead=False), 7]
    assert [run_end(prompt, first) for first in (6, 8, 11)] == [11, 11, 16]


def test_rows_that_look_ahead_are_one_chunk_and_others_are_cut_as_text_is():
    assert chunks_of([*TEXT, *ids("a", 12, ahead=True), *ids("b", 3, ahead=True), 7, 8]) == [6, 18, 21, 23]
    assert chunks_of([*TEXT, *ids("a", 12, ahead=False), 7, 8]) == [6, 14, 18, 20]


@pytest.mark.parametrize(("ahead", "found"), [(True, 6), (False, 10)])
def test_rows_of_a_picture_that_another_prompt_breaks_off_are_reused_only_if_they_do_not_look_ahead(ahead, found):
    """Two images whose first rows have the same ids are identical up to there."""
    rows = ids("a", 8, ahead=ahead)
    prompt, before = [*TEXT, *rows, 7, 8], [*TEXT, *rows[:5], 9, 9, 9, 9]
    assert CHUNKING.reused(prompt, Computed(before, [6, 14])) == found
    assert CHUNKING.reused(prompt, Computed(prompt, chunks_of(prompt))) == 14


def test_a_block_is_known_by_the_picture_in_it():
    keys = {block("root", None, [*TEXT, *ids(name, 4, ahead=True)], (10,)).key for name in ("a", "b", "a")}
    assert len(keys) == 2


def scheduler(**more):
    return Scheduler(SchedulerState(context=64, chunking=CHUNKING, depth=1, **more))


def generate(prompt, pictures, request=1):
    return Generate(
        request=request,
        prompt=prompt,
        sampled=[],
        max_tokens=2,
        sampling=GREEDY,
        logprobs=None,
        pictures=pictures,
    )


def test_a_step_has_a_pictures_rows_or_tokens_and_the_rows_of_just_its_positions():
    content = b"".join(bytes([row]) * 4 for row in range(12))
    under_test = scheduler()
    prompt = [*TEXT, *ids("a", 12, ahead=False), 7]
    assert under_test.submit(generate(prompt, [PictureRows(6, 12, content)])) is None
    found = []
    for number in range(4):
        step = under_test.next_step(0.0)
        assert step is not None
        found.append((step.positions[0], step.content))
        assert all(token < 0 for token in step.tokens) == bool(step.content)
        if number < 3:
            under_test.commit(step.step, {}, 0.0)
    assert found == [(0, b""), (6, content[:32]), (14, content[32:]), (18, b"")]
    assert content_of([PictureRows(0, 1, b"no"), PictureRows(6, 12, content)], 7, 9) == content[4:12]


def test_a_picture_that_no_step_has_room_for_is_refused_by_its_rows():
    prompt = [1, *ids("a", 17, ahead=True), 2]
    finished = scheduler().submit(generate(prompt, [PictureRows(1, 17, bytes(17 * 4))]))
    assert finished is not None
    assert finished.reason == "refused"
    assert "17 rows" in str(finished.error)
    assert longest_run([1, *ids("a", 40, ahead=False)]) == 0


def test_a_picture_that_another_encoder_saw_is_another_one():
    runs = (TokenRun((3,)), EmbeddedRun(rows=2, looks_ahead=False, content=bytes(8), layout="grid", columns=2))
    found = [placed(EncodedPicture(digest="a", encoder=each, runs=runs), 4) for each in ("x", "y", "x")]
    assert found[0] == found[2] != found[1]
    assert found[0][1] == [PictureRows(5, 2, bytes(8), "grid", 2)]


def test_a_grid_in_a_frame_has_a_time_for_each_row_and_is_counted():
    framed = PictureRows(2, 8, bytes(32), "framed", 3)
    found = rope_of([PictureRows(0, 1, bytes(4)), framed], range(2, 11))
    assert [found[at : at + 4] for at in range(0, 36, 4)] == [
        [2, 2, 2, 2],
        *([time, column, row, 1] for time, (row, column) in enumerate(product(range(2), range(3)), start=3)),
        [9, 9, 9, 9],
        [10, 10, 10, 0],
    ]


GRID = PictureRows(3, 6, bytes(6 * 4), "grid", 2)
"""Three rows of two columns."""


def test_a_grid_has_one_time_and_later_rows_come_after_its_longer_side():
    found = rope_of([GRID, PictureRows(10, 4, bytes(16), "grid", 4)], range(15))
    assert [found[4 * at : 4 * at + 4] for at in range(15)] == [
        *([at] * 3 + [0] for at in range(3)),
        *([3, 3 + at // 2, 3 + at % 2, 0] for at in range(6)),
        [6, 6, 6, 0],
        *([7, 7, 7 + at, 0] for at in range(4)),
        [11, 11, 11, 0],
    ]
    assert rope_of([PictureRows(3, 6, bytes(24))], range(15)) == []


def test_rows_in_a_line_are_turned_by_their_own_time_in_all_parts():
    line = [PictureRows(1, 2, bytes(8), "line")]
    assert rope_of(line, range(4)) == [0, 0, 0, 0, *[1] * 4, *[2] * 4, 3, 3, 3, 0]
    assert rope_of(line, [0]) == rope_of(line, [3, 4]) == [], "as tokens are"


def test_rows_batched_with_those_after_a_grid_are_rotated_by_their_positions():
    under_test = scheduler(sequences=2, batching=Batching(rows=2))
    prompts = {1: [1, 2, 3, *ids("a", 6, ahead=False), 4], 2: [7, 8]}
    for request, prompt in prompts.items():
        asked = replace(generate(prompt, [GRID] if request == 1 else [], request), max_tokens=8)
        assert under_test.submit(asked) is None
    found = []
    while (step := under_test.next_step(0.0)) is not None:
        found.append((step.positions, step.rope))
        samples = {each.request: SampledToken(token=5, ends=False) for of in step.samples.values() for each in of}
        under_test.commit(step.step, samples, 0.0)
    together = [(positions, rope) for positions, rope in found if len(positions) == 2 and positions[0] > positions[1]]
    assert together
    for (after, batched), rope in together:
        assert rope == [*[after - 3] * 3, 0, *[batched] * 3, 0]
    assert ([0, 1], []) in found, "of text alone they are not sent"


def test_a_picture_may_have_at_least_as_many_tokens_as_its_minimum():
    with pytest.raises(ConfigError, match="--image-min-tokens 9: is more than --image-max-tokens 8"):
        image_tokens(EndpointOptions(image_min_tokens=9, image_max_tokens=8))
    assert image_tokens(EndpointOptions(image_max_tokens=8)) == (0, 8)
