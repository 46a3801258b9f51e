"""Solve in a process of its own: a plan takes seconds of processor time, in which this daemon must answer pings and Ctrl-C.

A thread would not do: nothing can end it, so the daemon would wait for it before it stops. The child reads one question from
standard input and answers on standard output. It has a session of its own: Ctrl-C in a terminal is its parent's business.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Callable
from typing import Final

import msgspec

from halda import (
    CutOff,
    DeviceProfile,
    ExpertPlace,
    Infeasible,
    LinkProfile,
    ModelProfile,
    Objective,
    Solution,
    Workload,
    instance,
)
from halda.instance import Instance
from primad.daemon.owner import apply_nice
from primad.errors import PlanError
from primad.planning.default_context import HURRIED_S, WithContext, with_wanted_context
from primad.planning.extra_buffers import solved_as_planned
from primad.ring.spawn import how_it_ended
from primad.system.answer_stream import answer_stream
from primad.system.stop_flag import StopFlag

LEAST_NICE: Final = 19
GRACE_S: Final = 60.0
"""The solver keeps to its time limit by and large, and needs it again for devices that have no extra buffers after all; this
much later it hangs."""


class SolverRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What ``halda.solve`` is asked; ``require`` names the devices that must take part, ``helps`` lets GPUs help.

    ``extra_buffers`` is auto, on or off: devices are planned for with those that they will have. The context is to be
    ``wanted_tokens`` where these are more than in ``workload`` and cost little; as it was settled it has ``why_context``.
    """

    devices: list[DeviceProfile]
    links: list[LinkProfile]
    model: ModelProfile
    workload: Workload
    objective: Objective
    require: frozenset[str]
    time_limit_s: float
    extra_buffers: str = "auto"
    helps: bool = False
    experts: ExpertPlace = "auto"
    wanted_tokens: int = 0
    why_context: str = ""


class _Solved(msgspec.Struct, frozen=True, tag="solved"):
    solution: Solution
    devices: list[DeviceProfile]
    workload: Workload
    why_context: str


class _Unsolvable(msgspec.Struct, frozen=True, tag="infeasible"):
    message: str
    short_bytes: int
    is_cut_off: bool


async def solve_apart(
    question: SolverRequest, *, background: bool = False, grace_s: float = GRACE_S
) -> tuple[Solution, SolverRequest]:
    """The answer of ``halda.solve``, and ``question`` with devices and context as it is for; in the ``background`` all other
    work goes first.

    Raises ``Infeasible`` and ``CutOff`` as that does, ``PlanError`` when the child fails.
    """
    stop = StopFlag(subprocess.Popen.kill)
    try:
        solved = await asyncio.to_thread(_ask, question, stop, background, grace_s)
    finally:
        stop.set()
    return solved.solution, msgspec.structs.replace(
        question, devices=solved.devices, workload=solved.workload, why_context=solved.why_context
    )


def _ask(question: SolverRequest, stop: StopFlag, background: bool, grace_s: float) -> _Solved:
    timeout_s = question.time_limit_s + grace_s
    with subprocess.Popen(
        [sys.executable, "-m", "primad.head.solver_process"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    ) as child:
        stop.watch(child)
        if background:
            apply_nice(child.pid, LEAST_NICE)
        try:
            answer, errors = child.communicate(msgspec.msgpack.encode(question), timeout_s)
        except subprocess.TimeoutExpired:
            child.kill()
            raise PlanError(f"no plan within {timeout_s:g} s; set one with --windows") from None
    if child.returncode != 0:
        said = errors.decode("utf-8", errors="replace").strip().splitlines()
        how = how_it_ended(child.returncode) + (f": {said[-1]}" if said else "")
        raise PlanError(f"the solver {how}; set the plan with --windows")
    outcome = msgspec.msgpack.decode(answer, type=_Solved | _Unsolvable)
    if isinstance(outcome, _Unsolvable):
        kind = CutOff if outcome.is_cut_off else Infeasible
        raise kind(outcome.message, short_bytes=outcome.short_bytes)
    return outcome


def settled(question: SolverRequest, solve: Callable[[list[DeviceProfile], Workload, float], Solution]) -> WithContext:
    """What ``solve`` finds for the devices of ``question`` as they are in its plan, with the context that it is to have."""

    def planned(work: Workload, hurries: bool) -> tuple[Solution, list[DeviceProfile]]:
        limit_s = HURRIED_S if hurries else question.time_limit_s
        return solved_as_planned(
            lambda devices: solve(devices, work, limit_s), question.devices, question.model, question.extra_buffers
        )

    def asked(work: Workload) -> Instance:
        return instance(question.devices, question.links, question.model, work, {})

    return with_wanted_context(question.workload, question.wanted_tokens, planned, asked)


def _answer(question: SolverRequest) -> _Solved | _Unsolvable:
    from halda import CHUNKS, solve  # only this process loads the solver

    def of(devices: list[DeviceProfile], work: Workload, time_limit_s: float) -> Solution:
        return solve(
            devices,
            question.links,
            question.model,
            work,
            objective=question.objective,
            require=question.require,
            chunks=CHUNKS,
            time_limit_s=time_limit_s,
            helps=question.helps,
            experts=question.experts,
        )

    try:
        found = settled(question, of)
    except Infeasible as exc:
        return _Unsolvable(str(exc), exc.short_bytes, isinstance(exc, CutOff))
    return _Solved(found.solution, found.devices, found.workload, found.why)


if __name__ == "__main__":
    asked = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=SolverRequest)
    with answer_stream() as answers:
        answers.write(msgspec.msgpack.encode(_answer(asked)))
