"""GPU layers as llama.cpp counts them: the output matrix is one more layer, the last, and is offloaded first."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import numpy as np
import pytest

from halda import Plan, Window, assignments
from halda.assignment import in_memory
from halda.plan import OutputPlace
from primad.daemon.layer_files import Workspace, place_windows
from primad.engine.llama.model import gpus_in_order, n_gpu_layers, tensor_split
from primad.engine.llama.windows import MiddleWindow, TailWindow, WholeModel
from primad.engine.protocol import EngineOptions, WindowSource
from primad.errors import EngineError
from primad.gguf.windows import WindowPlan, WindowSpec
from primad.kv.store import KvStore
from primad.layers.cache import LayerCache
from tests.fakes.planning import model

OPTIONS = EngineOptions(context=64, sequences=1, rows=16, threads=1, batch_threads=1, kv_type="f16", lock=False)


def on_gpu(layers: int, output: OutputPlace) -> WindowSource:
    assignment = in_memory(0, 8, gpu_layers=layers, output=output)
    return WindowSource(window=0, metadata="none.gguf", layers=(), assignment=assignment, extra_buffers=False)


@pytest.mark.parametrize(
    ("layers", "output", "reported"),
    [
        (0, False, 0),
        (1, False, 2),  # hidden states: the output's placeholder counts too
        (8, False, 9),
        (0, True, 1),
        (1, True, 2),
        (8, True, 9),
    ],
)
def test_the_output_counts_as_the_last_layer(layers, output, reported):
    assert n_gpu_layers(in_memory(0, 8, gpu_layers=layers, output="gpu" if output else "none")) == reported


@pytest.mark.parametrize(
    ("layers", "output", "reported"), [(0, "cpu", 0), (0, "gpu", 1), (1, "gpu", 4), (8, "gpu", 11)]
)
def test_layers_for_multi_token_prediction_are_counted_but_never_there(layers, output, reported):
    """They lie between a whole model's other layers and its output."""
    assert n_gpu_layers(in_memory(0, 8, gpu_layers=layers, output=output), 2) == reported


def test_a_placement_that_llama_cpp_cannot_do_is_an_assertion_error():
    with pytest.raises(AssertionError):
        MiddleWindow(on_gpu(0, "gpu"), OPTIONS)
    for kind in (TailWindow, WholeModel):
        with pytest.raises(AssertionError):
            kind(on_gpu(1, "cpu"), OPTIONS, frozenset(), vocabulary=8)


@pytest.mark.parametrize(("gpu_layers", "output"), [(0, False), (0, True), (3, True), (8, True)])
def test_a_plan_of_one_window_sets_the_gpu_layers_of_the_whole_model(gpu_layers, output):
    window = Window(device="desk", first=0, last=8, gpu_layers=gpu_layers)
    plan = Plan(rounds=1, route=(window,), output_on_gpu=output, streaming=(), left_out=())
    (assignment,) = assignments(plan, model(layers=8))["desk"].windows
    assert (assignment.gpu_layers, assignment.output) == (gpu_layers, "gpu" if output else "cpu")


def test_only_the_tail_has_an_output(tmp_path):
    place = Workspace(
        cache=LayerCache(tmp_path), kv=KvStore(tmp_path / "cells"), run=tmp_path, usage=tmp_path / "usage", build="b"
    )
    specs = [WindowSpec(window=i, first=2 * i, last=2 * i + 2, metadata=b"GGUF", layers=()) for i in (0, 2, 4)]

    def placed(output: OutputPlace) -> list[tuple[int, bool]]:
        kept = [in_memory(0, 2, gpu_layers=2), in_memory(4, 6, gpu_layers=1), in_memory(8, 10, output=output)]
        plans = [
            WindowPlan(spec=spec, assignment=assignment, extra_buffers=False)
            for spec, assignment in zip(specs, kept, strict=True)
        ]
        placed = place_windows(place, plans, 1)
        return [(source.assignment.gpu_layers, source.assignment.output == "gpu") for source in placed]

    assert placed("gpu") == [(2, False), (1, False), (0, True)]
    assert placed("cpu") == [(2, False), (1, False), (0, False)]


def placed_by_llama_cpp(split: list[int], layers: int, reported: int) -> list[int | None]:
    """The index of the GPU where llama.cpp places each layer and the output, by its own rule in float32."""
    points = np.cumsum(np.array(split, np.float32), dtype=np.float32)
    points /= points[-1]
    first, count = max(layers + 1 - reported, 0), min(reported, layers + 1)
    return [
        None if layer < first else int(np.searchsorted(points, np.float32(layer - first) / np.float32(count), "right"))
        for layer in range(layers + 1)
    ]


@pytest.mark.parametrize("layers", [1, 7, 48, 80, 126])
def test_each_layer_is_on_its_planned_gpu(layers):
    options = msgspec.structs.replace(OPTIONS, gpu="A", other_gpus=("B", "C"))
    for on_gpus in {1, layers // 2, layers} - {0}:
        for second in range(on_gpus + 1):
            for third in {0, 1, on_gpus - second} - set(range(on_gpus - second + 1, on_gpus + 2)):
                assignment = in_memory(0, layers, gpu_layers=on_gpus, other_gpus=(second, third), output="gpu")
                gpus, reported = gpus_in_order(assignment, options), n_gpu_layers(assignment)
                split = tensor_split([count for _, count in gpus], reported)
                found = placed_by_llama_cpp(list(split)[: len(gpus)], layers, reported)
                names = [None if number is None else gpus[number][0] for number in found]
                first = on_gpus - second - third
                expected = [None] * (layers - on_gpus) + ["C"] * third + ["B"] * second + ["A"] * (first + 1)
                assert names == expected


def test_gpus_are_in_the_order_of_their_layers_with_the_one_for_prefill_offload_first():
    options = msgspec.structs.replace(OPTIONS, gpu="A", other_gpus=("B",))
    helping = msgspec.structs.replace(options, offloading_gpu="B")

    def order(options: EngineOptions, **changes: object) -> list[tuple[str, int]]:
        return gpus_in_order(replace(in_memory(0, 8), **changes), options)

    assert order(options) == []
    assert order(options, gpu_layers=6) == [("A", 6)]
    assert order(options, gpu_layers=6, other_gpus=(2,)) == [("B", 2), ("A", 4)]
    assert order(options, gpu_layers=6, other_gpus=(6,)) == [("B", 6)], "nothing of the first"
    assert order(options, gpu_layers=6, other_gpus=(6,), output="gpu") == [("B", 6), ("A", 0)]
    assert order(options, output="gpu") == [("A", 0)]
    assert order(options, prefill_offload=True) == [("A", 0)]
    assert order(helping, prefill_offload=True) == [("B", 0)]
    assert order(helping, gpu_layers=2, prefill_offload=True) == [("B", 0), ("A", 2)]
    assert order(helping, gpu_layers=2, other_gpus=(1,), prefill_offload=True) == [("B", 1), ("A", 1)]
    with pytest.raises(EngineError, match="layers on 3 GPUs; this device has 2"):
        order(options, gpu_layers=6, other_gpus=(1, 1))


def test_a_plan_of_two_gpus_sets_the_layers_on_each():
    window = Window(device="desk", first=0, last=8, gpu_layers=6, other_gpus=(4,))
    plan = Plan(rounds=1, route=(window,), output_on_gpu=True, streaming=(), left_out=())
    found = assignments(plan, model(layers=8))["desk"]
    assert found.windows[0].on_each_gpu == found.on_each_gpu == (2, 4)
    assert [*map(list, window.on_each_gpu)] == [[6, 7], [2, 3, 4, 5]]
