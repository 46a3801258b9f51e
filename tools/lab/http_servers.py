"""Real servers on this machine, queried over HTTP by a benchmark: primad's heads with their workers, and any other
command.

Daemons' profiles are measured before any of them starts, one after the other, once for each core and number of threads.
With ``machines`` each daemon has its own host name, and one core or all: to primad it is a separate machine, which
shares neither processor nor memory with the others, so its plans are those of several machines.
"""

from __future__ import annotations

import http.client
import json
import os
import secrets
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any, Final

import psutil

from primad.head.model.options import model_id
from primad.settings.config import LOOPBACK
from tools.lab.daemons import PRIMAD, daemon, environment, free_port
from tools.lab.names import LabError

START_S: Final = 600.0
ANSWER_S: Final = 600.0
PROFILE_S: Final = 300.0
PROFILE_AGAIN: Final = 2


class HttpServer:
    """A ``process`` that serves a model, under the name ``name``, on 127.0.0.1."""

    def __init__(self, process: subprocess.Popen[bytes], port: int, name: str) -> None:
        self.process, self._port, self._name = process, port, name

    @property
    def url(self) -> str:
        """The server's URL."""
        return f"http://127.0.0.1:{self._port}"

    def cpu_s(self) -> float:
        """Processor seconds so far of everything but ring processes."""
        head = psutil.Process(self.process.pid)
        others = [child for child in head.children(recursive=True) if "primad.ring.process" not in child.cmdline()]
        return sum(sum(each.cpu_times()[:2]) for each in [head, *others])

    def stream(
        self,
        prompt: Sequence[int],
        tokens: int,
        times: list[float] | None = None,
        leaves: threading.Event | None = None,
        **more: Any,
    ) -> list[float]:
        """Return the ``time.perf_counter`` time of each token of a completion of ``tokens`` tokens. Raises
        ``LabError``.

        They are added to ``times`` as they come, if given; when ``leaves`` is set the client disconnects.
        """
        asked = {"model": self._name, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "stream": True, **more}
        times = [] if times is None else times
        with closing(self.events("/v1/completions", asked)) as events:
            for at_s, _ in events:
                if leaves is not None and leaves.is_set():
                    return times
                times.append(at_s)
        del times[-1]  # the last event only ends the response
        return times

    def together(self, prompts: Sequence[Sequence[int]], tokens: int, **more: Any) -> list[list[float]]:
        """Return the token times of several concurrent completions; see ``stream``."""
        with ThreadPoolExecutor(len(prompts)) as pool:
            return list(pool.map(lambda prompt: self.stream(prompt, tokens, **more), prompts))

    def sampled(
        self, prompt: Sequence[int], tokens: int, found: list[tuple[float, int]] | None = None, /, **more: Any
    ) -> list[tuple[float, int]]:
        """Return the tokens of a completion, each with its time. Only for primad. Raises ``LabError``.

        They are added to ``found`` as they come, if given.
        """
        asked = {"prompt": prompt, "n_predict": tokens, "temperature": 0, "stream": True, **more}
        found = [] if found is None else found
        for at_s, body in self.events("/completion", asked):
            event = json.loads(body)
            if "error" in event:
                raise LabError(f"{self.url} ends a response: {event['error']}")
            if not event["stop"]:  # the last event only ends the response
                found += [(at_s, token) for token in event["tokens"]]
        return found

    def events(self, path: str, asked: dict[str, Any]) -> Generator[tuple[float, bytes], None, None]:
        """Yield the events of a response, each with its time. Raises ``LabError`` if the request is refused."""
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=ANSWER_S)
        try:
            connection.request("POST", path, json.dumps(asked), {"Content-Type": "application/json"})
            answer = connection.getresponse()
            if answer.status != 200:
                raise LabError(f"{self.url} answers {answer.status}: {answer.read(300).decode(errors='replace')}")
            for line in answer:
                if line.startswith(b"data: {"):
                    yield time.perf_counter(), line[6:]
        finally:
            connection.close()

    def status(self) -> dict[str, Any]:
        """Return primad's status."""
        return dict(json.loads(self._get("/status", 60)[1]))

    def plan(self) -> str:
        """Return the layers by device of primad's plan, the head's first, as in 9+21."""
        return "+".join(str(device["layers"]) for device in self.status()["devices"])

    def read_bytes(self) -> int:
        """Return the bytes of streamed weights that primad's devices have read."""
        return sum(device["memory"]["read_bytes"] or 0 for device in self.status()["devices"])

    def _get(self, path: str, timeout_s: float) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=timeout_s)
        try:
            connection.request("GET", path)
            answer = connection.getresponse()
            return answer.status, answer.read()
        finally:
            connection.close()

    def wait(self, log: Path, every_s: float = 0.2) -> None:
        """Wait until it serves, checking ``every_s``; it writes to ``log``. Raises ``LabError`` if it does not."""
        until = time.monotonic() + START_S
        while time.monotonic() < until and self.process.poll() is None:
            try:
                if self._get("/health", 5)[0] == 200:
                    return
            except OSError:
                pass
            time.sleep(every_s)
        raise LabError(f"{self.url} does not serve: {log.read_text(errors='replace')[-500:]}")


