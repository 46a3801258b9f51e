"""Run the solver in a separate process: a plan takes seconds of CPU time, during which the daemon must answer pings and
Ctrl-C.

A thread would not do: nothing can end it, so the daemon would wait for it before it stops. The child reads one question
from standard input and answers on standard output. It has a session of its own: Ctrl-C in a terminal is handled by its
parent.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
from typing import Final

import msgspec

from halda import CutOff, Infeasible
from primad.errors import PlanError
from primad.planning.plan import search
from primad.planning.request import FoundPlan, PlanRequest
from primad.system.children.child import begin_piped
from primad.system.children.reply_stream import answer_stream
from primad.system.children.spawn import how_it_ended
from primad.system.children.stop_flag import StopFlag
from primad.system.niceness import apply_nice
from primad.system.tasks import to_its_end

MIN_NICE: Final = 19
GRACE_S: Final = 60.0
"""The solver keeps to its limit of CPU time; this much later it is considered to hang."""
BACKGROUND_TIMES: Final = 10
"""Factor on the timeout where all other work goes first."""


class _Found(msgspec.Struct, frozen=True, tag="solved"):
    solved: FoundPlan


class _Unsolvable(msgspec.Struct, frozen=True, tag="infeasible"):
    message: str
    short_bytes: int
    is_cut_off: bool


async def solve_in_process(request: PlanRequest, *, background: bool = False, grace_s: float = GRACE_S) -> FoundPlan:
    """Return the result of ``search``; in the ``background`` all other work goes first. The process has ended with this
    task.

    Raises ``Infeasible`` and ``CutOff`` as ``search`` does, ``PlanError`` when the child fails.
    """
    stop = StopFlag(subprocess.Popen.kill)
    return await to_its_end(asyncio.to_thread(_ask, request, stop, background, grace_s), stop.set)


def _ask(request: PlanRequest, stop: StopFlag, background: bool, grace_s: float) -> FoundPlan:
    timeout_s = (request.time_limit_s + grace_s) * (BACKGROUND_TIMES if background else 1)
    with begin_piped("primad.planning.solver_process", errors=subprocess.PIPE) as child:
        stop.watch(child)
        if background:
            apply_nice(child.pid, MIN_NICE)
        try:
            answer, errors = child.communicate(msgspec.msgpack.encode(request), timeout_s)
        except subprocess.TimeoutExpired:
            child.kill()
            raise PlanError(f"no plan within {timeout_s:g} s; set one with --windows") from None
    if child.returncode != 0:
        lines = errors.decode("utf-8", errors="replace").strip().splitlines()
        how = how_it_ended(child.returncode) + (f": {lines[-1]}" if lines else "")
        raise PlanError(f"the solver {how}; set the plan with --windows")
    outcome = msgspec.msgpack.decode(answer, type=_Found | _Unsolvable)
    if isinstance(outcome, _Unsolvable):
        kind = CutOff if outcome.is_cut_off else Infeasible
        raise kind(outcome.message, short_bytes=outcome.short_bytes)
    return outcome.solved


def _answer(request: PlanRequest) -> _Found | _Unsolvable:
    try:
        return _Found(solved=search(request))
    except Infeasible as exc:
        return _Unsolvable(str(exc), exc.short_bytes, isinstance(exc, CutOff))


if __name__ == "__main__":
    asked = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=PlanRequest)
    with answer_stream() as answers:
        answers.write(msgspec.msgpack.encode(_answer(asked)))
