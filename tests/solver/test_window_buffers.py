"""Every window has a compute buffer of its own: a plan of more rounds needs more memory for the same layers."""

from __future__ import annotations

from dataclasses import replace

import pytest

from halda import Instance, Plan, Workload, arrange, cost, evaluate, instance
from halda.profile import ModelProfile
from halda.published import solve_published
from tests.fakes import planning
from tests.solver.test_solve import check_against_brute_force

MB = 10**6
LAYER = 50 * MB
WORK = Workload(context_tokens=256, kv_type="f16", sequences=1, prompt_tokens=512, answer_tokens=256, chunk_rows=512)


def model(*, layers: int = 13, width: int = 1024) -> ModelProfile:
    """Layers of 50 MB with compute buffers of 27 MB a window."""
    toy = planning.model(layers=layers, layer_bytes=LAYER)
    return replace(toy, output_bytes_by_type={"Q4_K": 20 * MB}, width=width)


def question(toy: ModelProfile, *rams: int, vram: int = 0, unified: bool = False) -> Instance:
    """Devices that read a layer in ten times as long as they compute it, with GPUs where ``vram`` is given."""
    devices = [
        planning.device(f"d{i}", ram=ram, rate=2e9, disk=0.2e9, vram=vram, unified=unified)
        for i, ram in enumerate(rams)
    ]
    return instance(devices, [], toy, WORK, {})


def buffer_bytes(asked: Instance) -> int:
    return cost.compute_buffer_bytes(asked.model, asked.workload)


def six_each(asked: Instance, rounds: int, *, on_gpu: bool = False) -> Plan:
    """Six layers for each of two devices in so many rounds, and one more for the head's tail."""
    plan = arrange(["d0", "d1"], [6 // rounds] * 2, rounds=rounds, model=asked.model)
    route = (
        replace(window, gpu_layers=len(window.layers) * (on_gpu and window.device == "d1")) for window in plan.route
    )
    return replace(plan, route=tuple(route))


@pytest.mark.parametrize("rounds", [2, 3, 6])
def test_the_same_layers_in_more_rounds_take_a_buffer_a_round_more(rounds):
    asked = question(model(), 4000 * MB, 4000 * MB, vram=2000 * MB)
    more = (rounds - 1) * buffer_bytes(asked)
    for once, often in zip(
        evaluate(six_each(asked, 1), asked).devices, evaluate(six_each(asked, rounds), asked).devices, strict=True
    ):
        assert often.layers == once.layers
        assert often.ram_bytes - once.ram_bytes == more
        assert often.vram_bytes == once.vram_bytes == 0
    once, often = (evaluate(six_each(asked, k, on_gpu=True), asked).devices[1] for k in (1, rounds))
    assert often.ram_bytes - once.ram_bytes == more
    assert often.vram_bytes - once.vram_bytes == more
    shared = question(model(), 4000 * MB, 4000 * MB, vram=2000 * MB, unified=True)
    once, often = (evaluate(six_each(shared, k, on_gpu=True), shared).devices[1] for k in (1, rounds))
    assert often.ram_bytes - once.ram_bytes == 2 * more


def test_the_head_of_a_ring_has_one_for_its_tail_and_a_device_alone_one_in_all():
    asked = question(model(), 4000 * MB, 4000 * MB)
    kv = asked.kv_bytes[0]
    head, other = evaluate(six_each(asked, 1), asked).devices
    own = asked.head_bytes + asked.model.output_bytes
    assert other.ram_bytes == 6 * (LAYER + kv) + cost.RUNTIME_BYTES + buffer_bytes(asked)
    assert head.ram_bytes == 7 * (LAYER + kv) + own + cost.RUNTIME_BYTES + 2 * buffer_bytes(asked)
    (alone,) = evaluate(arrange(["d0"], [13], rounds=1, model=asked.model), asked).devices
    assert alone.ram_bytes == 13 * (LAYER + kv) + own + cost.RUNTIME_BYTES + buffer_bytes(asked)


def test_a_plan_that_fits_with_one_buffer_a_device_only_is_not_made():
    roomy = question(model(layers=12), 430 * MB, 370 * MB)
    wanted = check_against_brute_force(roomy, "latency")
    assert wanted is not None
    plan = wanted.plan
    assert plan.rounds > 1
    assert plan.streaming
    rams = [part.ram_bytes - (part.windows - 1) * buffer_bytes(roomy) for part in wanted.prediction.devices]
    tight = question(roomy.model, *rams)
    short = evaluate(plan, tight).short
    assert [each.where for each in short] == list(plan.devices)
    assert [each.short_bytes for each in short] == [
        (part.windows - 1) * buffer_bytes(roomy) for part in wanted.prediction.devices
    ]
    found = check_against_brute_force(tight, "latency")
    assert found is not None
    assert found.plan != plan
    assert found.objective_s > wanted.objective_s
    for part, ram in zip(found.prediction.devices, rams, strict=True):
        assert part.ram_bytes <= ram


def test_less_memory_means_fewer_rounds_or_more_reading_and_no_plan_is_better():
    rounds = set()
    for ram in range(280, 400, 30):
        answer = check_against_brute_force(question(model(layers=12), (ram + 60) * MB, ram * MB), "latency")
        if answer is not None:
            rounds.add(answer.plan.rounds)
    assert len(rounds) > 1


@pytest.mark.parametrize("unified", [False, True])
@pytest.mark.parametrize("objective", ["latency", "balanced"])
def test_no_plan_is_better_where_the_buffers_of_a_gpu_count(unified, objective):
    """The GPUs have room for two to five layers, less what the buffers of their windows take."""
    on_gpu = set()
    for vram in range(400, 560, 20):
        asked = question(
            model(layers=8), (360 + unified * vram) * MB, (260 + unified * vram) * MB, vram=vram * MB, unified=unified
        )
        answer = check_against_brute_force(asked, objective)
        if answer is not None and len(answer.plan.devices) > 1:
            on_gpu |= {sum(window.gpu_layers for window in answer.plan.route)}
    assert len(on_gpu) > 1


def test_the_published_solver_counts_them_too():
    """Where it says that all memories hold their layers, they do: the head's with the buffer of its tail window."""
    fits = 0
    for ram in range(560, 800, 5):
        asked = question(model(layers=16), ram * MB, ram * MB)
        answer = solve_published(asked.devices, list(asked.links.values()), asked.model, WORK)
        if set(answer.sets.values()) == {"M4"}:
            assert not answer.plan.streaming
            assert not evaluate(answer.plan, asked).short
            fits += 1
    assert fits > 5
