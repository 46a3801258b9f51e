"""``http``: what a client gets from llama-server, and from primad with one, two, three ... processes of one machine.

Every server is the real one, as a user starts it, and gets requests over HTTP: primad's head and workers with their own
plan (all take part), and llama-server of the same sources (``--server``, which ``tools/setup-llama server`` builds).
Both run with and without extra buffers (repacked weights); primad also with its own choice. All are loaded before the
first run and take turns; one without requests computes nothing. Each gets the same prompts, no two of which begin
alike, so that no cached prefix helps. Ratios are to llama-server with the same buffers in the same round; a system that
chose its own buffers is judged by the time of whole requests.
"""

from __future__ import annotations

import itertools
import statistics
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final

from tools.lab.daemons import free_port
from tools.lab.harness import SMALL, Bench, Run, flag, in_thread
from tools.lab.http_servers import HttpServer
from tools.lab.names import LabError
from tools.lab.plain_llama import prompt_of
from tools.lab.served import AUTO, PRIMAD, Served

SERVER: Final = "llama-server"
PROMPT_TOKENS: Final = 128
TOKENS: Final = 128
CONTEXT: Final = 1024


async def measure(run: Run, model: Path) -> None:
    """Measure every server and number of streams in turn."""
    options, folder, maximum = run.options, run.folder(), max(run.options.streams)
    servers: dict[tuple[str, str, int], HttpServer] = {}
    for buffers, more in (("on", ()), ("off", ("--no-repack",))):
        servers[SERVER, buffers, 1] = run.stack.enter_context(
            _llama_server(options.server, model, folder, maximum, *more)
        )
    head = ["--context", str(CONTEXT), "--objective", options.objective]
    head += ["--prompt", str(PROMPT_TOKENS), "--answer", str(TOKENS), "--extra-buffers"]
    for buffers, count in itertools.product(options.extra_buffers, options.devices):
        servers[PRIMAD, buffers, count] = run.head(model, count, *head, buffers)
    turns = await run.alternate(
        {
            (*system, streams): in_thread(partial(_ask, server, streams))
            for streams in options.streams
            for system, server in servers.items()
        }
    )
    for (system, buffers, count, streams), its in turns.items():
        rates, first_s, whole_s = map(list, zip(*its, strict=True))
        what: dict[str, Any] = {"model": model.stem, "system": system, "devices": count, "streams": streams}
        run.add(Served(**what, extra_buffers=buffers, tokens_per_s=rates, first_s=first_s, whole_s=whole_s))


@contextmanager
def _llama_server(program: Path, model: Path, folder: Path, streams: int, *options: str) -> Iterator[HttpServer]:
    """Start llama-server with its defaults: it chooses threads, batches and flash attention."""
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


def _ask(server: HttpServer, streams: int, number: int) -> tuple[float, float, float]:
    """Return the tokens/s of all completions together, after the last of them began, and the mean seconds to a first
    and to a last token."""
    prompts = [[100 + 16 * number + place, *prompt_of(PROMPT_TOKENS - 1)] for place in range(streams)]
    begin_s = time.perf_counter()
    times = server.together(prompts, TOKENS, ignore_eos=True)
    since_s = max(each[0] for each in times)
    until_s = min(each[-1] for each in times)
    tokens = sum(sum(since_s < at_s <= until_s for at_s in each) for each in times)
    first_s, whole_s = (statistics.mean(each[place] - begin_s for each in times) for place in (0, -1))
    return tokens / (until_s - since_s), first_s, whole_s


BENCH: Final = Bench(
    help="primad's server compared with llama-server, as clients see them",
    measure=measure,
    models=(SMALL, "1b-q4k"),
    quick={"rounds": 1},
    quick_models=(SMALL,),
    all_quick=None,
    flags=(
        flag("--server", type=Path, required=True, help="llama-server (tools/setup-llama server builds it)"),
        flag("--devices", type=int, nargs="+", default=[1, 2, 3], help="processes of a ring"),
        flag("--streams", type=int, nargs="+", default=[1, 4], help="concurrent requests"),
        flag("--objective", default="balanced", help="what primad's plans minimise"),
        flag(
            "--extra-buffers",
            choices=(AUTO, "on", "off"),
            nargs="+",
            default=[AUTO, "on", "off"],
            help="extra buffers of primad",
        ),
    ),
)
