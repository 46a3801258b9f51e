"""The processors that this process may use."""

from __future__ import annotations

from pathlib import Path

import pytest

from primad.system import processors
from primad.system.processors import bound_cores, usable_cores, usable_cpus


@pytest.fixture
def many(monkeypatch) -> None:
    """This process may run on eight logical processors of four cores."""
    monkeypatch.setattr(processors, "_allowed", lambda: 8.0)
    monkeypatch.setattr(processors.psutil, "cpu_count", lambda logical=True: 8 if logical else 4)


class Groups:
    """CPU groups as the kernel shows them."""

    def __init__(self, folder: Path) -> None:
        self.root, self.proc = folder / "fs", folder / "cgroup"
        self.root.mkdir()

    def write(self, path: str, **files: str) -> None:
        folder = self.root / path
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (folder / name.replace("__", ".")).write_text(f"{text}\n")

    def cpus(self, *lines: str) -> float:
        self.proc.write_text("".join(f"{line}\n" for line in lines))
        return usable_cpus(self.proc, self.root)


@pytest.fixture
def made(tmp_path) -> Groups:
    return Groups(tmp_path)


def test_without_groups_it_is_where_this_process_may_run(many, tmp_path):
    assert usable_cpus(tmp_path / "none", tmp_path) == 8


def test_a_quota_of_version_2_counts(many, made):
    made.write("user/app", cpu__max="150000 100000")
    assert made.cpus("0::/user/app") == 1.5


def test_a_quota_of_version_1_counts(many, made):
    made.write("cpu/docker/a", cpu__cfs_quota_us="50000", cpu__cfs_period_us="100000")
    assert made.cpus("3:cpu,cpuacct:/docker/a", "7:memory:/docker/a") == 0.5


def test_the_tightest_of_the_parent_groups_counts(many, made):
    made.write("user", cpu__max="200000 100000")
    made.write("user/app", cpu__max="400000 100000")
    assert made.cpus("0::/user/app") == 2


@pytest.mark.parametrize("text", ["max 100000", "", "1 0", "many few", "-1 100000"])
def test_a_group_without_a_quota_limits_nothing(many, made, text):
    made.write("a", cpu__max=text)
    assert made.cpus("0::/a") == 8


@pytest.mark.parametrize(("cpus", "cores"), [(0.5, 1), (1.0, 1), (2.5, 2), (8.0, 4)])
def test_threads_are_for_whole_cores_at_least_one(many, monkeypatch, cpus, cores):
    monkeypatch.setattr(processors, "usable_cpus", lambda: cpus)
    assert usable_cores() == cores


@pytest.mark.parametrize(("allowed", "bound"), [([0, 1, 2, 3], ()), ([2], (2,)), ([3, 1], (1, 3)), ([], ())])
def test_a_process_is_bound_to_cores_unless_it_may_use_all(monkeypatch, allowed, bound):
    monkeypatch.setattr(processors, "_AT_FIRST", tuple(allowed))
    monkeypatch.setattr(processors.psutil.Process, "cpu_affinity", lambda _: allowed, raising=False)
    monkeypatch.setattr(processors.os, "cpu_count", lambda: 4)
    assert bound_cores() == bound


@pytest.mark.parametrize(("now", "cpus"), [([2], 3), ([0, 2], 2), ([5], 1)])
def test_a_first_thread_that_openmp_bound_does_not_count_for_the_process(monkeypatch, now, cpus, tmp_path):
    monkeypatch.setattr(processors, "_AT_FIRST", (0, 1, 2))
    monkeypatch.setattr(processors.psutil.Process, "cpu_affinity", lambda _: now, raising=False)
    assert usable_cpus(tmp_path / "none", tmp_path) == cpus
