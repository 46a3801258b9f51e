"""The simulator against hand-computed rings, the closed form, and invariants."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

import pytest

from halda import (
    CpuProfile,
    DeviceProfile,
    DiskProfile,
    Infeasible,
    LayerProfile,
    LinkProfile,
    ModelProfile,
    Plan,
    Streaming,
    TypeSpeed,
    Window,
    Workload,
    cost,
)
from halda.evaluate import evaluate, stream
from halda.instance import Instance
from halda.instance import instance as ask
from halda.load import under_load
from tests.solver.simulator import simulate, simulate_prefill
from tests.solver.small_fleets import solved
from tools.research.random_fleets import random_instance, random_plan

LAYER = 1000
"""Bytes of a layer of the toy model; a layer takes 1 s on the CPU."""
HOP_S = 0.5


# ---- hand-worked: a layer takes 1 s, a read as long as we say, a hop 0.5 s of which 0.1 s the link is occupied ----------


@pytest.fixture(autouse=True)
def _tokens_of_toys_cost_nothing_besides(monkeypatch):
    """Toy times are whole seconds, and no buffer has room for layers."""
    real, buffer = cost.output_s, cost.compute_buffer_bytes
    monkeypatch.setattr(cost, "output_s", lambda *given: 0.0 if given[2].name == "toy" else real(*given))
    monkeypatch.setattr(
        cost,
        "compute_buffer_bytes",
        lambda model, work: 0 if model.name == "toy" else buffer(model, work),
    )


def toy(layers: int, devices: int, *, read_s: float = 1.0, sequences: int = 1, chunks: int = 1) -> Instance:
    layer = LayerProfile(bytes_by_type={"F16": LAYER}, expert_bytes_by_type={}, kv_bytes_per_token=0)
    model = ModelProfile(
        name="toy",
        architecture="toyarch",
        layers=(layer,) * layers,
        embedding_bytes=0,
        output_bytes_by_type={},
        tied=False,
        width=1,
        vocabulary=0,
        context_tokens=64,
        experts=0,
        experts_used=0,
        kv_head_width=64,
        cut_multiple=1,
    )
    # One row per prefill chunk, so that a chunk takes as long as a token.
    work = Workload(
        context_tokens=64, kv_type="f16", sequences=sequences, prompt_tokens=chunks, answer_tokens=1, chunk_rows=1
    )
    fleet = [toy_device(f"d{i}", read_s) for i in range(devices)]
    links = [
        LinkProfile(source=a.device, target=b.device, address="", round_trip_s=2 * (HOP_S - 0.1), bytes_per_s=40)
        for a in fleet
        for b in fleet
        if a is not b
    ]
    return ask(fleet, links, model, work, {})


def toy_device(name: str, read_s: float) -> DeviceProfile:
    speed = TypeSpeed(
        type="F16",
        decode_bytes_per_s=LAYER,
        batch_bytes_per_s=LAYER,
        prefill_flop_per_s=1e6,
        extra_buffers=False,
        decode_spread=0,
        prefill_spread=0,
    )
    rate = LAYER / read_s
    return DeviceProfile(
        device=name,
        host=name,
        system="Linux",
        machine="x86_64",
        cpu=CpuProfile(name="a cpu", cores=1, threads=1, batch_threads=1, step_s=0, layer_s=0, speeds=(speed,)),
        ram_total_bytes=1 << 30,
        ram_available_bytes=1 << 30,
        ram_read_bytes_per_s=1e10,
        disk=DiskProfile(
            prefetch_bytes_per_s=rate, fault_bytes_per_s=rate, random_bytes_per_s=rate, free_bytes=1 << 30
        ),
        gpu=None,
    )


def ring(*sizes: tuple[str, int], rounds: int = 1, streaming: tuple[Streaming, ...] = ()) -> Plan:
    route, first = [], 0
    for device, size in sizes:
        route.append(Window(device=device, first=first, last=first + size, gpu_layers=0))
        first += size
    return Plan(rounds=rounds, route=tuple(route), output_on_gpu=False, streaming=streaming, left_out=())


def streams(device: str, layers: int, *, ahead: int) -> tuple[Streaming, ...]:
    """``layers`` layers' bytes stream, and ``ahead`` of them are read ahead."""
    return (Streaming(device=device, streamed_bytes=layers * LAYER, read_ahead_bytes=ahead * LAYER),)


