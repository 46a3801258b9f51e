"""Run one integer program with HiGHS.

Versions 1.13 to 1.15 report plans as optimal that are not (their presolve loses better ones). Version 1.16 does so if
it may restart a program and presolve it again, and if its presolve substitutes variables (it also reports feasible
programs as infeasible), so both are disabled. With times of hours next to times of milliseconds, presolve may never
end, whatever its time limit; it is disabled there. HiGHS writes a line about itself to the process's standard output,
once, where callers print their results.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Final

import highspy
import numpy as np
import pulp

from halda.time_limit import TimeLimit

_GAP: Final = 1e-9
_TOLERANCE: Final = 1e-9
_FINITE: Final = 1e29
_SOLVED: Final = (highspy.HighsModelStatus.kOptimal, highspy.HighsModelStatus.kModelEmpty)
_INFEASIBLE: Final = (highspy.HighsModelStatus.kInfeasible, highspy.HighsModelStatus.kUnboundedOrInfeasible)
_SUBSTITUTIONS: Final = 1 << 8 | 1 << 12
"""The presolve rules that substitute free columns, and variables by equations."""
_IN_VAIN: Final = ("rins", "rens", "feasibility_jump")


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a program ended: ``found`` a solution (its values are in the variables), ``proven`` optimal.

    ``bound`` is a lower bound of every solution; infinite for a program without any.
    """

    found: bool
    proven: bool
    value: float
    bound: float


def run(problem: Any, time_limit_s: float, *, maximum: float = math.inf, is_steep: bool = False) -> Outcome:
    """Solve ``problem`` in at most ``time_limit_s`` of processor time; ``is_steep``: its figures differ greatly in
    size.

    Solutions above ``maximum`` are not searched, and none is found if HiGHS rejects the program's figures.
    """
    _let_it_introduce_itself()
    budget = TimeLimit(time_limit_s)
    if maximum < math.inf:
        problem.addConstraint(problem.objective <= maximum, "no solution above the most")
    maximum -= float(problem.objective.constant)  # HiGHS does not know the constant
    variables = problem.variables()
    model = _model(problem, variables)
    highs = _highs(maximum, presolve="off" if is_steep else "choose")
    if highs.passModel(model) == highspy.HighsStatus.kError:  # as with a figure of 1e15
        return Outcome(False, False, math.inf, 0.0)
    _solve(highs, budget)
    if not is_steep and highs.getModelStatus() == highspy.HighsModelStatus.kSolveError:
        # The presolved solution may violate the whole program by a negligible amount.
        highs = _highs(maximum, presolve="off")
        highs.passModel(model)
        _solve(highs, budget)
    status, info = highs.getModelStatus(), highs.getInfo()
    if status in _INFEASIBLE:
        return Outcome(False, True, math.inf, math.inf)
    solved = status in _SOLVED
    if not solved and info.primal_solution_status != highspy.SolutionStatus.kSolutionStatusFeasible:
        return Outcome(False, False, math.inf, _bound(problem, info))
    for variable, value in zip(variables, highs.getSolution().col_value, strict=True):
        variable.varValue = value
    value = float(pulp.value(problem.objective))
    return Outcome(True, solved, value, value if solved else _bound(problem, info))


@cache
def _let_it_introduce_itself() -> None:
    """Let HiGHS write its line to nowhere, before anything is solved."""
    begin: Any = highspy.Highs
    if sys.platform == "win32":
        begin()  # another C library's buffer: the line comes through
        return
    library = ctypes.CDLL(None)
    sys.stdout.flush()
    with contextlib.ExitStack() as stack:
        kept = os.dup(1)
        stack.callback(os.close, kept)
        nowhere = os.open(os.devnull, os.O_WRONLY)
        stack.callback(os.close, nowhere)
        library.fflush(None)
        os.dup2(nowhere, 1)
        stack.callback(os.dup2, kept, 1)
        begin()
        library.fflush(None)


def _model(problem: Any, variables: Sequence[Any]) -> highspy.HighsLp:
    """Return ``problem`` as HiGHS takes it in one call: PuLP passes row by row, which takes as long as small programs
    do."""
    place = {id(variable): i for i, variable in enumerate(variables)}
    starts, columns, values, lower, upper = [0], list[int](), list[float](), list[float](), list[float]()
    for row in problem._constraints.values():
        for variable, value in row.items():
            if value:
                columns.append(place[id(variable)])
                values.append(value)
        starts.append(len(columns))
        lower.append(-highspy.kHighsInf if row.sense == pulp.LpConstraintLE else -row.constant)
        upper.append(highspy.kHighsInf if row.sense == pulp.LpConstraintGE else -row.constant)
    model = highspy.HighsLp()
    model.num_col_, model.num_row_ = len(variables), len(lower)
    costs = np.zeros(len(variables))
    for variable, cost in problem.objective.items():
        costs[place[id(variable)]] = cost
    model.col_cost_ = costs
    model.col_lower_ = [-highspy.kHighsInf if each.lowBound is None else each.lowBound for each in variables]
    model.col_upper_ = [highspy.kHighsInf if each.upBound is None else each.upBound for each in variables]
    model.row_lower_, model.row_upper_ = lower, upper
    model.integrality_ = [
        highspy.HighsVarType.kInteger if each.cat == pulp.LpInteger else highspy.HighsVarType.kContinuous
        for each in variables
    ]
    model.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
    model.a_matrix_.num_col_, model.a_matrix_.num_row_ = len(variables), len(lower)
    model.a_matrix_.start_, model.a_matrix_.index_, model.a_matrix_.value_ = starts, columns, values
    return model


def _solve(highs: highspy.Highs, budget: TimeLimit) -> None:
    """Run ``highs`` until ``budget`` ends: its own limit is in wall-clock time."""

    def look(_kind: object, _message: str, _out: object, into: Any, _data: object) -> None:
        into.user_interrupt = budget.left_s <= 0

    highs.setCallback(look, None)
    highs.startCallback(highspy.cb.HighsCallbackType.kCallbackMipInterrupt)
    highs.startCallback(highspy.cb.HighsCallbackType.kCallbackSimplexInterrupt)
    highs.run()


def _highs(maximum: float, *, presolve: str) -> highspy.Highs:
    # HiGHS prunes more with the bound than with the constraint alone. Where both leave only plans better than a
    # near-optimal one, its sub-MIP heuristics and feasibility jump search in vain.
    searches = {} if maximum == math.inf else {f"mip_heuristic_run_{name}": False for name in _IN_VAIN}
    highs = highspy.Highs()  # type: ignore[no-untyped-call]
    options: dict[str, Any] = {
        "output_flag": False,
        "mip_rel_gap": _GAP,
        "mip_abs_gap": _GAP,
        "threads": 1,
        "mip_feasibility_tolerance": _TOLERANCE,
        "primal_feasibility_tolerance": _TOLERANCE,
        "objective_bound": maximum,
        "presolve": presolve,
        "presolve_rule_off": _SUBSTITUTIONS,
        "mip_allow_restart": False,
        **searches,
    }
    for name, value in options.items():
        highs.setOptionValue(name, value)
    return highs


def _bound(problem: Any, info: Any) -> float:
    bound = float(info.mip_dual_bound)
    return bound + float(problem.objective.constant) if abs(bound) < _FINITE else 0.0
