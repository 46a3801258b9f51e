"""Layers with experts stream by expert in decode: what a token reads and waits for, and which plan is then the best."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from halda import Instance, LayerProfile, ModelProfile, Plan, Streaming, arrange, cost, evaluate, instance, milp, solve
from halda.profile import Workload
from halda.solving import run
from halda_research.random_fleets import random_instance, random_plan
from halda_research.simulate import simulate
from tests.fakes import planning
from tests.solver.brute import Brute
from tests.solver.small_fleets import small_instance
from tests.solver.test_solve import check_against_brute_force

MB = 10**6
BASE = 10 * MB
EXPERTS = 160 * MB
DISK = 1e9
WORK = Workload(context_tokens=1024, kv_type="f16", sequences=1, prompt_tokens=512, answer_tokens=256, chunk_rows=512)


def moe(layers: int = 12, *, dense: int = 0, used: int = 4) -> ModelProfile:
    """``dense`` layers, then those with 32 experts, of which a row uses ``used``."""
    toy = planning.model(layers=layers, layer_bytes=BASE)
    sparse = replace(toy.layers[0], expert_bytes_by_type={"Q4_K": EXPERTS})
    kinds = (replace(toy.layers[0], bytes_by_type={"Q4_K": BASE + EXPERTS}),) * dense + (sparse,) * (layers - dense)
    return replace(toy, layers=kinds, output_bytes_by_type={"Q4_K": 20 * MB}, width=4096, experts=32, experts_used=used)


def question(model: ModelProfile, *rams: int, work: Workload = WORK, disk: float = DISK) -> Instance:
    devices = [planning.device(f"d{i}", ram=ram, disk=disk) for i, ram in enumerate(rams)]
    return instance(devices, [], model, work, {})


def streaming(model: ModelProfile, *layers: int, slots: int = 2) -> Plan:
    plan = arrange(["d0"], [len(model.layers)], rounds=1, model=model)
    return replace(plan, streaming=(Streaming(device="d0", layers=layers, slots=slots),))


@pytest.mark.parametrize(("used", "experts", "picked"), [(4, 32, 20), (8, 128, 10), (1, 3, 54), (32, 32, 160)])
def test_a_token_reads_at_most_the_experts_that_a_row_uses(used, experts, picked):
    layer = LayerProfile(bytes_by_type={"F32": 7}, expert_bytes_by_type={"Q4_K": 100, "Q6_K": 60}, kv_bytes_per_token=0)
    model = replace(moe(), experts=experts, experts_used=used)
    assert cost.picked_bytes(layer, model) == picked
    assert cost.picked_bytes(replace(layer, expert_bytes_by_type={}), replace(model, experts=0)) == 0


def test_a_token_waits_for_what_the_routers_pick_and_a_chunk_reads_whole_layers():
    model = moe()
    asked = question(model, 10**10)
    plan = streaming(model, 1, 3, 5, 7, 9)
    all_there, found = evaluate(replace(plan, streaming=()), asked), evaluate(plan, asked)
    device = found.devices[0]
    assert device.disk_bytes_per_token == 5 * EXPERTS * 4 // 32 == 100 * MB
    assert found.disk_s == pytest.approx(0.1)
    assert found.stall_s == pytest.approx(0.1)
    assert found.tpot_s == pytest.approx(all_there.tpot_s + 0.1)
    # The memory is that of whole layers: three of five are not held, two slots are.
    assert all_there.devices[0].ram_bytes - device.ram_bytes == 3 * (BASE + EXPERTS)
    # Slots hold no expert before its router has picked it: more of them do nothing for a token.
    assert evaluate(streaming(model, 1, 3, 5, 7, 9, slots=4), asked).tpot_s == pytest.approx(found.tpot_s)


def test_every_chunk_of_a_prompt_waits_for_whole_layers():
    model, work = moe(), replace(WORK, prompt_tokens=1024)
    asked = question(model, 10**10, work=work, disk=DISK / 100)
    found = evaluate(streaming(model, 1, 3, 5, 7, 9), asked)
    assert found.prefill_chunk_s == pytest.approx(85)
    assert found.ttft_s == pytest.approx(2 * 85 + asked.members[0].cpu_output_s)
    assert found.disk_s == pytest.approx(10)


def test_in_a_ring_what_slots_do_not_hold_and_what_routers_pick_add_up():
    model = moe(17, dense=12)
    asked = question(model, 10**10, 10**10, disk=DISK / 5)
    plan = arrange(["d0", "d1"], [6, 10], rounds=1, model=model)
    streams = [("d0", (0, 1, 2, 3, 4)), ("d1", (6, 7, 8, 9, 12, 13))]
    streaming = tuple(Streaming(device=name, layers=layers, slots=2) for name, layers in streams)
    found = evaluate(replace(plan, streaming=streaming), asked)
    # Two of four dense layers and some experts of two others, at 200 MB/s.
    assert found.devices[1].window_s == pytest.approx(asked.members[1].step_s + (2 * 170 + 2 * 20) / 200)
    assert found.devices[1].disk_s == pytest.approx((4 * 170 + 2 * 20) / 200)
    assert found.tpot_s > found.disk_s == pytest.approx(5 * 170 / 200)


def test_dense_layers_beside_them_are_still_read_ahead_and_whole():
    model = moe(dense=4)
    asked = question(model, 10**10)
    dense, both = evaluate(streaming(model, 0, 1, 2), asked), evaluate(streaming(model, 0, 1, 2, 8, 9), asked)
    assert dense.devices[0].disk_bytes_per_token == 3 * (BASE + EXPERTS)
    assert both.devices[0].disk_bytes_per_token == 3 * (BASE + EXPERTS) + 2 * 20 * MB
    # The disk reads all the time: two slots are filled while others compute, the picked experts are not.
    assert dense.tpot_s == pytest.approx(0.51)
    assert both.tpot_s == pytest.approx(0.55)
    assert evaluate(streaming(model, 4, 5, 6), asked).tpot_s < dense.tpot_s / 1.5


@pytest.mark.parametrize("dense", [0, 3])
def test_the_plan_is_better_than_one_that_counts_whole_layers(monkeypatch, dense):
    """Beside a device of enough memory but a slow link, the head alone is quicker; whole layers would say otherwise."""
    model = moe(dense=dense)
    asked = question(model, 1300 * MB, 4000 * MB)
    links = [planning.link(a, b, round_trip_s=0.6) for a, b in (("d0", "d1"), ("d1", "d0"))]

    def answer() -> Plan:
        return solve(asked.devices, links, model, WORK, objective="latency", heads=["d0"]).plan

    by_expert = answer()
    with monkeypatch.context() as counting:
        counting.setattr(cost, "picked_bytes", lambda layer, model: 0)
        whole = answer()
    judged = replace(asked, links={(link.source, link.target): link for link in links})
    ours, theirs = evaluate(by_expert, judged), evaluate(whole, judged)
    assert not ours.short
    assert ours.tpot_s < 0.8 * theirs.tpot_s
    assert by_expert.devices == ("d0",)
    # Where there are dense layers too, these are the ones to keep.
    assert all(layer >= dense for layer in by_expert.streaming_of("d0").layers)


def test_the_simulation_of_layers_that_stream_by_expert_agrees_with_the_closed_form():
    counted = 0
    for seed in range(200):
        rng = random.Random(seed)
        asked = random_instance(rng, devices=rng.randint(1, 4), shared_hosts=False)
        if len(asked.kinds) > 1 or not asked.kinds[0].expert_bytes:
            continue
        plan = random_plan(rng, asked, streams=0.9)
        if not plan.streaming:
            continue
        counted += 1
        predicted, played = evaluate(plan, asked), simulate(plan, asked, tokens=4)
        assert played.tpot_s == pytest.approx(predicted.tpot_s, rel=1e-9)
        for use, device in zip(played.devices, predicted.devices, strict=True):
            assert use.disk_bytes == pytest.approx(device.disk_bytes_per_token)
            assert use.stall_s == pytest.approx(device.stall_s)
    assert counted > 5


def test_no_ring_that_is_played_is_sooner_than_predicted_where_dense_layers_stream_too():
    counted = 0
    for seed in range(300):
        rng = random.Random(seed)
        asked = random_instance(rng, devices=rng.randint(1, 4), shared_hosts=False)
        if len(asked.kinds) == 1 or not any(kind.expert_bytes for kind in asked.kinds):
            continue
        plan = random_plan(rng, asked, streams=0.9)
        if any(layer in (0, 1, 2) for streaming in plan.streaming for layer in streaming.layers):
            counted += 1
            played = simulate(plan, asked, tokens=6)
            assert played.tpot_s >= evaluate(plan, asked).tpot_s * (1 - 1e-9), seed
    assert counted > 10


def small_sparse(seed: int) -> Instance | None:
    asked, _ = small_instance(random.Random(seed))
    return asked if any(kind.expert_bytes for kind in asked.kinds) else None


@pytest.mark.parametrize("objective", ["latency", "ttft", "throughput", "balanced"])
def test_no_plan_is_better_on_small_fleets_with_experts(objective):
    answers = []
    for seed in range(5000, 5060):
        asked = small_sparse(seed)
        if asked is not None:
            answers.append(check_against_brute_force(asked, objective))
    plans = [answer.plan for answer in answers if answer is not None]
    assert len(plans) >= 6
    assert any(plan.streaming for plan in plans)


@pytest.mark.parametrize("objective", ["latency", "ttft", "throughput", "balanced"])
@pytest.mark.parametrize("dense", [0, 3, 6])
def test_no_plan_is_better_where_slow_disks_read_most(objective, dense):
    model, work = moe(8, dense=dense), replace(WORK, prompt_tokens=1024, answer_tokens=16, sequences=2)
    answers = []
    for roomy, slow in ((900 * MB, 0.02), (600 * MB, 0.1), (700 * MB, 0.5)):
        asked = question(model, 750 * MB, roomy, work=work, disk=DISK / 20)
        head, other = asked.devices
        other = replace(other, disk=replace(other.disk, prefetch_bytes_per_s=slow * DISK))
        answers.append(check_against_brute_force(replace(asked, devices=(head, other)), objective))
    plans = [answer.plan for answer in answers if answer is not None]
    assert len(plans) == 3
    assert all(plan.streaming for plan in plans)


@pytest.mark.parametrize("objective", ["latency", "throughput", "balanced"])
def test_no_plan_is_better_where_dense_layers_stream_beside_experts(objective):
    """So little memory that both devices stream most of their layers, and wait for what their slots do not hold."""
    model = replace(moe(10, dense=7), cut_multiple=4)  # one round
    for head_slots, slots in ((3, 2), (2.5, 3), (4, 4)):
        asked = question(model, 0, 0, disk=DISK / 5)
        kv, size = sum(asked.kv_bytes[kind] for kind in asked.kind_of), asked.slot_bytes
        besides = asked.runtime_bytes(2) + asked.head_bytes(2) + asked.model.output_bytes + kv
        asked = question(model, int(besides + head_slots * size), int(besides + slots * size), disk=DISK / 5)
        # On slow links a token takes longer than each disk reads.
        links = [planning.link(a, b, round_trip_s=1.5) for a, b in (("d0", "d1"), ("d1", "d0"))]
        asked = replace(asked, links={(link.source, link.target): link for link in links})
        answer = check_against_brute_force(asked, objective)
        assert answer is not None
        streamed = {layer for streaming in answer.plan.streaming for layer in streaming.layers}
        assert streamed & set(range(7))
        assert streamed & {7, 8, 9}
        # With these windows the program itself comes to the same time, not only to the same plan.
        problem = milp.new_problem("fixed")
        sub = replace(asked, devices=tuple(device for device in asked.devices if device.device in answer.plan.devices))
        milp.build(problem, sub, milp.fixed_layout(sub, answer.plan), objective, frozenset(), elastic=False)
        assert run(problem, 600).value / milp.MS == pytest.approx(answer.objective_s, rel=1e-6)


def test_where_the_output_matrix_streams_too_the_program_agrees_with_all_plans():
    model = moe(6, dense=1)
    asked = question(model, 0, work=WORK)
    least = asked.runtime_bytes(1) + asked.head_bytes(1) + sum(asked.kv_bytes[kind] for kind in asked.kind_of)
    asked = question(model, least + 2 * asked.slot_bytes + 5 * MB)
    assert Brute(asked, "latency").best() is None
    answer = check_against_brute_force(asked, "latency")
    assert answer is not None
    assert answer.plan.streams_output
