"""Compare primad's plan with the paper's on a random fleet, both rated by primad's evaluator."""

from __future__ import annotations

import random

from halda import Infeasible, evaluate, solve
from tools.research.published import solve_published
from tools.research.random_fleets import random_instance

SEEDS = range(50_000, 50_500)
TIME_LIMITS_S = (0.5, 10.0, 600.0)
"""Half a second is enough for nearly all questions; for the others, primad's solver gets longer limits."""


def beside_published(seed: int) -> float | None:
    """Time per token of the paper's plan over primad's, for 2 to 8 devices and 16 to 80 layers; None where it exceeds a
    limit."""
    rng = random.Random(seed)
    question = random_instance(rng, devices=rng.randint(2, 8), layers=rng.randint(16, 80), shared_hosts=False)
    what = (question.devices, list(question.links.values()), question.model, question.workload)
    try:
        theirs = evaluate(solve_published(*what, limits=question.limits).plan, question)
    except Infeasible:
        return None
    if theirs.short:
        return None
    for limit_s in TIME_LIMITS_S:
        try:
            ours = solve(*what, objective="latency", limits=question.limits, time_limit_s=limit_s)
        except Infeasible:
            if limit_s == TIME_LIMITS_S[-1]:
                raise
            continue
        if ours.objective_s <= theirs.tpot_s:
            break
    return theirs.tpot_s / ours.objective_s
