"""``tools/bench predict``, ``solve``, ``paper``: is the cost model right, how long does solving take, is it worth it?

``predict``: rings of 1 to 4 local processes for four models, of which the largest has less memory than it needs
(``bench_limited.py``). In each round the device is profiled (the types that the model has), then every ring decodes;
profiles and rings take turns, since this machine may change its speed from minute to minute. Prediction from the medians of
the profiles against the medians of the measurements.

``solve``: median seconds for random fleets, over their size. ``paper``: our plans beside Halda as published.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import AsyncExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from itertools import product
from multiprocessing import get_context
from pathlib import Path

import zmq.asyncio
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from halda import (  # noqa: E402
    CpuProfile,
    DeviceProfile,
    DiskProfile,
    Infeasible,
    Instance,
    LinkProfile,
    ModelProfile,
    Prediction,
    TypeSpeed,
    Workload,
    evaluate,
    instance,
    solve,
)
from primad.gguf.model import open_model  # noqa: E402
from primad.gguf.profile import model_profile  # noqa: E402
from primad.gguf.shapes import shape  # noqa: E402
from primad.network.contacts import Contact  # noqa: E402
from primad.network.control import WorkerEnd  # noqa: E402
from primad.network.gate import Gate  # noqa: E402
from primad.network.linkprobe import measure_links  # noqa: E402
from primad.network.messages import Echo  # noqa: E402
from primad.profiler.effort import Effort  # noqa: E402
from primad.profiler.measure import ram_read_bytes_per_s  # noqa: E402
from primad.profiler.processors import measure_cpu  # noqa: E402
from primad.system.process_start import measuring  # noqa: E402
from primad.trust.identity import new_identity  # noqa: E402
from tools.lab.local_ring import LocalRing, even_windows, types_of  # noqa: E402
from tools.lab.plain_llama import PROMPT  # noqa: E402
from tools.research.beside import SEEDS, beside_published  # noqa: E402
from tools.research.random_fleets import Memory, random_instance  # noqa: E402

PROMPT_TOKENS = 40
ANSWER_TOKENS = 96
BETTER = 1.01
CONTEXT = 1024
GIB = 1 << 30
_CPU_FIGURES = ("step_s", "layer_s", "token_s", "value_s", "wake_s", "row_s", "attention_s")
_SOME_DISK = DiskProfile(prefetch_bytes_per_s=1e9, fault_bytes_per_s=1e9, random_bytes_per_s=1e8, free_bytes=64 * GIB)
"""Of devices that read nothing."""

out = Console(highlight=False)


@dataclass
class Predicted:
    """One line of the result: milliseconds a token and to the first one. ``limit_share``: memory of all processes, of the
    model's size; None where nothing limits it."""

    model: str
    processes: int
    limit_share: float | None
    measured_ms: float
    predicted_ms: float
    measured_first_ms: float
    predicted_first_ms: float
    measured_rounds_ms: list[float]

    @property
    def error(self) -> float:
        """Predicted over measured, less 1."""
        return self.predicted_ms / self.measured_ms - 1

    @property
    def first_error(self) -> float:
        """The same of the first token."""
        return self.predicted_first_ms / self.measured_first_ms - 1


def predicted_row(
    model: str,
    processes: int,
    share: float | None,
    found: Prediction,
    decode_s: Sequence[float],
    first_s: Sequence[float],
) -> Predicted:
    """What was ``found`` beside the seconds of a token and to the first one, by run."""
    return Predicted(
        model=model,
        processes=processes,
        limit_share=share,
        measured_ms=statistics.median(decode_s) * 1e3,
        predicted_ms=found.tpot_s * 1e3,
        measured_first_ms=statistics.median(first_s) * 1e3,
        predicted_first_ms=found.ttft_s * 1e3,
        measured_rounds_ms=[seconds * 1e3 for seconds in decode_s],
    )


