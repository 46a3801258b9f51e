"""Choose where the picture encoder runs: on the head, or on the device and GPU where a picture takes clearly less time.
Pure.

A picture is sent to another device as its file, and its embeddings come back; both transfers count. The head always
keeps room for the encoder, since it encodes itself whenever the other device cannot.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from halda import DeviceProfile, GpuProfile, Plan, evaluate
from halda.cost import message_s, speed_of
from halda.instance import Instance
from primad.planning.draft_gain import HALF_THE_CORES, hosts_of, left_bytes
from primad.planning.question import PlannedEncoder

GAIN: Final = 0.1
"""Share of the time on the head's CPU that another place must save: messages over a network may be late."""
PICTURE_BYTES: Final = 1 << 20
"""Size of a picture's file, as a camera or a screen gives it, made smaller by the client."""
STAGING_BYTES: Final = 512 << 20
"""RAM of a process that computes on a GPU."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderPlace:
    """The ``device`` that encodes, on its ``gpu`` by llama.cpp's name for it (empty: its CPU).

    A picture takes ``picture_s`` there, including transfers; 0 where its sizes are not known.
    """

    device: str
    gpu: str = ""
    picture_s: float = 0.0


def encoder_place(
    encoder: PlannedEncoder | None, wish: str | None, plan: Plan, question: Instance
) -> EncoderPlace | None:
    """Return where ``encoder`` runs next to the layers of ``plan``: on the wished device if it has room, or where an
    picture takes the least time, or on the head's CPU where nothing is clearly faster."""
    if encoder is None:
        return None
    found = list(_places(encoder, plan, question, wish))
    head = found[0]
    assert head.device == plan.head
    if wish is not None:
        return min((each for each in found if each.device == wish), key=_time, default=head)
    best = min(found, key=_time)
    return best if best.picture_s < (1 - GAIN) * head.picture_s else head


def _time(place: EncoderPlace) -> float:
    return place.picture_s


def _places(encoder: PlannedEncoder, plan: Plan, question: Instance, wish: str | None) -> Iterator[EncoderPlace]:
    """All places that have room, the head's CPU first."""
    free, computing = left_bytes(plan, question), hosts_of(plan, question)
    hosts, names = [each.host for each in question.devices], [each.device for each in question.devices]
    vram = _free_vram(plan, question)
    for device in sorted(question.devices, key=lambda each: each.device != plan.head):
        name = device.device
        is_head = name == plan.head
        if not is_head and name != wish and hosts.count(device.host) > 1:
            continue  # it is not known whose memory and cores it takes
        way_s = 0.0 if is_head else _way_s(encoder, question, names.index(plan.head), names.index(name))
        busy = HALF_THE_CORES if device.host in computing and not is_head else 1.0
        if is_head or free[name] >= encoder.memory_bytes:
            yield EncoderPlace(device=name, picture_s=busy * _computed_s(encoder, device) + way_s)
        gpu = device.gpu
        ram = STAGING_BYTES + (encoder.memory_bytes if gpu is not None and gpu.unified_memory else 0)
        has_ram = is_head or free[name] >= ram
        if gpu is not None and gpu.id and has_ram and vram[name] >= encoder.memory_bytes + gpu.context_bytes:
            yield EncoderPlace(device=name, gpu=gpu.id, picture_s=_computed_s(encoder, gpu) + way_s)


def _free_vram(plan: Plan, question: Instance) -> dict[str, int]:
    """Memory that ``plan`` leaves free on the first GPU of each device."""
    taken = {each.device: each.each_gpu[0].vram_bytes for each in evaluate(plan, question).devices if each.each_gpu}
    limits = {each.name: each.vram_limits[0] for each in question.members if each.vram_limits}
    return {name: limit - taken.get(name, 0) for name, limit in limits.items()}


def _computed_s(encoder: PlannedEncoder, where: DeviceProfile | GpuProfile) -> float:
    speeds = where.speeds if isinstance(where, GpuProfile) else where.cpu.speeds
    return encoder.picture_flop / speed_of(speeds, "F16").prefill_flop_per_s if speeds else 0.0


def _way_s(encoder: PlannedEncoder, question: Instance, head: int, device: int) -> float:
    there, back = question.link(head, device), question.link(device, head)
    return message_s(there, PICTURE_BYTES) + message_s(back, encoder.encoded_bytes)