def test_a_token_takes_its_layers_and_its_hops():
    result = simulate(ring(("d0", 2), ("d1", 3), ("d0", 1)), toy(6, 2), tokens=4)
    assert result.tpot_s == pytest.approx(6 + 2 * HOP_S)
    assert result.tokens_per_s == pytest.approx(1 / 7)
    assert [use.compute_s for use in result.devices] == pytest.approx([3, 3])
    assert [use.hop_s for use in result.devices] == pytest.approx([0.5, 0.5])
    assert [use.link_s for use in result.devices] == pytest.approx([0.1, 0.1])
    assert [use.stall_s + use.disk_s for use in result.devices] == [0, 0]


def test_enough_read_ahead_hides_a_disk_that_keeps_up():
    """6 s of reading in a token of 7 s: nothing waits."""
    plan = ring(("d0", 2), ("d1", 3), ("d0", 1), streaming=streams("d1", 3, ahead=3))
    result = simulate(plan, toy(6, 2, read_s=2), tokens=8)
    assert result.tpot_s == pytest.approx(7)
    assert result.devices[1].disk_s == pytest.approx(6)
    assert result.devices[1].stall_s == 0


def test_a_layer_beyond_the_read_ahead_is_read_while_its_window_waits():
    """Two of three layers are there when the window begins; the first goes after 1 s, then 2 s of reading, then 1 s."""
    plan = ring(("d0", 2), ("d1", 3), ("d0", 1), streaming=streams("d1", 3, ahead=2))
    result = simulate(plan, toy(6, 2, read_s=2), tokens=8)
    assert result.devices[1].stall_s == pytest.approx(1)
    assert result.tpot_s == pytest.approx(8)


def test_a_disk_that_does_not_keep_up_sets_the_pace():
    plan = ring(("d0", 2), ("d1", 3), ("d0", 1), streaming=streams("d1", 3, ahead=3))
    assert simulate(plan, toy(6, 2, read_s=5), tokens=8).tpot_s == pytest.approx(15)


def test_one_device_reads_while_it_computes():
    plan = ring(("d0", 4), streaming=streams("d0", 2, ahead=2))
    assert simulate(plan, toy(4, 1, read_s=1.9), tokens=8).tpot_s == pytest.approx(4)
    assert simulate(plan, toy(4, 1, read_s=3), tokens=8).tpot_s == pytest.approx(6)


def test_sequences_follow_each_other_until_a_device_is_always_busy():
    plan, question = ring(("d0", 1), ("d1", 4), ("d0", 1)), toy(6, 2)
    rates = [simulate(plan, question, tokens=6, sequences=count).tokens_per_s for count in (1, 2, 5)]
    assert rates == pytest.approx([1 / 7, 1 / 4, 1 / 4])
    assert simulate(plan, question, tokens=6, sequences=5).tpot_s == pytest.approx(20)


def test_chunks_follow_each_other():
    plan = ring(("d0", 1), ("d1", 3), ("d0", 1))
    assert simulate_prefill(plan, toy(5, 2)) == pytest.approx(6)
    assert simulate_prefill(plan, toy(5, 2, chunks=4)) == pytest.approx(6 + 3 * 3)


def test_the_read_ahead_is_full_when_a_prompt_comes():
    plan = ring(("d0", 1), ("d1", 2), ("d0", 1), streaming=streams("d1", 2, ahead=2))
    assert simulate_prefill(plan, toy(4, 2, read_s=50)) == pytest.approx(5)
    assert simulate_prefill(plan, toy(4, 2, read_s=50, chunks=2)) > 100


def test_devices_on_one_machine_take_turns_at_its_disk():
    plan = ring(
        ("d0", 1),
        ("d1", 3),
        ("d2", 3),
        ("d0", 1),
        streaming=streams("d1", 3, ahead=3) + streams("d2", 3, ahead=3),
    )
    experts_on_cpu = toy(8, 3, read_s=3)
    shared = replace(
        experts_on_cpu,
        devices=(experts_on_cpu.devices[0], *(replace(d, host="box") for d in experts_on_cpu.devices[1:])),
    )
    assert simulate(plan, experts_on_cpu, tokens=8).tpot_s == pytest.approx(8 + 3 * HOP_S)
    assert simulate(plan, shared, tokens=8).tpot_s == pytest.approx(6 * 3)


