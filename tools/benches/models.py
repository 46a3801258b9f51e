"""``models``: the cost of one head with several models, in rings of devices that count as machines with a core each.

``switch``: the time from a request for a model that is not loaded, but whose layers all devices have, to its first
token, over that of a new head with ``--model`` on the same devices, from the time at which its links are measured: both
plan, load and compute. In each round there is a new head with the model, then a new head that offers all models, which
loads another model first and unloads it.

``unload``: what the processes of each device hold of its memory before anything is first loaded (in this head, in any
of the worker's heads), while the model is loaded, and after it is unloaded; page cache is not counted.

``beside``: both models stay loaded on three devices and serve one request each, in turn and concurrently. If they
compute on the same device, or on the same core because there are fewer cores than devices, the expected share of each
is half of its speed alone, otherwise all of it. Concurrent speeds are measured while both generate. Texts must be
identical to those alone.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import time
import urllib.request
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import psutil

from primad.system.memory import held_bytes
from tools.lab import LabError
from tools.lab.daemons import daemon, free_port
from tools.lab.figures import Compared
from tools.lab.harness import CORES, SMALL, Bench, Run, flag, in_thread, model_named
from tools.lab.http_servers import START_S, HttpServer, as_machine, profile_home
from tools.lab.plain_llama import PROMPT

OTHER: Final = "gemma3-270m-q4_k_m"
OPTIONS: Final = ("--use-all", "--context", "512", "--extra-buffers", "off")
ASKED: Final[Mapping[str, Any]] = {"ignore_eos": True, "cache_prompt": False, "speculate": False}
PROMPT_TOKENS: Final = 40
TOKENS: Final = 160
KNOWN: Final = "measuring links: done"
MAX_TIMES: Final = 1.2
GIVEN_BACK: Final = 0.95
OF_SHARE: Final = 0.9
LOOK_S: Final = 0.005


class House:
    """Devices whose workers run; heads come and go on the first one. ``folder`` has the models that heads offer."""

    def __init__(self, run: Run, count: int, folder: Path) -> None:
        self._homes, self._folder, self._cluster = run.homes(), folder, f"bench-{secrets.token_hex(4)}"
        self._homes.mkdir(parents=True)
        self.cores = {name: at % CORES for at, name in enumerate(["head", *(f"w{at}" for at in range(1, count))])}
        self._before = {name: as_machine(name, core) for name, core in self.cores.items()}
        self._processes: dict[str, int] = {}
        self.idle: dict[str, int] = {}
        """What each device held before anything was loaded."""
        for name, words in self._before.items():
            profile_home(self._homes / name, words, ())
        for name in list(self._before)[1:]:
            run.stack.enter_context(self._started(name, "join"))

    @contextmanager
    def _started(self, name: str, *words: str) -> Iterator[Any]:
        own = ["--home", str(self._homes / name), "--name", name, "--cluster", self._cluster]
        with (
            (self._homes / f"{name}.log").open("wb") as log,
            daemon([*words, *own], self._homes, log, before=self._before[name]) as process,
        ):
            self._processes[name] = process.pid
            yield process

    @contextmanager
    def head(self, model: Path | None) -> Iterator[tuple[HttpServer, float]]:
        """Start a head that serves ``model``, or offers all; yield it and the time at which it knew its devices."""
        port, others = free_port(), str(len(self._before) - 1)
        what = ("--models", str(self._folder)) if model is None else ("--model", str(model))
        waits = ("--wait", others, "--wait-timeout", f"{START_S:g}")
        with self._started("head", "serve", *what, "--port", str(port), *waits, *OPTIONS) as process:
            log = self._homes / "head.log"
            while KNOWN not in log.read_text(errors="replace"):
                if process.poll() is not None:
                    raise LabError(f"the head ends: {log.read_text(errors='replace')[-500:]}")
                time.sleep(LOOK_S)
            known_s = time.perf_counter()
            server = HttpServer(process, port, "" if model is None else model.stem)
            server.wait(log, every_s=LOOK_S)
            yield server, known_s

    def held(self) -> dict[str, int]:
        """Return the bytes of memory that each device holds."""
        found = {}
        for name, pid in self._processes.items():
            process = psutil.Process(pid)
            found[name] = held_bytes([pid, *(each.pid for each in process.children(recursive=True))])
        return found


def _ask(head: HttpServer, name: str, tokens: int = 1) -> list[tuple[float, int]]:
    return head.sampled(PROMPT[:PROMPT_TOKENS], tokens, model=name, **ASKED)


def _unload(head: HttpServer, name: str) -> None:
    asked = urllib.request.Request(f"{head.url}/models/unload", json.dumps({"model": name}).encode(), method="POST")
    asked.add_header("Content-Type", "application/json")
    with urllib.request.urlopen(asked, timeout=START_S) as answered:
        answered.read()


def _fresh(house: House, model: Path) -> float:
    with house.head(model) as (head, known_s):
        return _ask(head, model.stem)[0][0] - known_s


def _switched(house: House, model: Path, other: str) -> tuple[float, dict[str, tuple[int, int, int]]]:
    """Return the seconds of a switch, and what each device held before any load, with the model, and after it."""
    with house.head(None) as (head, _):
        house.idle = house.held() | {name: size for name, size in house.idle.items() if name != "head"}
        _ask(head, other)
        _unload(head, other)
        begin_s = time.perf_counter()
        took_s = _ask(head, model.stem)[0][0] - begin_s
        loaded = house.held()
        _unload(head, model.stem)
        after = house.held()
    return took_s, {name: (size, loaded[name], after[name]) for name, size in house.idle.items()}


def _beside(head: HttpServer, names: tuple[str, ...]) -> tuple[list[float], bool]:
    """Return the concurrent speed of each over its speed alone, and whether the texts are identical."""
    alone = {name: _ask(head, name, TOKENS) for name in names}
    with ThreadPoolExecutor(len(names)) as pool:
        at_once = dict(zip(names, pool.map(lambda name: _ask(head, name, TOKENS), names), strict=True))
    begin_s, end_s = (edge(its[at][0] for its in at_once.values()) for edge, at in ((max, 0), (min, -1)))
    found = []
    for name in names:
        times = [at_s for at_s, _ in alone[name]]
        written = [at_s for at_s, _ in at_once[name] if begin_s <= at_s <= end_s]
        rates = [(len(its) - 1) / (its[-1] - its[0]) for its in (written, times)]
        found.append(rates[0] / rates[1])
    return found, all([t for _, t in alone[name]] == [t for _, t in at_once[name]] for name in names)


async def _switch(run: Run, model: Path, other: Path) -> None:
    house, count = House(run, 2, model.parent), 2
    turns = await run.alternate(
        {
            "switch": in_thread(lambda _: _switched(house, model, other.stem)),
            "fresh": in_thread(lambda _: (_fresh(house, model), {})),
        }
    )
    run.add(
        Compared(
            model=model.stem,
            case="switch",
            devices=count,
            what="seconds to the first token, of a new head's",
            found=[took_s for took_s, _ in turns["switch"]],
            beside=[took_s for took_s, _ in turns["fresh"]],
            at_most=MAX_TIMES,
        )
    )
    for name in house.idle:
        held = [its[name] for _, its in turns["switch"]]
        run.add(
            Compared(
                model=model.stem,
                case="unload",
                devices=count,
                what=f"MB of {name} given back, of those taken",
                found=[(loaded - after) / 1e6 for _, loaded, after in held],
                beside=[(loaded - before) / 1e6 for before, loaded, _ in held],
                at_least=GIVEN_BACK,
            )
        )


async def _two(run: Run, model: Path, other: Path) -> None:
    house, count, names = House(run, 3, model.parent), 3, (model.stem, other.stem)
    with house.head(None) as (head, _):
        plans = list[dict[str, int]]()
        for name in names:
            await asyncio.to_thread(_ask, head, name)
            devices = head.status()["devices"]  # of the model used last; a name that is taken gets a number appended
            plans.append({each["name"].partition("-")[0]: each["layers"] for each in devices})
        cores = [{house.cores[device] for device in plan} for plan in plans]
        share = 0.5 if cores[0] & cores[1] else 1.0
        turns = await run.alternate({"both": in_thread(lambda _: _beside(head, names))})
    for at, name in enumerate(names):
        run.add(
            Compared(
                model=model.stem,
                case="beside",
                devices=count,
                what=f"tokens/s of {name} beside the other, of its share ({share:g} of alone)",
                found=[rates[at] for rates, _ in turns["both"]],
                beside=[share] * len(turns["both"]),
                at_least=OF_SHARE,
                is_same=all(is_same for _, is_same in turns["both"]),
                note=f"layers {plans[at]}",
            )
        )


async def measure(run: Run, model: Path) -> None:
    """Measure each case, with another model besides this one."""
    other = model_named(OTHER if model.stem != OTHER else SMALL)
    for case in run.options.case:
        async with run.part():
            await {"switch": _switch, "beside": _two}[case](run, model, other)


BENCH: Final = Bench(
    help="several models of one head: a switch, memory given back, two side by side",
    measure=measure,
    models=(SMALL, "1b-q4k"),
    rounds=3,
    flags=(flag("--case", choices=("switch", "beside"), nargs="+", default=["switch", "beside"]),),
    quick={"rounds": 1},
    quick_models=(SMALL,),
)
