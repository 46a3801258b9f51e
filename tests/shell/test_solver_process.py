"""The solver in a process of its own: the same result, a free event loop, and nothing left when it is stopped."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
from contextlib import suppress
from dataclasses import replace

import msgspec
import psutil
import pytest

from halda import CHUNKS, Infeasible, solve
from primad.errors import PlanError
from primad.planning import solver_process as solving
from primad.planning.context import MAX_AT_ONCE
from primad.planning.request import PlanRequest
from primad.planning.run_config import RunConfig
from primad.planning.solver_process import solve_in_process
from primad.system.children.stop_flag import StopFlag
from tests.fakes.planning import GB, device, link, model

PATIENCE_S = 180
"""Half of the time that a solver may take."""


def question(count: int, *, ram: int = 3 * GB, require: frozenset[str] = frozenset()) -> PlanRequest:
    names = [f"d{i}" for i in range(count)]
    toy = model()
    return PlanRequest(
        devices=[device(name, ram=ram, rate=(10 + i) * 1e9) for i, name in enumerate(names)],
        links=[link(a, b) for a in names for b in names if a != b],
        model=toy,
        run=RunConfig(context_tokens=toy.context_tokens),
        require=require,
        time_limit_s=20.0,
    )


def children() -> set[int]:
    """Process ids of the solvers that this process has started."""
    found = set()
    for child in psutil.Process().children():
        with suppress(psutil.Error):  # it has ended meanwhile
            if "primad.planning.solver_process" in child.cmdline():
                found.add(child.pid)
    return found


@pytest.mark.parametrize("require", [frozenset(), frozenset({"d1"})])
async def test_the_process_returns_the_solvers_solution(require):
    request = question(2, ram=8 * GB, require=require)
    answer = await solve_in_process(request)
    (work,) = request.workloads
    settled = {"settles": True, "at_once": MAX_AT_ONCE}
    expected = solve(
        request.devices, request.links, request.model, work, require=request.require, chunks=CHUNKS, **settled
    )
    assert answer.solution.plan == expected.plan
    assert answer.solution.prediction == expected.prediction
    assert (answer.devices, answer.workload, answer.why_context) == (request.devices, work, "")
    assert require <= set(answer.solution.plan.devices)


async def test_library_output_on_standard_output_is_no_part_of_the_reply(tmp_path, monkeypatch):
    (tmp_path / "sitecustomize.py").write_text(
        "import atexit\natexit.register(print, 'Running a library', flush=True)\n"
    )
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *sys.path]))
    assert (await solve_in_process(question(2, ram=8 * GB))).solution.plan.devices


async def test_streamed_layers_allow_larger_chunks():
    run = RunConfig(context_tokens=8192, prompt_tokens=4096, answer_tokens=16)
    quick = device("d0", ram=3 * GB, rate=100e9, disk=0.2e9)
    request = msgspec.structs.replace(question(1), devices=[quick], run=run, model=replace(model(), width=8192))
    assert (await solve_in_process(request)).solution.prediction.chunk_rows > 512


async def test_an_infeasible_plan_has_the_solvers_message():
    request = question(1, ram=GB // 8)
    with pytest.raises(Infeasible) as expected:
        solve(request.devices, request.links, request.model, *request.workloads, chunks=CHUNKS)
    with pytest.raises(Infeasible) as printed:
        await solve_in_process(request)
    assert (str(printed.value), printed.value.short_bytes) == (str(expected.value), expected.value.short_bytes)


async def test_a_solver_that_breaks_or_hangs_is_one_error(monkeypatch):
    before = children()
    with pytest.raises(PlanError, match=r"no plan within 0\.05 s"):
        await solve_in_process(question(2), grace_s=-19.95)
    assert children() <= before
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(PlanError, match="the solver ended with code 1; set the plan with --windows"):
        await solve_in_process(question(1))


async def test_a_killed_solver_is_reported_as_killed(monkeypatch):
    class Killing(StopFlag):
        def watch(self, child: subprocess.Popen[bytes]) -> None:
            super().watch(child)
            child.kill()

    monkeypatch.setattr(solving, "StopFlag", Killing)
    with pytest.raises(PlanError, match="the solver was ended by SIGKILL; set the plan with --windows"):
        await solve_in_process(question(1))


class Endless(StopFlag):
    """Suspends the child, so that it never replies."""

    started = threading.Event()

    def watch(self, child: subprocess.Popen[bytes]) -> None:
        super().watch(child)
        psutil.Process(child.pid).suspend()
        self.started.set()


async def test_the_loop_stays_free_and_stopping_ends_the_child_at_once(monkeypatch):
    monkeypatch.setattr(solving, "StopFlag", Endless)
    monkeypatch.setattr(Endless, "started", threading.Event())
    before = children()
    task = asyncio.create_task(solve_in_process(question(1)))
    assert await asyncio.to_thread(Endless.started.wait, PATIENCE_S)
    for _ in range(20):
        await asyncio.sleep(0.01)
    assert len(children() - before) == 1
    assert not task.done()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert children() <= before