def test_the_beginning_of_a_part_is_read_into_what_room_is_left():
    """2.5 of three layers with 2 s of reading each are there: the last needs 1 s more, once the first is computed."""
    plan = ring(("d0", 2), ("d1", 3), ("d0", 1))
    streaming = (Streaming(device="d1", streamed_bytes=3 * LAYER, read_ahead_bytes=5 * LAYER // 2),)
    result = simulate(replace(plan, streaming=streaming), toy(6, 2, read_s=2), tokens=8)
    assert result.devices[1].stall_s == pytest.approx(0)
    assert result.devices[1].disk_bytes == pytest.approx(3 * LAYER)
    assert result.tpot_s == pytest.approx(7)


# ---- the closed form ------------------------------------------------------------------------------------------------


def streaming_plans(count: int, **options: bool) -> Iterator[tuple[Plan, Instance]]:
    """Random plans of one to eight rounds with streamed layers."""
    seed = 0
    while count:
        seed += 1
        rng = random.Random(seed)
        question = random_instance(rng, **options)
        plan = random_plan(rng, question, rounds=rng.choice([1, 2, 3, 4, 6, 8]))
        if plan.streaming:
            yield plan, replace(question, workload=replace(question.workload, sequences=1))
            count -= 1


@pytest.mark.parametrize("count", [100, pytest.param(1000, marks=pytest.mark.matrix)])
def test_the_closed_form_agrees_with_the_simulation_but_for_few_plans(count):
    """A token is within 5 % in 99 of 100 plans, and hardly ever faster; a first token in 97, with experts in all."""
    tokens, firsts, picked = [], [], []
    for plan, question in streaming_plans(count, shared_hosts=False):
        closed = evaluate(plan, question)
        tokens.append(simulate(plan, question, tokens=6).tpot_s / closed.tpot_s)
        firsts.append(simulate_prefill(plan, question) / closed.ttft_s)
        if question.by_expert:
            picked.append(firsts[-1])
    assert min(tokens) > 0.98
    assert sum(ratio > 1.05 for ratio in tokens) <= 0.01 * count
    assert max(tokens) < 1.15
    assert picked == pytest.approx([1.0] * len(picked), rel=1e-6)
    assert sum(abs(ratio - 1) > 0.05 for ratio in firsts) <= 0.025 * count
    assert min(firsts) > 0.87
    assert max(firsts) < 1.2


@pytest.mark.parametrize("objective", ["latency", "ttft"])
@pytest.mark.parametrize("count", [4, pytest.param(60, marks=pytest.mark.matrix)])
def test_the_closed_form_agrees_with_the_simulation_of_chosen_plans(objective, count):
    """The solver exploits errors of the closed form: they reached 44 % for tokens and 62 % for prompts."""
    ratios, seed = list[float](), 0
    while len(ratios) < count:
        seed += 1
        asked = random_instance(random.Random(seed), devices=3, layers=12, memory="short", shared_hosts=False)
        asked = replace(asked, workload=replace(asked.workload, sequences=1))
        try:
            found = solved(asked, objective)
        except Infeasible:
            continue
        if found.plan.streaming:
            question = asked.with_rows(found.prediction.chunk_rows)
            closed = evaluate(found.plan, question)
            if objective == "latency":
                ratios.append(simulate(found.plan, question, tokens=6).tpot_s / closed.tpot_s)
            else:
                ratios.append(simulate_prefill(found.plan, question) / closed.ttft_s)
    minimum, maximum = (0.98, 1.15) if objective == "latency" else (0.65, 1.15)
    assert minimum < min(ratios)
    assert sum(abs(ratio - 1) > 0.05 for ratio in ratios) <= 0.12 * count + 1
    assert max(ratios) < maximum


def of_load(plan: Plan, question: Instance, sequences: int) -> float:
    """The ratio of simulated throughput to that of the closed form with this many sequences."""
    load = under_load(plan, question, sequences=sequences)
    steps = 1 if plan.streaming else load.steps
    simulated = simulate(plan, replace(question, decode_rows=load.rows), tokens=8, sequences=steps)
    return simulated.tokens_per_s / steps * load.tbt_s * (load.steps if plan.streaming else 1)


@pytest.mark.parametrize("sequences", [2, 4, 8])
def test_the_forecast_of_concurrent_sequences_agrees_with_the_simulation(sequences):
    alone, resident = [], []
    for seed in range(40):
        rng = random.Random(seed)
        question = random_instance(rng, shared_hosts=False)
        plan = random_plan(rng, question, streams=0)
        (alone if plan.rounds == 1 else resident).append(of_load(plan, question, sequences))
    streaming = [of_load(*found, sequences) for found in streaming_plans(40, shared_hosts=False)]
    assert alone == pytest.approx([1.0] * len(alone), rel=0.01)
    assert resident == pytest.approx([1.0] * len(resident))
    assert 1.02 > max(streaming) > min(streaming) > 0.85
    assert sum(abs(ratio - 1) > 0.05 for ratio in streaming) <= 2


def test_the_minimum_to_stream_is_streamed():
    seen = 0
    for plan, question in streaming_plans(20):
        for each in stream(plan, question, {}).streaming:

            def streamed(
                minimum: int, name: str = each.device, plan: Plan = plan, question: Instance = question
            ) -> int:
                return stream(plan, question, {}, {name: minimum}).streaming_of(name).streamed_bytes

            all_bytes = streamed(1 << 60)
            more = (each.streamed_bytes + all_bytes) // 2
            assert streamed(more) == more
            seen += more > each.streamed_bytes
    assert seen, "all streams everywhere"


def test_without_streaming_the_closed_form_is_exact():
    rng = random.Random(2)
    for _ in range(60):
        question = random_instance(rng)
        plan = random_plan(rng, question, streams=0)
        assert simulate(plan, question, tokens=2).tpot_s == pytest.approx(evaluate(plan, question).tpot_s)


def test_the_closed_form_is_a_lower_bound_on_shared_machines_too():
    ratios = [
        simulate(plan, question, tokens=12).tpot_s / evaluate(plan, question).tpot_s
        for plan, question in streaming_plans(100)
    ]
    assert min(ratios) > 0.999
    assert sum(ratio > 1.05 for ratio in ratios) <= 5
    assert max(ratios) < 1.5


# ---- invariants -----------------------------------------------------------------------------------------------------


def case(seed: int, **options: float) -> tuple[Plan, Instance]:
    rng = random.Random(seed)
    question = random_instance(rng)
    return random_plan(rng, question, **options), question


@pytest.mark.parametrize("sequences", [1, 3])
@pytest.mark.parametrize("seed", range(12))
def test_every_layer_is_computed_once_a_token_and_what_streams_read_once(seed, sequences):
    plan, question = case(seed, streams=0.9)
    tokens = 12
    result = simulate(plan, question, tokens=tokens, sequences=sequences)
    for use in result.devices:
        # Sums are taken at one moment; with several sequences other steps are in flight at both ends.
        slack = 0 if sequences == 1 else plan.layers_of(use.device) / tokens
        assert use.layers == pytest.approx(plan.layers_of(use.device), abs=slack)
        member = next(member for member in question.members if member.name == use.device)
        streaming = plan.streaming_of(use.device)
        kinds = [question.kind_of[i] for _, window in plan.windows_of(use.device) for i in window.in_ram]
        streamed = member.decode.read_bytes(streaming.streamed_bytes, sum(question.streamable[kind] for kind in kinds))
        read_ahead = 2 * max(streaming.read_ahead_bytes, streamed if question.by_expert else 0) / tokens / sequences
        assert use.disk_bytes == pytest.approx(streamed, abs=read_ahead)
    assert result.tokens_per_s == pytest.approx(sequences / result.tpot_s)


def test_more_sequences_never_make_fewer_tokens():
    for seed in range(8):
        plan, question = case(seed, streams=0.5)
        rates = [simulate(plan, question, tokens=8, sequences=count).tokens_per_s for count in (1, 2, 4)]
        assert all(more > 0.98 * fewer for fewer, more in pairwise(rates))


def test_a_prompt_costs_at_least_one_pass_and_what_the_busiest_device_computes():
    for seed in range(30):
        plan, question = case(seed, streams=0)
        ttft_s = simulate_prefill(plan, question)
        closed = evaluate(plan, question)
        assert ttft_s >= closed.ttft_s * 0.95
        assert ttft_s <= closed.ttft_s * 1.4
        assert ttft_s >= closed.prefill_chunk_s * 0.999
        if question.chunks == 1:
            assert ttft_s == pytest.approx(closed.ttft_s)


def test_a_thousand_devices():
    rng = random.Random(9)
    question = random_instance(rng, devices=3, layers=3001, shared_hosts=False)
    devices = tuple(replace(question.devices[i % 3], device=f"d{i}", host=f"d{i}") for i in range(1000))
    fleet = replace(question, devices=devices, links={}, limits={})
    order = [(f"d{i}", 3) for i in range(1000)]
    plan = ring(*order, ("d0", 1))
    size = 3 * question.model.largest_layer_bytes
    streaming = tuple(Streaming(device=f"d{i}", streamed_bytes=size, read_ahead_bytes=size) for i in range(0, 1000, 2))
    result = simulate(replace(plan, streaming=streaming), fleet, tokens=4)
    assert len(result.devices) == 1000
    assert result.tpot_s > sum(use.compute_s for use in result.devices)
