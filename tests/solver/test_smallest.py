"""Plans for very little memory: down to the KV cache, the buffers and what two slots take there is one, below that none."""

from __future__ import annotations

import random
import statistics
from dataclasses import replace

import pytest

from halda import (
    Infeasible,
    Instance,
    Limits,
    Objective,
    Plan,
    Prediction,
    Streaming,
    Window,
    arrange,
    evaluate,
    instance,
    residency,
    solve,
)
from halda.instance import ahead_bytes
from halda.profile import KV_TYPES, ModelProfile, Workload
from halda_research.random_fleets import random_instance, random_plan
from halda_research.simulate import simulate, simulate_prefill
from tests.fakes import planning
from tests.solver.brute import Brute
from tests.solver.small_fleets import small_instance
from tests.solver.test_solve import check_against_brute_force

MB = 10**6
LAYER = 50 * MB
WORK = Workload(context_tokens=1024, kv_type="f16", sequences=1, prompt_tokens=512, answer_tokens=256, chunk_rows=512)


def model(*, layers: int = 12, output: int) -> ModelProfile:
    toy = planning.model(layers=layers, layer_bytes=LAYER)
    return replace(toy, output_bytes_by_type={"Q4_K": output}, width=4096)


def question(toy: ModelProfile, *rams: int, work: Workload = WORK) -> Instance:
    devices = [planning.device(f"d{i}", ram=ram) for i, ram in enumerate(rams)]
    return instance(devices, [], toy, work, {})


def solved(asked: Instance, objective: Objective = "balanced") -> tuple[Plan, Prediction]:
    found = solve(asked.devices, [], asked.model, asked.workload, objective=objective, limits=asked.limits)
    return found.plan, found.prediction


def smallest_ram(toy: ModelProfile, work: Workload = WORK) -> int:
    """What a device alone needs at the least, summed up apart from the solver."""
    asked = question(toy, 0, work=work)
    kv = sum(asked.kv_bytes[kind] for kind in asked.kind_of)
    slots = max(2 * LAYER, toy.output_bytes + LAYER)
    return asked.runtime_bytes(1) + asked.head_bytes(1) + kv + slots


@pytest.mark.parametrize("output", [20 * MB, LAYER, 180 * MB])
@pytest.mark.parametrize("objective", ["balanced", "ttft"])
def test_the_smallest_memory_that_runs_gets_a_plan_and_a_byte_less_none(output, objective):
    toy = model(output=output)
    asked = question(toy, smallest_ram(toy))
    plan, prediction = solved(asked, objective)
    assert plan.streaming_of("d0").layers == tuple(range(13))
    assert plan.streams_output
    assert prediction.devices[0].ram_bytes == smallest_ram(toy)
    assert prediction.devices[0].disk_bytes_per_token == 12 * LAYER + output
    with pytest.raises(Infeasible, match=r"RAM of d0 is short of 0\.\d MB") as caught:
        solved(question(toy, smallest_ram(toy) - 1), objective)
    assert caught.value.short_bytes <= 2


@pytest.mark.parametrize("output", [20 * MB, 180 * MB])
def test_at_every_budget_from_there_on_no_more_is_read_than_does_not_fit(output):
    toy = model(output=output)
    whole = evaluate(arrange(["d0"], [12], rounds=1, model=toy), question(toy, 0)).devices[0].ram_bytes
    before = float("inf")
    for ram in range(smallest_ram(toy), whole + LAYER, 30 * MB):
        asked = question(toy, ram)
        plan, prediction = solved(asked, "latency")
        assert not prediction.short
        assert prediction.devices[0].disk_bytes_per_token <= before, "more memory, more to read"
        before = prediction.devices[0].disk_bytes_per_token
        streaming = plan.streaming_of("d0")
        held = ahead_bytes(asked.model, streaming.slots, output=plan.streams_output)
        assert before <= max(0, whole - ram) + held + LAYER, "the overflow, the slots, and a layer that is not split"
        by_rule = evaluate(residency(arrange(["d0"], [12], rounds=1, model=toy), asked), asked)
        assert not by_rule.short
        assert by_rule.devices[0].disk_bytes_per_token <= max(0, whole - ram) + 3 * LAYER + output
    assert before == 0


