"""A window takes the GPU memory that was planned for it, by ggml's own accounting."""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import msgspec
import pytest

from halda import DeviceProfile, OffloadSpeed, Plan, Window, Workload, evaluate, instance
from halda.cost import GPU_RUNTIME_BYTES
from primad.engine.binding import hear_llama
from primad.engine.llama.windows import WholeModel
from primad.gguf.adapter import Adapter
from primad.gguf.architectures.layers import layer_count
from primad.gguf.header import read_header
from primad.gguf.profile import model_profile
from primad.gguf.windows import vocabulary_size
from primad.planning.adapters import open_adapters, with_adapters
from tests.fakes.gguf import write_adapter
from tests.fakes.profile import GPU, PROFILE
from tests.gpu.families import KEYS, SHAPES, write_family
from tests.shell.test_cut_exact import OPTIONS, Route, assigned, files_of
from tools import synth

MIB = 1 << 20
MAX_OFF = 64 * MIB
MAX_SHARE = 0.05
CONTEXT = 4096
PLACES = (("desk", 0), ("lap", 2), ("desk", 4))
"""Each device and the first layer of its two-layer window."""
_BUFFER = re.compile(r": +(\S+) (?:model|KV|compute|RS|LoRA) buffer size = +([0-9.]+) MiB")


_LOADED = "loaded meta data with"
OFFLOADED = OffloadSpeed(type="Q4_K", few_bytes_per_s=5e9, prefill_flop_per_s=2e12)


def device(name: str) -> DeviceProfile:
    return replace(PROFILE, device=name, host=name, gpu=replace(GPU, prefill_offload=(OFFLOADED,)))


WORK = Workload(context_tokens=CONTEXT, kv_type="f16", sequences=1, prompt_tokens=512, answer_tokens=128, chunk_rows=64)
WIDE = replace(WORK, context_tokens=8192, chunk_rows=1024)
OF_FAMILIES = {
    **dict.fromkeys(("openelm", "step35"), replace(WIDE, chunk_rows=512)),
    "grok": replace(WIDE, context_tokens=2048, chunk_rows=512),
    "nemotron_h": replace(WIDE, chunk_rows=2048),
}
"""Exceptions, because plans count the largest layer's buffer in every window, in proportion to tokens; because Mesa's
device limits a buffer to 128 MiB; and because rows of a state are no wider than many others.
"""


def planned_bytes(header, plan: Plan, work: Workload = WORK, adapters: Sequence[Adapter] = ()) -> list[int]:
    """Planned VRAM of each device, without the backend's own overhead, which ggml does not count."""
    model = with_adapters(model_profile(header), adapters)
    asked = instance([device(name) for name in plan.devices], [], model, work, {})
    return [each.vram_bytes - GPU_RUNTIME_BYTES for each in evaluate(plan, asked).devices]


def allocated_bytes(caplog, gpu) -> float:
    """The GPU memory that llama.cpp has logged since the log was cleared."""
    found = [_BUFFER.search(record.getMessage()) for record in caplog.records]
    return sum(float(match[2]) * MIB for match in found if match is not None and match[1] == gpu.id)


def allocated_by_windows(caplog, gpu) -> list[float]:
    """The same by window, in load order."""
    found: list[float] = []
    for record in caplog.records:
        if _LOADED in record.getMessage():
            found.append(0.0)
        match = _BUFFER.search(record.getMessage())
        if match is not None and match[1] == gpu.id:
            found[-1] += float(match[2]) * MIB
    return found


@pytest.fixture
def printed(caplog):
    hear_llama()  # another test of this process may have set a callback
    caplog.set_level(logging.DEBUG, "primad.engine.binding")
    return caplog


@pytest.fixture(autouse=True)
def _options(monkeypatch):
    options = msgspec.structs.replace(OPTIONS, context=CONTEXT, sequences=1)
    monkeypatch.setattr("tests.shell.test_cut_exact.OPTIONS", options)


