"""Among plans of nearly equal request time, the one with the least loaded busiest machine is taken."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, combinations, product

import pytest

from halda import CHUNKS, OBJECTIVES, Instance, Objective, Plan, Solution, Window, Workload, evaluate, instance, solve
from halda.filling import WEIGHT, busy_s, evened, filled
from halda.load import under_load
from tests.fakes.planning import GB, device, link, model
from tests.solver.small_fleets import small_instance

WORK = Workload(context_tokens=4096, kv_type="f16", sequences=1, prompt_tokens=512, answer_tokens=256, chunk_rows=512)


def costs_s(plan: Plan, question: Instance, objective: Objective) -> tuple[float, float] | None:
    """The objective of ``plan``, without and with the weight of its busiest machine; None if it does not fit."""
    prediction = evaluate(plan, question)
    if prediction.short:
        return None
    value = prediction.objective_s(objective, question.workload.answer_tokens)
    return value, value + WEIGHT * max(busy_s(prediction, question, objective).values())


def every_split(question: Instance) -> list[Plan]:
    """All one-round plans of all devices in order, with any number of layers of each window on its GPU."""
    total, found = len(question.model.layers), []
    devices = [*question.devices, question.devices[0]]
    for ends in combinations(question.model.cut_points, len(devices) - 1):
        bounds = [0, *ends, total]
        on_gpu = [
            range(b - a + 1) if each.gpu else [0] for each, a, b in zip(devices, bounds, bounds[1:], strict=False)
        ]
        for counts, output_on_gpu in product(product(*on_gpu), {False, devices[0].gpu is not None}):
            shapes = zip(devices, bounds, bounds[1:], counts, strict=False)
            route = tuple(Window(device=each.device, first=a, last=b, gpu_layers=n) for each, a, b, n in shapes)
            if output_on_gpu or not counts[-1]:
                found.append(Plan(rounds=1, route=route, output_on_gpu=output_on_gpu, streaming=(), left_out=()))
    return found


@pytest.mark.parametrize("seeds", [range(16), pytest.param(range(16, 64), marks=pytest.mark.matrix)], ids=str)
def test_no_split_of_the_ring_fills_it_better_for_what_it_costs(seeds):
    compared = changed = 0
    for seed in seeds:
        objective = OBJECTIVES[seed // 2 % len(OBJECTIVES)]
        question, _ = small_instance(random.Random(seed))
        first = question.devices[0]
        like = [replace(first, device=each.device, host=each.host) for each in question.devices] if seed % 2 else []
        roomy = [replace(each, ram_available_bytes=64 * GB) for each in (like or question.devices)[:3]]
        question = replace(question, devices=tuple(roomy), limits={})
        if len(question.kinds) > 1 or question.model.experts or len(question.model.layers) > 8:
            continue
        plans = every_split(question)
        costs = [(*cost, plan) for plan in plans if (cost := costs_s(plan, question, objective)) is not None]
        if not costs:
            continue
        _, _, quickest = min(costs, key=lambda each: (each[0], -each[1]))
        taken = costs_s(filled(quickest, question, objective), question, objective)
        assert taken is not None
        assert taken[1] == pytest.approx(min(cost for _, cost, _ in costs), rel=1e-6), seed
        compared, changed = compared + 1, changed + (filled(quickest, question, objective) != quickest)
    assert compared > 8
    assert changed > 2


@pytest.mark.parametrize("objective", ["latency", "throughput", "balanced"])
def test_like_machines_get_like_shares_so_several_requests_run_nearly_twice_as_fast(objective):
    devices = [device("a"), device("b")]
    links = [link("a", "b"), link("b", "a")]
    found = solve(
        devices,
        links,
        model(),
        WORK,
        objective=objective,
        require=frozenset({"a", "b"}),
        time_limit_s=2.0,
        settles=True,
    )
    question = instance(devices, links, model(), WORK, {})
    plain = solve(devices, links, model(), WORK, objective=objective, require=frozenset({"a", "b"}), time_limit_s=2.0)
    assert found.objective_s <= plain.objective_s * (1 + WEIGHT)
    assert found.quickest_s == pytest.approx(plain.objective_s)
    assert found.plan.layers_of("b") in (9, 10, 11)
    loads = [under_load(found.plan, question, sequences=count).tokens_per_s for count in (1, 4)]
    assert loads[1] > 1.7 * loads[0]


@pytest.mark.parametrize(
    ("sizes", "shares"), [((1, 9, 10), (5, 9, 6)), ((8, 6, 5, 1), (5, 6, 5, 4)), ((5, 9, 6), None)]
)
def test_the_head_has_windows_of_about_the_same_length_at_both_ends(sizes, shares):
    devices = [device(name) for name in "abc"[: len(sizes) - 1]]
    links = [link(a.device, b.device) for a in devices for b in devices if a is not b]
    question = instance(devices, links, model(layers=20), WORK, {})

    def plan(sizes: Sequence[int]) -> Plan:
        bounds = [0, *accumulate(sizes)]
        owners = [*(each.device for each in devices), "a"]
        shapes = zip(owners, bounds, bounds[1:], strict=False)
        route = tuple(Window(device=owner, first=a, last=b, gpu_layers=0) for owner, a, b in shapes)
        return Plan(rounds=1, route=route, output_on_gpu=False, streaming=(), left_out=())

    assert evened(plan(sizes), question, "balanced") == plan(shares or sizes)


def test_windows_stay_where_moving_them_would_cost_the_request_something():
    devices, links = [device("a"), device("b")], [link("a", "b"), link("b", "a")]
    first, *rest = model(layers=8).layers
    heavy = replace(first, bytes_by_type={kind: 20 * size for kind, size in first.bytes_by_type.items()})
    like = replace(model(layers=8), layers=(first, heavy, *rest[:-1]))
    route = (Window(device="a", first=0, last=1, gpu_layers=0), Window(device="b", first=1, last=3, gpu_layers=0))
    plan = Plan(
        rounds=1,
        route=(*route, Window(device="a", first=3, last=8, gpu_layers=0)),
        output_on_gpu=False,
        streaming=(),
        left_out=(),
    )
    assert evened(plan, instance(devices, links, like, WORK, {}), "ttft") == plan


def test_more_requests_at_once_have_more_of_the_ring_for_at_most_a_twentieth_of_one():
    devices, heavy_output = [device("a"), device("b")], replace(model(), output_bytes_by_type={"Q4_K": 2 * GB})
    links = [link("a", "b"), link("b", "a")]
    both, question = frozenset({"a", "b"}), instance(devices, links, heavy_output, WORK, {})

    def found(at_once: int) -> Solution:
        return solve(
            devices,
            links,
            heavy_output,
            WORK,
            require=both,
            chunks=CHUNKS,
            settles=True,
            at_once=at_once,
            time_limit_s=2.0,
        )

    one, four = found(1), found(4)
    assert four.objective_s <= 1.05 * four.quickest_s
    assert four.quickest_s == pytest.approx(one.quickest_s)
    alone, together = (under_load(each.plan, question, sequences=4).tokens_per_s for each in (one, four))
    assert together > 1.1 * alone


def test_devices_bound_to_different_cores_of_one_machine_count_as_two():
    whole = [device(name, host="desk") for name in "ab"]
    bound = [replace(each, cores=(number,)) for number, each in enumerate(whole)]
    links = [link("a", "b"), link("b", "a")]
    shared, separate = (instance(devices, links, model(), WORK, {}) for devices in (whole, bound))
    assert shared.processors == ((0, 1),)
    assert separate.processors == ((0,), (1,))
    assert shared.hosts == separate.hosts == ((0, 1),)
    half = Plan(
        rounds=1,
        route=tuple(
            Window(device=name, first=a, last=b, gpu_layers=0)
            for name, a, b in [("a", 0, 9), ("b", 9, 19), ("a", 19, 20)]
        ),
        output_on_gpu=False,
        streaming=(),
        left_out=(),
    )
    together, each = (under_load(half, asked, sequences=4, max_rows=1).tokens_per_s for asked in (shared, separate))
    assert each > 1.7 * together
    overlapping = replace(bound[1], cores=(0, 1))
    assert instance([bound[0], overlapping], links, model(), WORK, {}).processors == ((0, 1),)
