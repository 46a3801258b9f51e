"""What ``tools/bench memory --endure`` judges, and the models that a benchmark writes and removes."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import sys
from collections import namedtuple
from collections.abc import Mapping
from pathlib import Path

import pytest

from primad.ring.messages import MemoryStatus, Status
from tools import synthetic
from tools.lab import LabError
from tools.lab.endurance import Ran
from tools.lab.endured import Row, broken, first_difference
from tools.lab.neighbour import Neighbour

HELD: Mapping[str, object] = {
    "asked_prompt_tokens": 8192,
    "prompt_tokens": 8192,
    "asked_neighbour_bytes": 500_000_000,
    "neighbour_bytes": 500_000_000,
    "asked_tokens": 200,
    "tokens": 200,
    "bytes_read_per_token": 1e9,
    "max_read_bytes": 1e9,
    "oom_kills": 0,
    "swap_bytes": 0,
    "swap_in_bytes": 0,
    "same_tokens": True,
}


def row(**differs: object) -> Row:
    """A run in which all held, but for what differs."""
    return Row(**{"error": None, **HELD, **differs})


def test_a_run_in_which_all_held_is_not_broken() -> None:
    assert list(broken(row(), None)) == []


@pytest.mark.parametrize(
    ("differs", "replies"),
    [
        ({"error": "the ring process was ended by SIGKILL"}, "SIGKILL"),
        ({"prompt_tokens": 4096}, "4096 of 8192 tokens of prompt: no room"),
        ({"neighbour_bytes": 260_000_000}, "260 of 500 MB"),
        ({"tokens": 150}, "ended its answer after 150 of 200"),
        ({"oom_kills": 1}, "1 killed"),
        ({"swap_bytes": 4096}, "4096 bytes in swap"),
        ({"swap_in_bytes": 4096}, "4096 swapped in"),
        ({"same_tokens": False, "first_difference": 7}, "token 7 is not"),
        ({"bytes_read_per_token": 1.2e9}, "1.20 times as much read"),
    ],
)
def test_what_does_not_hold_is_said(differs: dict[str, object], replies: str) -> None:
    (printed,) = broken(row(**differs), "no room")
    assert replies in printed


@pytest.mark.parametrize(
    ("ours", "theirs", "where"),
    [([1, 2], [1, 2], None), ([1, 2], [1, 3], 1), ([1], [1, 2], 1), ([1, 2, 3], [1, 2], 2), ([], [1], 0)],
)
def test_answers_part_at_their_first_difference(ours: list[int], theirs: list[int], where: int | None) -> None:
    assert first_difference(ours, theirs) == where


def status(steps: int, read_bytes: int, stall_s: float) -> Status:
    memory = MemoryStatus(
        resident=20,
        streamed=8,
        streams_output=False,
        read_ahead_bytes=2,
        resident_bytes=0,
        streamed_bytes=0,
        read_bytes=read_bytes,
        stall_s=stall_s,
        pressure="calm",
    )
    return Status(steps=steps, rows=0, compute_s=0, hop_s=[], rss_bytes=0, private_bytes=0, refused=0, memory=memory)


def test_the_prompt_and_the_tokens_behind_it_count_apart() -> None:
    ran = Ran()
    ran.tokens, ran.times_s = [1, 2, 3, 4, 5], [10.0, 10.5, 11.0, 11.5, 12.0]
    ran.reads = [1000, 1100, 1200, 1300, 1800]
    ran.statuses = [status(0, 50, 0.0), status(17, 1050, 4.0), status(21, 1850, 6.0)]
    assert ran.tokens_per_s == 2
    assert ran.read_per_token(0.0, 1.0) == 200
    assert (ran.read_per_token(0.0, 0.25), ran.read_per_token(0.75, 1.0)) == (100, 500)
    assert (ran.reported_per_token("read_bytes"), ran.reported_per_token("stall_s")) == (200, 0.5)
    assert ran.reported_of_prompt("stall_s") == 4


def test_a_run_that_ended_early_has_no_figures() -> None:
    ran = Ran()
    assert (ran.tokens_per_s, ran.read_per_token(0.0, 1.0), ran.reported_per_token("stall_s")) == (None, None, None)
    ran.tokens, ran.times_s, ran.reads = [1], [10.0], [1000]
    assert (ran.tokens_per_s, ran.read_per_token(0.0, 1.0), ran.reported_of_prompt("stall_s")) == (None, None, None)


# ---- the program beside it ------------------------------------------------------------------------------------------


linux = pytest.mark.skipif(sys.platform != "linux", reason="requires cgroups")


class Anywhere:
    """Takes the place of a group: notes who was put into it."""

    def __init__(self) -> None:
        self.pids: list[int] = []

    def add(self, pid: int) -> None:
        self.pids.append(pid)


@linux
def test_a_neighbour_says_how_often_it_took_memory() -> None:
    group = Anywhere()
    with Neighbour(group, 1_000_000) as other:  # type: ignore[arg-type]
        assert group.pids
        assert other.own_bytes > 1_000_000
        assert other.end() >= 0


@linux
def test_a_neighbour_that_was_killed_is_no_quiet_one() -> None:
    group = Anywhere()
    with Neighbour(group, 1_000_000) as other:  # type: ignore[arg-type]
        subprocess.run(["kill", "-9", str(group.pids[0])], check=True)
        with pytest.raises(RuntimeError, match="ended with code -9"):
            other.end()


# ---- models for as long as they are needed --------------------------------------------------------------------------


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The models that were written, which are empty."""
    paths: list[Path] = []

    def run(argv: list[str], *, check: bool) -> None:
        assert check
        paths.append(Path(argv[argv.index("--out") + 1]))
        paths[-1].touch()

    monkeypatch.setattr(synthetic.subprocess, "run", run)
    return paths


@pytest.mark.parametrize(("before", "keep", "after"), [(False, False, False), (False, True, True), (True, False, True)])
def test_only_a_model_that_was_not_there_is_removed(
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
