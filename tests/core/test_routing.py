"""The routing cost of layers with experts is the rest of their measured times."""

from __future__ import annotations

from dataclasses import replace

import pytest

from halda import RoutingCost
from halda.cost import layer_s
from primad.profiler.routing import _profiles, routing_of
from primad.profiler.synthetic import MIXED
from tests.fakes.planning import device

DESK = device("desk", vram=8 * 10**9)


@pytest.mark.parametrize("processor", [DESK.cpu, DESK.gpu])
def test_routing_is_found_again_in_the_times_that_it_makes(processor):
    routing = RoutingCost(layer_s=3e-5, many_ratio=2.5)
    layer, model = _profiles(MIXED, "Q4_K")

    def seconds(rows):
        return layer_s(replace(processor, routing=routing), 1e12, layer, model, rows, rows / 2, "f16", chunk=rows > 1)

    found = routing_of(processor, MIXED, seconds(1), seconds(512), 512)
    assert (found.layer_s, found.many_ratio) == (pytest.approx(3e-5), pytest.approx(2.5))


def test_the_routing_cost_of_a_disturbed_trial_is_bounded():
    assert routing_of(DESK.cpu, MIXED, 0.0, 0.0, 512) == RoutingCost(layer_s=0.0, many_ratio=1.0)
    layer, model = _profiles(MIXED, "Q4_K")
    known_s = layer_s(DESK.cpu, 1e12, layer, model, 1, 0.5, "f16")
    assert routing_of(DESK.cpu, MIXED, 9.0, 999.0, 512) == RoutingCost(layer_s=known_s, many_ratio=8.0)


def test_synthetic_experts_have_the_weights_of_their_shape():
    of_experts = [matrix for name, matrix in MIXED.matrices().items() if name.endswith("_exps")]
    assert sum(a * b * count for a, b, count in of_experts) == MIXED.expert_weights
    assert {count for _, _, count in of_experts} == {MIXED.experts}
