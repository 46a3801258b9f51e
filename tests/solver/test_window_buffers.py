"""In RAM, only one of a device's windows has a full compute buffer at a time; on a GPU each has one."""

from __future__ import annotations

from dataclasses import replace

import pytest

from halda import Instance, LayerProfile, Plan, Workload, arrange, cost, evaluate, instance
from halda.cost import GPU_RUNTIME_BYTES, RUNTIME_BYTES
from halda.profile import ModelProfile
from tests.fakes import planning
from tests.solver.test_solve import check_against_brute_force
from tools.research.published import solve_published

MB = 10**6
MIB = 1 << 20
LAYER = 50 * MB
WORK = Workload(context_tokens=1024, kv_type="f16", sequences=1, prompt_tokens=512, answer_tokens=256, chunk_rows=512)


def model(*, layers: int = 13, width: int = 4096) -> ModelProfile:
    """Layers of 50 MB with compute buffers of 62 MB."""
    toy = planning.model(layers=layers, layer_bytes=LAYER)
    return replace(toy, output_bytes_by_type={"Q4_K": 20 * MB}, width=width)


def question(toy: ModelProfile, *rams: int, vram: int = 0, unified: bool = False) -> Instance:
    """Devices that take ten times as long to read a layer as to compute it, with GPUs if ``vram`` is given."""
    devices = [
        planning.device(f"d{i}", ram=ram, rate=2e9, disk=0.2e9, vram=vram, unified=unified)
        for i, ram in enumerate(rams)
    ]
    return instance(devices, [], toy, WORK, {})


