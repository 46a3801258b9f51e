"""States that cannot be truncated are restored: logits after that are the same, bit for bit."""

from contextlib import ExitStack
from itertools import pairwise

import msgspec
import numpy as np
import pytest

from primad.engine.protocol import Rows
from primad.errors import EngineError
from primad.gguf.architecture import Sliding
from primad.gguf.architectures.table import SUPPORTED
from tests.shell.test_cut_exact import EVERY_KIND, HYBRIDS, OPTIONS, PROMPT, Route, cuts_of, rows
from tests.shell.test_kv_exact import UNSUPPORTED, SavedBlocks, Whole, restore, written

SLIDES = {name for name, each in SUPPORTED.items() if each.sliding is not Sliding.NEVER}
QUICK = ("qwen35", "nemotron_h", "gemma3", "gpt-oss")
CHUNKS = (PROMPT[:40], PROMPT[40:64], PROMPT[64:])
ANSWER = 4


ALIKE = {"lfm2moe", "nemotron_h_moe", "qwen35-array", "qwen35moe", "rwkv6qwen2"}
"""Each has the states of another architecture, with other networks."""


def some_quick(names):
    """``names`` as parameters, all but a few marked slow. Every run has one of each kind of state and of sliding
    window, including architectures that share KV cells or attend to parts of them.
    """
    firsts = {SUPPORTED[name].sliding: name for name in sorted(names, reverse=True) if name in SLIDES}
    every_run = {*QUICK, *firsts.values(), "gemma4", "llama4", *(set(HYBRIDS) - ALIKE)}
    marks = {name: [pytest.mark.slow] + [pytest.mark.matrix] * (name not in every_run) for name in names}
    return [pytest.param(name, marks=() if name in QUICK else marks[name]) for name in sorted(names)]


def printed(route, sequence, chunks, position):
    """The logits after each of ``chunks`` and each of ``ANSWER`` greedy tokens."""
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
def test_a_sequence_returns_to_a_saved_state(architecture, tmp_path):
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


ROLLS_BACK = sorted(name for name in HYBRIDS if name in SUPPORTED and SUPPORTED[name].takes_back)
LATENT = {"bailingmoe3"}
"""Without flash attention, its attention sums several tokens in another order."""
WRONG, OTHERS = [7, 9, 11], [13, 40, 8]
"""Rejected drafts. On some processors a float32 router's last bits depend on the other tokens of a step, which may
change the experts; models with experts are therefore compared with other drafts in the same steps.
"""


def step(route, tokens, position, sequence):
    """The logits after each of ``tokens``, computed in one step."""
    route.forward(
        msgspec.structs.replace(rows(np.array(tokens, np.int32), position, sequence), outputs=[True] * len(tokens))
    )
    return [route.windows[-1].logits(row).copy() for row in range(len(tokens))]


def with_drafts(route, own, text, wrong):
    """The logits after the prompt and each token of ``text``, computed one or two at a time with drafts that are rolled
    back, next to other sequences.
    """
    found, others = [printed(route, own, CHUNKS, 0)[len(CHUNKS) - 1]], -1
    each(route, lambda window: window.kv_remove(own, 0, -1))
    for tokens, position in zip(CHUNKS, (0, 40, 64), strict=True):
        route.logits(tokens, position, own)
    while len(found) <= ANSWER:
        at = len(found) - 1
        drafted = text[at : at + 1 + at % 2]
        found += step(route, [*drafted, *wrong[: 4 - len(drafted)]], len(PROMPT) + at, own)[: len(drafted)]
        end = len(PROMPT) + len(found) - 1
        if own:
            route.logits([at], others := others + 1, 0)
        each(route, lambda window, end=end: window.kv_remove(own, end, -1))
    return found


def are_equal(some, others):
    return all((one == other).all() for one, other in zip(some, others, strict=False))


@pytest.mark.parametrize("architecture", some_quick(ROLLS_BACK))
def test_rejected_drafts_are_rolled_back_and_logits_are_unchanged(architecture, tmp_path):
    header = written(tmp_path, architecture)
    for number, (cut, sequences) in enumerate([(None, 1), (cuts_of(header)[0], 3)]):
        own, routes = sequences - 1, []
        for rollback in (0, len(WRONG), len(WRONG)):
            options = msgspec.structs.replace(OPTIONS, sequences=sequences, rollback=rollback)
            (folder := tmp_path / f"{number}-{len(routes)}").mkdir()
            routes.append(Whole(header, options) if cut is None else Route(header, cut, folder, options))
        expected = printed(routes[0], own, CHUNKS, 0)[len(CHUNKS) - 1 :]
        text = [int(logits.argmax()) for logits in expected]
        found, again = (with_drafts(*how) for how in ((routes[1], own, text, WRONG), (routes[2], own, text, OTHERS)))
        assert are_equal(found, again), cut
        if not any("ffn_gate_inp" in name for name in header.tensors):
            assert are_equal(found, expected), cut
        for route in routes:
            route.release()


