"""``memory --pressure``: what a ring takes of its devices' memory so that their owners' other programs cannot have it.

Measured as in the paper: the loss of available memory that primad causes, pages that the kernel can have back at once not
counted, as a share of all memory. Each device is a ring process in a cgroup with that much memory, the page cache included,
and the model is 1.3 times what all of them have together, so that the solver's plan streams on each. Without ``--model``
one is written (the 8B preset with more layers) and removed at the end; so are the layer files that are cut from it.

A device counts what its group holds or what its process does, whichever is more, since what a process took before it
joined the group is not the group's. Daemons do not run: one that waits for a head is measured beside the ring, and its
memory added in a column of its own. What the kernel keeps for the processes, page tables mainly, has its own column too.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Final

import psutil

from halda import CHUNKS, CacheType, DeviceProfile, Infeasible, ModelProfile, Solution, Workload, solve
from halda.cost import kv_bytes
from halda.evaluate import DevicePrediction
from primad.errors import PrimadError
from primad.gguf.model import open_model
from primad.gguf.profile import model_profile
from primad.planning.question import default_workload
from primad.ring.messages import Sampled
from primad.system.memory import held_bytes
from tools import synthetic
from tools.lab import LabError
from tools.lab.daemons import daemon
from tools.lab.figures import Figure, Row, mega
from tools.lab.harness import Run
from tools.lab.here import LOOPBACK, links_between, measured_profile
from tools.lab.local_ring import LocalRing
from tools.lab.memory import Counters, LimitedGroup
from tools.lab.memory_runs import ROWS, busy_share, device_in, file_bytes, prefetch_rate
from tools.lab.plain_llama import PROMPT
from tools.synth import layers_for

LARGER: Final = 1.3
"""The model by the memory of all devices together."""
MAX_SHARE: Final = 0.05
"""Memory pressure that is promised on every device."""
PRESET: Final = "8b-q4k"
SOLVE_S: Final = 60.0
CONTEXT_STEP: Final = 256
PROMPT_TIMEOUT_S: Final = 1800.0
"""Of a step: the whole prompt can be one, through tens of billions of weights on two cores."""
SAMPLE_S: Final = 1.0
DAEMON_READY_S: Final = 180.0
SETTLE_S: Final = 2.0
WATCHED: Final = ("group_held_bytes", "process_held_bytes", "unevictable_bytes", "kernel_bytes", "swap_bytes")


def pressure_share(before_available_bytes: int, available_bytes: int, total_bytes: int) -> float:
    """Memory pressure as the paper has it: the loss of available memory as a share of all memory.

    What is available counts reclaimable pages, so that weights that are mapped and not locked cost nothing. ``total_bytes``
    is more than 0; other programs that end or begin meanwhile are part of the difference.
    """
    return max(0, before_available_bytes - available_bytes) / total_bytes


class Pressure(Row):
    """One device of the ring; bytes are the most that any sample saw, from its start to the last token.

    ``pressure_share`` is ``held_bytes`` by the limit: the more of ``group_held_bytes`` and ``process_held_bytes``, less
    ``before_bytes``, which the group held with nobody in it; ``drawing_share`` is the same of what the group held while
    tokens were drawn, behind the prompt. ``with_kernel_share`` adds ``kernel_bytes``,
    ``with_daemon_share`` adds ``daemon_bytes`` instead. Part of what is held is the KV cache, ``kv_bytes``;
    ``reserved_bytes`` is what the plan keeps for it and all else that is neither weights nor read
    ahead. ``bytes_read_per_token`` is decode alone. ``machine_loss_share`` is
    the loss of what the whole machine has available as a share of all limits, other programs included, at the end.
    """

    columns = (
        "device, limit_bytes=limit MB:MB, pressure_share=pressure:.1%, drawing_share=drawing tokens:.1%, "
        "with_kernel_share=with kernel:.1%, with_daemon_share=with daemon:.1%, held_bytes=held MB:MB, "
        "group_held_bytes=group MB:MB, process_held_bytes=process MB:MB, reserved_bytes=planned MB:MB, kv_bytes=KV MB:MB, "
        "kernel_bytes=kernel MB:MB, daemon_bytes=daemon MB:MB, peak_bytes=peak MB:MB, oom_kills=OOM kills, "
        "swap_bytes=swap MB:MB, streamed_bytes=streamed MB:MB, read_ahead_bytes=ahead MB:MB, "
        "bytes_read_per_token=MB/token:MB"
    )

    @classmethod
    def figures(cls, rows: Sequence[Pressure]) -> Iterator[Figure]:
        what, count = "of the memory of a device, the most of", len(rows)
        maximum = max(row.pressure_share for row in rows)
        drawing = max(row.drawing_share for row in rows)
        yield Figure(what=f"pressure, {what} {count}", values=(maximum,), at_most=MAX_SHARE)
        yield Figure(what=f"pressure while tokens are drawn, {what} {count}", values=(drawing,))


async def measure(run: Run, model: Path | None) -> None:
    """The figures of every device. Raises ``LabError`` where the machine has no room for it."""
    options, free = run.options, psutil.virtual_memory().available
    memory_bytes, tokens = int(options.memory * 1e9), options.tokens or 10
    fleet_bytes = options.devices * memory_bytes
    if fleet_bytes > free:
        raise LabError(
            f"{options.devices} devices of {options.memory:g} GB: this machine has {free / 1e9:.1f} GB available; choose a "
            "smaller --memory"
        )
    context = options.context or -(-(len(PROMPT) + tokens + 1) // CONTEXT_STEP) * CONTEXT_STEP
    path = _model(run, model, int(LARGER * fleet_bytes))
    size = path.stat().st_size
    run.say(f"{path.name}: {size / 1e9:.2f} GB, {size / fleet_bytes:.2f} x the memory of {options.devices} devices")
    synthetic.check_room(path.parent, size, f"layer files of {path.name}")
    fleet = _Fleet(path, options.devices, memory_bytes, measured_profile(run.folder(), options.threads))
    solution, workload = fleet.solved(context, options.rows, options.kv_type or "f16")
    run.say(_plan_line(solution, workload))
    rows = await _measured(fleet, solution, workload, run.folder(path.parent), threads=options.threads, tokens=tokens)
    run.add(*rows)
    one = rows[0]
    run.say(
        f"prompt of {one.prompt_tokens} tokens in {one.prompt_s:.1f} s, then {one.tokens} tokens at "
        f"{one.tokens_per_s:.2f} tokens/s (predicted {one.predicted_tokens_per_s:.2f}); the whole machine has "
        f"{one.machine_loss_share:.1%} of all limits less available than before, whoever took it"
    )


def _model(run: Run, given: Path | None, wanted_bytes: int) -> Path:
    """``given``, or a synthetic model of that size, which is removed at the end unless it was there before."""
    if given is not None:
        return given.resolve()
    layers = layers_for(wanted_bytes, PRESET)
    path = synthetic.model_path(PRESET, layers=layers)
    return run.stack.enter_context(synthetic.borrowed(path, PRESET, layers=layers, cut=True, keep=run.options.keep))


class _Fleet:
    """Devices made of this machine, each with the same memory."""

    def __init__(self, path: Path, devices: int, memory_bytes: int, profile: DeviceProfile) -> None:
        self.path = path
        self.names = [f"d{i}" for i in range(devices)]
        self.memory_bytes = memory_bytes
        self.model: ModelProfile = model_profile(open_model(path))
        self._profile = profile

    @contextmanager
    def groups(self) -> Iterator[Mapping[str, LimitedGroup]]:
        """The memory of all devices."""
        with ExitStack() as stack:
            yield {name: stack.enter_context(LimitedGroup(self.memory_bytes)) for name in self.names}

    def solved(self, context: int, rows: int | None, kv_type: CacheType) -> tuple[Solution, Workload]:
        """The solver's plan with every device in it, as ``primad serve`` asks for it.

        A step has as many rows as ``rows`` says, or as the solver finds best. Raises ``LabError``.
        """
        rate = prefetch_rate(self.path)
        with self.groups() as groups:
            devices = [device_in(group, self._profile, name, rate) for name, group in groups.items()]
        workload = default_workload(context, rows or ROWS[0], kv_type, prompt_tokens=len(PROMPT))
        try:
            solution = solve(
                devices,
                links_between(self.names, [LOOPBACK]),
                self.model,
                workload,
                require=frozenset(self.names),
                chunks=() if rows else CHUNKS,
                time_limit_s=SOLVE_S,
            )
        except Infeasible as exc:
            where = f"{self.path.name} on {len(self.names)} x {self.memory_bytes / 1e9:g} GB"
            raise LabError(f"{where}: no plan: {exc}") from exc
        return solution, replace(workload, chunk_rows=solution.prediction.chunk_rows)


def _plan_line(solution: Solution, workload: Workload) -> str:
    plan, prediction = solution.plan, solution.prediction
    windows = "+".join(str(len(window.layers)) for window in plan.route)
    sure = "" if solution.proven else f", perhaps not the best (gap {solution.gap:.0%})"
    still = [name for name in plan.devices if not plan.streaming_of(name).streamed_bytes]
    fits = f"; {', '.join(still)}: all layers fit, so these are no figures of a model too large" if still else ""
    return (
        f"plan: windows {windows}, {plan.rounds} rounds, {workload.chunk_rows} rows a step, context "
        f"{workload.context_tokens}{sure}; it forecasts a first token after {prediction.ttft_s:.0f} s and "
        f"{prediction.tokens_per_s:.2f} tokens/s{fits}"
    )


class _Watch:
    """The groups and processes of a ring: the most that each held so far."""

    def __init__(self, groups: Mapping[str, LimitedGroup]) -> None:
        self._groups = groups
        self.peaks = {name: Counter[str]() for name in groups}

    def look(self) -> dict[str, Counters]:
        """The counters of now."""
        counters = {name: group.counters() for name, group in self._groups.items()}
        for name, now in counters.items():
            self.peaks[name] |= Counter(
                group_held_bytes=now.held_bytes,
                unevictable_bytes=now.unevictable_bytes,
                kernel_bytes=now.kernel_bytes,
                swap_bytes=now.swap_bytes,
            )
        return counters

    def look_closely(self, pids: Mapping[str, int]) -> dict[str, Counters]:
        """The same with what the processes hold, which has the kernel walk through all that they have mapped."""
        for name, pid in pids.items():
            self.peaks[name] |= Counter(process_held_bytes=held_bytes([pid]))
        return self.look()

    async def keep_looking(self) -> None:
        """Until it is cancelled."""
        while True:
            await asyncio.sleep(SAMPLE_S)
            self.look()


async def _measured(
    fleet: _Fleet, solution: Solution, workload: Workload, folder: Path, *, threads: int, tokens: int
) -> list[Pressure]:
    """A ring of processes that computes a prompt and then ``tokens`` tokens. Raises ``LabError`` when it does not."""
    busy = busy_share()
    plan = solution.plan
    daemon = await asyncio.to_thread(_daemon_bytes)
    machine_before = psutil.virtual_memory().available
    with fleet.groups() as groups:
        before = {name: group.counters() for name, group in groups.items()}
        watch = _Watch(groups)
        ring = LocalRing(
            fleet.path,
            None,
            plan=plan,
            groups=groups,
            context=workload.context_tokens,
            rows=workload.chunk_rows,
            kv_type=workload.kv_type,
            threads=threads,
            folder=folder,
            step_timeout_s=PROMPT_TIMEOUT_S,
        )
        looking = asyncio.create_task(watch.keep_looking())
        try:
            async with ring:
                pids = {name: process.pid for name, process in ring.processes.items()}
                loaded = watch.look_closely(pids)
                times: list[float] = []
                seen: list[Mapping[str, Counters]] = []

                def heard(_: Sampled) -> None:
                    times.append(time.perf_counter())
                    seen.append(watch.look_closely(pids) if len(times) == 1 else watch.look())

                start = time.perf_counter()
                await ring.generate(PROMPT, 1 + tokens, heard=heard)
                last = watch.look_closely(pids)
                machine_after = psutil.virtual_memory().available
        except PrimadError as exc:
            watch.look()
            predicted_of = solution.prediction.devices
            reserved = {each.device: _reserved_bytes(fleet.model, solution, each) for each in predicted_of}
            killed = [
                f"{name}, which held {mega(watch.peaks[name]['group_held_bytes'])} MB ({mega(reserved[name])} MB planned)"
                for name, group in groups.items()
                if group.counters().oom_kills
            ]
            raise LabError(f"the ring ended: {exc}; killed for lack of memory: {'; '.join(killed) or 'none'}") from exc
        finally:
            looking.cancel()
            with suppress(asyncio.CancelledError):
                await looking
    drawn = len(times) - 1
    if drawn < 1:
        raise LabError(f"the model ended its answer after {len(times)} tokens; choose another --model")
    machine_loss = pressure_share(machine_before, machine_after, len(fleet.names) * fleet.memory_bytes)
    rows = []
    for predicted in solution.prediction.devices:
        name = predicted.device
        most = {key: watch.peaks[name][key] for key in WATCHED}
        held = max(most["group_held_bytes"], most["process_held_bytes"])

        def share(bytes_held: int, empty: int = before[name].held_bytes) -> float:
            limit = fleet.memory_bytes
            return pressure_share(limit - empty, limit - bytes_held, limit)

        rows.append(
            Pressure(
                device=name,
                model=fleet.path.stem,
                model_bytes=file_bytes(fleet.path),
                limit_bytes=fleet.memory_bytes,
                pressure_share=share(held),
                drawing_share=share(max(each[name].held_bytes for each in seen[1:])),
                with_kernel_share=share(held + most["kernel_bytes"]),
                with_daemon_share=share(held + daemon),
                before_bytes=before[name].held_bytes,
                held_bytes=held,
                **most,
                daemon_bytes=daemon,
                kv_bytes=_kv_bytes(fleet.model, workload, solution, name),
                reserved_bytes=_reserved_bytes(fleet.model, solution, predicted),
                **{key: getattr(last[name], key) for key in ("peak_bytes", "limit_hits", "oom_kills")},
                **{key: getattr(predicted, key) for key in ("layers", "streamed_bytes", "read_ahead_bytes")},
                rounds=plan.rounds,
                context=workload.context_tokens,
                rows=workload.chunk_rows,
                prompt_tokens=len(PROMPT),
                tokens=drawn,
                prompt_read_bytes=seen[0][name].read_bytes - loaded[name].read_bytes,
                bytes_read_per_token=(seen[-1][name].read_bytes - seen[0][name].read_bytes) / drawn,
                prompt_s=times[0] - start,
                tokens_per_s=drawn / (times[-1] - times[0]),
                predicted_tokens_per_s=solution.prediction.tokens_per_s,
                machine_loss_share=machine_loss,
                busy_share=busy,
            )
        )
    return rows


def _kv_bytes(model: ModelProfile, workload: Workload, solution: Solution, name: str) -> int:
    """The KV cache of a device."""
    windows = [window for _, window in solution.plan.windows_of(name)]
    return sum(kv_bytes(model.layers[layer], workload) for window in windows for layer in window.layers)


def _reserved_bytes(model: ModelProfile, solution: Solution, predicted: DevicePrediction) -> int:
    """What the plan keeps on a device besides weights and what is read ahead."""
    plan, name = solution.plan, predicted.device
    layers = [layer for _, window in plan.windows_of(name) for layer in window.layers]
    weights = sum(model.layers[layer].size_bytes for layer in layers) + (model.output_bytes if name == plan.head else 0)
    return predicted.ram_bytes - (weights - predicted.streamed_bytes) - predicted.read_ahead_bytes


def _daemon_bytes() -> int:
    """What ``primad join`` holds while it waits for a head, on loopback and trusted by nobody. Raises ``LabError``."""
    with tempfile.TemporaryDirectory(prefix="primad-bench-") as folder:
        homes, log = Path(folder), Path(folder) / "log"
        words = ("join", "--home", homes / "home", "--name", "waiting", "--port", "0")
        with log.open("wb") as file, daemon(words, homes, file) as process:
            deadline = time.monotonic() + DAEMON_READY_S
            while b"waiting for a head" not in log.read_bytes():
                if process.poll() is not None or time.monotonic() > deadline:
                    text = log.read_text(errors="replace").strip()
                    raise LabError(f"primad join was not ready within {DAEMON_READY_S:g} s; it said: {text}")
                time.sleep(0.2)
            time.sleep(SETTLE_S)
            children = [child.pid for child in psutil.Process(process.pid).children(recursive=True)]
            return held_bytes([process.pid, *children])
