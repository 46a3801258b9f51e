"""Memory readings from the kernel's files, and from systems without them; missing values are None."""

from __future__ import annotations

import ctypes
import statistics
import sys
import time
from pathlib import Path

import psutil
import pytest

from primad.engine.streaming import readings
from primad.engine.streaming.pressure import Stall
from primad.engine.streaming.readings import GROUPS_S, Sources

MIB = 1 << 20
GIB = 1 << 30


class Kernel:
    """The files of a kernel."""

    def __init__(self, folder: Path) -> None:
        self.proc, self.root = folder / "proc", folder / "fs"
        (self.proc / "pressure").mkdir(parents=True)
        (self.proc / "self").mkdir()
        self.root.mkdir()
        self.now = 0.0
        self.meminfo(8 * GIB, 5 * GIB)
        self.pressure(self.proc / "pressure" / "memory", 1.5, 0.25)
        (self.proc / "vmstat").write_text("nr_free_pages 5\npswpin 30\npswpout 40\nzpswpin 7\n")
        self.sources = Sources(self.proc, self.root, lambda: self.now)

    def meminfo(self, total: int, available: int, swap: int = GIB) -> None:
        (self.proc / "meminfo").write_text(
            f"MemTotal: {total >> 10} kB\nMemFree: 3 kB\nMemAvailable: {available >> 10} kB\nSwapTotal: {swap >> 10} kB\n"
        )

    def pressure(self, path: Path, some_s: float, full_s: float) -> None:
        path.write_text(
            f"some avg10=0.00 avg60=0.00 avg300=0.00 total={int(some_s * 1e6)}\n"
            f"full avg10=0.00 avg60=0.00 avg300=0.00 total={int(full_s * 1e6)}\n"
        )

    def group(self, path: str, limit: int | str, used: int, files: tuple[int, int]) -> Path:
        folder = self.root / path
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "memory.max").write_text(f"{limit}\n")
        (folder / "memory.current").write_text(f"{used}\n")
        (folder / "memory.stat").write_text(f"anon 3\ninactive_file {files[0]}\nactive_file {files[1]}\n")
        return folder

    def member_of(self, line: str) -> None:
        (self.proc / "self" / "cgroup").write_text(f"{line}\n")


@pytest.fixture
def kernel(tmp_path) -> Kernel:
    return Kernel(tmp_path)


def test_a_machine_without_cgroups(kernel):
    reading = kernel.sources.read()
    assert (reading.total_bytes, reading.available_bytes, reading.counts_mapped) == (8 * GIB, 5 * GIB, True)
    assert reading.stalls == (Stall(1.5, 0.25), None)
    assert reading.verdict is None


@pytest.mark.skipif(sys.platform == "win32", reason="needs pages and faults of Unix")
def test_bytes_read_back_from_swap_are_counted(kernel):
    assert kernel.sources.read().swapped_in_bytes == 30 * readings._page_bytes()
    kernel.meminfo(8 * GIB, 5 * GIB, swap=0)
    assert kernel.sources.read().swapped_in_bytes is None


def test_all_file_pages_of_a_group_are_available(kernel):
    """They include our layers: the policy subtracts what we hold, once."""
    kernel.member_of("0::/a/b")
    kernel.group("a", "max", 7 * GIB, (0, 0))
    folder = kernel.group("a/b", 512 * MIB, 500 * MIB, (100 * MIB, 300 * MIB))
    kernel.pressure(folder / "memory.pressure", 9.0, 8.0)
    reading = kernel.sources.read()
    assert (reading.total_bytes, reading.available_bytes) == (512 * MIB, 412 * MIB)
    assert reading.stalls == (Stall(1.5, 0.25), Stall(9.0, 8.0))


def test_a_group_of_version_1(kernel):
    kernel.member_of("4:memory:/x")
    folder = kernel.root / "memory" / "x"
    folder.mkdir(parents=True)
    (folder / "memory.limit_in_bytes").write_text(f"{256 * MIB}")
    (folder / "memory.usage_in_bytes").write_text(f"{200 * MIB}")
    (folder / "memory.stat").write_text(
        f"inactive_file 1\ntotal_inactive_file {50 * MIB}\ntotal_active_file {30 * MIB}\n"
    )
    reading = kernel.sources.read()
    assert (reading.total_bytes, reading.available_bytes) == (256 * MIB, 136 * MIB)
    assert reading.stalls[1] is None


