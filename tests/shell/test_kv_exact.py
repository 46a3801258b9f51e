"""KV cells are read by position and restored into other windows; logits stay the same, bit for bit."""

import struct
from contextlib import ExitStack
from dataclasses import replace
from itertools import pairwise

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from halda.assignment import in_memory
from halda.profile import KV_BLOCK
from primad.engine import kv_cache
from primad.engine.binding import llama
from primad.engine.llama.windows import WholeModel
from primad.engine.protocol import Rows
from primad.errors import EngineError
from primad.gguf.architecture import Sliding
from primad.gguf.architectures.layers import layer_count
from primad.gguf.architectures.table import SUPPORTED
from primad.gguf.header import read_header
from primad.gguf.profile import model_profile
from primad.gguf.windows import vocabulary_size
from primad.kv import keys
from primad.kv.cells import pack, unpack
from primad.kv.store import KvStore
from primad.planning.replicas import why_not_kept
from tests.shell.test_cut_exact import (
    EVERY_KIND,
    HYBRIDS,
    OPTIONS,
    PROMPT,
    Route,
    cuts_of,
    files_of,
    parts_of,
    rows,
    synth,
)
from tests.shell.test_model_profile import DIFFERING, LATENT
from tests.shell.test_streams_exact import EVERYTHING, streaming

KINDS = {"flash": ("f16", True), "scores": ("f16", False), "q8_0": ("q8_0", True)}
ANSWER = 7
UNSUPPORTED = {"deci", "deepseek32", "glm-dsa", "glm-dsa-full", "minimax-m3", "plamo2"}
"""Some of their layers have no cells, or a second cache for the choice of cells that attention sees, or the graph has
other names for its state tensors.
"""
WIDE = {"width": 256, "head_width": 64}
"""The heads' width is a multiple of a Q8_0 block."""


def options_of(kind, sequences):
    kv_type, flash = KINDS[kind]
    return msgspec.structs.replace(OPTIONS, kv_type=kv_type, flash=flash, sequences=sequences)


def written(folder, architecture, **sizes):
    path = folder / "model.gguf"
    synth.write_model(path, architecture=architecture, **sizes)
    return read_header(path)


def whole_of(header, options):
    files = files_of(header.path, (), in_memory(0, layer_count(header)))
    return WholeModel(files, options, frozenset(), vocabulary=vocabulary_size(header))


class Whole(Route):
    """The whole model as one window."""

    def __init__(self, header, options):
        self.windows = [whole_of(header, options)]


class SavedBlocks:
    """KV blocks of all layers, computed, read and kept as in a ring."""

    def __init__(self, route, sequence):
        self._route, self._sequence, self._end = route, sequence, 0
        self.blocks = []
        self.tokens = []

    def add(self, tokens):
        """Compute ``tokens`` in one step, and keep their KV cells."""
        logits = self._route.logits(tokens, self._end, self._sequence)
        self.tokens += tokens
        self.keep(self._end + len(tokens))
        return logits

    def keep(self, end):
        cells = [layer for each in self._route.windows for layer in each.kv_cells(self._sequence, self._end, end)]
        self.blocks.append(cells)
        self._end = end


def restore(route, blocks, sequence):
    for window in route.windows:
        first, last = window.layers.start, window.layers.stop
        window.kv_restore(sequence, [block[first:last] for block in blocks])


def answer(route, saved, sequence, logits, count):
    """Compute and keep ``count`` greedy tokens from ``logits``; returns the last logits."""
    for _ in range(count):
        logits = saved.add([int(logits.argmax())])
    return logits


def cut_into(header, folder, cuts):
    """The ``cuts``, each with the files of its windows."""
    found = []
    for number, cut in enumerate(cuts):
        place = folder / str(number)
        place.mkdir()
        found.append((cut, parts_of(header, cut, place)))
    return found


