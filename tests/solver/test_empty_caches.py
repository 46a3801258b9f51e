"""If some layers have no KV cache, no window has only such layers on a GPU, or only such layers off it.

llama.cpp opens no empty cache.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from halda import solve
from tests.fakes import planning
from tests.fakes.planning import GB
from tests.solver.test_by_expert import WORK

DENSE = planning.model(layers=8)


def skipping(attends: str):
    """A model in which only some layers attend."""
    layers = (replace(DENSE.layers[0], kv_bytes_per_token=4096 * int(each)) for each in attends)
    return replace(DENSE, layers=tuple(layers))


@pytest.mark.parametrize(
    ("attends", "found"),
    [
        ("11001100", [0, 0, 0, 3, 4, 5, 6, 7, 8]),
        ("00110011", [0, 1, 2, 3, 4, 5, 5, 5, 8]),
        ("11111111", [0, 1, 2, 3, 4, 5, 6, 7, 8]),
        ("00010000", [0, 0, 0, 0, 0, 0, 0, 0, 8]),
    ],
)
def test_neither_side_of_a_window_is_without_a_layer_that_attends(attends, found):
    assert [skipping(attends).openable(range(8), on_gpu) for on_gpu in range(9)] == found


def test_inputs_besides_hidden_states_enter_on_the_cpu():
    model = replace(skipping("11111111"), beside_values=100)
    assert [model.openable(range(4, 8), on_gpu) for on_gpu in range(5)] == [0, 1, 2, 3, 3]
    assert model.openable(range(8), 8) == 8, "the first window has it all itself"


def test_states_are_in_a_cache_of_their_own():
    layers = tuple(replace(layer, state_bytes=4096) for layer in skipping("10000000").layers)
    assert replace(DENSE, layers=layers).openable(range(8), 3) == 3


@pytest.mark.parametrize("vram", range(GB, 4 * GB, GB // 4))
def test_plans_keep_to_it(vram):
    model = skipping("11001100")
    devices = [planning.device("desk", vram=vram), planning.device("lap", vram=vram, ram=GB)]
    links = [planning.link(a, b, round_trip_s=1e-5) for a, b in (("desk", "lap"), ("lap", "desk"))]
    for require in (frozenset[str](), frozenset({"lap"})):
        found = solve(devices, links, model, WORK, objective="latency", require=require)
        assert found.plan.gpu_layers
        assert not found.prediction.short
        for window in found.plan.route:
            assert model.openable(window.layers, window.gpu_layers) == window.gpu_layers
