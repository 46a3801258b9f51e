"""What goes to the GPU, as llama.cpp counts it: the output matrix is one more layer, the last, and is offloaded first."""

from __future__ import annotations

import pytest

from halda import Plan, Window, assignments
from halda.assignment import in_memory
from halda.plan import OutputPlace
from primad.daemon.layer_files import Workspace, place_windows
from primad.engine.llama.model import n_gpu_layers
from primad.engine.llama.windows import MiddleWindow, TailWindow, WholeModel
from primad.engine.protocol import EngineOptions, WindowSource
from primad.gguf.windows import WindowSpec
from primad.kv.store import KvStore
from primad.layers.cache import LayerCache
from tests.fakes.planning import model

OPTIONS = EngineOptions(context=64, sequences=1, rows=16, threads=1, batch_threads=1, kv_type="f16", lock=False)


def on_gpu(layers: int, output: OutputPlace) -> WindowSource:
    assignment = in_memory(0, 8, gpu_layers=layers, output=output)
    return WindowSource(window=0, metadata="none.gguf", layers=(), assignment=assignment, extra_buffers=False)


@pytest.mark.parametrize(
    ("layers", "output", "told"),
    [
        (0, False, 0),
        (1, False, 2),  # hidden states: the stand-in of the output goes along
        (8, False, 9),
        (0, True, 1),
        (1, True, 2),
        (8, True, 9),
    ],
)
def test_the_output_counts_as_the_last_layer(layers, output, told):
    assert n_gpu_layers(in_memory(0, 8, gpu_layers=layers, output="gpu" if output else "none")) == told


@pytest.mark.parametrize(("layers", "output", "told"), [(0, "cpu", 0), (0, "gpu", 1), (1, "gpu", 4), (8, "gpu", 11)])
def test_layers_for_multi_token_prediction_are_counted_but_never_there(layers, output, told):
    """They come between a whole model's other layers and its output."""
    assert n_gpu_layers(in_memory(0, 8, gpu_layers=layers, output=output), 2) == told


def test_what_llama_cpp_cannot_do_is_our_mistake():
    with pytest.raises(AssertionError):
        MiddleWindow(on_gpu(0, "gpu"), OPTIONS)
    for kind in (TailWindow, WholeModel):
        with pytest.raises(AssertionError):
            kind(on_gpu(1, "cpu"), OPTIONS, frozenset(), vocabulary=8)


@pytest.mark.parametrize(("gpu_layers", "output"), [(0, False), (0, True), (3, True), (8, True)])
def test_a_plan_of_one_window_says_what_of_the_whole_model_is_on_the_gpu(gpu_layers, output):
    window = Window(device="desk", first=0, last=8, gpu_layers=gpu_layers)
    plan = Plan(rounds=1, route=(window,), output_on_gpu=output, streaming=(), left_out=())
    (assignment,) = assignments(plan, model(layers=8))["desk"].windows
    assert (assignment.gpu_layers, assignment.output) == (gpu_layers, "gpu" if output else "cpu")


def test_only_the_tail_has_an_output(tmp_path):
    place = Workspace(
        cache=LayerCache(tmp_path), cells=KvStore(tmp_path / "cells"), run=tmp_path, usage=tmp_path / "usage", build="b"
    )
    specs = [WindowSpec(window=i, first=2 * i, last=2 * i + 2, metadata=b"GGUF", layers=()) for i in (0, 2, 4)]

    def placed(output: OutputPlace) -> list[tuple[int, bool]]:
        kept = [in_memory(0, 2, gpu_layers=2), in_memory(4, 6, gpu_layers=1), in_memory(8, 10, output=output)]
        placed = place_windows(place, specs, kept, [False] * 3, 1)
        return [(source.assignment.gpu_layers, source.assignment.output == "gpu") for source in placed]

    assert placed("gpu") == [(2, False), (1, False), (0, True)]
    assert placed("cpu") == [(2, False), (1, False), (0, False)]
