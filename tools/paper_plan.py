"""Halda as published beside our solver, for any built-in model and fleet, both under our evaluator.

.venv/bin/python tools/paper_plan.py llama3-70b-q4k mixed-home
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))
sys.path.insert(1, str(Path(__file__).parent.parent / "solver"))

from halda import Plan, Prediction, evaluate
from halda_research.published import solve_published
from primad.gguf.shapes import shape
from primad.planning.explain import best_plan
from primad.planning.question import Question, Wishes, ask
from primad.planning.run_config import RunConfig
from primad.profiler.fleets import read_fleet
from primad.settings.quantities import show_bytes, show_ms


def compare(question: Question) -> tuple[str, str]:
    """A line for our plan and one for the paper's, for the same head, context and attention."""
    ours = best_plan(question)
    asked = ours.question
    links = list(question.all_links)
    found = solve_published(
        question.devices, links, question.model, asked.workload, limits={}, head=ours.plan.head
    ).plan
    return line("ours", ours.plan, ours.prediction), line("the paper's", found, evaluate(found, asked))


def line(name: str, plan: Plan, prediction: Prediction) -> str:
    """What a plan is, and what a token and the first one take."""
    shares = ", ".join(f"{device.device} {device.layers}" for device in prediction.devices)
    short = "".join(
        f"; the {each.what} of {each.where} is short of {show_bytes(each.short_bytes)}" for each in prediction.short
    )
    times = f"{show_ms(prediction.tpot_s * 1e3)} a token, first token {show_ms(prediction.ttft_s * 1e3)}"
    return f"{name}: {times}, rounds {plan.rounds}: {shares}{short}"


def main() -> int:
    """Print both."""
    parser = argparse.ArgumentParser(description="Halda as published beside our solver.")
    parser.add_argument("model_shape", help="a built-in model, as in llama3-70b-q4k")
    parser.add_argument("fleet", help="a built-in fleet, or a fleet's file")
    parser.add_argument("--context", type=int, default=4096)
    options = parser.parse_args()
    fleet = read_fleet(options.fleet)
    run = RunConfig(objective="latency", context_tokens=options.context, sequences=1)
    print(*compare(ask(Wishes(run=run), fleet.devices, fleet.links, shape(options.model_shape))), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
