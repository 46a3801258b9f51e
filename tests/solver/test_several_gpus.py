"""A device with several GPUs: each is a separate place with its own memory, time and steps."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

from halda import DeviceProfile, Instance, Limits, Objective, Solution, Workload, evaluate, instance
from halda.cost import GPU_RUNTIME_BYTES, between_gpus_s
from halda.filling import filled
from tests.fakes import planning
from tests.fakes.planning import GB, offloading
from tests.solver.simulator import simulate, simulate_prefill
from tests.solver.small_fleets import small_instance, solved
from tests.solver.test_solve import check_against_brute_force
from tools.research.random_fleets import random_instance, random_plan, with_more_gpus

LAYERS = 8
SIZE = GB // 4
WORK = Workload(context_tokens=512, kv_type="f16", sequences=1, prompt_tokens=256, answer_tokens=64, chunk_rows=256)


def desk(*rooms: float, name: str = "desk", host: str | None = None, **first: Any) -> DeviceProfile:
    """A device whose GPUs have room for these numbers of layers, besides a window's overhead on each."""
    device = planning.device(name, ram=8 * GB, vram=GB, host=host)
    assert device.gpu is not None
    question = asked(device)
    sizes = [int(room * (SIZE + question.kv_bytes[0])) + question.gpu_runtime_bytes(1) for room in rooms]
    gpus = [
        replace(device.gpu, id=f"CUDA{i}", vram_total_bytes=2 * size, vram_available_bytes=size)
        for i, size in enumerate(sizes)
    ]
    return device.with_gpus([replace(gpus[0], **first), *gpus[1:]])


def asked(*devices: DeviceProfile, limits: dict[str, Limits] | None = None, **changes: Any) -> Instance:
    model = planning.model(layers=LAYERS, layer_bytes=SIZE)
    return replace(instance(devices, [], model, WORK, limits or {}), **changes)


def on_each(found: Solution) -> list[int]:
    """The number of layers on each GPU of the head."""
    return [gpu.layers for gpu in found.prediction.devices[0].each_gpu]


def with_gpus(seed: int) -> tuple[Instance, Objective]:
    """A small question in which devices with a GPU have several."""
    rng = random.Random(seed)
    question, objective = small_instance(rng)
    while len(question.model.layers) > 8:
        question, objective = small_instance(rng)
    devices = tuple(with_more_gpus(rng, device) for device in question.devices)
    return replace(question, devices=devices), objective


@pytest.mark.parametrize("seeds", [range(6), pytest.param(range(6, 400), marks=pytest.mark.matrix)], ids=str)
def test_no_plan_is_better_where_devices_have_several_gpus(seeds):
    answers = [check_against_brute_force(*with_gpus(seed)) for seed in seeds]
    plans = [answer.plan for answer in answers if answer is not None]
    assert len(plans) > 0.6 * len(seeds)
    assert sum(any(window.other_gpus for window in plan.route) for plan in plans) > 0.15 * len(seeds)
    assert any(plan.streaming for plan in plans)


def test_simulation_and_closed_form_agree_with_several_gpus():
    rng = random.Random(2)
    several = 0
    for _ in range(60):
        question = random_instance(rng, shared_hosts=False)
        devices = tuple(with_more_gpus(rng, device) for device in question.devices)
        question = replace(question, devices=devices)
        plan = random_plan(rng, question, streams=0)
        several += any(any(window.other_gpus) for window in plan.route)
        closed = evaluate(plan, question)
        assert simulate(plan, question, tokens=2).tpot_s == pytest.approx(closed.tpot_s)
        if plan.rounds == 1:
            assert simulate_prefill(plan, question) == pytest.approx(closed.ttft_s)
    assert several > 20


def test_a_model_that_one_gpu_does_not_hold_is_on_both():
    found = solved(asked(desk(4.5, 6)), "latency")
    assert sum(on_each(found)) == LAYERS
    assert min(on_each(found)) > 0
    assert found.plan.output_on_gpu
    alone = solved(asked(desk(4.5)), "latency")
    assert found.objective_s < alone.objective_s / 2


def test_a_model_that_one_gpu_holds_is_on_one():
    """A transition between GPUs costs a step."""
    found = solved(asked(desk(12, 12)), "latency")
    assert on_each(found) == [LAYERS, 0]
    assert found.plan.route[0].other_gpus == ()


def test_the_faster_of_unequal_gpus_is_filled_first():
    device = desk(6, 12)
    slow = replace(device.other_gpus[0], vram_read_bytes_per_s=5e10, speeds=(planning.speed(5e10),))
    found = solved(asked(replace(device, other_gpus=(slow,))), "latency")
    first, second = on_each(found)
    assert first >= 4
    assert first + second == LAYERS
    assert [*found.plan.route[0].on_each_gpu[0]] == list(range(LAYERS - first, LAYERS)), "it has the last ones"


