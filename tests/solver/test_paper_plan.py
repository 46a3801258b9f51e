"""The paper's plan beside ours for the same question, which is not slower where the paper's holds all limits."""

from __future__ import annotations

import re

from primad.planning.question import ask
from tests.fakes.planning import GB, device, model, wishes
from tools.lab.paper_plan import compare


def test_the_papers_plan_stands_beside_ours_which_is_not_slower():
    devices = (device("desk", ram=3 * GB, vram=2 * GB, disk=2e9), device("laptop", ram=9 * GB, rate=10e9))
    ours, papers = compare(ask(wishes(objective="latency", context_tokens=4096, sequences=1), devices, (), model()))
    assert ours.startswith("ours: ")
    assert papers.startswith("the paper's: ")
    took = [float(re.search(r": ([\d.]+) ms a token", line)[1]) for line in (ours, papers)]
    assert "short of" in papers or took[0] <= took[1] * 1.001
