"""``tools/bench predict``, its cases with less memory than the model has: 1 to 4 local processes under each limit.

All processes of a ring together may hold a share of the model and what a process needs besides. They share one machine, so
its cores and its disk, which the plan knows. The plan is the solver's.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Final

from halda import DeviceProfile, Infeasible, Limits, LinkProfile, ModelProfile, Solution, Workload, solve
from primad.gguf.model import open_model
from primad.gguf.profile import model_profile
from primad.profiler.effort import Effort
from primad.profiler.measure import measure_home, ram_read_bytes_per_s
from primad.profiler.processors import measure_cpu
from primad.system.process_start import measuring
from tools.bench_solver import CONTEXT, Predicted, device_here, links_between, loopback, out, predicted_row
from tools.lab.local_ring import LocalRing, types_of
from tools.lab.memory import LimitedGroup
from tools.lab.memory_runs import ROWS, available
from tools.lab.plain_llama import PROMPT

PROCESS_BYTES: Final = 256 << 20
"""What each process may hold besides its share of the model."""
PROMPT_TOKENS: Final = 40
WARM_TOKENS: Final = 3
ANSWER_TOKENS: Final = 16
STEP_TIMEOUT_S: Final = 600.0
SOLVE_S: Final = 10.0


def predict(
    path: Path, shares: Sequence[float], processes: Sequence[int], rounds: int, threads: int
) -> list[Predicted]:
    """Measure each case so many times, and predict it. Raises ``LabError`` where there are no cgroups."""
    model = model_profile(open_model(path))
    rows = []
    with tempfile.TemporaryDirectory(prefix="primad-predict-") as name, measuring():
        # What streams has no extra buffers, and the rings here have none at all.
        cpu = measure_cpu(Path(name), threads, lambda _: None, Effort(types=types_of(model))).with_extra_buffers(())
        rate = ram_read_bytes_per_s(threads)
    links = [asyncio.run(loopback())]
    with tempfile.TemporaryDirectory(prefix="primad-predict-", dir=os.environ.get("TMPDIR", "/var/tmp")) as name:
        for count in processes:
            for share in shares:
                limit = int(share * path.stat().st_size / count) + PROCESS_BYTES
                names = [f"d{i}" for i in range(count)]
                with ExitStack() as stack:
                    groups = {each: stack.enter_context(LimitedGroup(limit)) for each in names}
                    limits = {each: Limits(ram_bytes=available(group)[1]) for each, group in groups.items()}
                    disk = measure_home(Path(name), lambda _: None, Effort()).disk
                    devices = [device_here(each, cpu, rate, disk) for each in names]
                    found = _solved(devices, links_between(names, links), model, limits)
                    if isinstance(found, str):
                        out.print(f"{path.stem} at {share:g} in {count}: no plan: {found}")
                        continue
                    solution, rows_a_step = found
                    folder = Path(name) / str(count)
                    used = {each: groups[each] for each in solution.plan.devices}
                    decode_s, first_s = asyncio.run(_run(path, solution, rows_a_step, used, rounds, threads, folder))
                rows.append(predicted_row(path.stem, count, share, solution.prediction, decode_s, first_s))
                out.print(
                    f"{path.stem} at {share:g} in {count}: {rows[-1].error:+.1%}, first {rows[-1].first_error:+.1%}"
                )
    return rows


def _solved(
    devices: Sequence[DeviceProfile], links: Sequence[LinkProfile], model: ModelProfile, limits: Mapping[str, Limits]
) -> tuple[Solution, int] | str:
    """The plan with as many rows a step as memory allows, and those rows; why there is none."""
    for rows in ROWS:
        work = Workload(
            context_tokens=CONTEXT,
            kv_type="f16",
            sequences=1,
            prompt_tokens=PROMPT_TOKENS,
            answer_tokens=ANSWER_TOKENS,
            chunk_rows=rows,
        )
        try:
            found = solve(devices, links, model, work, limits=limits, heads=["d0"], time_limit_s=SOLVE_S)
        except Infeasible as exc:
            why = str(exc)
        else:
            return found, found.prediction.chunk_rows
    return why


async def _run(
    path: Path,
    solution: Solution,
    rows: int,
    groups: Mapping[str, LimitedGroup],
    rounds: int,
    threads: int,
    folder: Path,
) -> tuple[list[float], list[float]]:
    """Seconds of a token and to the first one, of so many answers after a warm-up."""
    ring = LocalRing(
        path,
        None,
        plan=solution.plan,
        groups=groups,
        context=CONTEXT,
        rows=rows,
        threads=threads,
        folder=folder,
        step_timeout_s=STEP_TIMEOUT_S,
    )
    decode_s, first_s = list[float](), list[float]()
    async with ring:
        await ring.generate(PROMPT[:PROMPT_TOKENS], WARM_TOKENS)
        for _ in range(rounds):
            sampled, finished = await ring.generate(PROMPT[:PROMPT_TOKENS], ANSWER_TOKENS + 1)
            decode_s.append(finished.decode_s / (len(sampled) - 1))
            first_s.append(finished.prompt_s)
    return decode_s, first_s
