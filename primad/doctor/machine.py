"""The machine: memory, swap and the operating system."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import psutil

from primad.doctor.findings import Finding, finding
from primad.system.memory import memory

_SYSTEMS: Final = ("Linux", "Darwin", "Windows")
_LITTLE_BYTES: Final = 1 << 30
_LITTLE_PART: Final = 0.1
_SWAPPING_PART: Final = 0.25


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryFacts:
    """Bytes. ``total_bytes`` and ``available_bytes`` are what this process may use, ``machine_bytes`` all there is."""

    machine_bytes: int
    total_bytes: int
    available_bytes: int
    swap_total_bytes: int
    swap_used_bytes: int


def gather_memory() -> MemoryFacts:
    """The memory of now."""
    ours, swap = memory(), psutil.swap_memory()
    return MemoryFacts(
        machine_bytes=int(psutil.virtual_memory().total),
        total_bytes=ours.total_bytes,
        available_bytes=ours.available_bytes,
        swap_total_bytes=int(swap.total),
        swap_used_bytes=int(swap.used),
    )


def judge_memory(facts: MemoryFacts, system: str) -> list[Finding]:
    """Layers that do not fit into what is available are read from disk for every token."""
    amount = f"{_gib(facts.available_bytes)} of {_gib(facts.total_bytes)} are available"
    users = {"Windows": "taskmgr", "Darwin": "top -o mem"}.get(system, "ps aux --sort=-rss | head")
    if facts.available_bytes < max(_LITTLE_BYTES, _LITTLE_PART * facts.total_bytes):
        text = f"only {amount}: layers beyond them are read from disk for every token; close what you do not need"
        found = [finding("memory", "warning", text, users)]
    else:
        found = [finding("memory", "ok", amount)]
    if facts.total_bytes < facts.machine_bytes:
        text = (
            f"a cgroup (container or service) limits memory to {_gib(facts.total_bytes)} of {_gib(facts.machine_bytes)}"
        )
        found.append(finding("memory", "note", text))
    if facts.swap_total_bytes and facts.swap_used_bytes > _SWAPPING_PART * facts.swap_total_bytes:
        text = f"swap is in use: {_gib(facts.swap_used_bytes)}; what is swapped out is slow, layers among it"
        found.append(finding("memory", "note", text, users))
    return found


def judge_platform(system: str, machine: str, python: str) -> list[Finding]:
    """What primad is made for."""
    if system not in _SYSTEMS:
        return [finding("system", "note", f"{system or 'this system'} was never tried; Linux, macOS and Windows were")]
    return [finding("system", "ok", f"{system} on {machine}, Python {python}")]


def _gib(count: int) -> str:
    return f"{count / (1 << 30):.1f} GiB"
