"""A device's memory is the machine's or the tightest cgroup's (version 1 or 2); its owner may set a lower limit."""

from __future__ import annotations

import gc
import mmap
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from primad.profiler.device import cached_bytes, profile_device, within
from primad.settings.limits import NO_LIMITS, OwnerLimits
from primad.settings.profiles import check_profile
from primad.settings.quantities import Share
from primad.system.memory import Memory, children, groups, held_bytes, memory
from tests.fakes.profile import GPU, PROFILE, seed

MIB = 1 << 20
GIB = 1 << 30
NO_LIMIT_V1 = 9_223_372_036_854_771_712


@pytest.fixture
def cgroups(tmp_path) -> Cgroups:
    return Cgroups(tmp_path)


class Cgroups:
    """Cgroup folders as the kernel shows them."""

    def __init__(self, folder: Path) -> None:
        self.root = folder / "fs"
        self.root.mkdir()
        self.proc = folder / "cgroup"

    def v2(self, path: str, limit: str | int, used: int, inactive: int = 0) -> None:
        group = self.root / path.strip("/")
        group.mkdir(parents=True, exist_ok=True)
        (group / "memory.max").write_text(f"{limit}\n")
        (group / "memory.current").write_text(f"{used}\n")
        (group / "memory.stat").write_text(f"anon 5\ninactive_file {inactive}\nactive_file 7\n")

    def v1(self, path: str, limit: int, used: int, inactive: int = 0) -> None:
        group = self.root / "memory" / path.strip("/")
        group.mkdir(parents=True, exist_ok=True)
        (group / "memory.limit_in_bytes").write_text(f"{limit}\n")
        (group / "memory.usage_in_bytes").write_text(f"{used}\n")
        (group / "memory.stat").write_text(f"inactive_file 1\ntotal_inactive_file {inactive}\n")

    def memory(self, *lines: str) -> Memory:
        self.proc.write_text("".join(f"{line}\n" for line in lines))
        return memory(self.proc, self.root)


def test_without_cgroups_it_is_the_machines(tmp_path):
    found = memory(tmp_path / "none", tmp_path)
    assert found.total_bytes == psutil.virtual_memory().total
    assert 0 < found.available_bytes <= found.total_bytes


def test_this_machine_has_memory():
    found = memory()
    assert 0 < found.available_bytes <= found.total_bytes <= psutil.virtual_memory().total


def test_a_limit_of_version_2_is_all_there_is(cgroups):
    cgroups.v2("/user/app", 64 * MIB, 24 * MIB, inactive=4 * MIB)
    assert cgroups.memory("0::/user/app") == Memory(64 * MIB, 44 * MIB)


def test_the_soft_limit_of_version_2_counts_too(cgroups):
    """Above ``memory.high`` the kernel throttles processes, so plans stay below it."""
    cgroups.v2("/a", "max", 8 * MIB)
    (cgroups.root / "a" / "memory.high").write_text(f"{32 * MIB}\n")
    assert cgroups.memory("0::/a") == Memory(32 * MIB, 24 * MIB)


def test_a_cgroup_reports_the_memory_of_its_files(cgroups):
    cgroups.v2("/a", 64 * MIB, 24 * MIB, inactive=4 * MIB)
    cgroups.proc.write_text("0::/a\n")
    usage = groups(cgroups.proc, cgroups.root)[0].usage()
    assert (usage.inactive_file_bytes, usage.active_file_bytes) == (4 * MIB, 7)


def test_memory_that_our_own_processes_map_in_a_cgroup_is_available(cgroups, monkeypatch):
    monkeypatch.setattr("primad.system.memory._held", lambda *_: 0)
    cgroups.v2("/a", 8 * GIB, 6 * GIB)
    (cgroups.root / "a" / "memory.stat").write_text(f"inactive_file {GIB}\nactive_file {MIB}\n")
    cgroups.proc.write_text("0::/a\n")
    assert memory(cgroups.proc, cgroups.root).available_bytes == 3 * GIB
    ours = memory(cgroups.proc, cgroups.root, ours=[os.getpid()])
    assert ours.available_bytes == 3 * GIB + MIB, "no more than the group has in use"
    assert memory(cgroups.proc, cgroups.root, ours=[]).available_bytes == 3 * GIB


def test_memory_of_our_own_processes_is_available(cgroups, monkeypatch):
    """They free it when another plan needs it, but never more than the total."""
    cgroups.v2("/a", 8 * GIB, 6 * GIB)
    cgroups.proc.write_text("0::/a\n")
    monkeypatch.setattr("primad.system.memory._held", lambda pid, _: {1: GIB, 2: 2 * GIB, 3: 7 * GIB}[pid])
    monkeypatch.setattr("primad.system.memory._mapped", lambda _: 0)
    assert memory(cgroups.proc, cgroups.root, ours=iter([1, 2])).available_bytes == 5 * GIB
    assert memory(cgroups.proc, cgroups.root, ours=[3]).available_bytes == 8 * GIB


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere private memory is counted another way")
def test_memory_of_our_own_process_stays_available_to_plans(tmp_path):
    """A real process: plans may use its memory, as they could before it started."""
    seed(tmp_path)
    size = 256 * MIB

    def available() -> int:
        return profile_device("desk", tmp_path, None, lambda _: None).ram_available_bytes

    hold = f"held = b'1' * {size}; print('ready', flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", hold], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"ready\n"
        assert child.pid in children(), "besides those that other tests in this process have started"
        before, with_it, after = memory().available_bytes, available(), memory().available_bytes
        child.communicate(b"\n")
    assert with_it - min(before, after) >= size // 2, "other programs take and free memory meanwhile"