def judge(header, folder, kind, sequences, cuts):
    options, sequence = options_of(kind, sequences), sequences - 1
    with ExitStack() as stack:
        routes = [Whole(header, options)]
        routes += [Route(header, cut, folder, options, parts=parts) for cut, parts in cuts]
        for route in routes:
            stack.callback(route.release)
            assert all(window.kv_supported for window in route.windows)
        source = routes[1]
        saved = SavedBlocks(source, sequence)
        saved.add(PROMPT[:64])
        logits = answer(source, saved, sequence, saved.add(PROMPT[64:]), ANSWER)
        after = []
        for step in range(3):
            token = int(logits.argmax())
            logits = source.logits([token], len(saved.tokens) + step, sequence)
            after.append((token, logits))
        for route in (*routes, source):
            restore(route, saved.blocks, sequence)
            again = SavedBlocks(route, sequence)
            again.keep(len(saved.tokens))
            assert joined(again.blocks) == joined(saved.blocks)
            for step, (token, expected) in enumerate(after):
                difference = np.abs(route.logits([token], len(saved.tokens) + step, sequence) - expected).max()
                assert difference == 0, f"{kind}, {sequences} sequences, {step} tokens on: {difference}"


def joined(blocks):
    """The bytes of each layer, joined over all blocks."""
    return [
        (b"".join(bytes(cells.keys) for cells in layer), b"".join(bytes(cells.values) for cells in layer))
        for layer in zip(*blocks, strict=True)
    ]


PAIRS = [("flash", 1), ("scores", 3), ("q8_0", 1), ("flash", 3), ("scores", 1), ("q8_0", 3)]
SUPPORTED_KINDS = sorted(set(EVERY_KIND) - set(HYBRIDS) - UNSUPPORTED)
PLAIN = [
    each.name for each in SUPPORTED.values() if each.sliding is Sliding.NEVER and each.name not in {*LATENT, *DIFFERING}
]
"""Their layers all have the same KV cells, for all positions."""
EVERY_RUN = {*SUPPORTED_KINDS} - {*sorted({*SUPPORTED_KINDS} & {*PLAIN})[2 * len(PAIRS) :]}


@pytest.mark.slow
@pytest.mark.parametrize(
    "architecture",
    [pytest.param(name, marks=() if name in EVERY_RUN else pytest.mark.matrix) for name in SUPPORTED_KINDS],
)
def test_kv_cells_restore_into_windows_of_another_cut(architecture, tmp_path):
    """Each kind of cells, with one sequence and several, is tried with some architectures; the full matrix has all
    pairs.
    """
    into_other_cuts(architecture, [PAIRS[SUPPORTED_KINDS.index(architecture) % len(PAIRS)]], tmp_path)


@pytest.mark.matrix
@pytest.mark.parametrize("architecture", SUPPORTED_KINDS)
def test_kv_cells_of_each_kind_restore_into_windows_of_another_cut(architecture, tmp_path):
    into_other_cuts(architecture, PAIRS, tmp_path)


def into_other_cuts(architecture, pairs, folder):
    header = written(folder, architecture, **WIDE)
    assert not why_not_kept(model_profile(header)), "the reason that a plan shows"
    kinds = {"flash"} if architecture == "mimo2" else {"flash", "scores"}  # its values differ in size from its keys
    if model_profile(header).kv_head_width % KV_BLOCK == 0:
        kinds.add("q8_0")
    cuts = cut_into(header, folder, cuts_of(header))
    for kind, sequences in pairs:
        judge(header, folder, kind if kind in kinds else "flash", sequences, cuts)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("architecture", ["llama", "gemma3", "deepseek2"])
def test_kv_cells_restore_into_other_windows(architecture, kind, tmp_path):
    header = written(tmp_path, architecture, **WIDE)
    judge(header, tmp_path, kind, 3, cut_into(header, tmp_path, ([0, 2, 4, 6], [0, 1, 5, 6])))


