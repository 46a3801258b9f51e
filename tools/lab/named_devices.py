"""Devices as people name them ("RTX 3090 24GB", "Apple M2 Ultra 76-core 192GB"): their profiles, from data sheets."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace
from typing import Final, TypeVar

import msgspec

from halda import DeviceProfile
from primad.errors import ConfigError
from primad.profiler.store import load_profile
from tools.lab.data_sheets import SHEETS, MachineSheet, ProcessorSheet, Sheets, profile

_SAME_PC: Final = re.compile(r"\(?same (pc|box|machine|host)\)?", re.IGNORECASE)
_TIMES: Final = re.compile(r"^\s*(\d+)\s*[x×]\s+")
_SIZE: Final = re.compile(r"(\d+(?:\.\d+)?)\s*gi?b\b", re.IGNORECASE)
_MEMORY: Final = re.compile(r"ddr[45]x?-(\d{4})", re.IGNORECASE)
_CORES: Final = re.compile(r"(\d+)[- ](?:core|gpu cores)", re.IGNORECASE)
_WORD: Final = re.compile(r"[a-z]*\d*[a-z0-9.]*")
_MAKERS: Final = frozenset(
    ("nvidia", "geforce", "amd", "radeon", "intel", "apple", "core", "arc", "ryzen", "with", "of", "channels", "jetson")
)
_DESKTOP: Final = "AMD Ryzen 7 7700"
"""Assumed processor of a PC with a GPU if none is named."""
_Sheet = TypeVar("_Sheet")
_CHANNELS: Final = (1, 2, 4, 8, 12)


def is_second_gpu(name: str) -> bool:
    """Whether ``name`` is another GPU of the previous device."""
    return _SAME_PC.search(name) is not None


def count_of(name: str) -> tuple[int, str]:
    """Return the number of GPUs or devices in ``name`` ("2 x RTX 3090"), and the name of one."""
    found = _TIMES.match(name)
    return (int(found[1]), name[found.end() :]) if found else (1, name)


def named_device(name: str, sheets: Sheets, device: str) -> DeviceProfile:
    """Return the profile for a device's usual ``name``, as ``device``. Raises ``ConfigError`` if no data sheet has
    it."""
    words = _words(name)
    processor = _best(words, [(each, (each.name, *each.also)) for each in sheets.processors])
    gpu = _best(words, [(each, (each.name,)) for each in sheets.gpus if each.family != "apple"])
    if processor is None and gpu is None:
        file = SHEETS.parent / "devices" / f"{'-'.join(name.lower().split())}.json"
        if file.is_file():
            return replace(load_profile(file).device, device=device, host=device)
        raise ConfigError(
            f"'{name}': neither a data sheet of profiles/{SHEETS.name} nor a file of profiles/devices; add one"
        )
    if processor is not None and (cores := _CORES.search(name)):
        processor = _with_cores(processor, int(cores[1]), sheets)
    if gpu is not None and not gpu.memory_gib:
        processor = processor or next(each for each in sheets.processors if each.graphics == gpu.name)
    processor = processor or next(each for each in sheets.processors if each.name == _DESKTOP)
    if gpu is None and processor.graphics:
        gpu = sheets.gpu(processor.graphics)
    if "cpu" in words:
        gpu = None
    processor = _with_memory(processor, name)
    sizes = [float(size) for size in _SIZE.findall(name)]
    if gpu is not None and gpu.memory_gib and sizes:
        gpu = msgspec.structs.replace(gpu, memory_gib=sizes.pop(0))
    return profile(_machine(device, processor, sizes[0] if sizes else processor.ram_gib), processor, gpu)


def _words(name: str) -> set[str]:
    """Return the words of a name; a model's number also without the letters after it (14700K)."""
    found = {word for word in _WORD.findall(name.lower()) if word} - _MAKERS
    return found | {re.sub(r"(?<=\d{4})[a-z]+\d*$", "", word) for word in found}


def _best(words: set[str], sheets: Iterable[tuple[_Sheet, tuple[str, ...]]]) -> _Sheet | None:
    """Return the sheet whose name has the most words, all of them in ``words``; of equals the last: the largest."""
    best, maximum = None, 0
    for sheet, names in sheets:
        for name in names:
            its = {word for word in _WORD.findall(name.lower()) if word} - _MAKERS
            if its <= words and len(its) >= max(1, maximum):
                best, maximum = sheet, len(its)
    return best


def _with_cores(processor: ProcessorSheet, cores: int, sheets: Sheets) -> ProcessorSheet:
    """Return the processor of that name whose GPU has ``cores`` cores, or the closest number."""
    same = [each for each in sheets.processors if each.name == processor.name and each.graphics]
    return min(same, key=lambda each: abs(_graphics_cores(each) - cores), default=processor)


def _graphics_cores(processor: ProcessorSheet) -> int:
    found = _CORES.search(processor.graphics)
    return int(found[1]) if found else 0


def _with_memory(processor: ProcessorSheet, name: str) -> ProcessorSheet:
    """Return ``processor`` with memory of the speed in ``name``, with the number of channels nearest to its own
    bandwidth."""
    found = _MEMORY.search(name)
    if not found:
        return processor
    one = 8 * int(found[1]) / 1000
    channels = min(_CHANNELS, key=lambda count: abs(count * one - processor.memory_gb_per_s))
    return msgspec.structs.replace(processor, memory_gb_per_s=channels * one)


def _machine(device: str, processor: ProcessorSheet, ram_gib: float) -> MachineSheet:
    """Return an otherwise idle device, as in a measurement."""
    kept = 1.5 + ram_gib / 8 if processor.system == "Darwin" else 1 + ram_gib / 16
    return MachineSheet(
        device=device,
        processor=processor.name,
        ram_gib=ram_gib,
        free_gib=ram_gib - kept,
        disk_gb_per_s=3.0,
        disk_free_gib=1000,
    )
