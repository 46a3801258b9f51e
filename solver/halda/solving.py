"""Run one integer program: HiGHS, or CBC where HiGHS is not installed or not wanted."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any, Final

import pulp

from halda.solution import SolverName

_GAP: Final = 1e-9
_TOLERANCE: Final = 1e-9
_FINITE: Final = 1e29


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a program ended: ``found`` a solution (its values are in the variables), ``proven`` the best one.

    ``bound`` is below every solution; it is infinite for a program without any. ``seconds`` that it took.
    """

    found: bool
    proven: bool
    value: float
    bound: float
    seconds: float


def available(name: SolverName) -> SolverName:
    """``name``, or the one that is installed."""
    if name == "highs" and not pulp.HiGHS(msg=False).available():
        return "cbc"
    return name


def run(problem: Any, name: SolverName, time_limit_s: float) -> Outcome:
    """Solve ``problem`` for at most ``time_limit_s``."""
    if name == "highs":
        problem.solve(_highs(time_limit_s, presolve="choose"))
        seconds = float(problem.solutionTime)
        if problem.solverModel.getModelStatus().name == "kSolveError":
            # What its presolve made smaller does not always hold in the whole program, by less than counts.
            problem.solve(_highs(time_limit_s, presolve="off"))
            seconds += float(problem.solutionTime)
    else:
        with warnings.catch_warnings():
            # PuLP 3 brings CBC along; its successor wants a package of half a gigabyte for it.
            warnings.simplefilter("ignore", DeprecationWarning)
            solver = pulp.PULP_CBC_CMD(msg=False, gapRel=_GAP, gapAbs=_GAP, threads=1, timeLimit=time_limit_s)
        problem.solve(solver)
        seconds = float(problem.solutionTime)
    solved = problem.sol_status == pulp.LpSolutionOptimal
    found = solved or problem.sol_status == pulp.LpSolutionIntegerFeasible
    if problem.status == pulp.LpStatusInfeasible:
        return Outcome(False, True, float("inf"), float("inf"), seconds)
    value = float(pulp.value(problem.objective)) if found else float("inf")
    return Outcome(found, solved, value, value if solved else _bound(problem, name), seconds)


def _highs(time_limit_s: float, *, presolve: str) -> Any:
    return pulp.HiGHS(
        msg=False,
        gapRel=_GAP,
        gapAbs=_GAP,
        threads=1,
        timeLimit=time_limit_s,
        mip_feasibility_tolerance=_TOLERANCE,
        primal_feasibility_tolerance=_TOLERANCE,
        presolve=presolve,
    )


def _bound(problem: Any, name: SolverName) -> float:
    if name != "highs":
        return 0.0
    bound = float(problem.solverModel.getInfo().mip_dual_bound)
    return bound if abs(bound) < _FINITE else 0.0