@pytest.mark.parametrize("architecture", sorted(UNSUPPORTED))
def test_kv_cells_in_an_unknown_state_are_not_saved(architecture, tmp_path):
    header = written(tmp_path, architecture)
    model = whole_of(header, options_of("flash", 3))
    assert not model.kv_supported
    assert why_not_kept(model_profile(header)), "the reason that a plan shows"
    model.forward(rows(np.array(PROMPT[:3], np.int32), 0))
    model.release()


def test_latent_attention_has_only_keys(tmp_path):
    with opened(written(tmp_path, "deepseek2"), "flash", 1) as model:
        model.forward(rows(np.array(PROMPT[:3], np.int32), 0))
        assert {len(cells.values) for cells in model.kv_cells(0, 0, 3)} == {0}


@pytest.mark.parametrize("architecture", ["llama", "gemma3"])
def test_devices_with_and_without_flash_attention_exchange_kv_cells(architecture, tmp_path):
    header = written(tmp_path, architecture)
    with opened(header, "flash", 1) as flash, opened(header, "scores", 3) as scores:
        flash.forward(rows(np.array(PROMPT[:50], np.int32), 0))
        cells = flash.kv_cells(0, 0, 50)
        scores.kv_restore(1, [cells])
        assert joined([scores.kv_cells(1, 0, 50)]) == joined([cells])
        for model, sequence in ((flash, 0), (scores, 1)):
            model.forward(rows(np.array([9], np.int32), 50, sequence))
        assert np.abs(flash.logits(0) - scores.logits(0)).mean() < 0.3, "of logits that are 3 on average"


def test_kv_cells_restore_from_the_store_into_a_window_that_streams(tmp_path):
    header = written(tmp_path, "llama")
    store = KvStore(tmp_path / "cells")
    first = keys.block("root", None, PROMPT[:40], [40])
    second = keys.block("root", first, PROMPT[40:50], [50])
    with opened(header, "flash", OPTIONS.sequences) as model:
        for block, tokens in ((first, PROMPT[:40]), (second, PROMPT[40:50])):
            model.forward(rows(np.array(tokens, np.int32), block.start))
            store.put(block, model.kv_cells(0, block.start, block.end))
        model.forward(rows(np.array([9], np.int32), 50))
        expected = model.logits(0).copy()
    with streaming(header, [0, 3, 6], tmp_path, streamed=EVERYTHING) as made:
        for window, (start, stop) in zip(made.windows, pairwise((0, 3, 6)), strict=True):
            stream, window._tap.stream = window._tap.stream, Untouched()
            assert window.kv_supported
            window._tap.stream = stream
            window.kv_restore(0, [store.read(block.key, start, stop) for block in (first, second)])
        assert (made.logits([9], 50) == expected).all()


class Untouched:
    """Fails on any use: layers that stream are neither asked for nor counted."""

    def __getattr__(self, name):
        raise AssertionError(name)


# ---- any history --------------------------------------------------------------------------------------------------------

SEQUENCES = 3
HISTORY = st.lists(
    st.one_of(
        st.tuples(st.just("rows"), st.sets(st.integers(0, SEQUENCES - 1), min_size=1), st.integers(1, 40)),
        st.tuples(st.just("remove"), st.integers(0, SEQUENCES - 1), st.integers(0, 80)),
        st.tuples(st.just("copy"), st.permutations(range(SEQUENCES)), st.integers(1, 80)),
        st.tuples(st.just("restore"), st.permutations(range(SEQUENCES)), st.integers(1, 80)),
    ),
    min_size=1,
    max_size=10,
)


@pytest.fixture(scope="module", params=["llama", "gemma3"])
def with_history(request, tmp_path_factory):
    header = written(tmp_path_factory.mktemp("model"), request.param)
    with opened(header, "flash", SEQUENCES) as model, opened(header, "flash", SEQUENCES) as fresh:
        yield model, fresh