def test_each_gpu_pays_for_its_driver_its_step_and_the_transfer_to_the_next():
    question = asked(desk(14, 12, context_bytes=GB))
    plan = solved(question, "latency").plan
    split = replace(plan, route=(replace(plan.route[0], other_gpus=(3,)),))
    alone, both = (evaluate(each, question) for each in (plan, split))
    gpus, layer = both.devices[0].each_gpu, SIZE + question.kv_bytes[0]
    assert [gpu.layers for gpu in gpus] == [5, 3]
    assert alone.devices[0].vram_bytes - gpus[0].vram_bytes == 3 * layer
    assert gpus[1].vram_bytes == 3 * layer + question.gpu_runtime_bytes(1)
    besides = gpus[0].vram_bytes - 5 * layer - question.model.output_bytes
    assert besides == GB + question.gpu_runtime_bytes(1) - GPU_RUNTIME_BYTES
    second = question.devices[0].gpus[1]
    transfer_s = between_gpus_s(second, 1, question.model.hop_values)
    assert both.tpot_s - alone.tpot_s == pytest.approx(second.step_s + transfer_s)


def test_a_limit_of_vram_is_of_all_gpus_together():
    first = asked(desk(4, 4)).members[0].vram_limits[0]
    found = asked(desk(4, 4), limits={"desk": Limits(vram_bytes=first + 5)})
    assert found.members[0].vram_limits == (first, 5)


def test_a_shortage_names_the_gpu():
    plan = solved(asked(desk(12, 12)), "latency").plan
    split = replace(plan, route=(replace(plan.route[0], other_gpus=(6,)),))
    (short,) = evaluate(split, asked(desk(12, 2))).short
    assert (short.what, short.where) == ("VRAM", "desk (CUDA1)")


@pytest.mark.parametrize(("pci", "shared"), [(("a", "a"), True), (("a", "b"), False), (("", ""), True)])
def test_daemons_of_one_machine_share_the_memory_of_a_gpu_that_both_have(pci, shared):
    """The PCI address identifies it, or llama.cpp's name if there is none."""
    devices = [desk(6, name=name, host="pc", pci=address) for name, address in zip(("a", "b"), pci, strict=True)]
    found = asked(*devices)
    assert bool(found.vram_groups) == shared
    on_gpus = sum(device.gpu_layers for device in solved(found, "latency").prediction.devices)
    assert on_gpus < LAYERS if shared else on_gpus == LAYERS


@pytest.mark.parametrize("other", [{"id": "CUDA1"}, {"name": "another"}], ids=str)
def test_daemons_of_one_machine_with_a_gpu_each_have_all_of_it(other):
    first = desk(6, name="b", host="pc")
    assert first.gpu is not None
    found = asked(desk(6, name="a", host="pc"), replace(first, gpu=replace(first.gpu, **other)))
    assert found.vram_groups == ()
    assert sum(device.gpu_layers for device in solved(found, "latency").prediction.devices) == LAYERS


def test_prompts_are_offloaded_to_the_last_capable_gpu():
    """llama.cpp offloads to the GPU that has a window's first layers."""
    first = offloading(desk(3, 3))
    assert first.gpu is not None
    both = first.with_gpus([first.gpu, replace(first.gpu, id="CUDA1")])
    offloaded = [asked(each, prefill_offload=frozenset({"desk"})).members[0] for each in (both, first)]
    assert [member.offloading_gpu for member in offloaded] == [1, 0]
    assert offloaded[1].vram_limits[1] == 0, "one that cannot would be asked to if it had layers"
    found = solved(asked(both), "ttft", offloads=True)
    assert not found.prediction.short
    assert found.plan.prefill_offload == ("desk",)


def test_a_cut_that_moves_finds_the_gpu_with_room():
    """Steps are short here; otherwise another GPU would not pay."""
    devices = [desk(4, 4, name=name) for name in ("a", "b")]
    quick = [device.with_gpus([replace(gpu, step_s=1e-6) for gpu in device.gpus]) for device in devices]
    question = asked(*quick)
    lopsided = solved(question, "latency", require=frozenset({"b"})).plan
    before, after = (evaluate(plan, question) for plan in (lopsided, filled(lopsided, question, "latency")))
    assert before.devices[0].each_gpu[1].layers == 0
    assert after.devices[0].each_gpu[1].layers > 0
    assert not after.short
    assert sum(device.gpu_layers for device in after.devices) == LAYERS
