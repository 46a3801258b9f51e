"""``primad check`` as its user sees it: a table, JSON, an exit code, and one clear line for every mistake."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import msgspec
import psutil
import pytest

from primad.certify import shares
from primad.certify.check import Wanted, check
from primad.certify.child import MakeTiny, Tried, TryCuts, TryShares, TryWhole
from primad.certify.verdict import CheckVerdict, ForbiddenCut, load_verdict, save_verdict
from primad.gguf.architectures.cuts import cut_points
from primad.gguf.architectures.table import SUPPORTED
from primad.gguf.header import read_header
from primad.gguf.model import open_model
from primad.gguf.profile import model_profile
from primad.gguf.shares import share_header
from primad.profiler.store import save_profile
from primad.system.children.spawn import environment
from primad.system.children.task_child import TaskChild
from tests.fakes.planning import GB, device
from tools import synth
from tools.lab import zoo


@pytest.fixture
def checks(command, tmp_path):
    """Runs ``primad check`` with a home of its own; returns exit code, output and error output."""
    return lambda *arguments: command("check", *arguments, "--home", tmp_path / "home")


@pytest.fixture
def child():
    """A child process that tries cuts."""
    child = TaskChild("primad.certify.child", "the child", environment(os.environ, 1, 0), timeout_s=300)
    yield child
    child.close()


def test_gemma_is_certified_and_the_verdict_is_saved_for_all_its_files(checks, gemma3, tmp_path):
    code, out, err = checks(gemma3)
    assert (code, err) == (0, "")
    assert out.rstrip().endswith("certified")
    for words in ("18 windows", "q8_0  exact", "q4_0  exact", "sliding_window: exercised (logits"):
        assert words in out
    header = tmp_path / "header.gguf"
    with gemma3.open("rb") as file:
        header.write_bytes(file.read(open_model(gemma3).data_offset))
    verdict = load_verdict(tmp_path / "home", open_model(header, header_only=True))
    assert verdict is not None
    assert verdict.result == "certified"


@pytest.mark.parametrize("architecture", ["qwen35moe", "gemma4-moe", "llama4", "glm4moe"])
def test_mixtures_and_hybrids_are_certified(checks, architecture, tmp_path):
    path = tmp_path / "model.gguf"
    synth.write_model(path, architecture=architecture)
    code, out, _ = checks(path, "--json")
    verdict = msgspec.json.decode(out, type=CheckVerdict)
    assert (code, verdict.result) == (0, "certified")
    assert verdict.routes[0].cuts == (0, *cut_points(open_model(path)), verdict.layers)


@pytest.mark.slow
@pytest.mark.matrix
@pytest.mark.parametrize("architecture", sorted({*SUPPORTED, *zoo.MODELS}))
def test_every_architecture_is_certified(checks, architecture, tmp_path):
    path = tmp_path / "model.gguf"
    synth.write_model(path, architecture=architecture)
    code, out, _ = checks(path, "--all", "--time-limit", 600)
    assert code == 0, out


@pytest.mark.skipif(sys.platform == "win32", reason="has no such signal")
def test_a_task_that_only_computes_is_ended_by_the_processors_time_and_not_by_the_clock():
    lines = ("from primad.certify import child", "child.HANGS_S = 0.05", "def spin(task):", "    while True: pass")
    program = "\n".join((*lines, "child._answer = spin", "child.main()"))
    task = msgspec.json.encode(TryWhole(tiny="", kv_type="f16")) + b"\n"
    ended = subprocess.run([sys.executable, "-c", program], input=task, capture_output=True, check=False)
    assert ended.returncode == -signal.SIGPROF


def test_an_abort_of_llama_cpp_is_a_result_and_the_next_task_runs(child, gemma3, tmp_path):
    tiny = str(tmp_path / "tiny.gguf")
    assert child.ask(MakeTiny(model=str(gemma3), tiny=tiny, way="narrow"), Tried) == Tried("equal")
    cuts = tuple(range(19))
    wrong = TryCuts(tiny=tiny, cuts=cuts, kv_type="f16", wrong="gemma3.attention.sliding_window_pattern")
    ended = child.ask(wrong, Tried)
    assert isinstance(ended, str)
    assert "SIGABRT" in ended
    assert "is_swa_any" in ended
    assert child.ask(TryCuts(tiny=tiny, cuts=cuts, kv_type="f16"), Tried) == Tried("equal")


def test_shares_of_layers_are_tried_on_a_tiny_model_of_them_and_wrong_ones_are_seen(
    child, gemma3, tmp_path, monkeypatch
):
    tiny = str(tmp_path / "tiny.gguf")
    child.ask(MakeTiny(model=str(gemma3), tiny=tiny, way="narrow"), Tried)
    assert child.ask(TryShares(tiny=tiny), Tried) == Tried("equal")
    monkeypatch.setattr(shares, "share_header", lambda rules, weights, rank: share_header(rules, weights, 0))
    assert "of two shares differ by" in shares.shares_difference(read_header(Path(tiny)), tmp_path, "f16")


def test_a_window_with_the_pattern_of_other_layers_is_seen(child, gemma3, tmp_path):
    tiny = str(tmp_path / "tiny.gguf")
    child.ask(MakeTiny(model=str(gemma3), tiny=tiny, way="narrow"), Tried)
    wrong = TryCuts(tiny=tiny, cuts=(0, 9, 18), kv_type="f16", wrong="gemma3.attention.sliding_window_pattern")
    seen = child.ask(wrong, Tried)
    assert isinstance(seen, Tried)
    assert (seen.outcome, "differ by" in seen.why) == ("different", True)


def test_a_model_on_which_llama_cpp_aborts_is_not_certified(checks, tmp_path):
    path = tmp_path / "model.gguf"
    synth.write_model(path, architecture="qwen3", heads=4, heads_kv=3)
    code, out, _ = checks(path)
    assert code == 1
    assert "not certified: no tiny model of it can be computed: the child was ended by SIGABRT" in out


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"hello", "is not a GGUF file"), (b"", "is empty"), (None, "no such file"), ("cut", "damaged header")],
)
def test_a_file_that_is_no_model_is_refused_in_a_line(checks, gemma3, tmp_path, content, message):
    path = tmp_path / "model.gguf"
    if content == "cut":
        content = gemma3.read_bytes()[:2000]
    if content is not None:
        path.write_bytes(content)
    code, out, err = checks(path)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert message in err


def test_impossible_options_are_refused_in_a_line(checks, gemma3):
    for arguments, message in (
        (("--cuts", "3,x"), "--cuts: 'x' is not a whole number"),
        (("--cuts", "18"), "from 1 to 17"),
    ):
        code, _, err = checks(gemma3, *arguments)
        assert (code, err.count("\n")) == (2, 1)
        assert message in err


def test_a_verdict_that_cannot_be_saved_is_still_shown(checks, tmp_path):
    path = tmp_path / "model.gguf"
    synth.write_model(path, architecture="qwen35")
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "checks").write_text("no folder")
    code, out, err = checks(path)
    assert code == 0
    assert out.rstrip().endswith("certified")
    assert "cannot save the verdict" in err


def test_plan_names_the_verdict_and_follows_it(command, gemma3, tmp_path):
    home, profiles = tmp_path / "home", tmp_path / "profiles"
    profiles.mkdir()
    home.mkdir()
    for name in ("desk", "laptop"):
        save_profile(profiles / f"{name}.json", device(name, ram=2 * GB // 5), "made up")
    words = ("plan", "--model", gemma3, "--devices", profiles, "--home", home, "--context", 512, "--json")
    assert "not checked: primad check" in json.loads(command(*words)[1])["checked"]
    code, out, _ = command("check", gemma3, "--json", "--home", home)
    assert code == 0
    assert "checked bit for bit on" in json.loads(command(*words)[1])["checked"]
    header = open_model(gemma3)
    verdict = msgspec.json.decode(out, type=CheckVerdict)
    bad = ForbiddenCut(layers=(1,), why="made up")
    save_verdict(
        home, header, msgspec.structs.replace(verdict, forbidden=(bad,), result="not certified", why="made up")
    )
    answer = json.loads(command(*words)[1])
    assert "not certified" in answer["checked"]
    assert all(window["first"] % 2 == 0 for each in answer["devices"] for window in each["windows"])
    assert model_profile(header).cut_multiple == 1


def test_ctrl_c_ends_the_child_and_leaves_no_files(gemma3, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    began, before = [], psutil.Process().children()

    def interrupted(what: str) -> None:
        """Press Ctrl-C just before the third task."""
        began.append(what)
        if len(began) == 3:
            assert [*tmp_path.glob("primad-check-*/tiny.gguf")]
            assert len(psutil.Process().children()) > len(before)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        check(open_model(gemma3), Wanted(), interrupted)
    assert [*tmp_path.iterdir()] == []
    assert set(psutil.Process().children()) <= set(before)


def test_an_interrupted_check_does_not_end_with_success(checks, gemma3, tmp_path, monkeypatch):
    def stopped(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("primad.certify.check.check", stopped)
    assert checks(gemma3) == (130, "", "stopped\n")
    assert load_verdict(tmp_path / "home", open_model(gemma3)) is None
