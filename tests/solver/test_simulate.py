"""The simulator against hand-worked rings, against the closed form, and against what cannot be otherwise."""

from __future__ import annotations

import math
import random
from collections import Counter
from dataclasses import replace
from fractions import Fraction
from itertools import groupby, pairwise

import pytest

from halda import (
    CpuProfile,
    DeviceProfile,
    DiskProfile,
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
from halda.evaluate import cpu_layers, evaluate, spread
from halda.instance import Instance
from halda.instance import instance as ask
from halda_research.random_fleets import random_instance, random_plan
from halda_research.simulate import Simulation, simulate, simulate_prefill

LAYER = 1000
"""Bytes of a layer of the toy model; a layer takes 1 s on the CPU."""
HOP_S = 0.5


# ---- hand-worked: a layer takes 1 s, a read as long as we say, a hop 0.5 s of which 0.1 s the link is occupied ----------


@pytest.fixture(autouse=True)
def _tokens_of_toys_cost_nothing_besides(monkeypatch):
    """So that times of toys are whole seconds."""
    real = cost.output_s
    monkeypatch.setattr(
        cost, "output_s", lambda processor, model: 0.0 if model.name == "toy" else real(processor, model)
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
    # One row of prefill a chunk, so that a chunk takes what a token does.
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


def streams(device: str, *layers: int, slots: int) -> tuple[Streaming, ...]:
    return (Streaming(device=device, layers=layers, slots=slots),)


def test_a_token_takes_its_layers_and_its_hops():
    result = simulate(ring(("d0", 2), ("d1", 3), ("d0", 1)), toy(6, 2), tokens=4)
    assert result.tpot_s == pytest.approx(6 + 2 * HOP_S)
    assert result.tokens_per_s == pytest.approx(1 / 7)
    assert [use.compute_s for use in result.devices] == pytest.approx([3, 3])
    assert [use.hop_s for use in result.devices] == pytest.approx([0.5, 0.5])
    assert [use.link_s for use in result.devices] == pytest.approx([0.1, 0.1])
    assert [use.stall_s + use.disk_s for use in result.devices] == [0, 0]


def test_enough_slots_hide_a_disk_that_keeps_up():
    """6 s of reading in a token of 7 s: nobody waits."""
    plan = ring(("d0", 2), ("d1", 3), ("d0", 1), streaming=streams("d1", 2, 3, 4, slots=3))
    result = simulate(plan, toy(6, 2, read_s=2), tokens=8)
    assert result.tpot_s == pytest.approx(7)
    assert result.devices[1].disk_s == pytest.approx(6)
    assert result.devices[1].stall_s == 0


def test_a_layer_beyond_the_slots_is_read_while_its_window_waits():
    """Two slots of three are full when the window begins; the first is free after 1 s, then 2 s of reading, then 1 s."""
    plan = ring(("d0", 2), ("d1", 3), ("d0", 1), streaming=streams("d1", 2, 3, 4, slots=2))
    result = simulate(plan, toy(6, 2, read_s=2), tokens=8)
    assert result.devices[1].stall_s == pytest.approx(1)
    assert result.tpot_s == pytest.approx(8)


def test_a_disk_that_does_not_keep_up_sets_the_pace():
    plan = ring(("d0", 2), ("d1", 3), ("d0", 1), streaming=streams("d1", 2, 3, 4, slots=3))
    assert simulate(plan, toy(6, 2, read_s=5), tokens=8).tpot_s == pytest.approx(15)


def test_one_device_reads_while_it_computes():
    plan = ring(("d0", 4), streaming=streams("d0", 0, 2, slots=2))
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


def test_the_slots_are_full_when_a_prompt_comes():
    plan = ring(("d0", 1), ("d1", 2), ("d0", 1), streaming=streams("d1", 1, 2, slots=2))
    assert simulate_prefill(plan, toy(4, 2, read_s=50)) == pytest.approx(5)
    assert simulate_prefill(plan, toy(4, 2, read_s=50, chunks=2)) > 100


def test_the_timeline_is_that_of_one_token():
    plan = ring(("d0", 2), ("d1", 3), ("d0", 1), streaming=streams("d1", 2, 3, 4, slots=2))
    shown = simulate(plan, toy(6, 2, read_s=2), tokens=8, timeline=True).timeline
    rows = [
        (i.device, i.kind, pytest.approx(i.start_s), pytest.approx(i.end_s), i.layers)
        for i in shown
        if i.kind != "load"
    ]
    assert rows == [
        ("d0", "compute", 0, 2, (0, 1)),
        ("d0", "hop", 2, 2.5, ()),
        ("d1", "compute", 2.5, 3.5, (2,)),
        ("d1", "compute", 3.5, 4.5, (3,)),
        ("d1", "stall", 4.5, 5.5, (4,)),
        ("d1", "compute", 5.5, 6.5, (4,)),
        ("d1", "hop", 6.5, 7, ()),
        ("d0", "compute", 7, 8, (5,)),
    ]
    loads = [(round(i.start_s, 6), round(i.end_s, 6), i.layers) for i in shown if i.kind == "load"]
    # Layer 2 of the next token from 5.5 on, into the slot that layer 3 gave back at 4.5.
    assert loads == [(0, 1.5, (3,)), (3.5, 5.5, (4,)), (5.5, 7.5, (2,)), (7.5, 8, (3,))]
    assert simulate(plan, toy(6, 2), tokens=2).timeline == ()


def test_devices_on_one_machine_take_turns_at_its_disk():
    plan = ring(
        ("d0", 1),
        ("d1", 3),
        ("d2", 3),
        ("d0", 1),
        streaming=streams("d1", 1, 2, 3, slots=3) + streams("d2", 4, 5, 6, slots=3),
    )
    apart = toy(8, 3, read_s=3)
    shared = replace(apart, devices=(apart.devices[0], *(replace(d, host="box") for d in apart.devices[1:])))
    assert simulate(plan, apart, tokens=8).tpot_s == pytest.approx(8 + 3 * HOP_S)
    assert simulate(plan, shared, tokens=8).tpot_s == pytest.approx(6 * 3)


# ---- the closed form ------------------------------------------------------------------------------------------------


def stops(plan: Plan, device: str) -> list[list[int]]:
    """CPU layers of ``device`` between two hops; the tail and the next token's first window are one stop."""
    runs = [(name, list(windows)) for name, windows in groupby(plan.route, key=lambda window: window.device)]
    if len(runs) > 1:
        name, tail = runs.pop()
        runs[0] = (name, tail + runs[0][1])
    return [[layer for window in run for layer in cpu_layers(window)] for name, run in runs if name == device]


def coinciding(rng: random.Random) -> tuple[Plan, Instance] | None:
    """A plan to which the assumptions of the closed form apply, or None.

    Layers of one size, nothing shared, and each device that streams has as many streamed layers at every stop, evenly
    spread. Either its slots hold all of them, or: computing up to the first streamed layer and from the last on, GPU layers
    and output among it, takes less than 4 % of the token, all such devices and the tail (that makes stops uneven) together.
    """
    question = random_instance(rng, shared_hosts=False)
    bare = random_plan(rng, question, streams=0)
    token_s = evaluate(bare, question).tpot_s
    members = {member.name: member for member in question.members}
    streaming, edges_s = [], 0.0
    for name in bare.devices:
        places = stops(bare, name)
        least = min(len(place) for place in places)
        if least == 0 or len(question.kinds) > 1 or rng.random() < 0.5:
            continue
        count = rng.randint(1, least)
        layers = sorted(layer for place in places for layer in spread(place, count))
        if len(layers) < 2:
            continue
        slots = len(layers) if rng.random() < 0.4 else rng.randint(2, max(2, count))
        streaming.append(Streaming(device=name, layers=tuple(layers), slots=slots))
        if slots < len(layers):
            use = next(use for use in evaluate(bare, question).devices if use.device == name)
            cpu_s = members[name].decode.cpu[0]
            edges_s += use.compute_s - sum(len(place) for place in places) * cpu_s
            edges_s += cpu_s * sum(place.index(spread(place, count)[0]) + 1 for place in places)
            edges_s += cpu_s * sum(len(place) - place.index(spread(place, count)[-1]) for place in places)
            edges_s += tail_s(bare, question)
    plan = replace(bare, streaming=tuple(streaming))
    if edges_s > 0.04 * max(token_s, evaluate(plan, question).tpot_s):
        return None
    return plan, question


def tail_s(plan: Plan, question: Instance) -> float:
    """Seconds of the tail window and the output."""
    head, tail = question.members[0], plan.route[-1]
    layers_s = len(cpu_layers(tail)) * head.decode.cpu[0] + tail.gpu_layers * head.decode.gpu[0]
    return layers_s + (head.gpu_output_s if plan.output_on_gpu else head.cpu_output_s)


def test_the_closed_form_agrees_where_its_assumptions_hold():
    rng = random.Random(1)
    wanted = Counter({"all resident": 80, "all in slots": 160, "few slots": 60})
    paced = 0
    while wanted.total():
        sampled = coinciding(rng)
        if sampled is None:
            continue
        plan, question = sampled
        few_slots = any(streaming.slots < len(streaming.layers) for streaming in plan.streaming)
        kind = "few slots" if few_slots else "all in slots" if plan.streaming else "all resident"
        if not wanted[kind]:
            continue
        wanted[kind] -= 1
        closed = evaluate(plan, question)
        assert simulate(plan, question, tokens=12).tpot_s == pytest.approx(closed.tpot_s, rel=0.05)
        paced += closed.tpot_s == closed.disk_s
    assert 30 < paced < 270


def test_without_streaming_the_closed_form_is_exact():
    rng = random.Random(2)
    for _ in range(60):
        question = random_instance(rng)
        plan = random_plan(rng, question, streams=0)
        assert simulate(plan, question, tokens=2).tpot_s == pytest.approx(evaluate(plan, question).tpot_s)


def test_the_closed_form_is_a_lower_bound_and_seldom_far_off():
    """For any plan, on shared machines and with layers of several sizes, too."""
    rng = random.Random(3)
    ratios = []
    for _ in range(100):
        question = random_instance(rng)
        plan = random_plan(rng, question, streams=0.8)
        ratios.append(simulate(plan, question, tokens=12).tpot_s / evaluate(plan, question).tpot_s)
    assert min(ratios) > 0.999
    assert sum(ratio > 1.05 for ratio in ratios) <= 15
    assert max(ratios) < 1.5


# ---- what cannot be otherwise ---------------------------------------------------------------------------------------


def case(seed: int, **options: float) -> tuple[Plan, Instance]:
    rng = random.Random(seed)
    question = random_instance(rng)
    return random_plan(rng, question, **options), question


@pytest.mark.parametrize("sequences", [1, 3])
@pytest.mark.parametrize("seed", range(12))
def test_every_layer_is_computed_once_a_token_and_every_streamed_one_read_once(seed, sequences):
    plan, question = case(seed, streams=0.9)
    tokens = 12
    result = simulate(plan, question, tokens=tokens, sequences=sequences)
    for use in result.devices:
        # The sums are taken at a moment; with several sequences others are on their way at both ends.
        slack = 0 if sequences == 1 else plan.layers_of(use.device) / tokens
        assert use.layers == pytest.approx(plan.layers_of(use.device), abs=slack)
        streaming = plan.streaming_of(use.device)
        streamed = sum(token_bytes(question.model, layer) for layer in streaming.layers)
        read_ahead = (streaming.slots + 1) * question.slot_bytes / tokens / sequences
        assert use.disk_bytes == pytest.approx(streamed, abs=read_ahead)
    assert result.tokens_per_s == pytest.approx(sequences / result.tpot_s)


def token_bytes(model: ModelProfile, layer: int) -> int:
    """What a token reads of a streamed layer: of one with experts those that a row uses."""
    experts = sum(model.layers[layer].expert_bytes_by_type.values())
    if not experts:
        return model.layers[layer].size_bytes
    return math.ceil(Fraction(experts * model.experts_used, model.experts))


def test_the_same_seed_gives_the_same_run():
    plan, question = case(5, streams=0.9)

    def run(seed: int) -> Simulation:
        return simulate(plan, question, tokens=6, sequences=2, jitter=0.7, seed=seed, timeline=True)

    assert run(1) == run(1)
    assert run(1) != run(2)
    assert simulate_prefill(plan, question, jitter=0.7, seed=1) == simulate_prefill(plan, question, jitter=0.7, seed=1)


@pytest.mark.parametrize("sequences", [1, 4])
def test_jitter_does_not_make_a_ring_faster(sequences):
    for seed in range(8):
        plan, question = case(seed, streams=0.5)
        smooth = simulate(plan, question, tokens=10, sequences=sequences).tpot_s
        rough = [simulate(plan, question, tokens=10, sequences=sequences, jitter=1, seed=i).tpot_s for i in range(5)]
        assert sum(rough) / 5 > 0.97 * smooth


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
        assert ttft_s <= closed.ttft_s * 1.25
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
    layers = tuple(Streaming(device=f"d{i}", layers=(3 * i, 3 * i + 1, 3 * i + 2), slots=2) for i in range(0, 1000, 2))
    result = simulate(replace(plan, streaming=layers), fleet, tokens=4, timeline=True)
    assert len(result.devices) == 1000
    assert result.tpot_s > sum(use.compute_s for use in result.devices)
