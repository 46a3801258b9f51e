"""``models``: several models of one head: how long a switch takes, what an unloaded model leaves behind, two side by side.

A head offers two models on a ring of ``--devices``, each with a host name of its own and, while there are enough, a core.
``switch``: from a request for a model that is not loaded, whose layers all devices hold, to its first token; beside the time
from the start of ``primad serve --model`` on the same workers, which hold the layers too, to its first token.
``unload``: of what a device's processes took for a model (``held_bytes``: what the system cannot have back at once), the
share that they give back. ``beside``: tokens a second of each model while the other one answers too, by those while it does
not; on shared processors half each is fair, so the two shares are added.
"""

from __future__ import annotations

import json
import secrets
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import psutil

from primad.head.model.options import model_id
from primad.system.memory import held_bytes
from tools.lab.daemons import daemon, free_port
from tools.lab.figures import Compared
from tools.lab.harness import CORES, Bench, Run, flag, model_named
from tools.lab.http_servers import HttpServer, as_machine, profiled_home
from tools.lab.plain_llama import PROMPT

OTHER: Final = "gemma3-270m-q4_k_m"
HEAD: Final = ("--context", "1024", "--sequences", "1", "--speculate", "off", "--extra-buffers", "off", "--use-all")
TOKENS: Final = 96
SWITCH: Final = 1.2
GIVEN_BACK: Final = 0.95
SHARES: Final = 0.9


class Ring:
    """Workers that stay, and heads on them that come and go, with their processes by device."""

    def __init__(self, run: Run, devices: int) -> None:
        self._homes, self._cluster = run.homes(), f"bench-{secrets.token_hex(4)}"
        self._homes.mkdir(parents=True)
        names = ["head", *(f"w{place}" for place in range(1, devices))]
        self._before = {name: as_machine(name, at if at < CORES else None) for at, name in enumerate(names)}
        for name, words in self._before.items():
            profiled_home(self._homes / name, words, ())
        self._wait = str(devices - 1)
        self.pids: dict[str, int] = {}
        for name in names[1:]:
            run.stack.enter_context(self._started(name, "join"))

    @contextmanager
    def _started(self, name: str, *words: str) -> Iterator[subprocess.Popen[bytes]]:
        own = ("--home", str(self._homes / name), "--name", name, "--cluster", self._cluster)
        with (
            (self._homes / f"{name}.log").open("wb") as log,
            daemon([*words, *own], self._homes, log, before=self._before[name]) as process,
        ):
            self.pids[name] = process.pid
            yield process

    @contextmanager
    def head(self, *words: str, name: str = "") -> Iterator[HttpServer]:
        """``primad serve`` with ``words``, once it serves."""
        port = free_port()
        with self._started("head", "serve", "--port", str(port), "--wait", self._wait, *HEAD, *words) as process:
            server = HttpServer(process, port, name)
            server.wait(self._homes / "head.log")
            yield server

    def held_bytes(self) -> dict[str, int]:
        """What the processes of each device have."""
        found = {}
        for name, pid in self.pids.items():
            daemon_process = psutil.Process(pid)
            found[name] = held_bytes([pid, *(each.pid for each in daemon_process.children(recursive=True))])
        return found


async def measure(run: Run, model: Path) -> None:
    """The three cases, on the same workers."""
    folder, other = run.folder(), model_named(OTHER)
    for each in (model, other):
        (folder / each.name).symlink_to(each.resolve())
    devices = run.options.devices
    ring = Ring(run, devices)
    names = (model_id(model), model_id(other))
    offered, fresh = [], []
    with ring.head("--models", str(folder), "--idle-unload", "-1") as head:
        for name in names:
            _first_s(head, name)  # the layers are shipped
            _unload(head, name)
        before = ring.held_bytes()
        for _ in range(run.options.rounds):
            offered.append(_first_s(head, names[0]))
            loaded = ring.held_bytes()
            _unload(head, names[0])
            after = ring.held_bytes()
        for device, empty in before.items():
            taken = loaded[device] - empty
            back = (loaded[device] - after[device]) / taken
            what = f"given back by {device}, of {taken / 1e6:.0f} MB"
            run.add(
                Compared(
                    model=model.stem,
                    case="unload",
                    devices=devices,
                    what=what,
                    found=[back],
                    beside=[1.0],
                    at_least=GIVEN_BACK,
                )
            )
        run.add(*_beside(run, model, head, names))
    for _ in range(run.options.rounds):
        begin_s = time.perf_counter()
        with ring.head("--model", str(model), name=names[0]) as alone:
            _first_s(alone, names[0])
            fresh.append(time.perf_counter() - begin_s)
    what = "seconds to the first token"
    run.add(
        Compared(
            model=model.stem, case="switch", devices=devices, what=what, found=offered, beside=fresh, at_most=SWITCH
        )
    )


def _first_s(head: HttpServer, name: str) -> float:
    begin_s = time.perf_counter()
    return head.stream(PROMPT[:8], 2, model=name, cache_prompt=False)[0] - begin_s


def _unload(head: HttpServer, name: str) -> None:
    body = json.dumps({"model": name}).encode()
    asked = urllib.request.Request(f"{head.url}/models/unload", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(asked, timeout=120):
        pass


def _beside(run: Run, model: Path, head: HttpServer, names: tuple[str, str]) -> Iterator[Compared]:
    """Each model alone, then both; the text must be the same."""

    def rate(name: str) -> tuple[float, list[int]]:
        told = head.sampled(PROMPT[:40], TOKENS, model=name, cache_prompt=False, ignore_eos=True)
        return (len(told) - 1) / (told[-1][0] - told[0][0]), [token for _, token in told]

    for name in names:
        rate(name)
    shares, is_same = [], True
    with ThreadPoolExecutor(2) as pool:
        for _ in range(run.options.rounds):
            alone = list(map(rate, names))
            both = list(pool.map(rate, names))
            shares.append(sum(one[0] / other[0] for one, other in zip(both, alone, strict=True)))
            is_same = is_same and [text for _, text in both] == [text for _, text in alone]
            run.say(
                f"alone {alone[0][0]:.1f} and {alone[1][0]:.1f} tokens/s, both {both[0][0]:.1f} and {both[1][0]:.1f}"
            )
    yield Compared(
        model=f"{model.stem} and {OTHER}",
        case="beside",
        devices=run.options.devices,
        what="shares of both models together",
        found=shares,
        beside=[1.0] * len(shares),
        at_least=SHARES,
        is_same=is_same,
    )


BENCH: Final = Bench(
    help="several models of one head: switch, unload, side by side",
    measure=measure,
    rounds=3,
    quick={"rounds": 1},
    flags=(flag("--devices", type=int, default=3, help="devices of the ring"),),
    all_quick=None,
)
