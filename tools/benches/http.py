"""``http``: what a client gets of llama-server, and of primad with one, two, three ... processes of one machine.

Every server is the real one, as a user starts it, and asked over HTTP: primad's head and workers with the plan that they
make (all take part), llama-server of the same sources (``--server``, which ``tools/setup-llama server`` builds) with and
without repacked weights. All are loaded before the first run and take turns; one that nobody asks computes nothing. Each is
asked the same questions, of which no two begin alike, so that no kept prompt helps. Ratios are those to the best
llama-server of the same round.
"""

from __future__ import annotations

import statistics
import subprocess
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Final

from tools.lab.figures import Figure, Row, by_round
from tools.lab.harness import SMALL, Bench, Run, flag, in_thread
from tools.lab.http_servers import HttpServer, head_here
from tools.lab.names import LabError
from tools.lab.plain_llama import prompt_of
from tools.lab.ports import free_port

SERVER: Final = "llama-server"
PRIMAD: Final = "primad"
PROMPT_TOKENS: Final = 128
TOKENS: Final = 128
CONTEXT: Final = 1024
WANTED: Final = {1: 0.97, 2: 0.95, 3: 0.9}
"""Of the tokens a second of one answer, by processes."""


class Asked(Row):
    """What a server gave with so many answers at once, round by round: tokens a second of all of them from the first token
    on, and the mean of what their first tokens were waited for, seconds."""

    columns = "system=server, processes, streams=answers, tokens_per_s=tok/s:.1f, first_s=first ms:ms"

    def heading(self) -> str:
        return f"{self.model}, over HTTP"

    @classmethod
    def figures(cls, rows: Sequence[Asked]) -> Iterator[Figure]:
        """primad's tokens a second, and the waits for its first token, of the best llama-server in the same round."""
        for row in (row for row in rows if row.system == PRIMAD):
            theirs = [each for each in rows if each.system != PRIMAD]
            beside = [each for each in theirs if (each.model, each.streams) == (row.model, row.streams)]
            best = max(beside, key=lambda each: statistics.median(each.tokens_per_s))
            first = min(beside, key=lambda each: statistics.median(each.first_s))
            what = f"{row.model}: {row.processes} processes, {row.streams} answers at once, of the best {SERVER}"
            rates = tuple(by_round(row.tokens_per_s, best.tokens_per_s))
            minimum = WANTED.get(row.processes) if row.streams == 1 else None
            yield Figure(what=f"{what}: tokens/s", values=rates, at_least=minimum)
            yield Figure(what=f"{what}: time to the first token", values=tuple(by_round(row.first_s, first.first_s)))


async def measure(run: Run, model: Path) -> None:
    """Every server and number of streams in turn."""
    options, folder, maximum = run.options, run.folder(), max(run.options.streams)
    servers: dict[tuple[str, int], HttpServer] = {}
    for name, more in ((SERVER, ()), (f"{SERVER} --no-repack", ("--no-repack",))):
        servers[name, 1] = run.stack.enter_context(_llama_server(options.server, model, folder, maximum, *more))
    head = ["--context", str(CONTEXT), "--objective", options.objective, "--extra-buffers", options.extra_buffers]
    for count in options.devices:
        workers = [f"worker-{place}" for place in range(1, count)]
        all_take_part = ["--use-all"] if workers else []
        started = head_here(model, run.homes(), workers, head=[*head, *all_take_part])
        servers[PRIMAD, count] = run.stack.enter_context(started)
    turns = await run.alternate(
        {
            (*system, streams): in_thread(partial(_ask, server, streams))
            for streams in options.streams
            for system, server in servers.items()
        }
    )
    for (system, count, streams), its in turns.items():
        rates, first_s = map(list, zip(*its, strict=True))
        what = {"model": model.stem, "system": system, "processes": count, "streams": streams}
        run.add(Asked(**what, tokens_per_s=rates, first_s=first_s))


@contextmanager
def _llama_server(program: Path, model: Path, folder: Path, streams: int, *options: str) -> Iterator[HttpServer]:
    """llama-server with its defaults: threads, batches and flash attention are as it chooses them."""
    port = free_port()
    log = folder / f"llama-server-{port}.log"
    command = [str(program), "--model", str(model), "--port", str(port), "--parallel", str(streams)]
    command += ["--ctx-size", str(CONTEXT * streams), *options]
    with log.open("wb") as printed:
        try:
            process = subprocess.Popen(command, stdout=printed, stderr=subprocess.STDOUT)
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


BENCH: Final = Bench(
    help="primad's server beside llama-server, as clients see them",
    measure=measure,
    models=(SMALL, "1b-q4k"),
    quick={"rounds": 1},
    quick_models=(SMALL,),
    all_quick=None,
    flags=(
        flag("--server", type=Path, required=True, help="llama-server (tools/setup-llama server builds it)"),
        flag("--devices", type=int, nargs="+", default=[1, 2, 3], help="processes of a ring"),
        flag("--streams", type=int, nargs="+", default=[1, 4], help="answers at once"),
        flag("--objective", default="balanced", help="what primad's plans minimise"),
        flag("--extra-buffers", default="auto", help="whether primad has repacked weights: auto, on or off"),
    ),
)
