"""Prefill offload: a GPU computes prompts through layers in RAM; its costs, and when a plan uses it."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from halda import (
    OBJECTIVES,
    DeviceProfile,
    Infeasible,
    Instance,
    Objective,
    Plan,
    Solution,
    Window,
    Workload,
    assignments,
    evaluate,
    instance,
)
from halda.cost import COPIED_SHARE, GPU_RUNTIME_BYTES, OFFLOAD_ROWS, offloaded_layer_s
from halda.helping import able_to_offload, others_to_try
from tests.fakes import planning
from tests.fakes.planning import GB, offloading
from tests.solver import small_fleets
from tests.solver.brute import Brute
from tests.solver.simulator import simulate, simulate_prefill
from tests.solver.small_fleets import small_instance

MB = 10**6
CLOSE = 1e-6
MODEL = planning.model(layers=8, layer_bytes=100 * MB)
WORK = Workload(context_tokens=2048, kv_type="f16", sequences=1, prompt_tokens=1024, answer_tokens=64, chunk_rows=512)
NO_LAYER = GPU_RUNTIME_BYTES + GB // 2
"""VRAM for prefill offload but for no layer."""


def desk(*, vram: int = NO_LAYER, ram: int = 8 * GB, times: float = 4.0, unified: bool = False) -> DeviceProfile:
    return offloading(planning.device("desk", ram=ram, vram=vram, unified=unified), times=times)


def asked(*devices: DeviceProfile, work: Workload = WORK) -> Instance:
    return instance(devices, [], MODEL, work, {})


def solved(question: Instance, objective: Objective = "balanced", *, offloads: bool = True) -> Solution:
    return small_fleets.solved(question, objective, offloads=offloads)


def alone(*, gpu_layers: int = 0) -> Plan:
    window = Window(device="desk", first=0, last=8, gpu_layers=gpu_layers)
    return Plan(rounds=1, route=(window,), output_on_gpu=gpu_layers > 0, streaming=(), left_out=())


# ---- costs ---------------------------------------------------------------------------------------------------------------


def test_copying_counts_once_a_chunk_and_computing_once_a_row():
    gpu, layer = desk().gpu, MODEL.layers[0]
    seconds = [offloaded_layer_s(gpu, layer, MODEL, rows, 0, "f16") for rows in (32, 64, 512, 960)]
    few, many = gpu.layer_s + 100 * MB / gpu.prefill_offload[0].few_bytes_per_s, seconds[2]
    assert seconds[:2] == [pytest.approx(few)] * 2
    assert seconds[3] - many == pytest.approx(many - few)
    assert offloaded_layer_s(gpu, layer, MODEL, 512, 1000, "f16") > many


def test_a_token_and_a_short_prompt_are_the_processors():
    question, plan = asked(desk()), alone()
    assert evaluate(plan.with_offload(["desk"]), question).tpot_s == evaluate(plan, question).tpot_s
    assert evaluate(plan.with_offload(["desk"]), question).ttft_s < evaluate(plan, question).ttft_s
    short = replace(question, workload=replace(WORK, prompt_tokens=OFFLOAD_ROWS - 1))
    assert evaluate(plan.with_offload(["desk"]), short).ttft_s == evaluate(plan, short).ttft_s
    assert not able_to_offload(short)


@pytest.mark.parametrize("unified", [False, True])
def test_copies_and_buffers_take_vram(unified):
    question = asked(desk(unified=unified))
    found, offloaded = (evaluate(plan, question).devices[0] for plan in (alone(), alone().with_offload(["desk"])))
    # The output matrix is larger than half of a layer.
    assert found.vram_bytes == 0
    assert offloaded.vram_bytes == GPU_RUNTIME_BYTES + question.buffer_bytes + MODEL.output_bytes
    assert offloaded.ram_bytes - found.ram_bytes == (offloaded.vram_bytes if unified else 0)
    in_part, more = (evaluate(plan, question).devices[0] for plan in (alone(gpu_layers=2),) * 2)
    more = evaluate(alone(gpu_layers=2).with_offload(["desk"]), question).devices[0]
    assert more.vram_bytes - in_part.vram_bytes == COPIED_SHARE * 100 * MB


def test_a_long_context_has_keys_and_values_copied():
    question = asked(desk(), work=replace(WORK, context_tokens=16_384))
    assert question.copied_bytes == question.kv_bytes[0] > COPIED_SHARE * 100 * MB


def test_a_gpu_without_a_measured_prefill_offload_does_none():
    plan, unknown = alone().with_offload(["desk"]), asked(planning.device("desk", vram=GB))
    assert evaluate(plan, unknown) == evaluate(alone(), unknown)


def test_an_assignment_marks_the_windows_with_prefill_offload():
    route = (
        Window(device="desk", first=0, last=3, gpu_layers=3),
        Window(device="lap", first=3, last=6, gpu_layers=0),
        Window(device="desk", first=6, last=8, gpu_layers=1),
    )
    plan = Plan(rounds=1, route=route, output_on_gpu=True, streaming=(), left_out=()).with_offload(["desk"])
    found = assignments(plan, MODEL)
    assert [window.prefill_offload for window in found["desk"].windows] == [False, True]
    assert not found["lap"].windows[0].prefill_offload


# ---- which devices offload -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_prefill_is_offloaded_where_the_gpu_has_room(objective):
    question = asked(desk())
    assert solved(question, objective, offloads=False).plan.prefill_offload == ()
    found = solved(question, objective)
    assert found.plan.prefill_offload == ("desk",)
    assert found.prediction == evaluate(found.plan, question)
    assert not found.prediction.short
    assert found.bound_s <= found.objective_s
    short = solved(asked(desk(vram=GPU_RUNTIME_BYTES + MODEL.output_bytes)), objective)
    assert short.plan.prefill_offload == ()


def test_prefill_is_not_offloaded_to_a_gpu_slower_than_the_processor():
    assert solved(asked(desk(times=0.9))).plan.prefill_offload == ()


def test_layers_that_stream_would_travel_twice():
    found = solved(asked(desk(ram=600 * MB)))
    assert found.plan.streaming
    assert found.plan.prefill_offload == ()
    with pytest.raises(AssertionError):
        found.plan.with_offload(["desk"])


def test_a_gpu_that_has_all_layers_has_no_prefill_to_offload():
    found = solved(asked(desk(vram=8 * GB)))
    assert found.plan.gpu_layers == 8
    assert found.plan.prefill_offload == ()


def with_extra_buffers(device: DeviceProfile, times: float) -> DeviceProfile:
    """``device`` with decode ``times`` as fast with extra buffers."""
    (speed,) = device.cpu.speeds
    fast = replace(speed, decode_bytes_per_s=times * speed.decode_bytes_per_s, extra_buffers=True, plain=speed)
    return replace(device, cpu=replace(device.cpu, speeds=(fast,)))


def test_extra_buffers_are_given_up_only_where_the_whole_is_faster():
    device = with_extra_buffers(desk(), 1.5)
    assert solved(asked(device), "latency").plan.prefill_offload == ()
    assert solved(asked(device), "ttft").plan.prefill_offload == ("desk",)
    answers = {tokens: asked(device, work=replace(WORK, answer_tokens=tokens)) for tokens in (4, 1000)}
    assert {tokens: solved(each).plan.prefill_offload for tokens, each in answers.items()} == {4: ("desk",), 1000: ()}


def test_prefill_offload_moves_layers_where_ttft_counts():
    """Without offload two CPUs process a prompt faster than one; with offload one device is faster."""
    laptop = replace(planning.device("lap"), wireless=True)
    question = asked(desk(times=20.0), laptop)
    before, after = (solved(question, "ttft", offloads=offloads) for offloads in (False, True))
    assert before.plan.devices == ("desk", "lap")
    assert (after.plan.devices, after.plan.prefill_offload) == (("desk",), ("desk",))
    assert after.objective_s < evaluate(before.plan.with_offload(["desk"]), question).objective_s("ttft", 0)


# ---- brute force and simulator -------------------------------------------------------------------------------------------


def with_helpers(seed: int) -> tuple[Instance, Objective, frozenset[str]]:
    """A small fleet whose GPUs have room to offload and for at most two layers, and the devices that could offload."""
    question, objective = small_instance(random.Random(seed))
    rng = random.Random(seed)
    objective = rng.choice((objective, "ttft", "balanced"))
    besides = question.gpu_runtime_bytes(2, offloads=True) + question.output_copy_bytes

    def with_offload_speeds(device: DeviceProfile) -> DeviceProfile:
        device = offloading(device, times=rng.uniform(1, 16))
        assert device.gpu is not None
        vram = besides + int(rng.uniform(0, 2) * question.model.largest_layer_bytes)
        return replace(
            device,
            ram_available_bytes=2 * device.ram_available_bytes,
            gpu=replace(device.gpu, vram_total_bytes=2 * vram, vram_available_bytes=vram),
        )

    devices = tuple(device if device.gpu is None else with_offload_speeds(device) for device in question.devices)
    question = replace(question, devices=devices)
    return question, objective, able_to_offload(question)


def test_no_plan_with_prefill_offload_is_better_on_small_fleets():
    """With none, all or one of the able devices offloading, no plan is better than the answer."""
    found = offloaded = 0
    for seed in range(400, 420):
        question, objective, able = with_helpers(seed)
        if not able or len(question.devices) > 3:
            continue
        sets = [frozenset(), *others_to_try(able)]
        best = [Brute(replace(question, prefill_offload=names), objective).best() for names in sets]
        values = []
        for each in best:
            if each is not None:
                own = evaluate(each[1], question)
                assert not own.short
                values.append(own.objective_s(objective, question.workload.answer_tokens))
                assert values[-1] == pytest.approx(each[0], rel=CLOSE)
        if best[0] is None:
            with pytest.raises(Infeasible):
                solved(question, objective)
            continue
        answer = solved(question, objective)
        assert not answer.prediction.short
        assert answer.prediction == evaluate(answer.plan, question.with_rows(answer.prediction.chunk_rows))
        assert answer.objective_s <= (min(values) if objective in ("ttft", "balanced") else values[0]) * (1 + CLOSE)
        assert set(answer.plan.prefill_offload) <= able
        found, offloaded = found + 1, offloaded + bool(answer.plan.prefill_offload)
    assert found > 5
    assert offloaded > 2


def test_the_simulator_agrees():
    question = asked(desk(), replace(planning.device("lap"), wireless=True))
    route = (
        Window(device="desk", first=0, last=4, gpu_layers=0),
        Window(device="lap", first=4, last=7, gpu_layers=0),
        Window(device="desk", first=7, last=8, gpu_layers=0),
    )
    plan = Plan(rounds=1, route=route, output_on_gpu=False, streaming=(), left_out=()).with_offload(["desk"])
    found = evaluate(plan, question)
    assert simulate_prefill(plan, question) == pytest.approx(found.ttft_s, rel=0.02)
    assert simulate(plan, question, tokens=4).tpot_s == pytest.approx(found.tpot_s, rel=1e-3)