def test_the_output_matrix_streams_only_where_nothing_else_helps():
    toy = model(output=180 * MB)
    enough = smallest_ram(toy) + LAYER
    assert not solved(question(toy, enough))[0].streams_output
    assert solved(question(toy, enough - 1))[0].streams_output


def test_in_a_ring_the_head_streams_it():
    toy = model(layers=40, output=400 * MB)
    toys = question(toy, 0)
    # The head's other window in a ring, where it does without the vocabulary.
    second = toys.runtime_bytes(2) + toys.head_bytes(2) - toys.runtime_bytes(1) - toys.head_bytes(1)
    small = smallest_ram(toy) + second - 20 * toys.kv_bytes[0]
    asked = question(toy, small, toys.runtime_bytes(1) + 2 * LAYER + 20 * toys.kv_bytes[0])
    with pytest.raises(Infeasible, match="RAM of d0 is short"):
        solved(question(toy, small))
    plan, prediction = solved(asked)
    assert plan.devices == ("d0", "d1")
    assert plan.streams_output
    assert not prediction.short
    assert 40 not in plan.streaming_of("d1").layers


def test_a_head_with_its_output_matrix_on_the_gpu_does_not_stream_it():
    toy = model(output=180 * MB)
    head = planning.device("d0", ram=smallest_ram(toy), vram=256 * (1 << 20) + 300 * MB)
    found = solve([head], [], toy, WORK)
    assert found.plan.output_on_gpu
    assert not found.plan.streams_output


def test_a_plan_streams_what_its_device_computes_on_its_cpu_and_nothing_else():
    route = (
        Window(device="a", first=0, last=4, gpu_layers=1),
        Window(device="b", first=4, last=8, gpu_layers=0),
        Window(device="a", first=8, last=10, gpu_layers=0),
    )

    def plan(device: str, *layers: int, on_gpu: bool = False) -> Plan:
        streaming = Streaming(device=device, layers=layers, slots=2)
        return Plan(rounds=1, route=route, output_on_gpu=on_gpu, streaming=(streaming,), left_out=())

    assert plan("a", 0, 2, 9, 10).streams_output
    assert not plan("b", 4, 5, 6).streams_output
    for device, layers, on_gpu in (
        ("a", (0, 3), False),
        ("a", (0, 4), False),
        ("a", (2, 0), False),
        ("b", (4, 5, 10), False),
        ("a", (0, 1, 10), True),
        ("a", (0, 1, 11), False),
    ):
        with pytest.raises(AssertionError):
            plan(device, *layers, on_gpu=on_gpu)


@pytest.mark.parametrize("output", [20 * MB, 180 * MB])
def test_the_simulation_reads_the_output_matrix_once_a_token(output):
    toy = model(output=output)
    asked = question(toy, smallest_ram(toy))
    plan, prediction = solved(asked)
    played = simulate(plan, asked, tokens=8)
    assert played.devices[0].disk_bytes == pytest.approx(12 * LAYER + output)
    assert played.devices[0].layers == 13
    # Here the disk is all that takes time.
    assert played.tpot_s == pytest.approx(prediction.tpot_s, rel=0.1)
    assert played.tpot_s >= prediction.tpot_s * (1 - 1e-9)
    assert simulate_prefill(plan, asked) > 0


def streaming_output(rng: random.Random) -> tuple[Plan, Instance] | None:
    """A random plan whose head streams the output matrix with some layers; None by chance."""
    question = random_instance(rng, devices=rng.randint(1, 4), shared_hosts=False)
    plan = random_plan(rng, question, even=True)
    if plan.output_on_gpu or not plan.streaming_of(plan.head).layers:
        return None
    with_output = [
        replace(streaming, layers=(*streaming.layers, plan.layer_count)) if streaming.device == plan.head else streaming
        for streaming in plan.streaming
    ]
    return replace(plan, streaming=tuple(with_output)), question