async def predict_model(path: Path, processes: Sequence[int], rounds: int, threads: int) -> list[Predicted]:
    model = model_profile(open_model(path))
    kinds = types_of(model)
    measured: dict[int, list[float]] = {count: [] for count in processes}
    first: dict[int, list[float]] = {count: [] for count in processes}
    profiles, rates, links = [], [], []
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="primad-predict-")))
        rings = {}
        cpu = await asyncio.to_thread(measure_cpu, folder, threads, lambda _: None, Effort(types=kinds))
        for count in processes:
            ring = LocalRing(
                path,
                even_windows(len(model.layers), count),
                context=CONTEXT,
                threads=threads,
                cpu=cpu,
                folder=folder / str(count),
            )
            rings[count] = await stack.enter_async_context(ring)
            await ring.generate(PROMPT[:PROMPT_TOKENS], 8)
        for number in range(rounds):
            with measuring():
                if number:
                    cpu = await asyncio.to_thread(measure_cpu, folder, threads, lambda _: None, Effort(types=kinds))
                profiles.append(cpu)
                rates.append(await asyncio.to_thread(ram_read_bytes_per_s, threads))
            links.append(await loopback())
            for count, ring in rings.items():
                sampled, finished = await ring.generate(PROMPT[:PROMPT_TOKENS], ANSWER_TOKENS + 1)
                measured[count].append(finished.decode_s / (len(sampled) - 1))
                first[count].append(finished.prompt_s)
        cpu = _median_cpu(profiles)
        rows = []
        for count, ring in rings.items():
            question = _question(count, cpu, statistics.median(rates), links, model)
            found = evaluate(ring.plan, question)
            rows.append(predicted_row(path.stem, count, None, found, measured[count], first[count]))
        return rows


def _median_cpu(profiles: Sequence[CpuProfile]) -> CpuProfile:
    def speed(kind: str) -> TypeSpeed:
        found = [speed for profile in profiles for speed in profile.speeds if speed.type == kind]
        return replace(
            found[0],
            decode_bytes_per_s=statistics.median(speed.decode_bytes_per_s for speed in found),
            batch_bytes_per_s=statistics.median(speed.batch_bytes_per_s for speed in found),
            prefill_flop_per_s=statistics.median(speed.prefill_flop_per_s for speed in found),
        )

    return replace(
        profiles[0],
        **{name: statistics.median(getattr(profile, name) for profile in profiles) for name in _CPU_FIGURES},
        speeds=tuple(speed(speeds.type) for speeds in profiles[0].speeds),
    )


def _question(count: int, cpu: CpuProfile, rate: float, links: Sequence[LinkProfile], model: ModelProfile) -> Instance:
    names = [f"d{i}" for i in range(count)]
    devices = [device_here(name, cpu, rate, _SOME_DISK) for name in names]
    between = links_between(names, links)
    return instance(devices, between, model, _work(), {})


def device_here(name: str, cpu: CpuProfile, rate: float, disk: DiskProfile) -> DeviceProfile:
    """A process of this machine as a device, with more memory than any model of this bench needs."""
    return DeviceProfile(
        device=name,
        host="here",
        system="Linux",
        machine="",
        cpu=cpu,
        ram_total_bytes=64 * GIB,
        ram_available_bytes=64 * GIB,
        ram_read_bytes_per_s=rate,
        disk=disk,
        gpu=None,
    )