def test_a_limit_of_version_1_is_all_there_is(cgroups):
    cgroups.v1("/docker/abc", 64 * MIB, 24 * MIB, inactive=4 * MIB)
    found = cgroups.memory("12:cpu,cpuacct:/docker/abc", "7:memory:/docker/abc", "1:name=systemd:/docker/abc")
    assert found == Memory(64 * MIB, 44 * MIB)


def test_version_1_may_name_memory_among_others(cgroups):
    cgroups.v1("/x", 8 * MIB, 0)
    assert cgroups.memory("3:cpu,memory:/x") == Memory(8 * MIB, 8 * MIB)


def test_the_tightest_of_the_parent_groups_counts(cgroups):
    cgroups.v2("/a", 64 * MIB, 60 * MIB)
    cgroups.v2("/a/b", 128 * MIB, 8 * MIB)
    cgroups.v2("/a/b/c", "max", 8 * MIB)
    assert cgroups.memory("0::/a/b/c") == Memory(64 * MIB, 4 * MIB)


def test_the_root_of_a_container_may_have_the_limit(cgroups):
    cgroups.v2("/", 32 * MIB, 8 * MIB)
    assert cgroups.memory("0::/") == Memory(32 * MIB, 24 * MIB)


@pytest.mark.parametrize("limit", ["max", "", "nonsense", 1 << 62])
def test_no_limit_is_the_machines(cgroups, limit):
    cgroups.v2("/a", limit, 8 * MIB)
    assert cgroups.memory("0::/a").total_bytes == psutil.virtual_memory().total


def test_no_limit_of_version_1_is_the_machines(cgroups):
    cgroups.v1("/a", NO_LIMIT_V1, 8 * MIB)
    assert cgroups.memory("4:memory:/a").total_bytes == psutil.virtual_memory().total


def test_a_limit_beyond_the_machine_is_the_machines(cgroups):
    cgroups.v2("/a", psutil.virtual_memory().total * 2, 0)
    assert cgroups.memory("0::/a").total_bytes == psutil.virtual_memory().total


def test_a_group_over_its_limit_has_nothing_left(cgroups):
    cgroups.v2("/a", 8 * MIB, 9 * MIB)
    assert cgroups.memory("0::/a") == Memory(8 * MIB, 0)


def test_both_cgroup_versions_are_read_together(cgroups):
    cgroups.v1("/a", 64 * MIB, 0)
    cgroups.v2("/a", 32 * MIB, 16 * MIB)
    assert cgroups.memory("4:memory:/a", "0::/a") == Memory(32 * MIB, 16 * MIB)


def test_a_missing_statistic_reclaims_nothing(cgroups):
    cgroups.v2("/a", 64 * MIB, 24 * MIB, inactive=4 * MIB)
    (cgroups.root / "a" / "memory.stat").unlink()
    assert cgroups.memory("0::/a") == Memory(64 * MIB, 40 * MIB)


@pytest.mark.parametrize(
    "line", ["", "nonsense", "0::", "0::/../../other", "0::/gone", "4:memory:/gone", "x:y", "0::/\udce4"]
)
def test_a_line_that_leads_nowhere_is_the_machines(cgroups, line):
    cgroups.proc.write_bytes(line.encode("utf-8", errors="surrogateescape") + b"\n")
    assert memory(cgroups.proc, cgroups.root).total_bytes == psutil.virtual_memory().total


@pytest.mark.parametrize("statistic", ["", "inactive_file", "inactive_file x", "a b c\n", "\x00"])
def test_a_damaged_statistic_reclaims_nothing(cgroups, statistic):
    cgroups.v2("/a", 64 * MIB, 24 * MIB)
    (cgroups.root / "a" / "memory.stat").write_text(statistic)
    assert cgroups.memory("0::/a") == Memory(64 * MIB, 40 * MIB)


# ---- the owner's limits ---------------------------------------------------------------------------------------------


def limits(ram=None, vram=None, disk=None) -> OwnerLimits:
    return OwnerLimits(ram=ram, vram=vram, disk_bytes=disk)


def test_without_limits_a_profile_is_as_it_was():
    assert within(NO_LIMITS, PROFILE, 0) == PROFILE


def test_a_limit_caps_free_memory_and_leaves_the_total():
    capped = within(limits(ram=8 * GIB, vram=6 * GIB, disk=40 * GIB), PROFILE, 15 * GIB)
    assert (capped.ram_available_bytes, capped.ram_total_bytes) == (8 * GIB, PROFILE.ram_total_bytes)
    assert capped.gpu is not None
    assert (capped.gpu.vram_available_bytes, capped.gpu.vram_total_bytes) == (6 * GIB, GPU.vram_total_bytes)
    assert capped.disk.free_bytes == 40 * GIB
    assert (capped.cpu, capped.host) == (PROFILE.cpu, PROFILE.host)