def check(allocated: float, planned: float, *, windows: int = 1) -> None:
    maximum = max(windows * MAX_OFF, MAX_SHARE * planned)
    assert abs(allocated - planned) <= maximum, f"{allocated / MIB:.0f} of {planned / MIB:.0f} MiB"


@pytest.mark.parametrize("on_gpu", [30, 12])
def test_a_whole_model(smollm2, printed, gpu, on_gpu):
    header = read_header(smollm2)
    plan = Plan(
        rounds=1,
        route=(Window(device="desk", first=0, last=30, gpu_layers=on_gpu),),
        output_on_gpu=True,
        streaming=(),
        left_out=(),
    )
    options = msgspec.structs.replace(OPTIONS, context=CONTEXT, sequences=1)
    files = files_of(smollm2, (), assigned(30, on_gpu, is_tail=True))
    WholeModel(files, options, frozenset(), vocabulary=vocabulary_size(header)).release()
    check(allocated_bytes(printed, gpu), *planned_bytes(header, plan))


@pytest.mark.parametrize(
    ("on_gpu", "prefill_offload"),
    [((0, 10, 0), False), ((4, 4, 4), False), ((10, 10, 10), False), ((0, 0, 0), True), ((4, 4, 4), True)],
)
def test_windows(smollm2, printed, gpu, on_gpu, prefill_offload, tmp_path):
    header = read_header(smollm2)
    cuts = [0, 10, 20, 30]
    names = ["desk", "lap", "desk"]
    plan = Plan(
        rounds=1,
        route=tuple(
            Window(device=name, first=first, last=last, gpu_layers=layers)
            for name, (first, last), layers in zip(names, pairwise(cuts), on_gpu, strict=True)
        ),
        output_on_gpu=on_gpu[2] > 0,
        streaming=(),
        left_out=(),
    )
    plan = plan.with_offload(plan.devices if prefill_offload else ())
    Route(header, cuts, tmp_path, on_gpu=on_gpu, prefill_offload=prefill_offload).release()
    planned = planned_bytes(header, plan)
    check(allocated_bytes(printed, gpu), planned[1] + (planned[0] if prefill_offload or any(on_gpu[::2]) else 0))


def test_a_window_without_gpu_layers_takes_no_gpu_memory(smollm2, printed, gpu, tmp_path):
    Route(read_header(smollm2), [0, 10, 20, 30], tmp_path).release()
    assert allocated_bytes(printed, gpu) == 0


def test_experts_on_the_cpu_take_no_gpu_memory(printed, gpu, tmp_path):
    """They have 53 MB in each layer: on the GPU, windows would exceed the plan by 320 MB."""
    path = tmp_path / "model.gguf"
    synth.write_model(path, architecture="qwen3moe", width=512, expert_feed_forward=1024, experts=32, layers=6)
    header = read_header(path)
    route = tuple(Window(device=name, first=at, last=at + 2, gpu_layers=2, cpu_experts=2) for name, at in PLACES)
    plan = Plan(rounds=1, route=route, output_on_gpu=True, streaming=(), left_out=())
    planned = sum(planned_bytes(header, plan))
    Route(header, [0, 2, 4, 6], tmp_path, on_gpu=(2, 2, 2), experts_on_cpu=True).release()
    assert planned < 5 * MAX_OFF
    check(allocated_bytes(printed, gpu), planned)


