"""``--what-if``: the same question with one change.

add=FILE               a device (or several) from a profile file
drop=NAME              leave out a device
ram:NAME=16GiB         the memory that is free on a device
vram:NAME=12GiB        the memory that is free on its GPU
disk:NAME=3GB/s        the rate at which layers stream from its disk; its other rates change in proportion
link=1Gbit/s,2ms       all links
link:A:B=300Mbit/s     the links between two devices
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from halda import DeviceProfile
from primad.errors import ConfigError
from primad.planning.question import Question, both_ways, check_name, parse_link, unique_names, with_links
from primad.settings.quantities import parse_bytes, parse_rate

ReadDevices = Callable[[Path], Sequence[DeviceProfile]]
"""Reads the devices of a file."""

_FORMS = "add=FILE, drop=NAME, ram:NAME=16GiB, vram:NAME=12GiB, disk:NAME=3GB/s, link=1Gbit/s,2ms or link:A:B=300Mbit/s"


def change(question: Question, changes: Iterable[str], read: ReadDevices) -> Question:
    """Return ``question`` after ``changes`` in order. Raises ``ConfigError`` naming an invalid change."""
    for text in changes:
        question = _change(question, text, read)
    return question


def _change(question: Question, text: str, read: ReadDevices) -> Question:
    source = f"--what-if {text}"
    what, equals, value = text.partition("=")
    kind, colon, where = what.partition(":")
    if not equals or not value:
        raise ConfigError(f"{source}: is not a change; give {_FORMS}")
    match kind, bool(colon):
        case "add", False:
            devices = (*question.devices, *read(Path(value)))
            unique_names(devices)
            return replace(question, devices=devices)
        case "drop", False:
            return _drop(question, value, source)
        case "ram" | "vram" | "disk", True:
            return _resize(question, kind, where, value, source)
        case "link", False:
            return replace(question, links=(), default_link=parse_link(value, source))
        case "link", True:
            first, _, second = where.partition(":")
            a, b = (check_name(name, _names(question), source) for name in (first, second))
            if a == b:
                raise ConfigError(f"{source}: a link has two ends; name two devices")
            return replace(question, links=with_links(question.links, both_ways(a, b, parse_link(value, source))))
        case _:
            raise ConfigError(f"{source}: is not a change; give {_FORMS}")


def _drop(question: Question, name: str, source: str) -> Question:
    check_name(name, _names(question), source)
    if name == question.head:
        raise ConfigError(f"{source}: {name} is the head; name another one with --head")
    devices = tuple(device for device in question.devices if device.device != name)
    if not devices:
        raise ConfigError(f"{source}: {name} is the only device; nothing would be left to plan for")
    links = tuple(link for link in question.links if name not in (link.source, link.target))
    limits = {device: limit for device, limit in question.limits.items() if device != name}
    return replace(question, devices=devices, links=links, limits=limits)


def _resize(question: Question, kind: str, name: str, value: str, source: str) -> Question:
    check_name(name, _names(question), source)
    resize = {"ram": _ram, "vram": _vram, "disk": _disk}[kind]
    devices = tuple(resize(device, value, source) if device.device == name else device for device in question.devices)
    return replace(question, devices=devices)


def _ram(device: DeviceProfile, value: str, source: str) -> DeviceProfile:
    size = parse_bytes(value, source)
    changed = replace(device, ram_available_bytes=size, ram_total_bytes=max(size, device.ram_total_bytes))
    gpus = []
    for gpu in device.gpus:
        # With unified memory, the GPU's usable memory changes in proportion.
        share = gpu.vram_available_bytes / max(1, device.ram_available_bytes)
        available = min(size, round(share * size)) if gpu.unified_memory else gpu.vram_available_bytes
        total = max(available, gpu.vram_total_bytes)
        gpus.append(replace(gpu, vram_available_bytes=available, vram_total_bytes=total))
    return changed.with_gpus(gpus)


def _vram(device: DeviceProfile, value: str, source: str) -> DeviceProfile:
    size = parse_bytes(value, source)
    if device.gpu is None:
        raise ConfigError(f"{source}: {device.device} has no GPU")
    # Each of several GPUs gets its share of the size.
    before = sum(gpu.vram_available_bytes for gpu in device.gpus)
    shares = [gpu.vram_available_bytes / before if before else 1 / len(device.gpus) for gpu in device.gpus]
    gpus = [
        replace(
            gpu,
            vram_available_bytes=round(share * size),
            vram_total_bytes=max(round(share * size), gpu.vram_total_bytes),
        )
        for gpu, share in zip(device.gpus, shares, strict=True)
    ]
    return device.with_gpus(gpus)


def _disk(device: DeviceProfile, value: str, source: str) -> DeviceProfile:
    rate = parse_rate(value, source)
    times = rate / device.disk.prefetch_bytes_per_s
    disk = replace(
        device.disk,
        prefetch_bytes_per_s=rate,
        fault_bytes_per_s=device.disk.fault_bytes_per_s * times,
        random_bytes_per_s=device.disk.random_bytes_per_s * times,
    )
    return replace(device, disk=disk)


def _names(question: Question) -> tuple[str, ...]:
    return tuple(device.device for device in question.devices)