def six_each(asked: Instance, rounds: int, *, on_gpu: bool = False) -> Plan:
    """Six layers for each of two devices in ``rounds`` rounds, and one more for the head's tail."""
    plan = arrange(["d0", "d1"], [6 // rounds] * 2, rounds=rounds, model=asked.model)
    route = (
        replace(window, gpu_layers=len(window.layers) * (on_gpu and window.device == "d1")) for window in plan.route
    )
    return replace(plan, route=tuple(route))


def test_the_stand_in_layer_counts_for_each_window_and_its_weights_only_on_gpus() -> None:
    behind = LayerProfile(
        bytes_by_type={"IQ1_S": 7 * MB}, expert_bytes_by_type={}, kv_bytes_per_token=512, state_bytes=MB
    )
    plain, more = (question(each, 8_000 * MB) for each in (model(), replace(model(), stand_in=behind)))
    kept = cost.kv_bytes(behind, WORK) + cost.checkpoint_bytes(behind, WORK)
    assert kept > 1024 * 512 + 2 * MB
    assert more.runtime_bytes(3) - plain.runtime_bytes(3) == 3 * kept
    assert more.gpu_runtime_bytes(2) - plain.gpu_runtime_bytes(2) == 2 * (1024 * 512 + MB + 7 * MB)


# ---- the buffer ----------------------------------------------------------------------------------------------------------


def weights(kind: str, *matrices: tuple[int, int]) -> dict[str, int]:
    return {kind: int(sum(a * b for a, b in matrices) * cost.bytes_per_weight(kind))}


def shape(
    name: str,
    *,
    width: int,
    feed_forward: int,
    query: int,
    key: int,
    vocabulary: int,
    experts: tuple[int, int] = (0, 0),
) -> ModelProfile:
    """A model of these sizes; ``experts`` are all and the used ones, and ``feed_forward`` is the width of one."""
    attention = [(width, query), (query, width), (width, key), (width, key)]
    gated = [(width, feed_forward)] * 3
    layer = LayerProfile(
        bytes_by_type=weights("Q4_K", *attention, *([] if experts[0] else gated)),
        expert_bytes_by_type=weights("Q4_K", *gated * experts[0]) if experts[0] else {},
        kv_bytes_per_token=4 * key,
    )
    return replace(
        planning.model(),
        architecture=name,
        layers=(layer,),
        width=width,
        vocabulary=vocabulary,
        experts=experts[0],
        experts_used=experts[1],
    )


LLAMA_3B = shape("llama", width=3072, feed_forward=8192, query=3072, key=1024, vocabulary=128_256)
LLAMA_1B = shape("llama", width=2048, feed_forward=8192, query=2048, key=512, vocabulary=128_256)
LLAMA_8B = shape("llama", width=4096, feed_forward=14_336, query=4096, key=1024, vocabulary=320)
SMOL = shape("llama", width=576, feed_forward=1536, query=576, key=192, vocabulary=49_152)
GEMMA = shape("gemma3", width=640, feed_forward=2048, query=1024, key=256, vocabulary=262_144)
QWEN = shape("qwen2", width=1536, feed_forward=8960, query=1536, key=256, vocabulary=320)
QWEN_MOE = shape("qwen3moe", width=2048, feed_forward=768, query=4096, key=512, vocabulary=320, experts=(16, 8))
MIXTRAL = shape("llama", width=2048, feed_forward=3584, query=2048, key=512, vocabulary=320, experts=(4, 2))


@pytest.mark.parametrize(
    ("of", "rows", "context", "measured_mib"),
    [
        (LLAMA_3B, 128, 1024, 33.6),  # the logits
        (LLAMA_3B, 256, 8192, 40.0),
        (LLAMA_3B, 512, 1024, 73.0),
        (LLAMA_3B, 512, 8192, 80.0),
        (LLAMA_3B, 2048, 8192, 320.1),
        (LLAMA_3B, 2048, 1024, 146.0),  # rows are limited by the context
        (LLAMA_1B, 128, 1024, 32.8),
        (LLAMA_1B, 512, 8192, 72.0),
        (LLAMA_1B, 2048, 8192, 288.1),
        (LLAMA_8B, 128, 1024, 29.2),
        (LLAMA_8B, 512, 8192, 124.0),
        (SMOL, 512, 1024, 14.5),
        (SMOL, 2048, 8192, 86.0),
        (GEMMA, 512, 8192, 65.4),
        (GEMMA, 2048, 8192, 135.1),  # two masks
        (QWEN, 512, 8192, 72.5),
        (QWEN_MOE, 512, 1024, 89.0),
        (QWEN_MOE, 2048, 8192, 384.1),
        (MIXTRAL, 512, 8192, 66.0),
    ],
)
def test_a_buffer_is_a_little_more_than_llama_cpp_allocates(of, rows, context, measured_mib):
    """``measured_mib`` is llama.cpp's report for a whole model of these sizes."""
    work = replace(WORK, context_tokens=context, chunk_rows=rows)
    asked = instance([planning.device("d0")], [], of, work, {})
    counted = asked.buffer_bytes + asked.head_bytes(2) - cost.RING_HEAD_BYTES
    assert 0.98 * measured_mib * MIB <= counted <= 1.06 * measured_mib * MIB
    assert counted == max(cost.compute_buffer_bytes(of, work), cost.logits_bytes(of, work))


def test_more_users_need_no_larger_mask_and_no_more_activations():
    """A step has rows of one sequence, or one row of each."""
    one = cost.compute_buffer_bytes(LLAMA_3B, WORK)
    assert cost.compute_buffer_bytes(LLAMA_3B, replace(WORK, sequences=4)) == one


@pytest.mark.parametrize(
    ("context", "rows", "width", "heads", "query", "kv", "mib"),
    [
        (4096, 256, 2048, 32, 2048, 1024, 143.0),
        (16384, 64, 2048, 32, 2048, 1024, 134.75),
        (4096, 256, 576, 9, 576, 384, 43.19),
        (16384, 64, 576, 9, 576, 384, 40.8),
        (4096, 256, 2048, 32, 4096, 1024, 147.0),
        (4096, 256, 3072, 24, 3072, 512, 115.5),
        (4096, 256, 2048, 48, 6144, 2048, 218.0),
    ],
)
def test_without_flash_attention_a_row_has_a_score_for_each_head_and_cell(context, rows, width, heads, query, kv, mib):
    """As allocated by llama.cpp for synthetic versions of 1B, SmolLM2, Qwen3 MoE, StarCoder2 and GLM 4.5."""
    work = replace(WORK, context_tokens=context, chunk_rows=rows, flash=False)
    model = planning.model(layer_bytes=width * width)
    layer = replace(model.layers[0], kv_bytes_per_token=2 * kv)
    asked = replace(model, layers=(layer,), width=width, heads=heads, query_width=query)
    found = cost.compute_buffer_bytes(asked, work) / (1 << 20)
    assert mib <= found <= 1.02 * mib


@pytest.mark.parametrize(
    ("backend", "head", "has"), [("CUDA", 128, 1), ("CUDA", 100, 0), ("Metal", 160, 0), ("Vulkan", 100, 1)]
)
def test_a_gpu_without_flash_attention_for_such_heads_keeps_all_scores(backend, head, has):
    desk = planning.device("desk", vram=8 * planning.GB)
    assert desk.gpu is not None
    desk = replace(desk, gpu=replace(desk.gpu, backend=backend))
    of = replace(planning.model(), width=32 * head, heads=32, query_width=32 * head)
    asked = instance([desk], [], of, WORK, {})
    without = cost.compute_buffer_bytes(of, replace(WORK, flash=False))
    assert without > asked.buffer_bytes
    assert asked.gpu_buffer_bytes == (asked.buffer_bytes if has else without)


# ---- windows -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rounds", [2, 3, 6])
def test_more_rounds_take_no_buffer_more_of_ram_but_one_a_round_of_a_gpu(rounds):
    asked = question(model(), 4000 * MB, 4000 * MB, vram=2000 * MB)
    little, much = (rounds - 1) * asked.window_bytes, (rounds - 1) * asked.buffer_bytes
    assert asked.buffer_bytes > 5 * asked.window_bytes
    for once, often in zip(
        evaluate(six_each(asked, 1), asked).devices, evaluate(six_each(asked, rounds), asked).devices, strict=True
    ):
        assert often.layers == once.layers
        assert often.ram_bytes - once.ram_bytes == little
        assert often.vram_bytes == once.vram_bytes == 0
    once, often = (evaluate(six_each(asked, k, on_gpu=True), asked).devices[1] for k in (1, rounds))
    assert often.ram_bytes - once.ram_bytes == little
    assert often.vram_bytes - once.vram_bytes == much
    shared = question(model(), 4000 * MB, 4000 * MB, vram=2000 * MB, unified=True)
    once, often = (evaluate(six_each(shared, k, on_gpu=True), shared).devices[1] for k in (1, rounds))
    assert often.ram_bytes - once.ram_bytes == little + much


def test_every_device_has_one_buffer_and_the_head_room_for_logits():
    asked = question(model(), 4000 * MB, 4000 * MB, vram=2000 * MB)
    kv, besides = asked.kv_bytes[0], RUNTIME_BYTES + cost.hidden_bytes(asked.model, WORK) + asked.buffer_bytes
    head, other = evaluate(six_each(asked, 1), asked).devices
    assert asked.head_bytes(2) == cost.RING_HEAD_BYTES, "logits are in a buffer that holds more"
    vocabulary = cost.VOCABULARY_BYTES * asked.model.vocabulary
    assert other.ram_bytes == 6 * (LAYER + kv) + besides + asked.window_bytes
    assert (
        head.ram_bytes
        == 7 * (LAYER + kv) + asked.model.output_bytes + besides + 2 * asked.window_bytes + cost.RING_HEAD_BYTES
    )
    (alone,) = evaluate(arrange(["d0"], [13], rounds=1, model=asked.model), asked).devices
    assert alone.ram_bytes == 13 * (LAYER + kv) + asked.model.output_bytes + besides + asked.window_bytes + vocabulary
    on_gpu = evaluate(six_each(asked, 2, on_gpu=True), asked).devices[1]
    assert on_gpu.vram_bytes == 6 * (LAYER + kv) + GPU_RUNTIME_BYTES + 2 * asked.buffer_bytes
    # With few rows the buffer is smaller than the logits; only the head needs more.
    few = replace(asked, workload=replace(WORK, chunk_rows=64), model=replace(asked.model, vocabulary=128_000))
    head, other = evaluate(six_each(few, 1), few).devices
    assert few.head_bytes(2) > few.buffer_bytes
    assert head.ram_bytes - other.ram_bytes == LAYER + kv + few.model.output_bytes + few.window_bytes + few.head_bytes(
        2
    )


def test_a_plan_of_several_rounds_is_made_with_one_buffer_a_device_and_not_with_a_byte_less():
    roomy = question(model(layers=12), 360 * MB, 300 * MB)
    wanted = check_against_brute_force(roomy, "latency")
    assert wanted is not None
    assert wanted.plan.rounds > 1
    assert wanted.plan.streaming
    rams = [part.ram_bytes for part in wanted.prediction.devices]
    assert sum(rams) <= 660 * MB
    found = check_against_brute_force(question(roomy.model, *rams), "latency")
    assert found is not None
    assert found.objective_s == pytest.approx(wanted.objective_s, rel=1e-9)
    for i, name in enumerate(wanted.plan.devices):
        tight = question(roomy.model, *(ram - (i == at) for at, ram in enumerate(rams)))
        (short,) = evaluate(wanted.plan, tight).short
        assert (short.where, short.short_bytes) == (name, 1)
        answer = check_against_brute_force(tight, "latency")
        assert answer is None or answer.plan != wanted.plan


def test_less_memory_means_fewer_rounds_or_more_reading_and_no_plan_is_better():
    rounds = set()
    for ram in range(240, 720, 80):
        answer = check_against_brute_force(question(model(layers=12), (ram + 60) * MB, ram * MB), "latency")
        if answer is not None:
            rounds.add(answer.plan.rounds)
    assert len(rounds) > 1


@pytest.mark.parametrize("unified", [False, True])
@pytest.mark.parametrize("objective", ["latency", "balanced"])
def test_no_plan_is_better_where_the_buffers_of_a_gpu_count(unified, objective):
    """The GPUs have room for two to five layers, minus the buffers of their windows."""
    on_gpu = set()
    for vram in range(400, 640, 30):
        asked = question(
            model(layers=8), (360 + unified * vram) * MB, (260 + unified * vram) * MB, vram=vram * MB, unified=unified
        )
        answer = check_against_brute_force(asked, objective)
        if answer is not None and len(answer.plan.devices) > 1:
            on_gpu |= {sum(window.gpu_layers for window in answer.plan.route)}
    assert len(on_gpu) > 1


def test_the_published_solver_counts_them_too():
    """When it says that all memories hold their layers, they do, including the head's tail window."""
    fits = 0
    for ram in range(560, 800, 5):
        asked = question(model(layers=16), ram * MB, ram * MB)
        answer = solve_published(asked.devices, list(asked.links.values()), asked.model, WORK)
        if set(answer.sets.values()) == {"M4"}:
            assert not answer.plan.streaming
            assert not evaluate(answer.plan, asked).short
            fits += 1
    assert fits > 5
