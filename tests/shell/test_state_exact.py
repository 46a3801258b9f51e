"""States that cannot be cut back are put back: what is computed from there on is the same, bit for bit."""

from contextlib import ExitStack
from itertools import pairwise

import msgspec
import pytest

from primad.errors import EngineError
from primad.gguf.architecture import Sliding
from primad.gguf.architectures.table import SUPPORTED
from tests.shell.test_cut_exact import EVERY_KIND, HYBRIDS, OPTIONS, PROMPT, Route, cuts_of
from tests.shell.test_kv_exact import Kept, Whole, restore, written

SLIDES = {name for name, each in SUPPORTED.items() if each.sliding is not Sliding.NEVER}
QUICK = ("qwen35", "nemotron_h", "gemma3", "gpt-oss")
CHUNKS = (PROMPT[:40], PROMPT[40:64], PROMPT[64:])
ANSWER = 6


def some_quick(names):
    """``names``, of which all but some are slow."""
    return [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in names]


def printed(route, sequence, chunks, position):
    """The logits behind each of ``chunks`` and behind each of ``ANSWER`` greedy tokens."""
    found = []
    for tokens in chunks:
        found.append(route.logits(tokens, position, sequence))
        position += len(tokens)
    for _ in range(ANSWER):
        found.append(route.logits([int(found[-1].argmax())], position, sequence))
        position += 1
    return found


def each(route, act):
    for window in route.windows:
        act(window)


@pytest.mark.parametrize("architecture", some_quick(HYBRIDS))
def test_a_sequence_goes_back_to_where_its_state_was_kept(architecture, tmp_path):
    header = written(tmp_path, architecture)
    for number, (cut, sequences) in enumerate([(None, 1), (cuts_of(header)[0], 3)]):
        options = msgspec.structs.replace(OPTIONS, sequences=sequences)
        (tmp_path / str(number)).mkdir()
        with ExitStack() as stack:
            route = Whole(header, options) if cut is None else Route(header, cut, tmp_path / str(number), options)
            stack.callback(route.release)
            own = sequences - 1
            expected = printed(route, own, CHUNKS, 0)
            each(route, lambda window, own=own: window.kv_remove(own, 0, -1))
            route.logits(CHUNKS[0], 0, own)
            each(route, lambda window, own=own: window.state_keep(5, own, 40))
            route.logits(CHUNKS[1], 40, own)
            each(route, lambda window, own=own: window.state_keep(2, own, 64))
            printed(route, own, CHUNKS[2:], 64)
            if own:
                printed(route, 0, CHUNKS, 0)
            for state, chunk, end in ((2, 2, 64), (5, 1, 40), (5, 1, 40)):
                each(route, lambda window, own=own, state=state, end=end: window.state_restore(state, own, end))
                again = printed(route, own, CHUNKS[chunk:], end)
                assert all((one == other).all() for one, other in zip(again, expected[chunk:], strict=True)), (cut, end)


SLIDING = sorted(set(EVERY_KIND) & SLIDES - set(HYBRIDS))
LONG = [1 + (7 * i * i + i) % 200 for i in range(600)]
"""Past the cells that a small cache has, twice."""
ENDS = [40, 104, 168, 232, 296, 300, 364, 428, 492, 511, 512, 513, 570, 600]


@pytest.mark.parametrize("architecture", some_quick(SLIDING))
def test_a_small_cache_of_windows_goes_back_to_the_cells_that_it_had(architecture, tmp_path):
    header = written(tmp_path, architecture)
    small = msgspec.structs.replace(OPTIONS, context=1024, sequences=2, small_windows=True)
    chunks = [LONG[first:last] for first, last in pairwise([0, *ENDS])]
    cuts = [(None, False), (cuts_of(header)[0], True)] if architecture in QUICK else [(cuts_of(header)[0], False)]
    for number, (cut, flash) in enumerate(cuts):
        options = msgspec.structs.replace(small, flash=flash)
        (tmp_path / str(number)).mkdir()
        with ExitStack() as stack:
            whole = Whole(header, options)
            route = Whole(header, options) if cut is None else Route(header, cut, tmp_path / str(number), options)
            for made in (whole, route):
                stack.callback(made.release)
            expected, position = printed(whole, 1, chunks, 0), 0
            for at, tokens in enumerate(chunks):
                route.logits(tokens, position, 1)
                position += len(tokens)
                each(route, lambda window, at=at, end=position: window.state_keep(at, 1, end))
            for at in (4, 9, 10, 11, 4, 0, 12):
                each(route, lambda window, at=at: window.state_restore(at, 1, ENDS[at]))
                again = printed(route, 1, chunks[at + 1 :], ENDS[at])
                assert all((one == other).all() for one, other in zip(again, expected[at + 1 :], strict=True)), (
                    cut,
                    at,
                )


@pytest.mark.parametrize("flash", [True, False])
@pytest.mark.parametrize("architecture", ["gemma3", "gpt-oss"])
def test_blocks_of_a_small_cache_go_to_windows_of_another_cut(architecture, flash, tmp_path):
    header = written(tmp_path, architecture)
    options = msgspec.structs.replace(OPTIONS, context=1024, sequences=2, small_windows=True, flash=flash)
    chunks = [LONG[first:last] for first, last in pairwise([0, *ENDS])]
    with ExitStack() as stack:
        whole = Whole(header, options)
        routes = [whole]
        for number, cut in enumerate(([0, 1, 2, 6], [0, 4, 6])):
            (tmp_path / str(number)).mkdir()
            routes.append(Route(header, cut, tmp_path / str(number), options))
        for route in routes:
            stack.callback(route.release)
            assert all(window.kv_supported for window in route.windows)
        kept = Kept(whole, 1)
        expected = [kept.add(tokens) for tokens in chunks]
        for _ in range(ANSWER):
            expected.append(kept.add([int(expected[-1].argmax())]))
        for route in (*routes[1:], whole):
            for blocks in (3, 5, 10, 11, 14, 17):
                restore(route, kept.blocks[:blocks], 1)
                position, again = sum(len(each) for each in chunks[:blocks]) + max(0, blocks - len(chunks)), []
                for number in range(blocks, len(expected)):
                    tokens = chunks[number] if number < len(chunks) else [int(expected[number - 1].argmax())]
                    again.append(route.logits(tokens, position, 1))
                    position += len(tokens)
                assert all((one == other).all() for one, other in zip(again, expected[blocks:], strict=True)), blocks


def test_a_state_of_another_position_is_refused(tmp_path):
    route = Whole(written(tmp_path, "qwen35"), OPTIONS)
    (window,) = route.windows
    route.logits(CHUNKS[0], 0)
    with pytest.raises(EngineError, match="sequence 0 has 40 positions; its state is to be kept behind 41"):
        window.state_keep(0, 0, 41)
    window.state_keep(0, 0, 40)
    for number, end in ((1, 40), (0, 39)):
        with pytest.raises(EngineError, match=f"state {number} behind {end} positions is not kept here"):
            window.state_restore(number, 0, end)
    window.state_forget()
    with pytest.raises(EngineError, match="is not kept here"):
        window.state_restore(0, 0, 40)
    route.release()
