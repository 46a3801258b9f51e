"""``memory --rounds`` and ``--ring``: several devices made of this machine, in rings that stream or that hold the model.

Each device has a cgroup with memory, CPU time and a disk speed of its own, and the network is loopback. Since one device
computes at a time, each may have all the cores; but all disks together are this machine's one disk, so to show where rounds
help, ``--rounds`` makes the processors slow, not the disks fast: one thread and half a processor each, and a model of many
small layers, so that little of it is read ahead.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Final

from halda import (
    DeviceProfile,
    Infeasible,
    Instance,
    ModelProfile,
    Plan,
    arrange,
    assignments,
    evaluate,
    instance,
    residency,
    solve,
)
from halda.streaming import RESERVE_BYTES
from primad.gguf.model import open_model
from primad.gguf.profile import model_profile
from primad.planning.question import default_workload
from tools.lab.figures import Row, out
from tools.lab.harness import Run as Command
from tools.lab.here import LOOPBACK, links_between
from tools.lab.memory import LimitedGroup
from tools.lab.memory_runs import (
    Run,
    busy_share,
    device_in,
    median_of,
    prefetch_rate,
    run_plain,
    run_ring,
)

CONTEXT: Final = 512
CHUNK_ROWS: Final = 128
ROUNDS: Final = (1, 2, 4)
ROUNDS_DISK_BYTES_PER_S: Final = 250_000_000
ROUNDS_CPUS: Final = 0.5
SOLVE_S: Final = 60.0
"""More than a daemon spends on a plan: what is shown is what the best plan does."""


class StreamingRow(Row):
    """A ring of ``devices`` with ``rounds``: measured and predicted tokens a second.

    ``chosen``: the plan is the solver's own; the others are the best of even windows with that many rounds. ``factor`` is
    what the ring is faster than plain llama.cpp on one of the devices (None where that was not measured).
    """

    columns = (
        "model, devices, rounds, chosen=the plan's, windows=windows:+, streamed_layers=streamed:+, "
        "read_ahead_bytes=ahead MB:MB, tokens_per_s=tok/s:.2f, predicted_tokens_per_s=predicted:.2f, "
        "bytes_read_per_token=MB/token:MB, baseline_tokens_per_s=plain tok/s:.2f, factor=factor:.1f, busy_share=busy:.0%"
    )


async def measure_rounds(run: Command, path: Path, profile: DeviceProfile) -> None:
    """Rings of 1, 2 and 4 rounds on devices that must stream this share of their layers, and the one that the plan picks."""
    fleet = _Fleet(run, path, profile, run.options.streamed, ROUNDS_DISK_BYTES_PER_S, ROUNDS_CPUS)
    chosen = fleet.solved()
    plans = [(plan, False) for rounds in ROUNDS if (plan := fleet.even(rounds)) is not None]
    rows = await fleet.rows([*plans, (chosen, True)])
    run.add(*rows)
    best = max((row for row in rows if not row.chosen), key=lambda row: row.tokens_per_s)
    run.say(f"fastest of the even ones: {best.rounds} rounds; the plan picks {chosen.rounds}")


async def measure_ring(run: Command, path: Path, profile: DeviceProfile) -> None:
    """A ring that together holds the model, and plain llama.cpp with what the largest of its devices has; the factor."""
    fleet, options, speeds = _Fleet(run, path, profile, 0.0, None, None), run.options, list[float]()
    (row,) = await fleet.rows([(fleet.solved(), True)])
    how = {"threads": options.threads, "context": CONTEXT, "rows": CHUNK_ROWS, "tokens": options.tokens or 24}
    for _ in range(options.rounds):
        with fleet.group(max(fleet.limits)) as group:
            speeds.append(run_plain(path, group, seconds=options.seconds, **how).tokens_per_s)
    row.baseline_tokens_per_s = statistics.median(speeds)
    row.factor = row.tokens_per_s / row.baseline_tokens_per_s
    run.add(row)


class _Fleet:
    """Devices made of this machine, with just the memory to keep all but a share of their layers, evenly cut."""

    def __init__(
        self,
        run: Command,
        path: Path,
        profile: DeviceProfile,
        streamed: float,
        disk_bytes_per_s: int | None,
        cpus: float | None,
    ) -> None:
        devices, threads = run.options.devices, run.options.threads
        self._run, self._path = run, path
        self._names = [f"d{i}" for i in range(devices)]
        self._links = links_between(self._names, [LOOPBACK])
        self._model: ModelProfile = model_profile(open_model(path))
        self._disk_bytes_per_s = int(run.options.disk * 1e6) if run.options.disk else disk_bytes_per_s
        self._cpus = run.options.cpus or cpus
        self._workload = default_workload(CONTEXT, CHUNK_ROWS, "f16")
        rate = prefetch_rate(path)
        self._rate = min(rate, float(self._disk_bytes_per_s or rate))
        question, layers = self._question([profile]), len(self._model.layers)
        held = sum(layer.size_bytes for layer in self._model.layers) + layers * max(question.kv_bytes)
        share = -(-layers // devices) / layers
        read_ahead = 2 * self._model.largest_layer_bytes + RESERVE_BYTES if streamed else 0
        each = int(share * held * (1 - streamed)) + read_ahead
        head = self._model.output_bytes + question.head_bytes(2)
        windows = [1 + (i == 0 and devices > 1) for i in range(devices)]  # of one round
        self.limits = [
            int(1.02 * (each + question.runtime_bytes(count) + (0 if i else head))) for i, count in enumerate(windows)
        ]
        self._profile = profile if self._cpus is None else slowed(profile, self._cpus / threads)

    def _question(self, devices: Sequence[DeviceProfile]) -> Instance:
        return instance(devices, self._links, self._model, self._workload, {})

    def group(self, limit: int) -> LimitedGroup:
        """The memory and the disk of one device."""
        folder = self._path.resolve().parent
        return LimitedGroup(limit, cpus=self._cpus, read_bytes_per_s=self._disk_bytes_per_s, folder=folder)

    @contextmanager
    def _groups(self) -> Iterator[Mapping[str, LimitedGroup]]:
        with ExitStack() as stack:
            limits = zip(self._names, self.limits, strict=True)
            yield {name: stack.enter_context(self.group(limit)) for name, limit in limits}

    def _devices(self) -> list[DeviceProfile]:
        with self._groups() as groups:
            return [device_in(group, self._profile, name, self._rate) for name, group in groups.items()]

    def solved(self) -> Plan:
        """The solver's plan, with every device in it; says so when it is not sure that it is the best."""
        solution = solve(
            self._devices(),
            self._links,
            self._model,
            self._workload,
            objective="latency",
            require=frozenset(self._names),
            time_limit_s=SOLVE_S,
        )
        if not solution.proven:
            out.print(f"the solver did not end within {SOLVE_S:g} s: there may be a plan better by {solution.gap:.0%}")
        return solution.plan

    def even(self, rounds: int) -> Plan | None:
        """The best plan of so many rounds in which the workers have equal windows; None where none fits."""
        question, found = self._question(self._devices()), list[tuple[float, Plan]]()
        layers, workers = len(self._model.layers), len(self._names) - 1
        for head in range(1, layers // rounds + 1):
            for other in range(1, layers // rounds + 1):
                if rounds * (head + other * workers) < layers // 2:
                    continue  # nearly all would be the tail
                try:
                    arranged = arrange(self._names, [head, *[other] * workers], rounds=rounds, model=self._model)
                    plan = residency(arranged, question)
                except Infeasible:
                    continue
                prediction = evaluate(plan, question)
                if not prediction.short:
                    found.append((prediction.tpot_s, plan))
        return min(found, key=lambda each: each[0])[1] if found else None

    async def rows(self, plans: Sequence[tuple[Plan, bool]]) -> list[StreamingRow]:
        """All ``plans`` in turn, each with whether it is the solver's own."""
        options, busy, folder = self._run.options, list[float](), self._run.folder(self._path.resolve().parent)
        done: list[list[Run]] = [[] for _ in plans]
        how = {"threads": options.threads, "context": CONTEXT, "rows": CHUNK_ROWS, "tokens": options.tokens or 24}
        for _ in range(options.rounds):
            for number_of, (plan, _) in enumerate(plans):
                busy.append(busy_share())
                with self._groups() as groups:
                    done[number_of].append(await run_ring(self._path, plan, groups, folder=folder, **how))
        question = self._question(self._devices())
        return [
            StreamingRow(
                model=self._path.stem,
                devices=len(self._names),
                rounds=plan.rounds,
                chosen=chosen,
                windows=[len(window.layers) for window in plan.route],
                read_ahead_bytes=[plan.streaming_of(name).read_ahead_bytes for name in plan.devices],
                streamed_layers=[kept.streamed_layers for kept in assignments(plan, self._model).values()],
                limit_bytes=self.limits,
                disk_bytes_per_s=self._disk_bytes_per_s,
                tokens_per_s=statistics.median(each.tokens_per_s for each in ran),
                predicted_tokens_per_s=1 / evaluate(plan, question).tpot_s,
                bytes_read_per_token=median_of(ran, "read_bytes_per_token"),
                baseline_tokens_per_s=None,
                factor=None,
                oom_kills=sum(each.oom_kills for its in ran for each in its.counters),
                busy_share=max(busy),
            )
            for (plan, chosen), ran in zip(plans, done, strict=True)
        ]


def slowed(profile: DeviceProfile, share: float) -> DeviceProfile:
    """The profile of a device that has this share of the CPU time that ``profile`` was measured with."""
    cpu, share = profile.cpu, min(1.0, share)
    rates = ("decode_bytes_per_s", "batch_bytes_per_s", "prefill_flop_per_s")
    speeds = tuple(replace(speed, **{rate: getattr(speed, rate) * share for rate in rates}) for speed in cpu.speeds)
    return replace(profile, cpu=replace(cpu, step_s=cpu.step_s / share, layer_s=cpu.layer_s / share, speeds=speeds))