def links_between(names: Sequence[str], links: Sequence[LinkProfile]) -> list[LinkProfile]:
    """The middle one of ``links`` between any two devices."""
    link = sorted(links, key=lambda link: link.round_trip_s)[len(links) // 2]
    return [replace(link, source=a, target=b, address="") for a in names for b in names if a != b]


def _work() -> Workload:
    return Workload(
        context_tokens=CONTEXT,
        kv_type="f16",
        sequences=1,
        prompt_tokens=PROMPT_TOKENS,
        answer_tokens=ANSWER_TOKENS,
        chunk_rows=512,
    )


async def loopback() -> LinkProfile:
    """The link between two processes here, as daemons measure it."""
    with _echo_process() as (port, key):
        context = zmq.asyncio.Context()
        target = Contact(device="there", key=key, addresses=["127.0.0.1"], port=port)
        try:
            found = await measure_links(context, new_identity(), "here", [target])
        finally:
            context.term()
        return found.links[0]


@contextmanager
def _echo_process() -> Iterator[tuple[int, str]]:
    """A process that answers echoes: its port and its public key."""
    with subprocess.Popen(
        [sys.executable, __file__, "echo"],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    ) as child:
        try:
            assert child.stdout is not None
            port, key = child.stdout.readline().rstrip("\n").split(" ", 1)
            yield int(port), key
        finally:
            child.kill()


async def _echo() -> None:
    context, identity = zmq.asyncio.Context(), new_identity()
    async with Gate(context, lambda _: True):
        end = WorkerEnd(context, "127.0.0.1", None, 0, identity=identity)
        print(end.port, identity.public, flush=True)
        while True:
            peer, _, message = await end.receive()
            assert isinstance(message, Echo)
            await end.echo(peer, message.answer_bytes)


def predict(models: Sequence[Path], processes: Sequence[int], rounds: int, threads: int) -> list[Predicted]:
    """Measure and predict, nothing limited."""
    return [row for path in models for row in asyncio.run(predict_model(path, processes, rounds, threads))]


def show_predicted(rows: Sequence[Predicted]) -> None:
    """Print the rows, the median errors and the largest."""
    table = Table(
        *("model", "limit", "n", "ms", "rounds", "told", "error", "first", "told", "error"),
        box=SIMPLE_HEAD,
        pad_edge=False,
        padding=(0, 1, 0, 0),
    )
    for row in rows:
        table.add_row(
            row.model,
            "-" if row.limit_share is None else f"{row.limit_share:g}",
            str(row.processes),
            f"{row.measured_ms:.1f}",
            f"{min(row.measured_rounds_ms):.1f}-{max(row.measured_rounds_ms):.1f}",
            f"{row.predicted_ms:.1f}",
            f"{row.error:+.1%}",
            f"{row.measured_first_ms:.0f}",
            f"{row.predicted_first_ms:.0f}",
            f"{row.first_error:+.1%}",
        )
    out.print(table)
    for what, errors in (
        ("a token", [abs(row.error) for row in rows]),
        ("the first token", [abs(row.first_error) for row in rows]),
    ):
        out.print(f"{len(rows)} cases, {what}: median error {statistics.median(errors):.1%}, largest {max(errors):.1%}")


@dataclass
class Solved:
    """Seconds of the processor that one size of fleet took: each one with a plan, and each without (``infeasible_s``).

    ``gaps`` are those of plans that were not proven best. Windows may begin at multiples of ``multiple`` layers.
    """

    devices: int
    layers: int
    multiple: int
    solved_s: list[float]
    infeasible_s: list[float]
    gaps: list[float]


def solve_times(sizes: Sequence[int], fleets: int, layers: int, multiples: Sequence[int]) -> list[Solved]:
    """Solve random fleets with a model of ``layers`` like layers, in which windows may begin at multiples of each of the
    ``multiples``; prints a table over these and the number of devices."""
    like = replace_layers(shape("llama3-70b-q4k"), layers)
    rows = []
    for count, multiple in product(sizes, multiples):
        row, model = Solved(count, layers, multiple, [], [], []), replace(like, cut_multiple=multiple)
        for seed in range(fleets):
            rng = random.Random(seed)
            memory: Memory = rng.choice(("short", "about", "ample"))
            question = _with_a_head(random_instance(rng, devices=count, layers=layers, memory=memory, model=model))
            start = time.process_time()
            try:
                found = solve(
                    question.devices,
                    list(question.links.values()),
                    question.model,
                    question.workload,
                    limits=question.limits,
                    time_limit_s=60,
                )
            except Infeasible:
                row.infeasible_s.append(time.process_time() - start)
                continue
            row.solved_s.append(time.process_time() - start)
            if not found.proven:
                row.gaps.append(found.gap)
        rows.append(row)
    table = Table(
        "devices",
        "windows at",
        "with a plan",
        "median s",
        "slowest s",
        "not proven",
        "largest gap",
        "without",
        "slowest s",
    )
    for row in rows:
        table.add_row(
            str(row.devices),
            "any" if row.multiple == 1 else f"{row.multiple} n",
            str(len(row.solved_s)),
            *((f"{take(row.solved_s):.2f}" if row.solved_s else "-") for take in (statistics.median, max)),
            str(len(row.gaps)),
            f"{max(row.gaps):.1%}" if row.gaps else "-",
            str(len(row.infeasible_s)),
            f"{max(row.infeasible_s):.2f}" if row.infeasible_s else "-",
        )
    out.print(table)
    return rows


def _with_a_head(question: Instance) -> Instance:
    """Room on the head for the output matrix, which a random share of a large fleet's memory mostly lacks."""
    head, *others = question.devices
    more = question.model.output_bytes + question.head_bytes(2)
    return replace(question, devices=(replace(head, ram_available_bytes=head.ram_available_bytes + more), *others))


def replace_layers(model: ModelProfile, layers: int) -> ModelProfile:
    """The same model with another number of layers."""
    return replace(model, layers=model.layers[:1] * layers)


@dataclass
class Beside:
    """Seconds a token of the paper's plans over ours, under our evaluator, on fleets where the paper's holds all limits."""

    fleets: int
    compared: int
    better: float
    largest: float
    median: float
    quarter: float
    tenth: float


def beside_paper(fleets: int) -> list[Beside]:
    """Both solvers on random fleets; prints how often ours is better and by how much."""
    with ProcessPoolExecutor(os.cpu_count(), mp_context=get_context("spawn")) as pool:
        answers = list(pool.map(beside_published, SEEDS[:fleets], chunksize=10))
    ratios = sorted(ratio for ratio in answers if ratio is not None)
    cuts = statistics.quantiles(ratios, n=20)
    better = sum(ratio > BETTER for ratio in ratios) / len(ratios)
    row = Beside(fleets, len(ratios), better, ratios[-1], statistics.median(ratios), cuts[14], cuts[17])
    out.print(
        f"{row.compared} of {fleets} fleets compared; on the others the paper's plan breaks a limit. Ours is better by "
        f"more than 1 % on {row.better:.0%}. The paper's token takes {ratios[0]:.6f} times as long at the least, "
        f"{row.median:.2f} at the median, {row.quarter:.2f} or more on a quarter, {row.tenth:.2f} or more on a tenth, "
        f"{row.largest:.1f} at most"
    )
    return [row]


def add_benches(benches: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds ``predict`` and ``solve`` to the command line."""
    one = benches.add_parser("predict", help="predicted against measured milliseconds a token")
    one.add_argument("--model", type=Path, action="append", help="GGUF file with all memory (default: three models)")
    one.add_argument(
        "--limited", type=Path, help="GGUF file with little memory (default: a synthetic 3B without --model)"
    )
    one.add_argument("--limits", type=float, nargs="+", default=[0.9, 0.7, 0.5], help="memory, of the size of that")
    one.add_argument("--processes", type=int, nargs="+", default=[1, 2, 3, 4])
    one.add_argument("--rounds", type=int, default=2)
    one.add_argument("--threads", type=int, default=2)
    one.add_argument("--json", help="also write the figures to this file")
    three = benches.add_parser("paper", help="our plans beside the paper's on random fleets")
    three.add_argument("--fleets", type=int, default=500)
    three.add_argument("--json", help="also write the figures to this file")
    two = benches.add_parser("solve", help="seconds that solving takes, over the number of devices")
    two.add_argument("--sizes", type=int, nargs="+", default=[2, 4, 8, 16, 32, 64])
    two.add_argument("--fleets", type=int, default=15)
    two.add_argument("--layers", type=int, default=80)
    two.add_argument(
        "--multiples", type=int, nargs="+", default=[1], help="windows may begin at multiples of so many layers"
    )
    two.add_argument("--json", help="also write the figures to this file")


def as_rows(rows: Sequence[Predicted] | Sequence[Solved] | Sequence[Beside]) -> list[dict[str, object]]:
    """Plain data for ``--json``."""
    return [asdict(row) for row in rows]


if __name__ == "__main__":
    assert sys.argv[1:] == ["echo"]
    asyncio.run(_echo())
