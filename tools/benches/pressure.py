"""``memory --pressure``: the memory that a ring takes on its devices, so that other programs of their owners cannot
have it.

Measured as in the paper: the loss of available memory that primad causes, as a share of all memory; pages that the
kernel can reclaim immediately are not counted. Each device is a daemon with its processes in a cgroup with that much
memory, including the page cache, and the model has 1.3 times the memory of all devices together, so that the plan of
``primad serve`` streams on each. Without ``--model`` one is written (the 8B preset with more layers) and removed at the
end, as are its layer files.

The ring process is judged; the daemon and its other processes count in their own column, and so does what the kernel
keeps for all of them, mainly page tables.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Final

import psutil

from primad.system.memory import held_bytes
from tools import synthetic
from tools.lab import LabError
from tools.lab.device import role
from tools.lab.figures import Figure, Row
from tools.lab.harness import Run
from tools.lab.http_servers import head_here
from tools.lab.memory import LimitedGroup
from tools.lab.plain_llama import PROMPT
from tools.synth import layers_for

LARGER: Final = 1.3
"""Size of the model over the memory of all devices together."""
MAX_SHARE: Final = 0.05
"""Memory pressure that is guaranteed as a maximum on every device."""
PRESET: Final = "8b-q4k"
CONTEXT: Final = 768
SAMPLE_S: Final = 1.0


class Pressure(Row):
    """One device of the ring; bytes are maxima over all samples.

    ``pressure_share`` is what the ring process held over the limit, ``drawing_share`` the same during decode, after the
    prompt; ``with_daemon_share`` is what all processes held. ``reserved_bytes`` is the plan's.
    """

    columns = (
        "device, limit_bytes=limit MB:MB, pressure_share=pressure:.1%, drawing_share=drawing tokens:.1%, "
        "with_daemon_share=with daemon:.1%, ring_bytes=ring MB:MB, held_bytes=held MB:MB, kernel_bytes=kernel MB:MB, "
        "reserved_bytes=planned MB:MB, swap_bytes=swap MB:MB, oom_kills=OOM kills, streamed, read_ahead_bytes=ahead MB:MB"
    )

    @classmethod
    def figures(cls, rows: Sequence[Pressure]) -> Iterator[Figure]:
        what, count = "of the memory of a device, the most of", len(rows)
        for name, maximum, share in (
            ("pressure", MAX_SHARE, "pressure_share"),
            ("pressure while tokens are drawn", None, "drawing_share"),
            ("pressure with the daemon", None, "with_daemon_share"),
        ):
            most = max(getattr(row, share) for row in rows)
            yield Figure(what=f"{name}, {what} {count}", values=(most,), at_most=maximum)


async def measure(run: Run, model: Path | None) -> None:
    """Add the figures of every device. Raises ``LabError`` if the machine has too little memory."""
    options, free = run.options, psutil.virtual_memory().available
    memory_bytes = int(options.memory * 1e9)
    fleet_bytes = options.devices * memory_bytes
    if fleet_bytes > free:
        raise LabError(
            f"{options.devices} devices of {options.memory:g} GB: this machine has {free / 1e9:.1f} GB available; choose a "
            "smaller --memory"
        )
    path = _model(run, model, int(LARGER * fleet_bytes))
    size = path.stat().st_size
    run.say(f"{path.name}: {size / 1e9:.2f} GB, {size / fleet_bytes:.2f} x the memory of {options.devices} devices")
    synthetic.check_room(path.parent, size, f"layer files of {path.name}")
    run.add(*await asyncio.to_thread(_measured, run, path, memory_bytes))


def _model(run: Run, given: Path | None, wanted_bytes: int) -> Path:
    """Return ``given``, or a synthetic model of ``wanted_bytes``, which is removed at the end unless it existed
    before."""
    if given is not None:
        return given.resolve()
    layers = layers_for(wanted_bytes, PRESET)
    path = synthetic.model_path(PRESET, layers=layers)
    return run.stack.enter_context(synthetic.borrowed(path, PRESET, layers=layers, cut=True, keep=run.options.keep))


def _measured(run: Run, path: Path, memory_bytes: int) -> list[Pressure]:
    """Have a ring compute a prompt and then some tokens, and return the figures of its devices."""
    options, workers = run.options, [f"w{i}" for i in range(1, run.options.devices)]
    groups = {name: run.stack.enter_context(LimitedGroup(memory_bytes)) for name in ("head", *workers)}
    starting = iter([*workers, "head"])
    head = ["--context", str(CONTEXT), "--sequences", "1", "--prompt", str(len(PROMPT)), "--speculate", "off"]
    head += ["--kv-type", options.kv_type or "f16", *(["--use-all"] if workers else [])]
    prompted, drawing = ({name: Counter[str]() for name in groups} for _ in range(2))
    every = ("--threads", str(options.threads))
    with (
        head_here(
            path,
            run.folder(path.parent) / "homes",
            workers,
            every=every,
            head=head,
            machines=bool(workers),
            bound=False,
            started=lambda pid: groups[next(starting)].add(pid),  # noqa: PLW0108  (each one's own group)
        ) as server,
        ThreadPoolExecutor(1) as pool,
    ):
        status, sampled = server.status(), list[tuple[float, int]]()
        forecast = status["predicted"]["tokens_per_s"]
        asked = pool.submit(server.sampled, PROMPT, 1 + (options.tokens or 10), sampled)
        while not wait([asked], SAMPLE_S).done:
            _look(groups, drawing if sampled else prompted)
        asked.result()
        _look(groups, drawing)
    if len(sampled) < 2:
        raise LabError(f"the model ended its response after {len(sampled)} tokens; choose another --model")
    rate = (len(sampled) - 1) / (sampled[-1][0] - sampled[0][0])
    run.say(f"{len(sampled)} tokens, {rate:.2f} tokens/s (forecast {forecast:.2f})")
    rows = []
    for device in status["devices"]:
        late, most = drawing[device["name"]], drawing[device["name"]] | prompted[device["name"]]
        rows.append(
            Pressure(
                device=device["name"],
                model=path.stem,
                model_bytes=path.stat().st_size,
                limit_bytes=memory_bytes,
                pressure_share=most["ring_bytes"] / memory_bytes,
                drawing_share=late["ring_bytes"] / memory_bytes,
                with_daemon_share=most["held_bytes"] / memory_bytes,
                **{key: most[key] for key in ("ring_bytes", "held_bytes", "kernel_bytes", "swap_bytes", "oom_kills")},
                reserved_bytes=device["predicted"]["ram_bytes"],
                **{key: device["predicted"][key] for key in ("streamed", "resident", "read_ahead_bytes")},
                tokens_per_s=rate,
                predicted_tokens_per_s=forecast,
            )
        )
    return rows


def _look(groups: Mapping[str, LimitedGroup], peaks: Mapping[str, Counter[str]]) -> None:
    """Raise ``peaks`` to the current values where these are higher."""
    for name, group in groups.items():
        now = group.counters()
        peaks[name] |= Counter(
            ring_bytes=held_bytes([pid for pid in group.pids() if role(pid) == "ring"]),
            held_bytes=now.held_bytes,
            kernel_bytes=now.kernel_bytes,
            swap_bytes=now.swap_bytes,
            oom_kills=now.oom_kills,
        )
