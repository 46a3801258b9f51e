"""The paper's plan and ours for one question, both under our evaluator."""

from __future__ import annotations

from halda import Plan, Prediction, evaluate
from primad.planning.explain import best_plan
from primad.planning.question import Question
from primad.settings.quantities import show_bytes, show_ms
from tools.research.published import solve_published


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