def test_the_machine_may_have_less_than_the_group_allows(kernel):
    kernel.member_of("0::/a")
    kernel.group("a", 6 * GIB, GIB, (0, 0))
    kernel.meminfo(8 * GIB, 100 * MIB)
    assert (kernel.sources.read().total_bytes, kernel.sources.read().available_bytes) == (8 * GIB, 100 * MIB)


def test_a_limit_that_changes_is_seen_at_once_and_a_new_one_soon(kernel):
    kernel.member_of("0::/a")
    kernel.group("a", "max", 0, (0, 0))
    assert kernel.sources.read().total_bytes == 8 * GIB
    kernel.group("a", GIB, 0, (0, 0))
    kernel.now = GROUPS_S
    assert kernel.sources.read().total_bytes == GIB
    kernel.group("a", GIB // 2, 0, (0, 0))
    assert kernel.sources.read().total_bytes == GIB // 2
    kernel.group("a", "max", 0, (0, 0))
    assert kernel.sources.read().total_bytes == 8 * GIB


@pytest.mark.parametrize("text", ["", "nonsense", "some", "some avg10=0.00 total=x\n"])
def test_pressure_that_the_kernel_does_not_report_is_unknown(kernel, text):
    (kernel.proc / "pressure" / "memory").write_text(text)
    assert kernel.sources.read().stalls == (None, None)


def test_pressure_of_an_older_kernel_has_no_full(kernel):
    (kernel.proc / "pressure" / "memory").write_text("some avg10=0.00 avg60=0.00 avg300=0.00 total=1000000\n")
    assert kernel.sources.read().stalls == (Stall(1.0, 0.0), None)


def test_a_system_without_any_of_these_files(tmp_path):
    reading = Sources(tmp_path / "none", tmp_path / "none").read()
    assert reading.total_bytes == psutil.virtual_memory().total
    assert 0 < reading.available_bytes <= reading.total_bytes
    assert reading.stalls == (None, None)
    assert reading.swapped_in_bytes is None
    assert not reading.counts_mapped


def sysctl(values: dict[bytes, int]):
    """``sysctlbyname`` of a macOS that has ``values``."""

    def call(name, value, size, new, new_size) -> int:
        if name not in values:
            return -1
        ctypes.cast(value, ctypes.POINTER(ctypes.c_int))[0] = values[name]
        return 0

    return call


@pytest.mark.parametrize(("value", "level"), [(1, "calm"), (2, "some"), (4, "high"), (3, None)])
def test_the_level_of_macos(monkeypatch, tmp_path, value, level):
    known = {b"kern.memorystatus_vm_pressure_level": value, b"vm.page_free_count": 100}
    known[b"vm.page_pageable_external_count"] = 900
    monkeypatch.setattr(readings._MacOs, "open", lambda: readings._MacOs(sysctl(known)))
    reading = Sources(tmp_path, tmp_path).read()
    assert reading.verdict == level
    assert reading.available_bytes == 1000 * readings._page_bytes()
    assert reading.counts_mapped


def test_a_macos_without_figures_has_no_verdict(monkeypatch, tmp_path):
    monkeypatch.setattr(readings._MacOs, "open", lambda: readings._MacOs(sysctl({})))
    reading = Sources(tmp_path, tmp_path).read()
    assert reading.verdict is None
    assert not reading.counts_mapped


class Kernel32:
    """The two functions of Windows; with ``low`` None, the second fails."""

    def __init__(self, low: int | None) -> None:
        self.low = low

    def QueryMemoryResourceNotification(self, handle, low) -> int:  # noqa: N802
        assert handle.value == 7
        if self.low is None:
            return 0
        ctypes.cast(low, ctypes.POINTER(ctypes.c_int))[0] = self.low
        return 1


@pytest.mark.parametrize(("low", "level"), [(0, "calm"), (1, "high"), (None, None)])
def test_the_notification_of_windows(monkeypatch, tmp_path, low, level):
    monkeypatch.setattr(readings._LowMemory, "open", lambda: readings._LowMemory(Kernel32(low), 7))
    assert Sources(tmp_path, tmp_path).read().verdict == level


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
def test_this_machine_is_read_in_less_than_a_millisecond():
    sources = Sources()
    reading = sources.read()
    assert 0 < reading.available_bytes <= reading.total_bytes <= psutil.virtual_memory().total
    assert reading.major_faults is not None

    def seconds() -> float:
        start = time.thread_time()  # other processes do not count
        sources.read()
        return time.thread_time() - start

    assert statistics.median(seconds() for _ in range(101)) < 1e-3
