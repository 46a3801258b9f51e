"""Layers with experts stream by expert in decode: a token's reads and waits, and the best plan for them."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from halda import Infeasible, Instance, ModelProfile, Plan, Solution, Streaming, arrange, evaluate, instance, solve
from halda.profile import Workload
from halda.streaming import RESERVE_BYTES, ReadLine, read_bytes, read_lines
from tests.fakes import planning
from tests.solver.simulator import simulate, simulate_prefill
from tests.solver.small_fleets import small_instance
from tests.solver.test_solve import check_against_brute_force
from tools.research.random_fleets import random_instance, random_plan

MB = 10**6
BASE = 10 * MB
EXPERTS = 160 * MB
DISK = 1e9
WORK = Workload(context_tokens=1024, kv_type="f16", sequences=1, prompt_tokens=512, answer_tokens=256, chunk_rows=512)


def moe(layers: int = 12, *, dense: int = 0, used: int = 4) -> ModelProfile:
    """``dense`` layers, then layers with 32 experts, of which a row uses ``used``."""
    toy = planning.model(layers=layers, layer_bytes=BASE)
    sparse = replace(toy.layers[0], expert_bytes_by_type={"Q4_K": EXPERTS})
    kinds = (replace(toy.layers[0], bytes_by_type={"Q4_K": BASE + EXPERTS}),) * dense + (sparse,) * (layers - dense)
    return replace(toy, layers=kinds, output_bytes_by_type={"Q4_K": 20 * MB}, width=4096, experts=32, experts_used=used)


def question(model: ModelProfile, *rams: int, work: Workload = WORK, disk: float = DISK) -> Instance:
    devices = [planning.device(f"d{i}", ram=ram, disk=disk) for i, ram in enumerate(rams)]
    return instance(devices, [], model, work, {})


def streaming(model: ModelProfile, size: int) -> Plan:
    plan = arrange(["d0"], [len(model.layers)], rounds=1, model=model)
    return replace(plan, streaming=(Streaming(device="d0", streamed_bytes=size, read_ahead_bytes=0),))


@pytest.mark.parametrize(("used", "experts", "share"), [(4, 32, 1 / 8), (8, 128, 1 / 16), (1, 3, 1 / 3), (32, 32, 1)])
def test_a_row_reads_the_experts_that_it_uses_and_many_rows_nearly_all(used, experts, share):
    model = replace(moe(), experts=experts, experts_used=used)
    for all_bytes in (1000, 2000):
        assert read_bytes(read_lines(model, 1), 1000, all_bytes) == pytest.approx(1000 * share)
        two = 1 - (1 - share) ** 2
        assert read_bytes(read_lines(model, 2), 1000, all_bytes) == pytest.approx(1000 * two), "two may pick the same"
        assert read_bytes(read_lines(model, 512), 1000, all_bytes) == pytest.approx(1000, rel=1e-6)
        assert read_bytes(read_lines(planning.model(), 1), 1000, all_bytes) == 1000


def test_the_least_picked_experts_stream_first():
    lines = read_lines(replace(moe(), expert_use=(0.3, 0.1, 0.1, 0.0)), 1)

    def read(streamed: float, rows_read: tuple[ReadLine, ...] = lines) -> float:
        return read_bytes(rows_read, streamed, 400)

    assert [read(size) for size in (0, 50, 100, 200, 300)] == pytest.approx([0, 0, 0, 10, 20])
    assert [read(size) for size in (350, 400)] == pytest.approx([35, 50]), "at the end all that a row picks"
    many = read_lines(replace(moe(), expert_use=(0.3, 0.1, 0.1, 0.0)), 512)
    assert read(400, many) == pytest.approx(300), "what is never picked is not read"
    assert read_lines(replace(moe(), expert_use=(0.125,) * 8), 1) == read_lines(moe(), 1)


def test_a_model_whose_routers_have_favourites_reads_less_for_a_token():
    model, size = moe(), 800 * MB
    biased = replace(model, expert_use=(0.3, 0.3, 0.1, 0.1, 0.1, 0.05, 0.05, 0.0))
    read = []
    for each in (model, biased):
        asked = question(each, 10**10)
        read.append(evaluate(streaming(each, asked.buffer_bytes + size), asked).devices[0].disk_bytes_per_token)
    streamed = size / (12 * EXPERTS)
    assert read[0] == pytest.approx(size / 8)
    assert read[1] == pytest.approx(12 * EXPERTS * ((0.05 + 0.05) / 8 + 0.1 * (streamed - 3 / 8)), rel=1e-6)


def test_a_token_waits_for_what_the_routers_pick_and_a_chunk_for_all():
    model = moe()
    asked = question(model, 10**10)
    size = asked.buffer_bytes + 800 * MB
    plan = streaming(model, size)
    all_there, found = evaluate(replace(plan, streaming=()), asked), evaluate(plan, asked)
    device = found.devices[0]
    assert device.disk_bytes_per_token == 100 * MB, "an eighth of what streams while the buffer's room keeps some"
    assert found.disk_s == pytest.approx(0.1)
    assert found.stall_s == pytest.approx(0.1)
    assert found.tpot_s == pytest.approx(all_there.tpot_s + 0.1)
    assert found.ttft_s == pytest.approx(all_there.ttft_s + size / DISK)
    assert all_there.devices[0].ram_bytes - device.ram_bytes == size - RESERVE_BYTES, "nothing is read ahead"


def test_every_chunk_of_a_prompt_waits_for_all_that_streams():
    model, work = moe(), replace(WORK, prompt_tokens=1024)
    asked = question(model, 10**10, work=work, disk=DISK / 100)
    found = evaluate(streaming(model, 850 * MB), asked)
    bare = evaluate(replace(streaming(model, 1), streaming=()), asked)
    assert found.prefill_chunk_s == pytest.approx(bare.prefill_chunk_s + 85)
    assert found.ttft_s == pytest.approx(bare.ttft_s + 2 * 85)


def test_in_a_ring_each_device_waits_for_its_own():
    model = moe(17)
    asked = question(model, 10**10, 10**10, disk=DISK / 5)
    plan = arrange(["d0", "d1"], [6, 10], rounds=1, model=model)
    sizes = {name: asked.buffer_bytes + size * MB for name, size in (("d0", 80), ("d1", 160))}
    streaming = tuple(Streaming(device=name, streamed_bytes=size, read_ahead_bytes=0) for name, size in sizes.items())
    bare, found = evaluate(plan, asked), evaluate(replace(plan, streaming=streaming), asked)
    stalls = [each.window_s - alone.window_s for each, alone in zip(found.devices, bare.devices, strict=True)]
    assert stalls == pytest.approx([10 / 200, 20 / 200])
    assert found.tpot_s == pytest.approx(bare.tpot_s + 0.15)


def test_dense_layers_stay_where_experts_stream():
    model = moe(dense=4)
    asked = question(model, 0)
    needed = evaluate(arrange(["d0"], [12], rounds=1, model=model), asked).devices[0].ram_bytes
    maximum = 7 * EXPERTS - RESERVE_BYTES
    minimum = question(model, needed - maximum)
    found = solve(minimum.devices, [], model, WORK, objective="latency")
    assert found.plan.streaming_of("d0").streamed_bytes == 7 * EXPERTS
    short = question(model, needed - maximum - 1)
    with pytest.raises(Infeasible, match="RAM of d0 is short"):
        solve(short.devices, [], model, WORK, objective="latency")


@pytest.mark.parametrize("dense", [0, 3])
def test_the_plan_is_better_than_one_that_counts_whole_layers(monkeypatch, dense):
    """The other device has memory enough but a slow link, so the head alone is faster; whole layers would hide that."""
    model = moe(dense=dense)
    asked = question(model, 1300 * MB, 4000 * MB)
    links = [planning.link(a, b, round_trip_s=0.6) for a, b in (("d0", "d1"), ("d1", "d0"))]

    def answer() -> Plan:
        return solve(asked.devices, links, model, WORK, objective="latency", heads=["d0"]).plan

    by_expert = answer()
    with monkeypatch.context() as counting:
        counting.setattr("halda.streaming.read_lines", lambda model, rows: (ReadLine(1.0, 0.0),))
        whole = answer()
    judged = replace(asked, links={(link.source, link.target): link for link in links})
    ours, theirs = evaluate(by_expert, judged), evaluate(whole, judged)
    assert not ours.short
    assert ours.tpot_s < 0.8 * theirs.tpot_s
    assert by_expert.devices == ("d0",)


def test_the_simulation_of_layers_that_stream_by_expert_agrees_with_the_closed_form():
    counted = 0
    for seed in range(300):
        rng = random.Random(seed)
        asked = random_instance(rng, devices=rng.randint(1, 4), shared_hosts=False)
        if not asked.by_expert:
            continue
        plan = random_plan(rng, asked, streams=0.9)
        if not plan.streaming:
            continue
        counted += 1
        predicted, simulated = evaluate(plan, asked), simulate(plan, asked, tokens=4)
        assert simulated.tpot_s == pytest.approx(predicted.tpot_s, rel=1e-9)
        for use, device in zip(simulated.devices, predicted.devices, strict=True):
            assert use.disk_bytes == pytest.approx(device.disk_bytes_per_token, abs=1)
            assert use.stall_s == pytest.approx(device.stall_s)
    assert counted > 15


@pytest.mark.parametrize("multiple", [1, 2])
def test_a_tail_may_have_all_of_the_heads_last_window(multiple):
    model = replace(moe(4 * multiple), cut_multiple=multiple)
    asked = question(model, 10**10, 10**10, work=replace(WORK, chunk_rows=128))
    plan = arrange(["d0", "d1"], [multiple, multiple], rounds=2, model=model)
    assert [window.device for window in plan.route] == ["d0", "d1", "d1", "d0"]
    assert evaluate(plan, asked).ttft_s == pytest.approx(simulate_prefill(plan, asked))


def small_sparse(seed: int) -> Instance | None:
    asked, _ = small_instance(random.Random(seed))
    return asked if any(kind.expert_bytes for kind in asked.kinds) else None


@pytest.mark.parametrize(
    "seeds", [range(5000, 5030), pytest.param(range(5030, 5100), marks=pytest.mark.matrix)], ids=str
)
@pytest.mark.parametrize("objective", ["latency", "ttft", "throughput", "balanced"])
def test_no_plan_is_better_on_small_fleets_with_experts(objective, seeds):
    answers = []
    for seed in seeds:
        asked = small_sparse(seed)
        if asked is not None:
            answers.append(check_against_brute_force(asked, objective))
    plans = [answer.plan for answer in answers if answer is not None]
    assert len(plans) >= 4
    assert any(plan.streaming for plan in plans)


def of_chunks(seed: int) -> Solution | None:
    """The answer for prompts of several chunks, checked against every plan; None without experts or if nothing fits."""
    asked, rng = small_sparse(seed), random.Random(seed)
    if asked is None:
        return None
    prompt, rows = rng.choice([200, 512, 900]), rng.choice([64, 128])
    work = replace(asked.workload, prompt_tokens=prompt, chunk_rows=rows, context_tokens=1024)
    return check_against_brute_force(replace(asked, workload=work), rng.choice(["ttft", "balanced"]))


@pytest.mark.parametrize(
    "seeds",
    [
        range(240, 260),
        pytest.param(range(260, 280), marks=pytest.mark.matrix),
        pytest.param(range(400, 1200), marks=pytest.mark.matrix),
    ],
    ids=str,
)
def test_no_plan_is_better_where_chunks_follow_each_other(seeds):
    answers = [of_chunks(seed) for seed in seeds]
    plans = [answer.plan for answer in answers if answer is not None]
    assert any(plan.rounds > 1 for plan in plans)
    assert any(plan.streaming for plan in plans)


def test_no_plan_is_lost_by_presolving_again():
    """HiGHS 1.16 returns 77.7 s as the best of one round if it may presolve again; a plan with 75.7 s exists."""
    assert of_chunks(171) is not None


@pytest.mark.parametrize("objective", ["latency", "ttft", "throughput", "balanced"])
@pytest.mark.parametrize("dense", [0, 3])
def test_no_plan_is_better_where_slow_disks_read_most(objective, dense):
    model, work = moe(8, dense=dense), replace(WORK, prompt_tokens=1024, answer_tokens=16, sequences=2)
    answers = []
    for roomy, slow in ((900 * MB, 0.02), (600 * MB, 0.1), (700 * MB, 0.5)):
        besides = dense * (BASE + EXPERTS) // 4
        asked = question(model, 750 * MB + besides, roomy + besides, work=work, disk=DISK / 20)
        head, other = asked.devices
        other = replace(other, disk=replace(other.disk, prefetch_bytes_per_s=slow * DISK))
        answers.append(check_against_brute_force(replace(asked, devices=(head, other)), objective))
    plans = [answer.plan for answer in answers if answer is not None]
    assert len(plans) == 3
    assert all(plan.streaming for plan in plans)