def as_machine(name: str, number: int | None) -> list[str]:
    """Return the words before a command that runs as on its own machine: with host name ``name``, and the core of this
    number, if any. Raises ``LabError`` if that is impossible.
    """
    unshare, bind = shutil.which("unshare"), shutil.which("taskset")
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    if unshare is None or bind is None or (number or 0) >= len(cores):
        raise LabError(f"{name}: no machine of its own; that needs Linux, util-linux and a core for each")
    rights = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
    naming = [unshare, *rights, "--uts", "sh", "-c", 'hostname "$0" && exec "$@"', name]
    return naming if number is None else [*naming, bind, "--cpu-list", str(cores[number])]


@contextmanager
def head_here(
    model: Path,
    homes: Path,
    workers: Sequence[str] = (),
    *,
    every: Sequence[str] = (),
    head: Sequence[str] = (),
    machines: bool = False,
    bound: bool = True,
    started: Callable[[int], None] = lambda _: None,
    host: str | None = LOOPBACK,
    port: int = 0,
    is_heard: bool = False,
) -> Iterator[HttpServer]:
    """Run a head and ``workers`` by name in their own cluster, each with a home in ``homes``, a new folder without
    earlier daemons. Earlier measurements for the same daemon in a neighbouring folder are reused.

    ``machines`` are ``bound`` to a core each, or not. ``every`` daemon has these options, and the ``head`` some more.
    ``started`` is called with the process of each start; all listen on ``host``, or everywhere. The head has ``port``
    if it is free; if it ``is_heard`` its output is printed. Raises ``LabError`` if it does not start.
    """
    homes.mkdir(parents=True, exist_ok=True)
    names, cluster, port = ["head", *workers], f"bench-{secrets.token_hex(4)}", free_port(port)
    before = {name: as_machine(name, at if bound else None) if machines else [] for at, name in enumerate(names)}
    for name, words in before.items():
        profile_home(homes / name, words, every)
    others = ["--wait", str(len(workers)), "--wait-timeout", f"{START_S:g}"] if workers else ["--single-device"]
    with ExitStack() as stack:

        def start(name: str, *words: str) -> subprocess.Popen[bytes]:
            log = stack.enter_context((homes / f"{name}.log").open("wb"))
            own = ["--home", str(homes / name), "--name", name, "--cluster", cluster]
            heard = None if is_heard and name == "head" else log
            process = stack.enter_context(daemon([*words, *own, *every], homes, heard, before=before[name], host=host))
            started(process.pid)
            return process

        for name in workers:
            start(name, "join")
        serve = ("serve", "--model", str(model), "--port", str(port), *others, *head)
        server = HttpServer(start("head", *serve), port, model_id(model))
        server.wait(homes / "head.log")
        yield server


def profile_home(home: Path, before: Sequence[str], every: Sequence[str]) -> None:
    """Give ``home`` a profile: that of another daemon with the same options, or a new one."""
    options = [
        word for option in ("--threads",) if option in every for word in (option, every[every.index(option) + 1])
    ]
    kept = home.parent.parent / "profiled" / "-".join(("process", *before[-1:], *options))
    if not kept.exists():
        command = [*before, str(PRIMAD), "profile", "--home", str(kept), *options]
        how: dict[str, Any] = {
            "env": environment(home.parent),
            "timeout": PROFILE_S,
            "capture_output": True,
            "text": True,
        }
        done = subprocess.run(command, check=False, **how)
        for _ in range(PROFILE_AGAIN):  # measurements of a busy machine may be refused
            if done.returncode:
                done = subprocess.run([*command, "--remeasure"], check=False, **how)
        if done.returncode:
            raise LabError(f"{home.name}: cannot be profiled: {done.stderr.strip()[-300:]}")
    home.mkdir()
    shutil.copy(kept / "profile.json", home)
