"""Time limits count processor time, so other work on the machine makes no plan worse."""

from __future__ import annotations

import random

import pulp

from halda import time_limit
from halda.solving import run
from halda.time_limit import TimeLimit


class Clock:
    """Processor time that advances by a second with every reading."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def process_time(self) -> float:
        self.now_s += 1
        return self.now_s


def knapsack() -> pulp.LpProblem:
    """A knapsack problem with too many choices to be solved at once."""
    rng = random.Random(3)
    problem = pulp.LpProblem("knapsack", pulp.LpMinimize)
    things = [problem.add_variable(f"thing_{i}", 0, 1, pulp.LpInteger) for i in range(40)]
    problem += pulp.lpSum(rng.uniform(1, 2) * thing for thing in things)
    for _ in range(12):
        problem += pulp.lpSum(rng.randint(1, 30) * thing for thing in things) >= 200
    return problem


def test_a_program_ends_by_processor_time_whatever_the_wall_clock_shows(monkeypatch):
    assert run(knapsack(), 1e9).proven
    monkeypatch.setattr(time_limit, "time", Clock())
    assert not run(knapsack(), 0.5).proven


def test_a_part_of_a_time_limit_ends_no_later_than_all_of_it(monkeypatch):
    monkeypatch.setattr(time_limit, "time", Clock())
    whole = TimeLimit(100.0)
    part = whole.part(0.5)
    assert part.seconds < 50
    assert whole.part(1.0, 3.0).seconds == 3.0
    assert TimeLimit(0.5).left_s <= 0
