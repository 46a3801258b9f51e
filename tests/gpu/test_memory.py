"""What a window takes of a GPU is what the plan said, by ggml's own accounting."""

from __future__ import annotations

import logging
import re
from dataclasses import replace
from itertools import pairwise

import msgspec
import pytest

from halda import DeviceProfile, HelpedSpeed, Plan, Window, Workload, evaluate, instance
from halda.cost import GPU_RUNTIME_BYTES
from primad.engine.llama import WholeModel
from primad.gguf.header import read_header
from primad.gguf.profile import model_profile
from primad.gguf.windows import vocabulary_size
from tests.fakes.profile import GPU, PROFILE
from tests.shell.test_cut_exact import OPTIONS, Route, assigned, files_of
from tools import synth

MIB = 1 << 20
MOST_OFF = 64 * MIB
MOST_SHARE = 0.05
CONTEXT = 4096
_BUFFER = re.compile(r": +(\S+) (?:model|KV|compute|RS) buffer size = +([0-9.]+) MiB")


HELPED = HelpedSpeed(type="Q4_K", few_bytes_per_s=5e9, prefill_flop_per_s=2e12)


def device(name: str) -> DeviceProfile:
    return replace(PROFILE, device=name, host=name, gpu=replace(GPU, helped=(HELPED,)))


def planned_bytes(header, plan: Plan) -> list[int]:
    """VRAM of each device of ``plan``, without what a backend keeps for itself, which ggml does not count."""
    work = Workload(
        context_tokens=CONTEXT, kv_type="f16", sequences=1, prompt_tokens=512, answer_tokens=128, chunk_rows=64
    )
    asked = instance([device(name) for name in plan.devices], [], model_profile(header), work, {})
    return [each.vram_bytes - GPU_RUNTIME_BYTES for each in evaluate(plan, asked).devices]


def taken_bytes(caplog, gpu) -> float:
    """What llama.cpp said since that it took of the GPU."""
    found = [_BUFFER.search(record.getMessage()) for record in caplog.records]
    return sum(float(match[2]) * MIB for match in found if match is not None and match[1] == gpu.id)


@pytest.fixture
def said(caplog):
    caplog.set_level(logging.DEBUG, "primad.engine.llama")
    return caplog


@pytest.fixture(autouse=True)
def _options(monkeypatch):
    options = msgspec.structs.replace(OPTIONS, context=CONTEXT, sequences=1)
    monkeypatch.setattr("tests.shell.test_cut_exact.OPTIONS", options)


def check(taken: float, planned: float) -> None:
    assert abs(taken - planned) <= max(MOST_OFF, MOST_SHARE * planned), f"{taken / MIB:.0f} of {planned / MIB:.0f} MiB"


@pytest.mark.parametrize("on_gpu", [30, 12])
def test_a_whole_model(smollm2, said, gpu, on_gpu):
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
    check(taken_bytes(said, gpu), *planned_bytes(header, plan))


@pytest.mark.parametrize(
    ("on_gpu", "helped"),
    [((0, 10, 0), False), ((4, 4, 4), False), ((10, 10, 10), False), ((0, 0, 0), True), ((4, 4, 4), True)],
)
def test_windows(smollm2, said, gpu, on_gpu, helped, tmp_path):
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
    plan = plan.with_help(plan.devices if helped else ())
    Route(header, cuts, tmp_path, on_gpu=on_gpu, helped=helped).release()
    planned = planned_bytes(header, plan)
    check(taken_bytes(said, gpu), planned[1] + (planned[0] if helped or any(on_gpu[::2]) else 0))


def test_a_window_without_layers_there_takes_nothing(smollm2, said, gpu, tmp_path):
    Route(read_header(smollm2), [0, 10, 20, 30], tmp_path).release()
    assert taken_bytes(said, gpu) == 0


def test_experts_on_the_cpu_take_nothing_there(said, gpu, tmp_path):
    """53 MB a layer: with them the windows would be 320 MB over what was planned."""
    path = tmp_path / "model.gguf"
    synth.write_model(path, architecture="qwen3moe", width=512, expert_feed_forward=1024, experts=32, layers=6)
    header = read_header(path)
    route = tuple(
        Window(device=name, first=first, last=first + 2, gpu_layers=2, cpu_experts=2)
        for name, first in (("desk", 0), ("lap", 2), ("desk", 4))
    )
    plan = Plan(rounds=1, route=route, output_on_gpu=True, streaming=(), left_out=())
    planned = sum(planned_bytes(header, plan))
    Route(header, [0, 2, 4, 6], tmp_path, on_gpu=(2, 2, 2), apart=True).release()
    assert planned < 5 * MOST_OFF
    check(taken_bytes(said, gpu), planned)