def test_a_share_is_of_what_the_machine_has():
    capped = within(limits(ram=Share(0.25), vram=Share(0.5)), PROFILE, 0)
    assert capped.ram_available_bytes == 4 * GIB
    assert capped.gpu is not None
    assert capped.gpu.vram_available_bytes == 12 * GIB


def test_a_limit_beyond_free_memory_gives_nothing_more():
    assert within(limits(ram=1 << 50, vram=1 << 50, disk=1 << 50), PROFILE, 0) == PROFILE


def test_layers_that_are_cached_give_way_to_those_of_a_plan():
    """Cached layers count as free space, up to the limit: a full cache prevents no other model."""
    free = PROFILE.disk.free_bytes
    assert within(NO_LIMITS, PROFILE, 5 * GIB).disk.free_bytes == free + 5 * GIB
    for cached in (0, 9 * GIB, 11 * GIB):
        assert within(limits(disk=10 * GIB), PROFILE, cached).disk.free_bytes == 10 * GIB
    full = replace(PROFILE, disk=replace(PROFILE.disk, free_bytes=0))
    assert within(limits(disk=10 * GIB), full, 4 * GIB).disk.free_bytes == 4 * GIB


def test_a_gpu_in_shared_memory_keeps_to_both_limits():
    shared = replace(PROFILE, gpu=replace(GPU, unified_memory=True))
    for ram, vram, expected in ((2 * GIB, 6 * GIB, 2 * GIB), (6 * GIB, 2 * GIB, 2 * GIB), (Share(0.5), None, 8 * GIB)):
        gpu = within(limits(ram=ram, vram=vram), shared, 0).gpu
        assert gpu is not None
        assert gpu.vram_available_bytes == expected


def test_the_tightest_limits_are_still_a_believable_profile():
    check_profile(within(limits(ram=1, vram=0, disk=0), PROFILE, 1))


def test_partial_files_count_as_part_of_the_cache(tmp_path):
    assert cached_bytes(tmp_path) == 0
    partial = tmp_path / "cache" / "layers" / "partial"
    partial.mkdir(parents=True)
    (partial.parent / "a.gguf").write_bytes(bytes(100))
    (partial / "b").write_bytes(bytes(20))
    assert cached_bytes(tmp_path) == 120


def test_the_profile_of_this_device_keeps_to_the_limits(tmp_path):
    seed(tmp_path)
    profile = profile_device("desk", tmp_path, None, lambda _: None, limits=limits(ram=1 << 20, disk=1 << 20))
    assert (profile.ram_available_bytes, profile.disk.free_bytes) == (1 << 20, 1 << 20)
    assert profile.ram_total_bytes == memory().total_bytes


# ---- what a program uses --------------------------------------------------------------------------------------------


def rollup(folder: Path, pid: int, **fields: int) -> None:
    (folder / str(pid)).mkdir()
    lines = ["00400000-7fff0000 ---p 00000000 00:00 0    [rollup]", *(f"{key}: {kb} kB" for key, kb in fields.items())]
    (folder / str(pid) / "smaps_rollup").write_text("\n".join(lines))


def test_processes_take_what_the_system_cannot_have_back(tmp_path):
    rollup(tmp_path, 7, Rss=9000, Pss_Anon=100, Pss_File=8000, Pss_Shmem=20, Locked=0)
    rollup(tmp_path, 8, Rss=9000, Pss_Anon=10, Pss_File=8000, Pss_Shmem=0, Locked=0)
    assert held_bytes([7, 8], tmp_path) == 130 << 10


def test_locked_files_are_taken(tmp_path):
    rollup(tmp_path, 7, Rss=9000, Pss_Anon=100, Pss_File=8000, Pss_Shmem=0, Locked=5100)
    assert held_bytes([7], tmp_path) == 5100 << 10


def test_processes_that_are_gone_take_nothing(tmp_path):
    assert held_bytes([2**22 + 1], tmp_path) == 0


@pytest.fixture
def no_collection() -> Iterator[None]:
    """Keep garbage of other tests from being freed during this one."""
    gc.disable()
    yield
    gc.enable()


@pytest.mark.skipif(sys.platform != "linux", reason="needs smaps_rollup")
@pytest.mark.usefixtures("no_collection")
def test_a_mapped_file_is_not_taken_and_memory_is(tmp_path):
    path = tmp_path / "weights"
    path.write_bytes(bytes(64 * MIB))
    before = held_bytes([os.getpid()])
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped:
        assert sum(mapped[::4096]) == 0
        assert held_bytes([os.getpid()]) - before < 16 * MIB
    with mmap.mmap(-1, 64 * MIB) as taken:  # not from the heap, which may hold freed memory
        taken.write(b"\1" * len(taken))
        assert held_bytes([os.getpid()]) - before > 48 * MIB
