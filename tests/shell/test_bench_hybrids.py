"""What ``tools/bench hybrids`` judges, of heads that answer without computing."""

from __future__ import annotations

import argparse
import itertools
import os
from pathlib import Path

import pytest

from tools.benches import BENCHES, hybrids
from tools.lab import figures
from tools.lab.figures import read_figures, read_file
from tools.lab.harness import add_bench, execute

WORKERS = [11, 12]


class AnsweringHead:
    def __init__(self, clock: itertools.count, odd: int) -> None:
        self.clock, self.odd = clock, odd

    def sampled(self, prompt, tokens, found=None, **how):
        found = [] if found is None else found
        found += [(float(next(self.clock)), token + self.odd) for token in range(tokens)]
        return found

    def status(self):
        return {"drafts": {"drafted": 10, "accepted": 7}, "kv": {"computed_again_tokens": 3}}

    def plan(self):
        return "8+8"


@pytest.fixture
def run(monkeypatch, tmp_path):
    """The exit code, figures and processes that were killed of all cases, where drafts change texts or not."""
    killed, clock = list[int](), itertools.count()
    monkeypatch.setattr(figures, "machine", lambda: {"busy_share_before": 0.0})
    monkeypatch.setattr(figures, "run_facts", lambda _: {"day": "2026-11-28", "commit": "abc1234"})
    monkeypatch.setattr(hybrids, "_model", lambda run, is_right=False: (Path("model.gguf"), 1.0))
    monkeypatch.setattr(os, "kill", lambda pid, _: killed.append(pid))

    def all_cases(changes: bool = False):
        def head(run, model, devices, *options, pids=None):
            if pids is not None:
                pids += [*WORKERS, 10]
            return AnsweringHead(clock, int(changes and "mtp" in options))

        monkeypatch.setattr(hybrids, "_head", head)
        parser = argparse.ArgumentParser()
        add_bench(parser.add_subparsers(dest="bench"), "hybrids", BENCHES["hybrids"])
        kept = tmp_path / "hybrids.json"
        words = ("--rounds", "1", "--lengths", "10", "40", "--json", str(kept))
        code = execute("hybrids", BENCHES["hybrids"], parser.parse_args(["hybrids", *words]))
        return code, read_figures(read_file(kept)), killed

    return all_cases


def test_each_case_is_judged_alone_and_in_a_ring(run):
    code, found, killed = run()
    assert code == 0
    assert {each.what.removeprefix("qwen35, "): (each.at_least, each.at_most) for each in found} == {
        **{
            f"turn, {devices} devices: TTFT of {what}": (None, 0.2)
            for devices in (1, 2)
            for what in ("the second turn", "it asked again")
        },
        "pause, 3 devices: s of pause at 40 tokens, of that at 10": (None, 1.5),
        "mtp, 1 devices: tokens/s with MTP, 7 of 10 right": (1.3, None),
        "mtp, 2 devices: tokens/s with MTP, 7 of 10 right": (1.6, None),
        **{f"mtp, {devices} devices: tokens/s with MTP, random": (0.97, None) for devices in (1, 2)},
        **{f"four, {devices} devices: tokens/s of four requests, of one": (None, None) for devices in (1, 2)},
    }
    assert killed == [WORKERS[-1]] * 2


def test_drafts_that_change_a_text_fail_the_command(run, capsys):
    assert run(changes=True)[0] == 1
    assert "mtp, 2 devices, tokens/s with MTP, random: the text DIFFERS" in capsys.readouterr().out
