"""The paper's fleet under our plan: predicted token latencies next to the published ones, as rows and as tables."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from halda import (
    Instance,
    ModelProfile,
    Plan,
    Solution,
    Workload,
    arrange,
    evaluate,
    instance,
    residency,
    solve,
)
from primad.gguf.shapes import shape
from primad.profiler.fleets import Fleet
from tools.research.published import PublishedPlan, solve_published

ROOT: Final = Path(__file__).resolve().parents[2]
PAGE: Final = ROOT / "profiles" / "PAPER.md"
PAPER: Final = json.loads((ROOT / "profiles" / "paper.json").read_text(encoding="utf-8"))
FLEET: Final = "paper-d1-d4"
BEST_DEVICE: Final = "paper-d3"
MODELS: Final = {
    "Llama 3-8B": "llama3-8b",
    "Llama 3-14B": "llama3-14b",
    "Llama 1-30B": "llama1-30b",
    "Llama 3-45B": "llama3-45b",
    "Llama 3-60B": "llama3-60b",
    "Llama 1-65B": "llama1-65b",
    "Llama 3-70B": "llama3-70b",
}
WITH_SELECTION_MS: Final = {"Llama 3-8B": 15, "Llama 3-14B": 20}
"""prima.cpp with device selection, as in the notes of paper.json; the others are in its table."""
WORKLOAD: Final = Workload(
    context_tokens=512, kv_type="f16", sequences=1, prompt_tokens=16, answer_tokens=256, chunk_rows=16
)
"""A prompt of one line and a response of 256 tokens, as in prima.cpp's own example; the context holds both."""


@dataclass(frozen=True)
class Row:
    """One model on the fleet: our plan, the paper's plan, and alternatives. Seconds per token."""

    name: str
    model: ModelProfile
    published_s: float
    ours: Solution
    paper: PublishedPlan
    paper_s: float
    memory_split_s: float
    published_memory_split_s: float
    one_device_s: float
    published_one_device_s: float

    @property
    def deviation(self) -> float:
        """Our latency divided by the published one, less 1."""
        return self.ours.prediction.tpot_s / self.published_s - 1


def row(name: str, fleet: Fleet) -> Row:
    """Return everything about one model of the paper."""
    model, latency = shape(MODELS[name]), PAPER["token_latency_ms"][name]
    paper = solve_published(fleet.devices, fleet.links, model, WORKLOAD, head=BEST_DEVICE)
    asked = ask(fleet, model, BEST_DEVICE)
    split = memory_split(fleet, asked)
    heads = [device.device for device in fleet.devices]
    return Row(
        name=name,
        model=model,
        published_s=WITH_SELECTION_MS.get(name, latency["prima"]) / 1000,
        ours=solve(fleet.devices, fleet.links, model, WORKLOAD, objective="latency", heads=heads, time_limit_s=600),
        paper=paper,
        paper_s=evaluate(paper.plan, asked).tpot_s,
        memory_split_s=evaluate(split, ask(fleet, model, split.head)).tpot_s,
        published_memory_split_s=latency["prima_no_halda"] / 1000,
        one_device_s=one_device_s(asked),
        published_one_device_s=latency["llama.cpp"] / 1000,
    )


def ask(fleet: Fleet, model: ModelProfile, head: str) -> Instance:
    """Return the fleet with this head."""
    return instance(fleet.devices, fleet.links, model, WORKLOAD, {}, head)


def memory_split(fleet: Fleet, asked: Instance) -> Plan:
    """Return layers in proportion to free memory (VRAM if there is a GPU), as many on GPUs as fit: prima.cpp without
    Halda."""
    model, devices = asked.model, fleet.devices
    budgets = [device.gpu.vram_available_bytes if device.gpu else device.ram_available_bytes for device in devices]
    counts = apportion(budgets, len(model.layers), minimum=[2, *([1] * (len(devices) - 1))])
    plan = arrange([device.device for device in devices], counts, rounds=1, model=model)
    room = {member.name: gpu_layers(asked, member.name, len(plan.windows_of(member.name))) for member in asked.members}
    route = []
    for window in plan.route:
        on_gpu = min(len(window.layers), room[window.device])
        room[window.device] -= on_gpu
        route.append(replace(window, gpu_layers=on_gpu))
    return residency(replace(plan, route=tuple(route)), ask(fleet, model, plan.head))