def test_only_tokens_of_the_last_step_are_rolled_back_and_one_of_them_stays(tmp_path):
    """llama.cpp would roll back others as well, and then compute wrong logits."""
    route = Whole(written(tmp_path, "qwen35"), msgspec.structs.replace(OPTIONS, sequences=3, rollback=3))
    (window,) = route.windows

    def several():
        content, outputs = np.ones(2, np.int32), [True] * 2
        route.forward(Rows(content=content, positions=[0, 0], sequences=[[1], [2]], outputs=outputs))

    def roll_back():
        window.state_keep(0, 0, 46)
        window.state_restore(0, 0, 46)

    for start, between in (
        (40, None),  # all of them
        (39, None),
        (42, None),  # more than are kept
        (43, several),
        (44, lambda: window.kv_remove(0, 45, -1)),
        (45, roll_back),
    ):
        each(route, lambda window: [window.kv_remove(sequence, 0, -1) for sequence in range(3)])
        route.logits(CHUNKS[0], 0)
        step(route, WRONG * 2, 40, 0)
        if between is not None:
            between()
        with pytest.raises(EngineError, match=f"^positions {start} to .* of sequence 0 cannot be taken back"):
            window.kv_remove(0, start, -1)
    route.release()


@pytest.mark.parametrize("architecture", some_quick(set(HYBRIDS) - LATENT))
def test_tokens_of_several_sequences_in_one_step_have_the_logits_of_single_ones(architecture, tmp_path):
    header, each_from = written(tmp_path, architecture), (40, 64, 52)
    for number, flash in enumerate((True, False)):
        (folder := tmp_path / str(number)).mkdir()
        options = msgspec.structs.replace(OPTIONS, sequences=3, flash=flash)
        for route in (Whole(header, options), Route(header, cuts_of(header)[0], folder, options)):
            single = []
            for together in (False, True):
                for sequence in (2, 0, 1):
                    each(route, lambda window, sequence=sequence: window.kv_remove(sequence, 0, -1))
                    route.logits(PROMPT[: each_from[sequence]], 0, sequence)
                for at in range(ANSWER):
                    tokens, positions = [WRONG[(at + i) % 3] for i in range(3)], [at + end for end in each_from]
                    if not together:
                        single.append([step(route, [tokens[i]], positions[i], i)[0] for i in range(3)])
                        continue
                    content = np.array(tokens, np.int32)
                    several = Rows(content=content, positions=positions, sequences=[[0], [1], [2]], outputs=[True] * 3)
                    route.forward(several)
                    found = [route.windows[-1].logits(i) for i in range(3)]
                    assert all((one == other).all() for one, other in zip(found, single[at], strict=True)), (flash, at)
            route.release()


SLIDING = sorted(set(EVERY_KIND) & SLIDES - set(HYBRIDS))
LONG = [1 + (7 * i * i + i) % 200 for i in range(600)]
"""Twice the length of a small cache."""
ENDS = [40, 104, 168, 232, 296, 300, 364, 428, 492, 511, 512, 513, 570, 600]


@pytest.mark.parametrize("architecture", some_quick(SLIDING))
def test_a_small_window_cache_returns_to_its_saved_kv_cells(architecture, tmp_path):
    header = written(tmp_path, architecture)
    small = msgspec.structs.replace(OPTIONS, context=1024, sequences=2, small_windows=True)
    chunks = [LONG[first:last] for first, last in pairwise([0, *ENDS])]
    cuts = [(None, False), (cuts_of(header)[0], True)] if architecture in QUICK else [(cuts_of(header)[0], False)]
    back = (4, 9, 10, 11, 4, 0, 12) if architecture in QUICK else (9, 11, 4, 0)
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
            for at in back:
                each(route, lambda window, at=at: window.state_restore(at, 1, ENDS[at]))
                again = printed(route, 1, chunks[at + 1 :], ENDS[at])
                assert all((one == other).all() for one, other in zip(again, expected[at + 1 :], strict=True)), (
                    cut,
                    at,
                )


