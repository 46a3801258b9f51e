"""``tools/bench http``: what a client gets of llama-server, and of primad with one, two, three ... processes of one machine.

Every server is the real one, as a user starts it, and asked over HTTP: primad's head and workers with the plan that they
make (all take part), llama-server of the same sources (``--server``, which ``tools/setup-llama server`` builds) with and
without repacked weights. All are loaded before the first run and take turns; one that nobody asks computes nothing. Each is
asked the same questions, of which no two begin alike, so that no kept prompt helps. Ratios are those to the best
llama-server of the same round.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from tools.lab.http_servers import HttpServer, head_here
from tools.lab.names import LabError
from tools.lab.plain_llama import prompt_of
from tools.lab.ports import free_port
from tools.lab.served import by_round

SERVER: Final = "llama-server"
PRIMAD: Final = "primad"
PROMPT_TOKENS: Final = 128
TOKENS: Final = 128
CONTEXT: Final = 1024
WANTED: Final = {1: 0.97, 2: 0.95, 3: 0.9}
"""Of the tokens a second of one answer, by processes."""

out = Console(highlight=False)


@dataclass(kw_only=True)
class Asked:
    """What a server gave with so many answers at once, round by round: tokens a second of all of them from the first token
    on, and the mean of what their first tokens were waited for, seconds."""

    model: str
    system: str
    processes: int
    streams: int
    tokens_per_s: list[float] = field(default_factory=list)
    first_s: list[float] = field(default_factory=list)


def measure(model: Path, options: argparse.Namespace) -> list[Asked]:
    """Every server and number of streams in turn, after a round that does not count. Raises ``LabError``."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="primad-http-")))
        found: list[tuple[Asked, HttpServer]] = []

        def add(system: str, processes: int, server: AbstractContextManager[HttpServer]) -> None:
            started = stack.enter_context(server)
            for streams in options.streams:
                asked = Asked(model=model.stem, system=system, processes=processes, streams=streams)
                found.append((asked, started))

        maximum = max(options.streams)
        add(SERVER, 1, _llama_server(options.server, model, folder, maximum))
        add(f"{SERVER} --no-repack", 1, _llama_server(options.server, model, folder, maximum, "--no-repack"))
        plan = ("--objective", options.objective, "--extra-buffers", options.extra_buffers)
        for count in options.devices:
            (folder / str(count)).mkdir()
            workers = [f"worker-{number}" for number in range(1, count)]
            head = ("--context", str(CONTEXT), *(["--use-all"] if workers else []), *plan)
            add(PRIMAD, count, head_here(model, folder / str(count), workers, head=head))
        found.sort(key=lambda each: options.streams.index(each[0].streams))
        for number in range(options.rounds + 1):
            for asked, server in found:
                tokens_per_s, first_s = _ask(server, asked.streams, number)
                if number:
                    asked.tokens_per_s.append(tokens_per_s)
                    asked.first_s.append(first_s)
        return [asked for asked, _ in found]


@contextmanager
def _llama_server(program: Path, model: Path, folder: Path, streams: int, *options: str) -> Iterator[HttpServer]:
    """llama-server with its defaults: threads, batches and flash attention are as it chooses them."""
    port = free_port()
    log = folder / f"llama-server-{port}.log"
    command = [str(program), "--model", str(model), "--port", str(port), "--parallel", str(streams)]
    command += ["--ctx-size", str(CONTEXT * streams), *options]
    with log.open("wb") as said:
        try:
            process = subprocess.Popen(command, stdout=said, stderr=subprocess.STDOUT)
        except OSError as exc:
            raise LabError(f"--server {program}: {exc.strerror}; `tools/setup-llama server` builds it") from exc
    try:
        server = HttpServer(process, port, model.stem)
        server.wait(log)
        yield server
    finally:
        process.terminate()
        process.wait(60)


def _ask(server: HttpServer, streams: int, number: int) -> tuple[float, float]:
    """Tokens a second of all answers together once the last of them began, and the mean of seconds to a first token."""
    with ThreadPoolExecutor(streams) as pool:
        begin_s = time.perf_counter()
        prompts = [[100 + 16 * number + place, *prompt_of(PROMPT_TOKENS - 1)] for place in range(streams)]
        times = list(pool.map(lambda prompt: server.stream(prompt, TOKENS, ignore_eos=True), prompts))
    since_s = max(each[0] for each in times)
    until_s = min(each[-1] for each in times)
    tokens = sum(sum(since_s < at_s <= until_s for at_s in each) for each in times)
    return tokens / (until_s - since_s), statistics.mean(each[0] - begin_s for each in times)


def ratios(rows: Sequence[Asked]) -> list[dict[str, Any]]:
    """primad's tokens a second, and the waits for its first token, of the best llama-server in the same round."""
    found = []
    for row in (row for row in rows if row.system == PRIMAD):
        beside = [
            each for each in rows if each.system != PRIMAD and (each.model, each.streams) == (row.model, row.streams)
        ]
        best = max(beside, key=lambda each: statistics.median(each.tokens_per_s))
        first = min(beside, key=lambda each: statistics.median(each.first_s))
        what = f"{row.model}: {row.processes} processes, {row.streams} answers at once, of the best {SERVER}"
        minimum = WANTED.get(row.processes) if row.streams == 1 else None
        values = by_round(row.tokens_per_s, best.tokens_per_s)
        found.append({"what": f"{what}: tokens/s", "value": statistics.median(values), "at_least": minimum})
        values = by_round(row.first_s, first.first_s)
        found.append({"what": f"{what}: time to the first token", "value": statistics.median(values), "at_least": None})
    return found


def show(rows: Sequence[Asked]) -> None:
    """Print them: a table a model."""
    for model in dict.fromkeys(row.model for row in rows):
        table = Table(title=f"{model}, over HTTP", title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
        table.add_column("server", no_wrap=True)
        for column in ("processes", "answers", "tok/s", "first ms"):
            table.add_column(column, justify="right", no_wrap=True)
        for row in (row for row in rows if row.model == model):
            rate, first_ms = statistics.median(row.tokens_per_s), 1e3 * statistics.median(row.first_s)
            table.add_row(row.system, str(row.processes), str(row.streams), f"{rate:.1f}", f"{first_ms:.0f}")
        out.print(table)


def add_bench(benches: argparse._SubParsersAction[argparse.ArgumentParser]) -> argparse.ArgumentParser:
    """Adds ``http`` to the command line."""
    one = benches.add_parser("http", help="primad's server beside llama-server, as clients see them")
    one.add_argument("--model", type=Path, action="append", help="GGUF file (default: SmolLM2 and a synthetic 1B)")
    one.add_argument("--server", type=Path, required=True, help="llama-server (tools/setup-llama server builds it)")
    one.add_argument("--devices", type=int, nargs="+", default=[1, 2, 3], help="processes of a ring")
    one.add_argument("--streams", type=int, nargs="+", default=[1, 4], help="answers at once")
    one.add_argument("--objective", default="balanced", help="what primad's plans make small")
    one.add_argument("--extra-buffers", default="auto", help="whether primad has repacked weights: auto, on or off")
    one.add_argument("--rounds", type=int, default=5)
    one.add_argument("--json", help="also write the figures to this file")
    return one