@given(history=HISTORY)
@settings(max_examples=40)
def test_after_any_history_a_position_has_its_own_kv_cell(with_history, history):
    """``kv_cells`` reads a position where llama.cpp's own state has it."""
    model, fresh = with_history
    ends = [0] * SEQUENCES
    for sequence in range(SEQUENCES):
        model.kv_remove(sequence, 0, -1)
    for kind, where, amount in history:
        _play(model, ends, kind, where, amount)
    for sequence, end in enumerate(ends):
        if end:
            cells = model.kv_cells(sequence, 0, end)
            check_state(model, sequence, cells)
            if end < OPTIONS.context:
                fresh.kv_restore(0, [cells])
                for window, number in ((model, sequence), (fresh, 0)):
                    window.forward(rows(np.array([5], np.int32), end, number))
                assert (model.logits(0) == fresh.logits(0)).all()
                model.kv_remove(sequence, end, -1)


def _play(model, ends, kind, where, amount):
    match kind:
        case "rows":
            count = min([amount, 64 // len(where), *(OPTIONS.context - ends[each] for each in where)])
            if count:
                order = [each for each in sorted(where) for _ in range(count)]
                positions = [ends[each] + i for each in sorted(where) for i in range(count)]
                tokens = np.array(
                    [4 + (7 * each + 3 * at) % 200 for each, at in zip(order, positions, strict=True)], np.int32
                )
                model.forward(
                    Rows(content=tokens, positions=positions, sequences=[[each] for each in order],
                         outputs=[False] * (len(order) - 1) + [True])
                )  # fmt: skip
                for each in where:
                    ends[each] += count
        case "remove":
            ends[where] = min(ends[where], amount)
            model.kv_remove(where, ends[where], -1)
        case "copy" if ends[where[0]]:
            ends[where[1]] = min(ends[where[0]], amount)
            model.kv_copy(where[0], where[1], ends[where[1]])
        case "restore" if ends[where[0]]:
            end = min(ends[where[0]], amount)
            middle = max(end // 2, 1)
            parts = [(start, stop) for start, stop in ((0, middle), (middle, end)) if start < stop]
            model.kv_restore(where[1], [model.kv_cells(where[0], *part) for part in parts])
            ends[where[1]] = end


def check_state(model, sequence, cells):
    """Compare ``cells`` with llama.cpp's saved state of ``sequence``, which lacks what sliding windows have passed."""
    size = llama.llama_state_seq_get_size(model._context, sequence)
    buffer = (llama.ctypes.c_uint8 * size)()
    assert llama.llama_state_seq_get_data(model._context, buffer, size, sequence) == size
    data, place, seen = bytes(buffer), 8, 0

    def take(form):
        nonlocal place
        values = struct.unpack_from(f"<{form}", data, place)
        place += struct.calcsize(f"<{form}")
        return values

    while place < size:
        (streams,) = take("I")
        for _ in range(streams):
            (count,) = take("I")
            if not count:
                continue
            positions = [take("iIi")[0] for _ in range(count)]
            assert positions == list(range(positions[0], cells[0].end)), "in the order of the positions"
            transposed, layers = take("II")
            assert not transposed
            sides = []
            for _ in range(2 * layers):
                _, row = take("iQ")
                sides.append(np.frombuffer(data, np.uint8, count * row, place).reshape(count, row))
                place += count * row
            seen += layers
            for key_rows, value_rows in zip(sides[:layers], sides[layers:], strict=True):
                assert any(_has(each, key_rows, value_rows, positions) for each in cells)
    assert seen == len(cells)


def _has(cells, key_rows, value_rows, positions):
    keys_, values = (np.frombuffer(side, np.uint8).reshape(cells.end, -1) for side in (cells.keys, cells.values))
    return (keys_[positions] == key_rows).all() and (values[positions] == value_rows).all()


# ---- refusals -----------------------------------------------------------------------------------------------------------


class opened:  # noqa: N801
    """A whole model, released at the end."""

    def __init__(self, header, kind, sequences):
        self._model = whole_of(header, options_of(kind, sequences))

    def __enter__(self):
        assert self._model.kv_supported
        return self._model

    def __exit__(self, *_):
        self._model.release()


def test_copied_kv_cells_are_available_at_once(tmp_path):
    """llama.cpp defers the copy until the next step."""
    with opened(written(tmp_path, "llama"), "flash", 3) as model:
        model.forward(rows(np.array(PROMPT[:20], np.int32), 0))
        model.forward(rows(np.array(PROMPT[30:40], np.int32), 0, 1))
        first, second = model.kv_cells(0, 0, 20), model.kv_cells(1, 0, 10)
        model.kv_copy(0, 2, 15)
        model.kv_restore(0, [second])
        assert joined([model.kv_cells(2, 0, 15)]) == joined(
            [[replace(each, keys=each.keys[: len(each.keys) * 3 // 4], values=each.values[: len(each.values) * 3 // 4])
              for each in first]]
        )  # fmt: skip
        assert joined([model.kv_cells(0, 0, 10)]) == joined([second])
        with pytest.raises(EngineError, match="it ends at 15"):
            model.kv_cells(2, 0, 16)


def test_kv_cells_of_another_window_are_refused_and_the_window_still_works(tmp_path):
    with opened(written(tmp_path, "llama"), "flash", 3) as model:
        model.forward(rows(np.array(PROMPT[:20], np.int32), 0))
        good = model.kv_cells(0, 0, 10)
        more = model.kv_cells(0, 10, 20)
        model.forward(rows(np.array([7], np.int32), 20))
        expected = model.logits(0).copy()

        def changed(**fields):
            return [*good[:-1], replace(good[-1], **fields)]

        full = [[replace(each, start=10 * i, end=10 * i + 10) for each in good] for i in range(26)]
        for blocks, why in (
            ([], "do not fit"),
            ([good[1:]], "are not those of a window of layers 0 to 5"),
            ([good[::-1]], "are not those of a window"),
            ([more], "do not follow position 0"),
            ([good, good], "do not follow position 10"),
            ([changed(end=9)], "do not follow"),
            ([changed(key_type=8)], "other types or sizes"),
            ([changed(value_type=0)], "other types or sizes"),
            ([changed(keys=good[-1].keys[:-2])], "other types or sizes"),
            ([changed(values=b"")], "other types or sizes"),
            (full, "260 KV cells do not fit a cache of 256"),
        ):
            with pytest.raises(EngineError, match=why):
                model.kv_restore(1, blocks)
            with pytest.raises(EngineError, match="it ends at 0"):
                model.kv_cells(1, 0, 1)
        for start, end in ((-1, 3), (5, 5), (7, 3), (0, 22)):
            with pytest.raises(EngineError, match="has no KV cells"):
                model.kv_cells(0, start, end)
        model.kv_restore(1, [good, more])
        model.forward(rows(np.array([7], np.int32), 20, 1))
        assert (model.logits(0) == expected).all()


def test_kv_cells_equal_their_packed_bytes(tmp_path):
    with opened(written(tmp_path, "llama"), "flash", 1) as model:
        model.forward(rows(np.array(PROMPT[:20], np.int32), 0))
        block = keys.block("root", None, PROMPT[:20], [20])
        cells = model.kv_cells(0, 0, 20)
        assert unpack(b"".join(pack(block, cells))) == (block, cells)


@pytest.mark.parametrize("change", [("_NAME", kv_cache.re.compile(rb"(?!)(k)(v)")), ("_MAGIC", 1)])
def test_a_build_with_another_kv_layout_is_detected(change, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(kv_cache, *change)
    model = whole_of(written(tmp_path, "llama"), options_of("flash", 1))
    with caplog.at_level("WARNING"):
        assert not model.kv_supported
    assert sum("layers 0 to 5 cannot be kept" in line for line in caplog.messages) == 1
    model.forward(rows(np.array(PROMPT[:20], np.int32), 0))
    assert np.isfinite(model.logits(19)).all()
    with pytest.raises(EngineError, match="does not give or take"):
        model.kv_cells(0, 0, 1)
    model.release()