def test_adapters_take_gpu_memory_next_to_their_layers(printed, gpu, tmp_path):
    """They have 63 MB in each layer: without them in the plan, a window would exceed it by 126 MB."""
    path = tmp_path / "model.gguf"
    synth.write_model(path, layers=6, is_empty=True, width=2048, heads=32, head_width=64, feed_forward=8192)
    header = read_header(path)
    changed = ("attn_q.weight", "ffn_up.weight", "ffn_down.weight", "output.weight")
    tensors = {name: each.shape for name, each in header.tensors.items() if name.endswith(changed)}
    adapters = open_adapters([(write_adapter(tmp_path / "lora.gguf", tensors, rank=640), 1.0)], header)
    route = tuple(Window(device=name, first=at, last=at + 2, gpu_layers=2) for name, at in PLACES)
    plan = Plan(rounds=1, route=route, output_on_gpu=True, streaming=(), left_out=())
    Route(header, [0, 2, 4, 6], tmp_path, on_gpu=(2, 2, 2), adapters=adapters).release()
    head, worker = planned_bytes(header, plan, adapters=adapters)
    assert worker - planned_bytes(header, plan)[1] > 1.5 * MAX_OFF
    first, middle, tail = allocated_by_windows(printed, gpu)
    check(middle, worker)
    check(first + tail, head, windows=2)


@pytest.mark.parametrize("family", ["llama", "gpt-oss", "qwen3moe", "starcoder2"])
def test_without_flash_attention_scores_take_the_planned_memory(family, printed, gpu, tmp_path):
    """Attention without flash attention, as for heads that a backend does not support."""
    header = write_family(tmp_path / "model.gguf", family)
    work = replace(WORK, context_tokens=2048, chunk_rows=256, flash=False)
    options = msgspec.structs.replace(OPTIONS, context=2048, sequences=1, rows=256, flash=False)
    route = tuple(Window(device=name, first=at, last=at + 2, gpu_layers=2) for name, at in PLACES)
    plan = Plan(rounds=1, route=route, output_on_gpu=True, streaming=(), left_out=())
    printed.clear()
    Route(header, [0, 2, 4, 6], tmp_path, options, (2, 2, 2)).release()
    head, worker = planned_bytes(header, plan, work)
    first, middle, tail = allocated_by_windows(printed, gpu)
    check(middle, worker)
    check(first + tail, head, windows=2)
    assert first + tail + middle < head + worker, "no less is planned than taken"


def check_family(family: str, work: Workload, printed, gpu, folder) -> None:
    """Check three windows of the family's model."""
    header = write_family(folder / "model.gguf", family)
    each = layer_count(header) // 3
    cuts = [0, each, 2 * each, 3 * each]
    on_gpu = (each, each, each)
    route = tuple(
        Window(device=name, first=first, last=last, gpu_layers=layers)
        for name, (first, last), layers in zip(["desk", "lap", "desk"], pairwise(cuts), on_gpu, strict=True)
    )
    plan = Plan(rounds=1, route=route, output_on_gpu=True, streaming=(), left_out=())
    options = msgspec.structs.replace(
        OPTIONS,
        context=work.context_tokens,
        sequences=1,
        rows=work.chunk_rows,
        small_windows=work.small_windows,
        rollback=work.rollback,
    )
    printed.clear()
    Route(header, cuts, folder, options, on_gpu).release()
    head, worker = planned_bytes(header, plan, work)
    first, middle, tail = allocated_by_windows(printed, gpu)
    check(middle, worker)
    check(first + tail, head, windows=2)


@pytest.mark.parametrize("family", sorted({*SHAPES, *KEYS}))
def test_each_family(family, printed, gpu, tmp_path):
    """KV cache of sliding or varying layers, states, latent vectors and chunk buffers, at real widths."""
    check_family(family, OF_FAMILIES.get(family, WIDE), printed, gpu, tmp_path)


@pytest.mark.parametrize("family", ["gemma3", "gpt-oss", "mimo2"])
def test_small_caches_of_sliding_windows(family, printed, gpu, tmp_path):
    work = replace(WIDE, context_tokens=32_768, chunk_rows=512, small_windows=True)
    check_family(family, work, printed, gpu, tmp_path)


@pytest.mark.parametrize("family", ["qwen35", "nemotron_h"])
def test_states_with_rollback_take_the_planned_memory(family, printed, gpu, tmp_path):
    check_family(family, replace(OF_FAMILIES.get(family, WIDE), rollback=3), printed, gpu, tmp_path)