def apportion(weights: Sequence[int], total: int, *, minimum: Sequence[int]) -> list[int]:
    """Split ``total`` in proportion to ``weights`` by largest remainder, at least ``minimum[i]`` each; sums to
    ``total``."""
    assert total >= sum(minimum)
    free = total - sum(minimum)
    ideal = [weight / sum(weights) * total for weight in weights]
    wanted = [max(0.0, want - low) for want, low in zip(ideal, minimum, strict=True)]
    scale = free / sum(wanted) if sum(wanted) else 0.0
    extra = [int(want * scale) for want in wanted]
    by_remainder = sorted(range(len(weights)), key=lambda i: extra[i] - wanted[i] * scale)
    for i in by_remainder[: free - sum(extra)]:
        extra[i] += 1
    return [low + more for low, more in zip(minimum, extra, strict=True)]


def gpu_layers(asked: Instance, name: str, windows: int) -> int:
    """Return how many layers the GPU of a device with ``windows`` windows holds."""
    member = next(member for member in asked.members if member.name == name)
    layer = asked.kinds[0].size_bytes + asked.kv_bytes[0]
    return max(0, member.vram_limit - asked.gpu_runtime_bytes(windows)) // layer if member.has_gpu else 0


def one_device_s(asked: Instance) -> float:
    """Return plain llama.cpp's time on the head: layers outside its GPU are mapped, and read again for each token if
    they exceed RAM.

    The kernel drops the least recently used pages, which are the next to be needed, so all mapped layers are read.
    """
    head, layers = asked.members[0], len(asked.model.layers)
    on_gpu = min(layers, gpu_layers(asked, head.name, 1))
    mapped = (layers - on_gpu) * asked.kinds[0].size_bytes + (asked.model.output_bytes if on_gpu < layers else 0)
    compute = on_gpu * head.decode.gpu[0] + (layers - on_gpu) * head.decode.cpu[0] + head.step_s + head.gpu_step_s
    compute += head.gpu_output_s if on_gpu == layers else head.cpu_output_s
    needed = mapped + (layers - on_gpu) * asked.kv_bytes[0] + asked.runtime_bytes(1)
    return compute + (mapped / head.disk_bytes_per_s if needed > head.ram_limit else 0.0)


def layout(plan: Plan) -> str:
    """Return the layers of each device: on the CPU and on the GPU, and how many bytes stream; the head first."""

    def of(name: str) -> str:
        gpu = sum(window.gpu_layers for _, window in plan.windows_of(name))
        cpu, streamed = plan.layers_of(name) - gpu, plan.streaming_of(name).streamed_bytes / 1e9
        places = [
            f"{cpu} CPU" if cpu else "",
            f"{gpu} GPU" if gpu else "",
            f"{streamed:.1f} GB streamed" if streamed else "",
        ]
        return f"{name.removeprefix('paper-').upper()} " + " + ".join(place for place in places if place)

    return ", ".join(of(name) for name in plan.devices) + (f"; k = {plan.rounds}" if plan.rounds > 1 else "")


def ms(seconds: float) -> str:
    """Milliseconds without decimals."""
    return f"{seconds * 1000:.0f}"


def tables(rows: Sequence[Row]) -> Mapping[str, str]:
    """Return the three tables in Markdown."""
    ours = [
        "| model | published | our plan | deviation | our layers |",
        "|---|---:|---:|---:|---|",
        *(
            f"| {r.name} | {ms(r.published_s)} | {ms(r.ours.prediction.tpot_s)} | {r.deviation:+.0%} "
            f"| {layout(r.ours.plan)} |"
            for r in rows
        ),
    ]
    paper = [
        "| model | published | its plan by its formula | its plan under our evaluator | our plan | its layers and sets |",
        "|---|---:|---:|---:|---:|---|",
        *(
            f"| {r.name} | {ms(r.published_s)} | {ms(r.paper.predicted_s)} | {ms(r.paper_s)} "
            f"| {ms(r.ours.prediction.tpot_s)} | {layout(r.paper.plan)} ({', '.join(r.paper.sets.values())}) |"
            for r in rows
        ),
    ]
    others = [
        "| model | our plan | split by memory | published without Halda | one device (D3) | published llama.cpp |",
        "|---|---:|---:|---:|---:|---:|",
        *(
            f"| {r.name} | {ms(r.ours.prediction.tpot_s)} | {ms(r.memory_split_s)} | {ms(r.published_memory_split_s)} "
            f"| {ms(r.one_device_s)} | {ms(r.published_one_device_s)} |"
            for r in rows
        ),
    ]
    return {"ours": "\n".join(ours), "paper": "\n".join(paper), "others": "\n".join(others)}
