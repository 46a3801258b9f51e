"""Link costs in plans: message times by size, late messages, and air time shared by devices."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from halda import (
    CutOff,
    Instance,
    LinkProfile,
    MessageTime,
    Objective,
    Plan,
    Window,
    Workload,
    arrange,
    evaluate,
    instance,
)
from halda.cost import hop_s, message_s
from halda.orders import ring_order
from tests.fakes import planning
from tests.solver.simulator import simulate, simulate_prefill
from tests.solver.small_fleets import small_instance, solved
from tests.solver.test_solve import check_against_brute_force
from tools.research.random_fleets import random_instance

WIDTH = 1024
WORK = Workload(context_tokens=8192, kv_type="f16", sequences=8, prompt_tokens=8000, answer_tokens=100, chunk_rows=250)
seconds = st.floats(0, 0.1)


@st.composite
def links(draw: st.DrawFn) -> LinkProfile:
    """A link as measured by the probe: larger messages take at least as long."""
    sizes = sorted(draw(st.sets(st.integers(1, 1 << 20), max_size=4)))
    times = sorted(draw(st.lists(seconds, min_size=len(sizes), max_size=len(sizes))))
    return replace(
        planning.link("a", "b", bytes_per_s=draw(st.floats(1e5, 1e10)), round_trip_s=draw(st.floats(1e-6, 0.1))),
        late_s=draw(seconds),
        messages=tuple(MessageTime(size_bytes=n, beyond_s=s) for n, s in zip(sizes, times, strict=True)),
    )


@given(links(), st.lists(st.floats(0, 1e8), min_size=2, max_size=10))
def test_a_larger_message_never_takes_less_and_none_less_than_latency_and_its_bytes(link, sizes):
    times = [message_s(link, size) for size in sorted(sizes)]
    assert all(a <= b * (1 + 1e-9) for a, b in pairwise(times))
    for size, time in zip(sorted(sizes), times, strict=True):
        assert time >= link.round_trip_s / 2 + size / link.bytes_per_s
    assert message_s(link, 0) == link.round_trip_s / 2


@given(links())
def test_a_message_of_a_measured_size_takes_the_measured_time(link):
    for point in link.messages:
        beyond_s = max(point.beyond_s, point.size_bytes / link.bytes_per_s)
        assert message_s(link, point.size_bytes) == pytest.approx(link.round_trip_s / 2 + beyond_s)


def test_between_two_sizes_the_time_is_on_a_straight_line_and_beyond_the_largest_the_rate_counts():
    points = (MessageTime(size_bytes=1000, beyond_s=0.004), MessageTime(size_bytes=3000, beyond_s=0.006))
    link = replace(planning.link("a", "b", bytes_per_s=1e6, round_trip_s=0.002), messages=points)
    found = [message_s(link, size) - 0.001 for size in (500, 1000, 2000, 3000, 4000)]
    assert found == pytest.approx([0.002, 0.004, 0.005, 0.006, 0.007])


@given(st.floats(1e-5, 1e-1))
def test_a_hop_counts_with_its_mean_where_delays_are_exponential(mean_s):
    """Their median is ln 2 of the mean, their 95th percentile ln 20; n hops of a token then take n means."""
    link = replace(
        planning.link("a", "b", bytes_per_s=1e15, round_trip_s=2 * math.log(2) * mean_s),
        late_s=(math.log(20) - math.log(2)) * mean_s,
    )
    assert hop_s(link, 1, WIDTH) == pytest.approx(mean_s, rel=0.15)


def wireless(question: Instance, *names: str) -> Instance:
    return replace(
        question, devices=tuple(replace(device, wireless=device.device in names) for device in question.devices)
    )


def asymmetric(count: int = 3, *, bytes_per_s: float = 1e6) -> Instance:
    """Links slow enough to dominate, with a different rate in each direction."""
    devices = [planning.device(f"d{i}", rate=2e12) for i in range(count)]
    names = [device.device for device in devices]
    made = [
        planning.link(a, b, bytes_per_s=bytes_per_s * (1 + i + 2 * j), round_trip_s=1e-5)
        for i, a in enumerate(names)
        for j, b in enumerate(names)
        if a != b
    ]
    return instance(devices, made, planning.model(layers=4 * count, layer_bytes=1_000_000), WORK, {})


def test_wires_carry_hops_concurrently_and_the_air_one_at_a_time():
    asked = asymmetric()
    hops = [asked.transfers_s[a][b] for a, b in ((0, 1), (1, 2), (2, 0))]
    assert asked.occupied_s((0, 1, 2)) == max(hops)
    assert wireless(asked, "d0", "d1", "d2").occupied_s((0, 1, 2)) == pytest.approx(sum(hops))
    assert wireless(asked, "d0").occupied_s((0, 1, 2)) == pytest.approx(max(hops[1], hops[0] + hops[2]))
    assert wireless(asked, "d0", "d1", "d2").occupied_s((0,)) == 0


def test_processes_of_one_machine_send_nothing_through_the_air():
    asked = wireless(asymmetric(2), "d0", "d1")
    together = replace(asked, devices=tuple(replace(device, host="box") for device in asked.devices))
    assert together.occupied_s((0, 1)) == max(together.transfers_s[0][1], together.transfers_s[1][0])


def test_each_direction_counts_with_its_own_rate():
    asked = asymmetric()
    assert ring_order(asked, (0, 1, 2)).chunk_hops_s != ring_order(asked, (0, 2, 1)).chunk_hops_s


def one_pass() -> Plan:
    """Twelve layers around a ring of three."""
    bounds = (("d0", 0, 3), ("d1", 3, 7), ("d2", 7, 11), ("d0", 11, 12))
    route = tuple(Window(device=name, first=first, last=last, gpu_layers=0) for name, first, last in bounds)
    return Plan(route=route, rounds=1, output_on_gpu=False, streaming=(), left_out=())


@pytest.mark.parametrize("in_air", [(), ("d0",), ("d0", "d1", "d2")], ids=len)
def test_chunks_and_tokens_of_several_pass_as_often_as_the_busiest_medium_lets_them(in_air):
    asked = wireless(asymmetric(), *in_air)
    plan = one_pass()
    predicted = evaluate(plan, asked)
    occupied_s = asked.occupied_s((0, 1, 2))
    assert predicted.period_s == pytest.approx(max(occupied_s, predicted.tpot_s / WORK.sequences), rel=0.05)
    simulated = simulate(plan, asked, tokens=20, sequences=WORK.sequences)
    assert 1 / simulated.tokens_per_s == pytest.approx(predicted.period_s, rel=0.05)
    assert simulate_prefill(plan, asked) == pytest.approx(predicted.ttft_s, rel=0.08)


def small_wifi(seed: int, objective: Objective) -> Instance:
    """A small fleet with some devices on Wi-Fi, late messages, and links slow enough to dominate."""
    rng = random.Random(seed)
    question, _ = small_instance(rng)
    devices = tuple(replace(device, wireless=rng.random() < 0.6) for device in question.devices)
    slowed = {
        pair: replace(
            link, bytes_per_s=link.bytes_per_s / 10 ** rng.uniform(1, 3), round_trip_s=1e-4, late_s=rng.random() * 1e-4
        )
        for pair, link in question.links.items()
    }
    sequences = 16 if objective == "throughput" else 1
    work = replace(question.workload, context_tokens=256, prompt_tokens=250, answer_tokens=1, chunk_rows=32)
    return replace(question, devices=devices, links=slowed, workload=replace(work, sequences=sequences))


@pytest.mark.parametrize("seeds", [range(6), pytest.param(range(12), marks=pytest.mark.matrix)], ids=str)
@pytest.mark.parametrize("objective", ["throughput", "ttft", "balanced"])
def test_no_plan_is_better_for_devices_that_share_the_air(objective, seeds):
    decided = 0
    for seed in seeds:
        asked = small_wifi(seed, objective)
        answer = check_against_brute_force(asked, objective)
        if answer is not None:
            wired = evaluate(answer.plan, wireless(asked))
            decided += wired.objective_s(objective, 1) < answer.objective_s * (1 - 1e-3)
    assert decided, "the air matters to some of them"


def test_a_token_goes_around_once_less_where_the_tail_has_all_of_the_heads_last_window():
    devices, model = [planning.device("a"), planning.device("b")], planning.model(layers=6)
    question = instance(devices, [planning.link("a", "b"), planning.link("b", "a")], model, WORK, {})
    plan = arrange(["a", "b"], [1, 2], rounds=2, model=model)
    assert [window.device for window in plan.route] == ["a", "b", "b", "a"]
    assert evaluate(plan, question).hop_s == pytest.approx(ring_order(question, (0, 1)).hops_s)


def test_no_plan_sends_over_a_link_that_does_not_work():
    question = random_instance(random.Random(5), devices=3, layers=6, memory="ample", shared_hosts=False, workload=WORK)
    everyone = frozenset({"d1", "d2"})
    assert everyone < set(solved(question, "latency", require=everyone).plan.devices)
    links = dict(question.links)
    for pair in (("d1", "d2"), ("d2", "d1")):
        links[pair] = replace(links[pair], round_trip_s=60.0, bytes_per_s=1.0, works=False)
    cut = replace(question, links=links)
    with pytest.raises(
        CutOff, match=r"^d[12] does not reach d[12], and there is no plan without the link between them$"
    ):
        solved(cut, "latency", require=everyone)
    assert not everyone <= set(solved(cut, "latency").plan.devices)
    for name in ("d1", "d2"):
        assert name in solved(cut, "latency", require=frozenset({name})).plan.devices
