"""Convert a plan and its prediction to the types of the schema, and name the bottleneck of a token in one sentence."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Self

import msgspec

from halda import Assignment, Plan, ShareBytes, assignments
from halda.evaluate import DevicePrediction, Prediction
from halda.instance import Instance
from halda.shared import SUMS
from halda.solution import Solution
from primad.planning.batching import Batches
from primad.planning.default_context import too_small_for
from primad.planning.encoder_place import EncoderPlace
from primad.planning.plan import Planned
from primad.planning.question import Question
from primad.planning.replicas import holders, replicas, token_bytes, why_not_kept
from primad.planning.schema import (
    DeviceJson,
    GpuJson,
    KeptJson,
    LoadJson,
    ModelJson,
    Predicted,
    Proof,
    RingJson,
    ShortJson,
    WindowJson,
    WorkloadJson,
)
from primad.settings.quantities import show_bytes, show_count, show_ms, show_rate

_SAME: Final = 1e-6


@dataclass(frozen=True, slots=True)
class DescribedPlan:
    """A plan, the question it answers and its prediction.

    ``extra_buffers``: why a device has extra buffers or none, where its profile has both. ``share_bytes``: what ranks of
    its groups hold, where the model's file is known.
    """

    plan: Plan
    prediction: Prediction
    instance: Instance
    extra_buffers: Mapping[str, str] = field(default_factory=dict)
    share_bytes: ShareBytes | None = None

    @classmethod
    def of(
        cls,
        planned: Planned,
        extra_buffers: Mapping[str, str] | None = None,
        share_bytes: ShareBytes | None = None,
    ) -> Self:
        """Describe ``planned`` as it is run."""
        return cls(planned.plan, planned.prediction, planned.question, extra_buffers or {}, share_bytes)


def ring_part(answer: DescribedPlan) -> RingJson:
    """The plan with its costs."""
    plan, prediction = answer.plan, answer.prediction
    kept = assignments(plan, answer.instance.model, answer.share_bytes)
    return RingJson(
        head=plan.head,
        rounds=plan.rounds,
        output_on_gpu=plan.output_on_gpu,
        chunk_rows=prediction.chunk_rows,
        devices=[_device(answer, device, kept[device.device]) for device in prediction.devices],
        predicted=predicted_part(answer),
        short=msgspec.convert(prediction.short, list[ShortJson], from_attributes=True),
        one_disk=_one_disk(answer),
    )


def _one_disk(answer: DescribedPlan) -> list[list[str]]:
    """The devices of the plan that share a disk, in the order of the ring."""
    plan, asked = answer.plan, answer.instance
    at_each = [{asked.devices[m].device for m in here} for here in asked.disks]
    found = [[name for name in plan.devices if name in here] for here in at_each]
    return [names for names in found if len(names) > 1]


def load_part(batches: Batches) -> LoadJson | None:
    """The prediction for concurrent requests; None for one."""
    load = batches.load
    if load.sequences == 1:
        return None
    return LoadJson(
        sequences=load.sequences,
        tokens_per_s=load.tokens_per_s,
        tbt_ms=load.tbt_s * 1e3,
        ttft_ms=load.ttft_s * 1e3,
        rows=load.rows,
        machines=load.machines,
        is_exact=batches.is_exact,
    )


def kept_part(planned: Planned) -> list[KeptJson]:
    """Where the KV cells of the workers are replicated."""
    plan, asked, tokens_per_s = planned.plan, planned.question, planned.batches.load.tokens_per_s
    links = {pair: link.bytes_per_s for pair, link in asked.links.items()}
    bytes_of = token_bytes(plan, asked.model.layers, asked.workload.kv_type, links, tokens_per_s)
    devices = holders({each.device: each for each in asked.devices if each.device in bytes_of}, bytes_of)
    return [
        KeptJson(
            device=kept.device,
            replica=kept.replica,
            bytes_per_token=kept.token_bytes,
            bytes_per_s=kept.bytes_per_s,
            why=kept.why,
        )
        for kept in replicas(
            devices,
            plan.head,
            links,
            tokens_per_s,
            why_not=why_not_kept(asked.model),
        )
        if not plan.group_of(kept.device)  # without one of its devices a group has other shares
    ]


def _device(answer: DescribedPlan, found: DevicePrediction, kept: Assignment) -> DeviceJson:
    plan, model, name = answer.plan, answer.instance.model, found.device
    member = next(member for member in answer.instance.members if member.name == name)
    windows = [
        WindowJson(
            index=i,
            first=window.first,
            last=window.last,
            layers=len(window.layers),
            gpu_layers=window.gpu_layers,
            cpu_experts=window.cpu_experts,
            streamed_bytes=kept.windows[place].streamed_bytes,
            other_gpus=[*window.other_gpus],
        )
        for place, (i, window) in enumerate(plan.windows_of(name))
    ]
    size = sum(model.layers[layer].size_bytes for _, window in plan.windows_of(name) for layer in window.layers)
    is_rank = bool(plan.group_of(name))
    weights = round(kept.share * size)
    return DeviceJson(
        name=name,
        share=kept.share,
        leader=plan.place_of(name) if is_rank else "",
        head=name == plan.head,
        windows=windows,
        layers=found.layers,
        gpu_layers=found.gpu_layers,
        cpu_experts=found.cpu_experts,
        prefill_offload=name in plan.prefill_offload,
        extra_buffers=answer.extra_buffers.get(name, ""),
        resident_layers=kept.resident_layers,
        streamed_layers=kept.streamed_layers,
        read_ahead_bytes=found.read_ahead_bytes,
        ram_bytes=found.ram_bytes,
        ram_limit_bytes=member.ram_limit,
        vram_bytes=found.vram_bytes,
        vram_limit_bytes=member.vram_limit,
        resident_bytes=weights - kept.streamed_bytes,
        streamed_bytes=kept.streamed_bytes,
        shard_bytes=kept.layer_bytes + kept.output_bytes if is_rank and not found.gpu_layers else found.shard_bytes,
        disk_bytes_per_token=found.disk_bytes_per_token,
        compute_ms=found.compute_s * 1e3,
        hop_ms=found.hop_s * 1e3,
        stall_ms=found.stall_s * 1e3,
        prefill_ms=found.prefill_s * 1e3,
        gpus=msgspec.convert(found.each_gpu, list[GpuJson], from_attributes=True),
    )


def predicted_part(answer: DescribedPlan) -> Predicted:
    """The predicted times."""
    prediction = answer.prediction
    return Predicted(
        tpot_ms=prediction.tpot_s * 1e3,
        ttft_ms=prediction.ttft_s * 1e3,
        tokens_per_s=prediction.tokens_per_s,
        exchange_ms=prediction.exchange_s(answer.instance.workload.answer_tokens) * 1e3,
        bottleneck=bottleneck(answer.plan, prediction, answer.instance),
        compute_ms=prediction.compute_s * 1e3,
        hop_ms=prediction.hop_s * 1e3,
        stall_ms=prediction.stall_s * 1e3,
        disk_ms=prediction.disk_s * 1e3,
        disk_bytes_per_token=sum(device.disk_bytes_per_token for device in prediction.devices),
    )


def proof_part(question: Question, found: Solution) -> Proof:
    """How close to optimal the plan is known to be."""
    objective = question.run.objective
    if question.run.windows is not None:
        return Proof(objective=objective, objective_ms=found.objective_s * 1e3, bound_ms=None, gap=None, proven=False)
    return Proof(
        objective=objective,
        objective_ms=found.objective_s * 1e3,
        bound_ms=found.bound_s * 1e3,
        gap=found.gap,
        proven=found.proven,
        given_up_ms=found.given_up_s * 1e3,
    )


def workload_part(planned: Planned) -> WorkloadJson:
    """The workload that the plan is made for."""
    work, why = planned.question.workload, planned.why_context
    return WorkloadJson(
        context_tokens=work.context_tokens,
        why_context=why,
        too_small_for=too_small_for(work.context_tokens, planned.question.model) if why else "",
        kv_type=work.kv_type,
        sequences=work.sequences,
        why_sequences=planned.why_sequences,
        flash=work.flash,
        small_windows=work.small_windows,
        prompt_tokens=work.prompt_tokens,
        answer_tokens=work.answer_tokens,
    )


def model_part(question: Question, place: EncoderPlace | None) -> ModelJson:
    """The model of ``question``, and the ``place`` of its encoder."""
    model, encoder = question.model, question.encoder
    return ModelJson(
        name=model.name,
        architecture=model.architecture,
        layers=len(model.layers),
        bytes=model.size_bytes,
        sees=encoder is not None and encoder.sees,
        hears=encoder is not None and encoder.hears,
        encoder_bytes=0 if encoder is None else encoder.memory_bytes,
        encoder_device=None if place is None else place.device,
        encoder_gpu="" if place is None else place.gpu,
        picture_ms=None if place is None or not place.picture_s else place.picture_s * 1e3,
    )


def bottleneck(plan: Plan, prediction: Prediction, instance: Instance) -> str:
    """Name the largest of each device's compute, the wait for disks and all hops together, with its share of a token.

    Where a disk is busy for as long as a token takes, it is the bottleneck whatever else takes time: nothing else would
    help.
    """
    slowest = max(prediction.devices, key=lambda device: device.compute_s)
    if prediction.disk_s >= prediction.tpot_s * (1 - _SAME):
        return _disk(max(prediction.devices, key=lambda device: device.disk_s), instance, "it reads all the time")
    largest = max(slowest.compute_s, prediction.hop_s, prediction.stall_s)
    if prediction.stall_s == largest:
        waiting = max(prediction.devices, key=lambda device: device.stall_s)
        return _disk(waiting, instance, f"{_percent(waiting.stall_s, prediction)} of the time per token waits for it")
    if prediction.hop_s == largest:
        return _hops(plan, prediction, instance)
    share = _percent(slowest.compute_s, prediction)
    return f"compute of {slowest.device} ({share} of the time per token: {_where(slowest)})"


def _disk(device: DevicePrediction, instance: Instance, how: str) -> str:
    rate = next(member.disk_bytes_per_s for member in instance.members if member.name == device.device)
    return (
        f"the disk of {device.device}: {show_bytes(device.disk_bytes_per_token)} per token at {show_rate(rate)} ({how})"
    )


def _hops(plan: Plan, prediction: Prediction, instance: Instance) -> str:
    slowest = max(prediction.devices, key=lambda device: device.hop_s)
    if ranks := plan.group_of(slowest.device):
        layers = plan.layers_of(slowest.device)
        return (
            f"all-reduces between the {len(ranks)} devices that share {show_count(layers, 'layer')} ({SUMS * layers} of "
            f"them; with hops {_percent(prediction.hop_s, prediction)} of the time per token)"
        )
    count = len(plan.places) * plan.rounds
    index = {device.device: i for i, device in enumerate(instance.devices)}
    target = plan.after(slowest.device)
    link = instance.link(index[slowest.device], index[target])
    late = f", p95 delay +{show_ms(link.late_s * 1e3)}" if link.late_s > link.round_trip_s / 2 else ""
    return (
        f"hops between devices ({_percent(prediction.hop_s, prediction)} of the time per token: {count} hops; the "
        f"slowest, from {slowest.device} to {target}, takes {show_ms(slowest.hop_s / plan.rounds * 1e3)} at "
        f"{show_ms(link.round_trip_s * 1e3)} round trip{late})"
    )


def _where(device: DevicePrediction) -> str:
    on_cpu = device.layers - device.gpu_layers
    parts = [f"{show_count(on_cpu, 'layer')} on the CPU"] if on_cpu else []
    where = "GPUs" if sum(gpu.layers > 0 for gpu in device.each_gpu) > 1 else "the GPU"
    parts += [
        f"{device.gpu_layers} on {where}" if on_cpu else f"{show_count(device.gpu_layers, 'layer')} on {where}"
    ] * bool(device.gpu_layers)
    parts += [f"the experts of {device.cpu_experts} of these on the CPU"] * bool(device.cpu_experts)
    return ", ".join(parts)


def _percent(part_s: float, prediction: Prediction) -> str:
    return f"{100 * part_s / prediction.tpot_s:.0f} %"
