"""What a plan costs as the engine carries it out, where that is less than what plans count: a forecast, not the objective.

A plan streams whole layers through slots. The engine parts them: of each layer the same share streams, so that what is
held ahead of it is smaller, and what the plan leaves over of the memory, and while tokens are drawn the compute buffer's
room as well, keeps more. So less is read. Plans are still compared by whole layers, which are on the safe side and which
the integer program can count.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from halda.evaluate import DevicePrediction, Prediction
from halda.instance import Instance
from halda.plan import Plan

LEAST_AHEAD_BYTES: Final = 16 << 20
"""What the engine holds ahead at least, or two layers where they are smaller."""


RESERVE_BYTES: Final = 16 << 20
"""What the engine leaves free of the memory that a plan leaves over."""


def as_run(plan: Plan, prediction: Prediction, instance: Instance) -> Prediction:
    """``prediction`` of ``plan`` with what is read for a token as the engine reads it; other figures as far as they follow.

    Where experts stream one by one, and where nothing streams, nothing changes.
    """
    if instance.model.experts or not plan.streaming:
        return prediction
    found = [_parted(plan, device, instance) for device in prediction.devices]
    hop_s = sum(device.hop_s for device in found)
    busy = [sum(found[i].window_s for i in _same_host(plan, instance, host)) for host in instance.hosts]
    disks = [sum(found[i].disk_s for i in _same_host(plan, instance, host)) for host in instance.hosts]
    disk_s = max(disks)
    tpot_s = min(prediction.tpot_s, max(sum(device.window_s for device in found) + hop_s, disk_s))
    saved_s = prediction.tpot_s - tpot_s
    return replace(
        prediction,
        tpot_s=tpot_s,
        period_s=min(
            prediction.period_s, max(tpot_s / instance.workload.sequences, *busy, prediction.period_s - saved_s)
        ),
        stall_s=sum(device.stall_s for device in found),
        disk_s=disk_s,
        devices=tuple(found),
    )


def _same_host(plan: Plan, instance: Instance, host: tuple[int, ...]) -> list[int]:
    """Places in the prediction of the devices of a machine that take part."""
    places = {name: place for place, name in enumerate(plan.devices)}
    names = [instance.devices[i].device for i in host]
    return [places[name] for name in names if name in places]


def _parted(plan: Plan, device: DevicePrediction, instance: Instance) -> DevicePrediction:
    if not device.disk_bytes_per_token:
        return device
    read = read_bytes(plan, device, instance)
    rate = device.disk_bytes_per_token / device.disk_s
    saved_s = (device.disk_bytes_per_token - read) / rate
    return replace(
        device,
        disk_bytes_per_token=read,
        disk_s=read / rate,
        stall_s=max(0.0, device.stall_s - saved_s),
    )


def read_bytes(plan: Plan, device: DevicePrediction, instance: Instance) -> int:
    """Bytes that ``device`` reads for a token: what does not fit, and what is held ahead of it."""
    more = max(0, device.room_bytes - RESERVE_BYTES) + instance.buffer_bytes
    streamed = device.disk_bytes_per_token
    ahead = instance.ahead_bytes(device.slots, output=device.streams_output)
    if len(plan.route) > 1:
        return 0 if streamed - more <= ahead else streamed - more
    layers = sum(layer.size_bytes for layer in instance.model.layers)
    over = streamed - ahead - more  # what is in no case in memory
    if over <= 0:
        return 0
    # Two parts of layers are held ahead, a share of them that is the share of all that streams.
    parted = over / (1 - 2 * instance.slot_bytes / layers) if layers > 2 * instance.slot_bytes else layers
    if parted > layers:
        parted = over + 2 * instance.slot_bytes  # all layers do, and of the output matrix what is left
    least = over + min(LEAST_AHEAD_BYTES, 2 * instance.slot_bytes)
    return int(min(max(parted, least), streamed))
