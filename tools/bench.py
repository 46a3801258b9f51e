"""Speed and memory, measured side by side in one run: alternating runs, medians, ratios.

    tools/bench ring [--json FILE] [--quick] [--model FILE.gguf ...] [--gpu]
    tools/bench memory [--json FILE] [--quick] [--model FILE.gguf ... | --preset NAME ...] [--limits SHARE ...]
                       [--rounds | --ring | --pressure | --endure]
    tools/bench predict [--json FILE] [--rounds N] [--model FILE.gguf ...] [--limited FILE.gguf] [--limits SHARE ...]
    tools/bench solve [--json FILE] [--sizes N ...]
    tools/bench paper [--json FILE] [--fleets N]
    tools/bench published [--json FILE] [--figures FILE] [--write]
    tools/bench api [--json FILE] [--rounds N] [--model FILE.gguf]
    tools/bench copies [--json FILE] [--rounds N] [--model FILE.gguf]
    tools/bench experts [--json FILE] [--rounds N] [--experts N ...] [--transformers PYTHON]
    tools/bench speculate [--json FILE] [--rounds N] [--model FILE.gguf ...] [--case CASE ...] [--way WAY ...]
                          [--windows N ...] [--latency-ms MS ...] [--target f16]
    tools/bench serve [--json FILE] [--rounds N] [--model FILE.gguf ...] [--devices N ...] [--rows N ...] [--streams N ...]
                      [--cpus SHARE | --beside [--rpc FILE]]
    tools/bench serve --case CASE ... [--json FILE] [--model FILE.gguf ...] [--devices N ...]
    tools/bench http --server FILE [--json FILE] [--rounds N] [--model FILE.gguf ...] [--devices N ...] [--streams N ...]
    tools/bench all [--quick] [--only BENCH ...] [--folder FOLDER] [--keep] [--report]

``ring``: plain llama.cpp (low-level llama-cpp-python, one process) against primad's ring of 1, 2, 3 and 4 local processes.
Plain runs with extra buffers off and on, and with its threads waiting as by default and as primad has them wait (bound to
a core each); decode and prefill are each compared with the best of the four. All processes are loaded before the first run
and take turns, so that whatever else the machine does disturbs all of them alike. With ``--gpu`` all layers and the output
matrix of all of them are on the first GPU that llama.cpp sees. ``memory``: see ``bench_memory.py``;
``predict``, ``solve`` and ``paper``: see ``bench_solver.py``; ``published``: ``bench_published.py``; ``api``:
``bench_api.py``; ``copies``: ``bench_copies.py``; ``experts``: ``bench_experts.py``; ``speculate``: ``bench_speculate.py``;
``serve``: ``bench_serve.py`` and ``bench_together.py``; ``http``: ``bench_http.py``; ``all``: ``lab/report.py``.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import platform
import signal
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack, ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import psutil
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))


from primad.engine.binding import hear_llama  # noqa: E402
from primad.errors import PrimadError  # noqa: E402
from primad.gguf.model import open_model  # noqa: E402
from primad.gguf.profile import model_profile  # noqa: E402
from primad.profiler.effort import Effort  # noqa: E402
from primad.profiler.gpus import list_gpus  # noqa: E402
from primad.profiler.processors import measure_cpu  # noqa: E402
from primad.system.children.spawn import environment  # noqa: E402
from tools import (  # noqa: E402
    bench_api,
    bench_copies,
    bench_experts,
    bench_http,
    bench_limited,
    bench_memory,
    bench_published,
    bench_serve,
    bench_solver,
    bench_speculate,
    bench_together,
)
from tools.lab import LabError, drafted, report  # noqa: E402
from tools.lab.energy import Gauge, Reading, gauge  # noqa: E402
from tools.lab.local_ring import LocalRing, even_windows, types_of  # noqa: E402
from tools.lab.plain_child import PlainChild  # noqa: E402
from tools.lab.plain_llama import PROMPT  # noqa: E402
from tools.lab.served import Served, by_round, wanted  # noqa: E402
from tools.synthetic import borrowed, model_path  # noqa: E402
from tools.synthetic import write as synthesise  # noqa: E402

SMALL = ROOT / ".models" / "smollm2-135m-q4_1.gguf"
MIDDLE = ROOT / ".models" / "gemma3-270m-q4_k_m.gguf"
LARGE = ROOT / ".models" / "synthetic-1b-q4_k.gguf"
LARGER = ROOT / ".models" / "synthetic-3b-q4_k.gguf"
DEEP = ROOT / ".models" / "synthetic-deep-q4_k.gguf"
LARGEST = ROOT / ".models" / "synthetic-8b-q4_k.gguf"
CONTEXT = 1024
PREFILL_ROWS = 512
DECODE_TOKENS = 96
DECODE_AFTER = 40
BUSY_SHARE = 0.1

out = Console(highlight=False)


@dataclass
class Series:
    """Tokens per second, run by run."""

    decode: list[float] = field(default_factory=list)
    prefill: list[float] = field(default_factory=list)
    joules: list[float] = field(default_factory=list)
    """Of each token; that of a ring has its short prompt with it."""

    def add_joules(self, energy: Gauge | None, before: Reading | None, tokens: int) -> None:
        """Count what was taken since ``before``, for so many tokens."""
        if energy is not None and before is not None and tokens:
            joules = energy.joules(before, energy.read())
            self.joules += [] if joules is None else [joules / tokens]


@dataclass
class Row:
    """One line of the result; rates in tokens/s, ratios to plain llama.cpp at its best, by run and their medians.

    ``joules_per_token`` is what the processor, or the whole machine, takes while answers are written; None where it cannot
    be read.
    """

    model: str
    system: str
    processes: int
    decode_tokens_per_s: float
    prefill_tokens_per_s: float
    decode_ratio: float | None
    prefill_ratio: float | None
    decode_ratios: list[float]
    prefill_ratios: list[float]
    joules_per_token: float | None
    hop_median_us: float | None
    hop_p99_us: float | None
    rss_bytes: list[int]
    private_bytes: list[int]
    extra_buffers: list[bool]


async def bench_model(model: Path, devices: Sequence[int], runs: int, threads: int, gpu: str) -> list[Row]:
    profile = model_profile(open_model(model))
    layers = len(profile.layers)
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="primad-bench-")))
        cpu = await asyncio.to_thread(measure_cpu, folder, threads, lambda _: None, Effort(types=types_of(profile)))
        settings = [
            (f"extra buffers {extra}, threads {waiting}", extra, environ)
            for extra in ("off", "on")
            for waiting, environ in (("default", os.environ), ("bound", environment(os.environ, threads, 0)))
        ]
        plain = {
            setting: PlainChild(model, threads, extra, environ, context=CONTEXT, gpu_layers=layers + 1 if gpu else 0)
            for setting, extra, environ in ([("on the GPU", "off", os.environ)] if gpu else settings)
        }
        for child in plain.values():
            stack.callback(child.close)
        rings: dict[int, LocalRing] = {}
        for count in devices:
            ring = LocalRing(
                model,
                even_windows(layers, count),
                context=CONTEXT,
                threads=threads,
                cpu=cpu,
                folder=folder / str(count),
                gpu=gpu,
            )
            rings[count] = await stack.enter_async_context(ring)
        names: list[str | int] = [*plain, *rings]
        series = {name: Series() for name in names}
        energy = gauge()
        for run in range(runs + 1):  # the first warms up and is not counted
            for setting, child in plain.items():
                before = energy.read() if energy else None
                decode = await asyncio.to_thread(child.ask, decode=DECODE_TOKENS, after=DECODE_AFTER)
                series[setting].add_joules(energy, before, DECODE_TOKENS)
                prefill = await asyncio.to_thread(child.ask, prefill=PREFILL_ROWS)
                if run:
                    series[setting].decode.append(DECODE_TOKENS / decode)
                    series[setting].prefill.append(PREFILL_ROWS / prefill)
            for count, ring in rings.items():
                before = energy.read() if energy else None
                sampled, finished = await ring.generate(PROMPT[:DECODE_AFTER], DECODE_TOKENS + 1)
                series[count].add_joules(energy, before, len(sampled))
                rate = (len(sampled) - 1) / finished.decode_s if len(sampled) > 1 else math.nan
                _, prompted = await ring.generate(PROMPT, 1)
                if run:
                    series[count].decode.append(rate)
                    series[count].prefill.append(PREFILL_ROWS / prompted.prompt_s)
        return await _rows(model, plain, rings, series)


async def _rows(
    model: Path, plain: dict[str, PlainChild], rings: dict[int, LocalRing], series: dict[str | int, Series]
) -> list[Row]:
    best_decode = max(plain, key=lambda setting: statistics.median(series[setting].decode))
    best_prefill = max(plain, key=lambda setting: statistics.median(series[setting].prefill))
    rows = [
        Row(
            model=model.stem,
            system=f"plain llama.cpp, {setting}",
            processes=1,
            decode_tokens_per_s=statistics.median(series[setting].decode),
            prefill_tokens_per_s=statistics.median(series[setting].prefill),
            decode_ratio=None,
            prefill_ratio=None,
            decode_ratios=[],
            prefill_ratios=[],
            joules_per_token=_median(series[setting].joules),
            hop_median_us=None,
            hop_p99_us=None,
            rss_bytes=[child.rss_bytes],
            private_bytes=[],
            extra_buffers=["buffers on" in setting],
        )
        for setting, child in plain.items()
    ]
    for count, ring in rings.items():
        statuses = [await ring.status(name) for name in ring.plan.devices]
        hops = sorted(hop for status in statuses for hop in status.hop_s)
        decoded = by_round(series[count].decode, series[best_decode].decode)
        prefilled = by_round(series[count].prefill, series[best_prefill].prefill)
        rows.append(
            Row(
                model=model.stem,
                system="primad",
                processes=count,
                decode_tokens_per_s=statistics.median(series[count].decode),
                prefill_tokens_per_s=statistics.median(series[count].prefill),
                decode_ratio=_median(decoded),
                prefill_ratio=_median(prefilled),
                decode_ratios=decoded,
                prefill_ratios=prefilled,
                joules_per_token=_median(series[count].joules),
                hop_median_us=statistics.median(hops) * 1e6 if hops else None,
                hop_p99_us=hops[len(hops) * 99 // 100] * 1e6 if hops else None,
                rss_bytes=[status.rss_bytes for status in statuses],
                private_bytes=[status.private_bytes for status in statuses],
                extra_buffers=ring.extra_buffers,
            )
        )
    return rows


def _median(figures: Sequence[float]) -> float | None:
    return statistics.median(figures) if figures else None


def show(rows: Sequence[Row]) -> None:
    """Print the result: a table a model, which a terminal of 80 columns holds."""
    for model in dict.fromkeys(row.model for row in rows):
        table = Table(title=model, title_justify="left", box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
        table.add_column("system", no_wrap=True)
        for column in (
            "n",
            "decode\ntok/s",
            "ratio",
            "prefill\ntok/s",
            "ratio",
            "hop\nus",
            "p99\nus",
            "J a\ntoken",
            "all MB\n(own)",
            "extra",
        ):
            table.add_column(column, justify="right", no_wrap=True)
        for row in rows:
            if row.model == model:
                table.add_row(*_cells(row))
        out.print(table)


def _cells(row: Row) -> list[str]:
    def shown(figure: float | None, digits: int) -> str:
        return "" if figure is None else f"{figure:.{digits}f}"

    private = f"/{sum(row.private_bytes) / 1e6:.0f}" if row.private_bytes else ""
    return [
        row.system.replace("llama.cpp, extra buffers ", "").replace("threads ", ""),
        str(row.processes),
        shown(row.decode_tokens_per_s, 1),
        shown(row.decode_ratio, 3),
        shown(row.prefill_tokens_per_s, 0),
        shown(row.prefill_ratio, 3),
        shown(row.hop_median_us, 0),
        shown(row.hop_p99_us, 0),
        shown(row.joules_per_token, 2),
        f"{sum(row.rss_bytes) / 1e6:.0f}{private}",
        f"{sum(row.extra_buffers)}/{len(row.extra_buffers)}",
    ]


def machine() -> dict[str, Any]:
    """What the figures were measured on, and whether it was idle before."""
    return {
        "system": platform.platform(),
        "machine": platform.machine(),
        "cores": psutil.cpu_count(logical=False),
        "ram_bytes": psutil.virtual_memory().total,
        "busy_share_before": psutil.cpu_percent(interval=2.0) / 100,
    }


def warn_if_busy(facts: dict[str, Any]) -> None:
    """Say that figures of a busy machine mean little."""
    if facts["busy_share_before"] > BUSY_SHARE:
        out.print(f"warning: the machine is {facts['busy_share_before']:.0%} busy; the figures will not mean much")


def write_json(path: str | None, bench: str, facts: dict[str, Any], rows: list[dict[str, Any]]) -> None:
    """Keep the figures."""
    if path:
        content = {"bench": bench, "machine": facts, "rows": rows}
        Path(path).write_text(json.dumps(content, indent=2) + "\n")


def predict(options: argparse.Namespace) -> int:
    models, limited = options.model or [], options.limited
    if not models and limited is None:
        models = [SMALL, MIDDLE, synthesise(LARGE, "1b-q4k")]
        limited = synthesise(LARGER, "3b-q4k")
    for path in [*models, *([] if limited is None else [limited])]:
        open_model(path)  # what is no model is said before minutes were measured
    facts = machine()
    warn_if_busy(facts)
    rows = bench_solver.predict(models, options.processes, options.rounds, options.threads)
    try:
        if limited is not None:
            rows += bench_limited.predict(limited, options.limits, options.processes, options.rounds, options.threads)
    except LabError as exc:
        out.print(f"tools/bench predict: error: {exc}")
    bench_solver.show_predicted(rows)
    write_json(options.json, "predict", facts, bench_solver.as_rows(rows))
    return 0


def api(options: argparse.Namespace) -> int:
    facts = machine()
    warn_if_busy(facts)
    rows = bench_api.show(bench_api.measure(options.model, options.rounds, options.threads))
    write_json(options.json, "api", facts, rows)
    return 0


def copies(options: argparse.Namespace) -> int:
    facts = machine()
    warn_if_busy(facts)
    rows = bench_copies.show(bench_copies.measure(options.model, options.rounds, options.threads))
    write_json(options.json, "copies", facts, rows)
    return 0


def speculate(options: argparse.Namespace) -> int:
    facts = machine()
    warn_if_busy(facts)
    try:
        rows = [
            row
            for model in options.model or [SMALL]
            for case, devices, latency_s in bench_speculate.rings_of(options)
            for row in asyncio.run(bench_speculate.measure(case, devices, latency_s, model, options))
        ]
        counted = [
            asyncio.run(bench_speculate.differing(model, options))
            for model in options.model or [SMALL]
            if bench_speculate.DIFFERING in options.case
        ]
    except LabError as exc:
        out.print(f"tools/bench speculate: error: {exc}")
        return 1
    drafted.show(rows)
    for each in counted:
        out.print(str(each))
    write_json(options.json, "speculate", facts, [*drafted.plain_data(rows), *map(asdict, counted)])
    return 0


def experts(options: argparse.Namespace) -> int:
    facts = machine()
    warn_if_busy(facts)
    try:
        rows = bench_experts.show(asyncio.run(bench_experts.measure(options)))
    except LabError as exc:
        out.print(f"tools/bench experts: error: {exc}")
        return 1
    write_json(options.json, "experts", facts, rows)
    return 0


def solve(options: argparse.Namespace) -> int:
    facts = machine()
    warn_if_busy(facts)
    rows = bench_solver.solve_times(options.sizes, options.fleets, options.layers, options.multiples)
    write_json(options.json, "solve", facts, bench_solver.as_rows(rows))
    return 0


@contextmanager
def memory_models(options: argparse.Namespace) -> Iterator[list[Path]]:
    """The models of ``tools/bench memory``; those of ``--preset`` only for as long as they are needed."""
    with ExitStack() as stack:
        if options.model:
            yield options.model
        elif options.preset:
            paths = {preset: model_path(preset, folder=options.folder) for preset in options.preset}
            yield [stack.enter_context(borrowed(path, name, keep=options.keep)) for name, path in paths.items()]
        elif options.pressure:
            yield []  # made to measure
        elif options.rounds:
            yield [synthesise(DEEP, "deep-q4k")]
        elif options.ring or options.quick or options.endure:
            yield [synthesise(LARGER, "3b-q4k")]
        else:
            yield [synthesise(LARGER, "3b-q4k"), synthesise(LARGEST, "8b-q4k")]


def memory(options: argparse.Namespace) -> int:
    facts = machine()
    warn_if_busy(facts)

    def keep(rows: list[dict[str, Any]]) -> None:
        write_json(options.json, "memory", facts, rows)

    try:
        with memory_models(options) as models:
            rows = bench_memory.bench(options, models, keep)
    except LabError as exc:
        out.print(f"tools/bench memory: error: {exc}")
        return 1
    keep(rows)
    return int(any(row.get("broken") for row in rows))


def models_in_memory(options: argparse.Namespace) -> list[Path]:
    """Those asked for, or SmolLM2 and a synthetic 1B."""
    return options.model or [SMALL, synthesise(LARGE, "1b-q4k")]


def ring(options: argparse.Namespace) -> int:
    gpus = list_gpus() if options.gpu else []
    if isinstance(gpus, str) or (options.gpu and not gpus):
        out.print(f"tools/bench ring: error: {gpus or 'llama.cpp sees no GPU; `primad doctor` says what to install'}")
        return 1
    models = models_in_memory(options)
    facts = machine()
    warn_if_busy(facts)
    gpu, runs = gpus[0].id if gpus else "", 3 if options.quick else options.runs
    rows: list[Row] = []
    for model in models:
        rows += asyncio.run(bench_model(model, options.devices, runs, options.threads, gpu))
    show(rows)
    write_json(options.json, "ring", facts | {"runs": options.runs}, [asdict(row) for row in rows])
    return 0


def serve(options: argparse.Namespace) -> int:
    models = models_in_memory(options)
    options.devices = options.devices or ([1, 2, 3] if options.beside else [1, 2])
    facts = machine()
    warn_if_busy(facts)
    if options.case:
        figures = [
            {"model": model.stem, "devices": count, **asyncio.run(bench_together.CASES[case](model, count))}
            for case in options.case
            for model in models
            for count in options.devices
        ]
        bench_together.show(figures)
        write_json(options.json, "serve", facts, figures)
        return 0
    rows: list[Served] = []
    try:
        for model in models:
            rows += asyncio.run(bench_serve.bench_streams(model, options))
    except LabError as exc:
        out.print(f"tools/bench serve: error: {exc}")
        return 1
    ratios = wanted(rows)
    bench_serve.show(rows, bench_serve.title(options))
    bench_serve.show_wanted(ratios)
    write_json(options.json, "serve", facts, bench_serve.plain_data(rows, ratios))
    return 0


def http(options: argparse.Namespace) -> int:
    facts = machine()
    warn_if_busy(facts)
    try:
        rows = [row for model in models_in_memory(options) for row in bench_http.measure(model, options)]
    except LabError as exc:
        out.print(f"tools/bench http: error: {exc}")
        return 1
    ratios = bench_http.ratios(rows)
    bench_http.show(rows)
    bench_serve.show_wanted(ratios)
    write_json(options.json, "http", facts, [*map(asdict, rows), *ratios])
    return 0


def paper(options: argparse.Namespace) -> int:
    rows = bench_solver.beside_paper(options.fleets)
    write_json(options.json, "paper", {}, bench_solver.as_rows(rows))
    return 0


def published(options: argparse.Namespace) -> int:
    rows = bench_published.measure(options, out)
    write_json(options.json, "published", {}, [msgspec.to_builtins(row) for row in rows])
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(prog="tools/bench", description="Speed and memory, measured side by side.")
    benches = parser.add_subparsers(dest="bench", required=True)
    one = benches.add_parser("ring", help="plain llama.cpp against rings of local processes")
    one.add_argument("--model", type=Path, action="append", help="GGUF file (default: SmolLM2 and a synthetic 1B)")
    one.add_argument("--devices", type=int, nargs="+", default=[1, 2, 3, 4], help="ring sizes")
    one.add_argument("--runs", type=int, default=9, help="counted runs of each (default: 9)")
    one.add_argument("--quick", action="store_true", help="three runs only")
    one.add_argument("--gpu", action="store_true", help="all layers on the first GPU that llama.cpp sees")
    one.add_argument("--threads", type=int, default=psutil.cpu_count(logical=False) or 1, help="threads a process")
    one.add_argument("--json", help="also write the figures to this file")
    one.set_defaults(run=ring)
    bench_memory.add_bench(benches, psutil.cpu_count(logical=False) or 1).set_defaults(run=memory)
    bench_solver.add_benches(benches)
    bench_api.add_bench(benches, SMALL)
    bench_copies.add_bench(benches, SMALL)
    bench_experts.add_bench(benches, psutil.cpu_count(logical=False) or 1)
    benches.choices["experts"].set_defaults(run=experts)
    bench_speculate.add_bench(benches, SMALL)
    benches.choices["speculate"].set_defaults(run=speculate)
    bench_serve.add_bench(benches)
    benches.choices["serve"].set_defaults(run=serve)
    benches.choices["api"].set_defaults(run=api)
    benches.choices["copies"].set_defaults(run=copies)
    benches.choices["predict"].set_defaults(run=predict)
    benches.choices["solve"].set_defaults(run=solve)
    benches.choices["paper"].set_defaults(run=paper)
    bench_published.add_bench(benches).set_defaults(run=published)
    bench_http.add_bench(benches).set_defaults(run=http)
    report.add_bench(benches)
    options = parser.parse_args()
    if options.bench == "serve" and options.cpus is not None and options.beside:
        parser.error("--cpus limits primad's devices alone, so it does not go with --beside")
    hear_llama()  # else llama_cpp's own logger prints what was loaded among the figures
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # what was written and started is taken away again
    try:
        return int(options.run(options))
    except PrimadError as exc:
        print(f"tools/bench {options.bench}: error: {exc}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
