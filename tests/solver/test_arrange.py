"""Layers per device become a route: every layer once, in order, head first and last; or one clear reason why not."""

from __future__ import annotations

from fractions import Fraction
from itertools import pairwise

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from halda import Infeasible, LayerProfile, ModelProfile, Plan, arrange
from tools.lab.paper import apportion


def model(layers: int, *, multiple: int = 1, kv_bytes: int = 512, tail: int = 1) -> ModelProfile:
    layer = LayerProfile(bytes_by_type={"Q4_K": 1000, "F32": 24}, expert_bytes_by_type={}, kv_bytes_per_token=kv_bytes)
    return ModelProfile(
        name="toy",
        architecture="toyarch",
        layers=(layer,) * layers,
        embedding_bytes=4096,
        output_bytes_by_type={"Q6_K": 4096},
        tied=False,
        width=64,
        vocabulary=100,
        context_tokens=2048,
        experts=0,
        experts_used=0,
        kv_head_width=64,
        cut_multiple=multiple,
        tail_layers=tail,
    )


def names(count: int) -> list[str]:
    return [f"d{i}" for i in range(count)]


def shown(plan: Plan) -> list[tuple[str, int, int]]:
    return [(window.device, window.first, window.last) for window in plan.route]


def assert_whole(plan: Plan, toy: ModelProfile) -> None:
    """The assumptions of all code after the solver."""
    assert [layer for window in plan.route for layer in window.layers] == list(range(len(toy.layers)))
    assert plan.route[0].device == plan.route[-1].device == plan.head
    assert all(window.first % toy.cut_multiple == 0 for window in plan.route)
    assert len(plan.route) == 1 or len(plan.route[-1].layers) >= toy.tail_layers
    if len(plan.devices) > 1:
        for before, after in pairwise(plan.route):
            if before.device != after.device:
                assert plan.after(before.device) == after.device, "a device has one next device"


@given(st.integers(2, 6), st.integers(1, 4), st.data())
def test_any_windows_that_fit_are_a_whole_route(devices, rounds, data):
    sizes = data.draw(st.lists(st.integers(1, 9), min_size=devices, max_size=devices))
    taken = rounds * sum(sizes)
    toy = model(taken + data.draw(st.integers(0, 5)))
    tail_needs_one = taken == len(toy.layers)
    assume(not tail_needs_one or sizes[0] > 1)
    plan = arrange(names(devices), sizes, rounds=rounds, model=toy)
    assert_whole(plan, toy)
    assert plan.rounds == rounds
    assert plan.devices == tuple(names(devices))
    for i in range(1, devices):
        assert [len(window.layers) for _, window in plan.windows_of(f"d{i}")] == [sizes[i]] * rounds
    head = [len(window.layers) for _, window in plan.windows_of("d0")]
    assert head[: rounds - 1] == [sizes[0]] * (rounds - 1)
    assert head[rounds - 1 :] == ([sizes[0] - 1, 1] if tail_needs_one else [sizes[0], len(toy.layers) - taken])


def test_a_route_as_it_is_written_down():
    assert shown(arrange(names(3), [2, 1, 1], rounds=2, model=model(10))) == [
        ("d0", 0, 2),
        ("d1", 2, 3),
        ("d2", 3, 4),
        ("d0", 4, 6),
        ("d1", 6, 7),
        ("d2", 7, 8),
        ("d0", 8, 10),
    ]


def test_when_all_layers_are_taken_the_heads_last_window_gives_one():
    assert shown(arrange(names(2), [3, 2], rounds=2, model=model(10))) == [
        ("d0", 0, 3),
        ("d1", 3, 5),
        ("d0", 5, 7),
        ("d1", 7, 9),
        ("d0", 9, 10),
    ]


def test_a_head_of_two_devices_may_give_its_last_window_away():
    plan = arrange(names(2), [1, 2], rounds=2, model=model(6))
    assert shown(plan) == [("d0", 0, 1), ("d1", 1, 3), ("d1", 3, 5), ("d0", 5, 6)]
    assert_whole(plan, model(6))


@pytest.mark.parametrize(("devices", "rounds"), [(2, 1), (3, 1), (3, 2), (4, 3)])
def test_a_head_that_cannot_give_a_layer_is_named(devices, rounds):
    with pytest.raises(Infeasible, match=r"the windows take all \d+ layers; the tail window on d0 needs 1: give d0 a"):
        arrange(names(devices), [1] * devices, rounds=rounds, model=model(devices * rounds))


