"""The program that takes memory next to a model, and the models that a benchmark writes and removes."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import sys
from collections import namedtuple
from pathlib import Path

import pytest

from tests.fakes.neighbour import Neighbour
from tools import synthetic
from tools.lab import LabError

# ---- the neighbour --------------------------------------------------------------------------------------------------


linux = pytest.mark.skipif(sys.platform != "linux", reason="requires cgroups")


class Anywhere:
    """Stands in for a control group and notes the processes added to it."""

    def __init__(self) -> None:
        self.pids: list[int] = []

    def add(self, pid: int) -> None:
        self.pids.append(pid)


@linux
def test_a_neighbour_reports_how_often_it_took_memory() -> None:
    group = Anywhere()
    with Neighbour(group, 1_000_000) as other:  # type: ignore[arg-type]
        assert group.pids
        assert other.end() >= 0


@linux
def test_a_killed_neighbour_is_an_error_and_not_a_quiet_one() -> None:
    group = Anywhere()
    with Neighbour(group, 1_000_000) as other:  # type: ignore[arg-type]
        subprocess.run(["kill", "-9", str(group.pids[0])], check=True)
        with pytest.raises(RuntimeError, match="ended with code -9"):
            other.end()


# ---- temporary models -----------------------------------------------------------------------------------------------


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The models that were written, as empty files."""
    paths: list[Path] = []

    def run(argv: list[str], *, check: bool) -> None:
        assert check
        paths.append(Path(argv[argv.index("--out") + 1]))
        paths[-1].touch()

    monkeypatch.setattr(synthetic.subprocess, "run", run)
    return paths


@pytest.mark.parametrize(("before", "keep", "after"), [(False, False, False), (False, True, True), (True, False, True)])
def test_only_a_model_that_was_missing_before_is_removed(
    tmp_path: Path, written: list[Path], before: bool, keep: bool, after: bool
) -> None:
    path = synthetic.model_path("deep-q4k", folder=tmp_path)
    if before:
        path.touch()
    with synthetic.borrowed(path, "deep-q4k", keep=keep) as model:
        assert model == tmp_path / "synthetic-deep-q4_k.gguf"
        assert model.exists()
    assert [len(written), path.exists()] == [not before, after]
    assert [entry.suffix for entry in tmp_path.iterdir()] == [".gguf"] * after


Usage = namedtuple("Usage", "total used free")


@pytest.mark.parametrize(("cut", "free", "fits"), [(False, 1.7e9, True), (False, 1.5e9, False), (True, 1.7e9, False)])
def test_a_disk_without_room_is_named(
    tmp_path: Path, written: list[Path], monkeypatch: pytest.MonkeyPatch, cut: bool, free: float, fits: bool
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: Usage(0, 0, free))
    path = synthetic.model_path("deep-q4k", folder=tmp_path)
    with contextlib.ExitStack() as stack:
        if not fits:
            stack.enter_context(
                pytest.raises(LabError, match=f"{free / 1e9:.1f} GB are free, but .* needed for {path.name}")
            )
        with synthetic.borrowed(path, "deep-q4k", cut=cut, keep=False):
            assert fits
    assert bool(written) == fits
    assert list(tmp_path.iterdir()) == []