def test_no_ring_that_is_played_reads_an_output_matrix_sooner_than_predicted():
    ratios = []
    for seed in range(150):
        found = streaming_output(random.Random(seed))
        if found is None:
            continue
        plan, asked = found
        predicted, played = evaluate(plan, asked), simulate(plan, asked, tokens=6)
        ratios.append(played.tpot_s / predicted.tpot_s)
        assert ratios[-1] >= 1 - 1e-9, seed
    assert len(ratios) > 40
    assert statistics.median(ratios) < 1.01


def test_of_plans_that_stream_the_output_matrix_none_is_better():
    found = []
    for seed in range(20):
        rng = random.Random(9000 + seed)
        asked, objective = small_instance(rng)
        head, *others = (replace(device, gpu=None) for device in asked.devices)
        asked = replace(asked, devices=(replace(head, ram_available_bytes=1), *others), limits={})
        with pytest.raises(Infeasible) as caught:
            solve(asked.devices, list(asked.links.values()), asked.model, asked.workload, objective=objective)
        # So little is missing at the least, and without the output matrix that streams more.
        enough = 1 + caught.value.short_bytes + int(rng.uniform(0, 0.9) * asked.slot_bytes)
        asked = replace(asked, devices=(replace(head, ram_available_bytes=enough), *others))
        if Brute(asked, objective).best() is None:
            found.append(check_against_brute_force(asked, objective))
    plans = [answer.plan for answer in found if answer is not None]
    assert len(plans) >= 6
    assert any(len(plan.devices) > 1 for plan in plans)
    assert all(plan.streams_output for plan in plans)


def test_a_stall_is_laid_to_the_device_that_reads_longest():
    toy = model(output=20 * MB)
    asked = question(toy, smallest_ram(toy) + 4 * LAYER)
    _, prediction = solved(asked)
    assert prediction.disk_s > prediction.compute_s
    assert sum(device.stall_s for device in prediction.devices) == pytest.approx(prediction.stall_s)
    assert prediction.devices[0].stall_s == pytest.approx(prediction.tpot_s - prediction.compute_s)


# ---- KV cache ----------------------------------------------------------------------------------------------------------


def test_a_smaller_kv_cache_takes_its_share_of_memory_and_time():
    toy = model(output=20 * MB)
    by_type = {}
    for kv_type in KV_TYPES:
        asked = question(toy, 10**10, work=replace(WORK, kv_type=kv_type))
        by_type[kv_type] = (asked.kv_bytes[0], evaluate(arrange(["d0"], [12], rounds=1, model=toy), asked))
    assert [size for size, _ in by_type.values()] == [4096 * 1024, 4096 * 1024 * 17 // 32, 4096 * 1024 * 9 // 32]
    held = [found.devices[0].ram_bytes for _, found in by_type.values()]
    assert held[0] - held[2] == 12 * 4096 * 1024 * 23 // 32
    times = [found.tpot_s for _, found in by_type.values()]
    assert times == sorted(times, reverse=True)
    assert times[0] > times[2]


def test_a_context_that_does_not_fit_is_never_shortened_but_said():
    toy = model(output=20 * MB)
    long = replace(WORK, context_tokens=200_000)
    ram = smallest_ram(toy, replace(long, kv_type="q8_0"))
    with pytest.raises(Infeasible) as caught:
        solved(question(toy, ram, work=long))
    said = str(caught.value)
    assert "with 200000 tokens of context" in said
    assert "RAM of d0 is short of" in said
    assert said.endswith(
        "the KV cache (f16) takes 9,830.4 MB in all: a smaller context or a KV cache in q8_0 or q4_0 takes less"
    )
    assert solved(question(toy, ram, work=replace(long, kv_type="q8_0")))[0].devices == ("d0",)
    with pytest.raises(Infeasible, match=r"\(q4_0\) takes 2,764\.8 MB in all: a smaller context takes less$"):
        solved(question(toy, 100 * MB, work=replace(long, kv_type="q4_0")))


def test_an_owner_who_allows_too_little_is_told_how_much_is_short():
    toy = model(output=20 * MB)
    short = Limits(ram_bytes=smallest_ram(toy) - 10 * MB)
    asked = replace(question(toy, 10**10), limits={"d0": short})
    with pytest.raises(Infeasible, match=r"RAM of d0 is short of 10\.0 MB"):
        solved(asked)
