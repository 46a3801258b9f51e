"""``tools/bench http``: what a client gets of llama-server, and of primad with one, two, three ... processes of one machine.

Every server is the real one, as a user starts it, and asked over HTTP: primad's head and workers with the plan that they
make (all take part), llama-server of the same sources (``--server``, which ``tools/setup-llama server`` builds) with and
without repacked weights. All are loaded before the first run and take turns; one that nobody asks computes nothing. Each is
asked the same questions, of which no two begin alike, so that no kept prompt helps. Ratios are those to the best
llama-server of the same round.
"""

from __future__ import annotations

import argparse
import http.client
import json
import secrets
import statistics
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from primad.head.options import model_id
from tools.bench_api import free_port, wait_until_serving
from tools.demo import daemon
from tools.lab.names import LabError
from tools.lab.plain_llama import prompt_of

SERVER: Final = "llama-server"
PRIMAD: Final = "primad"
PROMPT_TOKENS: Final = 128
TOKENS: Final = 128
CONTEXT: Final = 1024
TIMEOUT_S: Final = 600.0
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


@dataclass(frozen=True, slots=True)
class _Server:
    system: str
    processes: int
    port: int
    name: str


def measure(model: Path, options: argparse.Namespace) -> list[Asked]:
    """Every server and number of streams in turn, after a round that does not count. Raises ``LabError``."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="primad-http-")))
        servers = [
            stack.enter_context(_llama_server(options.server, model, folder, repack, max(options.streams)))
            for repack in (True, False)
        ]
        servers += [
            stack.enter_context(_primad(model, folder / str(count), count, options)) for count in options.devices
        ]
        found = [
            (Asked(model=model.stem, system=each.system, processes=each.processes, streams=streams), each)
            for streams in options.streams
            for each in servers
        ]
        for number in range(options.rounds + 1):
            for asked, server in found:
                tokens_per_s, first_s = _ask(server, asked.streams, number)
                if number:
                    asked.tokens_per_s.append(tokens_per_s)
                    asked.first_s.append(first_s)
        return [asked for asked, _ in found]


@contextmanager
def _llama_server(program: Path, model: Path, folder: Path, repack: bool, streams: int) -> Iterator[_Server]:
    """llama-server with its defaults: threads, batches and flash attention are as it chooses them."""
    port = free_port()
    log = folder / f"llama-server-{port}.log"
    command = [str(program), "--model", str(model), "--port", str(port), "--parallel", str(streams)]
    command += ["--ctx-size", str(CONTEXT * streams), *([] if repack else ["--no-repack"])]
    with log.open("wb") as said:
        try:
            process = subprocess.Popen(command, stdout=said, stderr=subprocess.STDOUT)
        except OSError as exc:
            raise LabError(f"--server {program}: {exc.strerror}; `tools/setup-llama server` builds it") from exc
    try:
        wait_until_serving(process, port, log)
        yield _Server(SERVER if repack else f"{SERVER} --no-repack", 1, port, model.stem)
    finally:
        process.terminate()
        process.wait(60)


@contextmanager
def _primad(model: Path, folder: Path, processes: int, options: argparse.Namespace) -> Iterator[_Server]:
    """A head and workers, each with a home of its own, in a cluster of their own."""
    folder.mkdir()
    port, cluster = free_port(), f"bench-{secrets.token_hex(4)}"
    with ExitStack() as stack:
        for number in range(1, processes):
            name = f"worker-{number}"
            said = stack.enter_context((folder / f"{name}.log").open("wb"))
            home = ["--home", str(folder / name), "--name", name, "--cluster", cluster]
            stack.enter_context(daemon(["join", *home], folder, stderr=said))
        said = stack.enter_context((folder / "head.log").open("wb"))
        home = ["--home", str(folder / "head"), "--name", "head", "--cluster", cluster]
        others = ["--wait", str(processes - 1), "--wait-timeout", "300", "--use-all"] if processes > 1 else ["--alone"]
        serve = ["serve", "--model", str(model), "--port", str(port), "--context", str(CONTEXT), *home, *others]
        serve += ["--objective", options.objective, "--extra-buffers", options.extra_buffers]
        process = stack.enter_context(daemon(serve, folder, stderr=said))
        wait_until_serving(process, port, folder / "head.log")
        yield _Server(PRIMAD, processes, port, model_id(model))


def _ask(server: _Server, streams: int, number: int) -> tuple[float, float]:
    """Tokens a second of all answers together once the last of them began, and the mean of seconds to a first token."""
    with ThreadPoolExecutor(streams) as pool:
        begin_s = time.perf_counter()
        times = list(pool.map(lambda place: _stream(server, 100 + 16 * number + place), range(streams)))
    since_s = max(each[0] for each in times)
    until_s = min(each[-1] for each in times)
    tokens = sum(sum(since_s < at_s <= until_s for at_s in each) for each in times)
    return tokens / (until_s - since_s), statistics.mean(each[0] - begin_s for each in times)


def _stream(server: _Server, begins: int) -> list[float]:
    """When each event of one answer came."""
    asked = {
        "model": server.name,
        "prompt": [begins, *prompt_of(PROMPT_TOKENS - 1)],
        "max_tokens": TOKENS,
        "temperature": 0,
        "stream": True,
        "ignore_eos": True,
    }
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=TIMEOUT_S)
    try:
        connection.request("POST", "/v1/completions", json.dumps(asked), {"Content-Type": "application/json"})
        answer = connection.getresponse()
        if answer.status != 200:
            raise LabError(f"{server.system} answers {answer.status}: {answer.read(300).decode(errors='replace')}")
        times = [time.perf_counter() for line in answer if line.startswith(b"data: {")]
    finally:
        connection.close()
    return times[:-1]  # the last one only ends the answer


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
        least = WANTED.get(row.processes) if row.streams == 1 else None
        values = _by_round(row.tokens_per_s, best.tokens_per_s)
        found.append({"what": f"{what}: tokens/s", "value": statistics.median(values), "at_least": least})
        values = _by_round(row.first_s, first.first_s)
        found.append({"what": f"{what}: time to the first token", "value": statistics.median(values), "at_least": None})
    return found


def _by_round(ours: Sequence[float], theirs: Sequence[float]) -> list[float]:
    return [a / b for a, b in zip(ours, theirs, strict=True)]


def show(rows: Sequence[Asked], found: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Print them; plain data for ``--json``."""
    for model in dict.fromkeys(row.model for row in rows):
        table = Table(title=f"{model}, over HTTP", title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
        table.add_column("server", no_wrap=True)
        for column in ("processes", "answers", "tok/s", "first ms"):
            table.add_column(column, justify="right", no_wrap=True)
        for row in (row for row in rows if row.model == model):
            rate, first_ms = statistics.median(row.tokens_per_s), 1e3 * statistics.median(row.first_s)
            table.add_row(row.system, str(row.processes), str(row.streams), f"{rate:.1f}", f"{first_ms:.0f}")
        out.print(table)
    for each in found:
        least = "" if each["at_least"] is None else f" (wanted: at least {each['at_least']:g})"
        out.print(f"{each['what']}: {each['value']:.2f}{least}")
    return [*map(asdict, rows), *map(dict, found)]


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
