"""Steps without eval callbacks of llama.cpp give the same bits as steps with one for every node."""

import numpy as np
import pytest
from msgspec.structs import replace

from primad.engine import quiet
from primad.engine.llama.tap import Tap
from primad.engine.llama.windows import WholeModel
from primad.gguf.architectures.layers import layer_count
from primad.gguf.header import read_header
from primad.gguf.windows import vocabulary_size
from tests.shell.test_cut_exact import OPTIONS, PROMPT, Route, assigned, files_of, rows
from tools import synth

LONG = replace(OPTIONS, context=512, sequences=1, branches=1)
CHUNKS = [PROMPT[:64], *[[token] for token in range(30, 80)], [5, 6, 7, 8], *[[token] for token in range(60, 240)]]
"""A prompt, single tokens, four at once, and single tokens past 256 cells, where llama.cpp builds another graph."""


@pytest.fixture
def callbacks(monkeypatch):
    """The nodes for which llama.cpp called back since the list was cleared."""
    nodes = []

    def note(tap, node):
        nodes.append(node)
        return dict.__getitem__(tap, node) if node in tap else tap.__missing__(node)

    monkeypatch.setattr(Tap, "__getitem__", note, raising=False)
    return nodes


@pytest.fixture(params=["llama", "gemma3", "qwen2moe"])
def header(request, tmp_path):
    synth.write_model(tmp_path / "model.gguf", architecture=request.param)
    return read_header(tmp_path / "model.gguf")


def logits_of(header, route):
    """Logits for each of ``CHUNKS``, from the whole model with all callbacks and from ``route``."""
    files = files_of(header.path, (), assigned(layer_count(header), 0, is_tail=True))
    model = WholeModel(files, LONG, frozenset(), vocabulary=vocabulary_size(header))
    model._quiet._scheduler = lambda: None
    position = 0
    for tokens in CHUNKS:
        model.forward(rows(np.array(tokens, np.int32), position))
        yield position, model.logits(len(tokens) - 1).copy(), route.logits(tokens, position)
        position += len(tokens)
    model.release()
    route.release()


@pytest.mark.parametrize("is_found", [True, False], ids=["quiet", "asked"])
def test_windows_are_exact_with_and_without_the_callback_of_llama_cpp(header, is_found, monkeypatch, tmp_path):
    if not is_found:
        monkeypatch.setattr(quiet, "_GET_SCHEDULER", "not exported")
    middle = layer_count(header) // 2
    route = Route(header, [0, middle, layer_count(header)], tmp_path, LONG)
    for position, expected, found in logits_of(header, route):
        assert (expected == found).all(), f"at position {position}"


def test_an_unchanged_graph_makes_no_callbacks(tmp_path, callbacks):
    synth.write_model(tmp_path / "model.gguf", layers=4)
    route = Route(read_header(tmp_path / "model.gguf"), [0, 1, 3, 4], tmp_path, LONG)
    position, silent = 0, []
    for tokens in CHUNKS:
        callbacks.clear()
        route.logits(tokens, position)
        position += len(tokens)
        silent.append(not callbacks)
    route.release()
    assert not silent[0]
    assert all(silent[5:51]), "after some steps with the same graph"
    assert not any(silent[51:53]), "another number of rows is another graph"
    assert silent[52:].count(False) <= 8, "as are more cells, once"
    assert silent[-1]


def test_kv_cells_are_found_and_copied_between_steps_without_callbacks(tmp_path):
    synth.write_model(tmp_path / "model.gguf", layers=4)
    header = read_header(tmp_path / "model.gguf")
    silent_route, other = (Route(header, [0, 2, 4], folder(tmp_path / name), LONG) for name in ("quiet", "asked"))
    for window in other.windows:
        window._quiet._scheduler = lambda: None
    assert all(window.kv_supported for window in (*silent_route.windows, *other.windows))
    for position in range(60):
        found, expected = ([route.logits([40 + position], position)] for route in (silent_route, other))
        for mine, its in zip(silent_route.windows, other.windows, strict=True):
            if position in (30, 40):
                mine.kv_copy(0, 1, position - 10)
                its.kv_copy(0, 1, position - 10)
            if position % 7 == 0:
                found += [cells.keys for cells in mine.kv_cells(0, 0, position + 1)]
                expected += [cells.keys for cells in its.kv_cells(0, 0, position + 1)]
        assert all(np.array_equal(*pair) for pair in zip(found, expected, strict=True)), f"at position {position}"
    for route in (silent_route, other):
        route.release()


def folder(path):
    path.mkdir()
    return path