@pytest.mark.parametrize("flash", [True, False])
@pytest.mark.parametrize("architecture", ["gemma3", "gpt-oss"])
def test_blocks_of_a_small_cache_restore_into_windows_of_another_cut(architecture, flash, tmp_path):
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
        saved = SavedBlocks(whole, 1)
        expected = [saved.add(tokens) for tokens in chunks]
        for _ in range(ANSWER):
            expected.append(saved.add([int(expected[-1].argmax())]))
        for route in (*routes[1:], whole):
            for blocks in (3, 5, 10, 11, 14, 17):
                restore(route, saved.blocks[:blocks], 1)
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
    with pytest.raises(EngineError, match="sequence 0 has 40 positions; its state is to be kept after 41"):
        window.state_keep(0, 0, 41)
    window.state_keep(0, 0, 40)
    window.state_restore(1, 0, 40)  # it exists
    route.logits([5], 40)
    for number, end in ((1, 40), (0, 39)):
        with pytest.raises(EngineError, match=f"state {number} after {end} positions is not kept here"):
            window.state_restore(number, 0, end)
    window.state_forget()
    with pytest.raises(EngineError, match="is not kept here"):
        window.state_restore(0, 0, 40)
    route.release()


def state_of(route, sequence, end):
    return [layer for window in route.windows for layer in window.kv_cells(sequence, end, end)]


@pytest.mark.parametrize("architecture", some_quick(sorted(set(HYBRIDS) - UNSUPPORTED)))
def test_kv_cells_and_a_state_restore_into_windows_of_another_cut(architecture, tmp_path):
    header = written(tmp_path, architecture)
    options = msgspec.structs.replace(OPTIONS, sequences=2)
    with ExitStack() as stack:
        routes = [Whole(header, options)]
        for number, cut in enumerate(cuts_of(header)):
            (tmp_path / str(number)).mkdir()
            routes.append(Route(header, cut, tmp_path / str(number), options))
        for route in routes:
            stack.callback(route.release)
            assert all(window.kv_supported for window in route.windows)
        source, end = routes[1], len(PROMPT) + 1
        saved = SavedBlocks(source, 1)
        logits = [saved.add(tokens) for tokens in CHUNKS][-1]
        saved.add([int(logits.argmax())])
        state = state_of(source, 1, end)
        expected = printed(source, 1, [PROMPT[:3]], end)
        for route in (*routes[::-1], source):
            restore(route, [*saved.blocks, state], 1)
            assert state_of(route, 1, end) == state
            again = printed(route, 1, [PROMPT[:3]], end)
            assert all((one == other).all() for one, other in zip(again, expected, strict=True))
        (window,) = routes[0].windows
        with pytest.raises(EngineError, match="the state of layer 0 has another type, size or place"):
            window.kv_restore(1, [*saved.blocks[:-1], state])
        with pytest.raises(EngineError, match=f"sequence 1 has no state after {end} positions"):
            window.kv_cells(1, end, end)


@pytest.mark.parametrize("architecture", some_quick([*HYBRIDS, *SLIDING]))
def test_a_copy_resumes_from_a_saved_state(architecture, tmp_path):
    """The source sequence may have passed that state or be at it."""
    header = written(tmp_path, architecture)
    options = msgspec.structs.replace(OPTIONS, context=1024, sequences=3, small_windows=architecture in SLIDING)
    ends = [0, *ENDS[:7], 400]
    chunks = [LONG[first:last] for first, last in pairwise(ends)]
    route = Route(header, cuts_of(header)[0], tmp_path, options)
    expected = printed(route, 0, chunks, 0)
    for position, tokens in zip(ends, chunks[:-1], strict=False):
        route.logits(tokens, position, 2)
        if position == 296:
            each(route, lambda window: window.state_keep(3, 2, 300))
    each(route, lambda window: window.kv_copy(2, 0, 364))
    is_same(printed(route, 0, chunks[-1:], 364), expected)
    each(route, lambda window: window.kv_copy(2, 1, 300))
    each(route, lambda window: window.state_restore(3, 1, 300))
    is_same(printed(route, 1, chunks[-2:], 300), expected)
    is_same(printed(route, 2, chunks[-1:], 364), expected)
    route.release()


def is_same(again, expected):
    assert all((one == other).all() for one, other in zip(again, expected[-len(again) :], strict=True))
