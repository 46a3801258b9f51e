"""What holds a token up most, in one sentence."""

from __future__ import annotations

from typing import Final

from halda import Plan
from halda.evaluate import DevicePrediction, Prediction
from halda.instance import Instance
from primad.settings.quantities import show_bytes, show_count, show_ms, show_rate

_SAME: Final = 1e-6


def bottleneck(plan: Plan, prediction: Prediction, instance: Instance) -> str:
    """The largest of each device's compute, the wait for disks and all hops together, with its share of a token.

    Where a disk reads as long as a token takes, it is the disk whatever else takes time: nothing else would help.
    """
    slowest = max(prediction.devices, key=lambda device: device.compute_s)
    if prediction.disk_s >= prediction.tpot_s * (1 - _SAME):
        return _disk(max(prediction.devices, key=lambda device: device.disk_s), instance, "it reads all the time")
    largest = max(slowest.compute_s, prediction.hop_s, prediction.stall_s)
    if prediction.stall_s == largest:
        waiting = max(prediction.devices, key=lambda device: device.stall_s)
        return _disk(waiting, instance, f"{_percent(waiting.stall_s, prediction)} of a token waits for it")
    if prediction.hop_s == largest:
        return _hops(plan, prediction, instance)
    return f"compute of {slowest.device} ({_percent(slowest.compute_s, prediction)} of a token: {_where(slowest)})"


def _disk(device: DevicePrediction, instance: Instance, how: str) -> str:
    rate = next(member.disk_bytes_per_s for member in instance.members if member.name == device.device)
    return (
        f"the disk of {device.device}: {show_bytes(device.disk_bytes_per_token)} a token at {show_rate(rate)} ({how})"
    )


def _hops(plan: Plan, prediction: Prediction, instance: Instance) -> str:
    slowest = max(prediction.devices, key=lambda device: device.hop_s)
    count = len(plan.devices) * plan.rounds
    index = {device.device: i for i, device in enumerate(instance.devices)}
    target = plan.after(slowest.device)
    link = instance.link(index[slowest.device], index[target])
    late = f", one message of twenty {show_ms(link.late_s * 1e3)} late" if link.late_s > link.round_trip_s / 2 else ""
    return (
        f"hops between devices ({_percent(prediction.hop_s, prediction)} of a token: {count} hops; the slowest, from "
        f"{slowest.device} to {target}, takes {show_ms(slowest.hop_s / plan.rounds * 1e3)} at "
        f"{show_ms(link.round_trip_s * 1e3)} round trip{late})"
    )


def _where(device: DevicePrediction) -> str:
    on_cpu = device.layers - device.gpu_layers
    parts = [f"{show_count(on_cpu, 'layer')} on the CPU"] if on_cpu else []
    parts += [
        f"{device.gpu_layers} on the GPU" if on_cpu else f"{show_count(device.gpu_layers, 'layer')} on the GPU"
    ] * bool(device.gpu_layers)
    parts += [f"the experts of {device.cpu_experts} of these on the CPU"] * bool(device.cpu_experts)
    return ", ".join(parts)


def _percent(part_s: float, prediction: Prediction) -> str:
    return f"{100 * part_s / prediction.tpot_s:.0f} %"
