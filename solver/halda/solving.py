"""Run one integer program with HiGHS.

Versions 1.13 to 1.15 call plans the best that are not (their presolve loses better ones); 1.16 does where it may begin a
program anew and presolve it once more, and where its presolve substitutes variables (it calls programs infeasible that are
not, and loses better plans), so it may do neither. Where times of hours stand beside those of milliseconds, presolve may
never end, whatever its time limit; it is left out there. It writes a line about itself to the process's standard output,
once, which is where callers print their answers.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import sys
from dataclasses import dataclass
from functools import cache
from typing import Any, Final

import highspy
import pulp

_GAP: Final = 1e-9
_TOLERANCE: Final = 1e-9
_FINITE: Final = 1e29
_SUBSTITUTIONS: Final = 1 << 8 | 1 << 12
"""The presolve rules that substitute free columns, and variables by equations."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a program ended: ``found`` a solution (its values are in the variables), ``proven`` the best one.

    ``bound`` is below every solution; it is infinite for a program without any. ``seconds`` of the processor that it took:
    what else a machine does must not make plans worse.
    """

    found: bool
    proven: bool
    value: float
    bound: float
    seconds: float


def run(problem: Any, time_limit_s: float, *, maximum: float = math.inf, is_steep: bool = False) -> Outcome:
    """Solve ``problem`` for at most ``time_limit_s``; ``is_steep``: its figures are of very different sizes.

    Solutions above ``maximum`` are not looked for, and none is found of a program whose figures HiGHS does not take.
    """
    _let_it_introduce_itself()
    if maximum < math.inf:
        problem.addConstraint(problem.objective <= maximum, "no solution above the most")
    maximum -= float(problem.objective.constant)  # PuLP keeps it from HiGHS
    try:
        problem.solve(_highs(time_limit_s, maximum, presolve="off" if is_steep else "choose"))
    except IndexError:  # PuLP looks for the values of a program that was not read, as with a figure of 1e15
        return Outcome(False, False, math.inf, 0.0, 0.0)
    seconds = float(problem.solutionCpuTime)
    if not is_steep and problem.solverModel.getModelStatus().name == "kSolveError":
        # What its presolve made smaller does not always hold in the whole program, by less than counts.
        problem.solve(_highs(time_limit_s, maximum, presolve="off"))
        seconds += float(problem.solutionCpuTime)
    solved = problem.sol_status == pulp.LpSolutionOptimal
    found = solved or problem.sol_status == pulp.LpSolutionIntegerFeasible
    if problem.status == pulp.LpStatusInfeasible:
        return Outcome(False, True, math.inf, math.inf, seconds)
    value = float(pulp.value(problem.objective)) if found else math.inf
    return Outcome(found, solved, value, value if solved else _bound(problem), seconds)


@cache
def _let_it_introduce_itself() -> None:
    """Have HiGHS write its line to nowhere, before anything is solved."""
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


def _highs(time_limit_s: float, maximum: float, *, presolve: str) -> Any:
    # HiGHS cuts off more with the bound than with the constraint alone. Where the two say that nothing is left to find but
    # what is better than a plan near the best, it looks for that in vain in smaller programs.
    searches = {} if maximum == math.inf else {"mip_heuristic_run_rins": False, "mip_heuristic_run_rens": False}
    return pulp.HiGHS(
        msg=False,
        gapRel=_GAP,
        gapAbs=_GAP,
        threads=1,
        timeLimit=time_limit_s,
        mip_feasibility_tolerance=_TOLERANCE,
        primal_feasibility_tolerance=_TOLERANCE,
        objective_bound=maximum,
        presolve=presolve,
        presolve_rule_off=_SUBSTITUTIONS,
        mip_allow_restart=False,
        **searches,
    )


def _bound(problem: Any) -> float:
    bound = float(problem.solverModel.getInfo().mip_dual_bound)
    return bound + float(problem.objective.constant) if abs(bound) < _FINITE else 0.0