def test_one_device_has_the_whole_model_in_one_window():
    for layers in (1, 7):
        plan = arrange(["d0"], [layers], rounds=1, model=model(7))
        assert shown(plan) == [("d0", 0, 7)]
        assert plan.rounds == 1


def test_more_layers_than_the_model_has_are_refused_by_the_numbers():
    with pytest.raises(Infeasible) as caught:
        arrange(names(3), [2, 3, 4], rounds=2, model=model(17))
    assert str(caught.value) == "the windows take 18 layers (2 x 2+3+4); toy has 17"


@pytest.mark.parametrize(("sizes", "rounds"), [([0, 1], 1), ([1, -1], 1), ([1, 1], 0), ([1, 1], -3)])
def test_a_window_without_layers_is_refused(sizes, rounds):
    with pytest.raises(Infeasible, match="every window needs at least one layer"):
        arrange(names(2), sizes, rounds=rounds, model=model(10))


@pytest.mark.parametrize(("sizes", "layers"), [([2, 4], 12), ([4, 3], 12), ([4, 4], 12)])
def test_a_window_may_begin_at_a_multiple_only(sizes, layers):
    toy = model(layers, multiple=4)
    if all(size % 4 == 0 for size in sizes):
        assert_whole(arrange(names(2), sizes, rounds=1, model=toy), toy)
        return
    with pytest.raises(Infeasible, match="a window of toyarch may begin only at a multiple of 4 layers, not at layer"):
        arrange(names(2), sizes, rounds=1, model=toy)


def test_the_tail_of_a_model_with_a_multiple_has_as_many_layers():
    toy = model(12, multiple=4)
    assert shown(arrange(names(2), [8, 4], rounds=1, model=toy)) == [("d0", 0, 4), ("d1", 4, 8), ("d0", 8, 12)]
    with pytest.raises(Infeasible, match="the tail window on d0 needs 4"):
        arrange(names(2), [4, 8], rounds=1, model=toy)


def test_the_tail_has_as_many_layers_as_the_model_requires():
    toy = model(12, multiple=2, tail=5)
    assert shown(arrange(names(2), [4, 2], rounds=1, model=toy)) == [("d0", 0, 4), ("d1", 4, 6), ("d0", 6, 12)]
    assert shown(arrange(names(2), [6, 2], rounds=1, model=toy)) == [("d0", 0, 4), ("d1", 4, 6), ("d0", 6, 12)]
    with pytest.raises(Infeasible, match="the windows take 8 layers; the tail window on d0 needs 6: give d0 a larger"):
        arrange(names(2), [2, 6], rounds=1, model=toy)


@given(st.integers(1, 6), st.integers(1, 5), st.integers(1, 40), st.integers(1, 4), st.integers(1, 40), st.data())
def test_any_request_is_a_whole_route_or_infeasible(devices, rounds, layers, multiple, tail, data):
    sizes = data.draw(st.lists(st.integers(-1, 12), min_size=devices, max_size=devices))
    toy = model(layers, multiple=multiple, tail=min(tail, layers))
    try:
        plan = arrange(names(devices), sizes, rounds=rounds, model=toy)
    except Infeasible as exc:
        assume(str(exc))
        return
    assert_whole(plan, toy)


# ---- apportion ------------------------------------------------------------------------------------------------------


@given(st.lists(st.tuples(st.integers(1, 1 << 45), st.integers(0, 5)), min_size=1, max_size=8), st.integers(0, 200))
def test_shares_sum_up_and_nobody_gets_less_than_the_minimum(parties, more):
    weights, minimum = [weight for weight, _ in parties], [low for _, low in parties]
    total = sum(minimum) + more
    shares = apportion(weights, total, minimum=minimum)
    assert sum(shares) == total
    assert all(share >= low for share, low in zip(shares, minimum, strict=True))


@given(st.lists(st.integers(1, 1 << 45), min_size=1, max_size=8), st.integers(0, 200))
def test_without_a_minimum_shares_are_proportional_to_one_layer(weights, total):
    for weight, share in zip(weights, apportion(weights, total, minimum=[0] * len(weights)), strict=True):
        ideal = Fraction(weight * total, sum(weights))
        assert abs(share - ideal) <= 1


def test_equal_parties_get_equal_shares():
    assert apportion([5, 5, 5], 9, minimum=[1, 1, 1]) == [3, 3, 3]


def test_a_tiny_party_gets_its_minimum():
    assert apportion([1, 1 << 40], 10, minimum=[2, 1]) == [2, 8]
