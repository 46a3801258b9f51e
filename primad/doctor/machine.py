"""The machine: memory, swap, battery, file descriptors, clock, Python and the operating system."""

from __future__ import annotations

import contextlib
import platform
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import psutil

from primad.doctor.findings import Finding, finding, gib, output_of
from primad.system.memory import memory

if sys.platform != "win32":
    import resource

MIN_PYTHON: Final = (3, 11)
MIN_FILES: Final = 1024
_SYSTEMS: Final = ("Linux", "Darwin", "Windows")
_LITTLE_PART: Final = 0.1
_SWAPPING_PART: Final = 0.25
_DAY_S: Final = 86_400
_RING_PROCESS: Final = "primad.ring.process"


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryFacts:
    """Bytes. ``total_bytes`` and ``available_bytes`` are what this process may use, ``machine_bytes`` the whole RAM.

    ``own_bytes`` are used by primad's processes here, which hold layers and can release them.
    """

    machine_bytes: int
    total_bytes: int
    available_bytes: int
    own_bytes: int
    swap_total_bytes: int
    swap_used_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ClockFacts:
    """``synchronized`` is None if the system does not say; ``behind_s`` is how far the clock is before the time of the
    installation."""

    synchronized: bool | None
    behind_s: float


def gather_memory() -> MemoryFacts:
    """Read the current memory."""
    ours, swap = memory(), psutil.swap_memory()
    return MemoryFacts(
        machine_bytes=int(psutil.virtual_memory().total),
        total_bytes=ours.total_bytes,
        available_bytes=ours.available_bytes,
        own_bytes=_own_bytes(),
        swap_total_bytes=int(swap.total),
        swap_used_bytes=int(swap.used),
    )


def _own_bytes() -> int:
    """Return the memory of primad's ring processes, as far as this user may see it; page cache counts as available."""
    found = 0
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if _RING_PROCESS in process.cmdline():
                held = process.memory_info()
                found += held.rss - getattr(held, "shared", 0)
    return found


def judge_memory(facts: MemoryFacts, system: str) -> list[Finding]:
    """Judge memory: layers that do not fit into available memory are read from disk for every token."""
    amount = f"{gib(facts.available_bytes)} of {gib(facts.total_bytes)} are available"
    users = {"Windows": "taskmgr", "Darwin": "top -o mem"}.get(system, "ps aux --sort=-rss | head")
    if facts.own_bytes:
        amount += f", and primad has {gib(facts.own_bytes)} already"
    if facts.available_bytes + facts.own_bytes < _LITTLE_PART * facts.total_bytes:
        text = f"only {amount}: layers beyond them are read from disk for every token; close what you do not need"
        found = [finding("memory", "warning", text, users)]
    else:
        found = [finding("memory", "ok", amount)]
    if facts.total_bytes < facts.machine_bytes:
        text = (
            f"a cgroup (container or service) limits memory to {gib(facts.total_bytes)} of {gib(facts.machine_bytes)}"
        )
        found.append(finding("memory", "note", text))
    if facts.swap_total_bytes and facts.swap_used_bytes > _SWAPPING_PART * facts.swap_total_bytes:
        text = f"swap is in use: {gib(facts.swap_used_bytes)}; swapped memory is slow, layers included"
        found.append(finding("memory", "note", text, users))
    return found


def gather_battery() -> tuple[float, bool] | None:
    """Return (percent, plugged in), or None without a battery."""
    ask = getattr(psutil, "sensors_battery", None)  # not on every system
    battery = ask() if ask is not None else None
    return None if battery is None else (float(battery.percent), battery.power_plugged is not False)


def judge_battery(battery: tuple[float, bool] | None) -> list[Finding]:
    """Judge the battery: on battery a device is slower and soon gone."""
    if battery is None:
        return []
    percent, plugged = battery
    if plugged:
        return [finding("battery", "ok", f"plugged in, {percent:.0f} %")]
    text = f"on battery, {percent:.0f} %: slower, and gone when it is empty"
    return [finding("battery", "note", text, "primad join --pause-on-battery")]


def gather_files() -> int | None:
    """Return how many files this process may open; None for no limit."""
    if sys.platform == "win32":
        return None
    else:  # for mypy, which knows no resource module there
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        return None if limit == resource.RLIM_INFINITY else limit


def judge_files(limit: int | None) -> list[Finding]:
    """Judge the limit of open files: each link and each layer file needs one."""
    if limit is None:
        return []
    if limit >= MIN_FILES:
        return [finding("system", "ok", f"{limit} files may be open")]
    text = f"only {limit} files may be open at once: links to many devices fail"
    return [finding("system", "warning", text, f"ulimit -n {4 * MIN_FILES}")]


def gather_clock() -> ClockFacts:
    """Read whether the clock is synchronised, and whether it is before the day of primad's installation."""
    output = output_of("timedatectl", "show", "--property=NTPSynchronized", "--value")
    answer = {"yes": True, "no": False}.get((output or "").strip())
    return ClockFacts(synchronized=answer, behind_s=Path(__file__).stat().st_mtime - time.time())


def judge_clock(facts: ClockFacts, system: str) -> list[Finding]:
    """Judge the clock. Devices agree on nothing that depends on it; logs and trust dates do."""
    command = {
        "Linux": "sudo timedatectl set-ntp true",
        "Darwin": "sudo sntp -sS time.apple.com",
        "Windows": "w32tm /resync",
    }.get(system)
    if facts.behind_s > _DAY_S:
        text = (
            f"the clock is {facts.behind_s / _DAY_S:.0f} days behind: downloads of certificates and dates in logs fail"
        )
        return [finding("clock", "warning", text, command)]
    if facts.synchronized is False:
        text = "the clock is not synchronized: dates in logs differ between devices (serving does not depend on it)"
        return [finding("clock", "note", text, command)]
    if facts.synchronized is None:
        return [finding("clock", "ok", "the clock looks right; this system does not tell whether it is synchronized")]
    return [finding("clock", "ok", "the clock is synchronized")]


def gather_platform() -> tuple[str, str, tuple[int, ...], bool]:
    """Return (system, machine, version of Python, whether it is 64-bit)."""
    return platform.system(), platform.machine(), sys.version_info[:3], sys.maxsize > 1 << 32


def judge_platform(system: str, machine: str, python: Sequence[int], wide: bool) -> list[Finding]:
    """Judge whether primad supports the platform."""
    version = ".".join(str(part) for part in python)
    if tuple(python[:2]) < MIN_PYTHON:
        text = f"Python {version} is too old; primad needs {MIN_PYTHON[0]}.{MIN_PYTHON[1]} or later"
        return [finding("system", "error", text, "https://www.python.org/downloads/")]
    if not wide:
        text = f"Python {version} is 32-bit: models beyond 2 GiB cannot be mapped; install a 64-bit Python"
        return [finding("system", "error", text, "https://www.python.org/downloads/")]
    if system not in _SYSTEMS:
        return [finding("system", "note", f"{system or 'this system'} was never tried; Linux, macOS and Windows were")]
    return [finding("system", "ok", f"{system} on {machine}, Python {version}")]
