"""Real servers of this machine, asked over HTTP by a benchmark: primad's heads with their workers, and any other command."""

from __future__ import annotations

import http.client
import json
import secrets
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final

import psutil

from primad.head.model.options import model_id
from tools.demo import daemon
from tools.lab.names import LabError
from tools.lab.ports import free_port

START_S: Final = 300.0
ANSWER_S: Final = 600.0


class HttpServer:
    """A ``process`` that serves a model, which it calls ``name``, on 127.0.0.1."""

    def __init__(self, process: subprocess.Popen[bytes], port: int, name: str) -> None:
        self._process, self._port, self._name = process, port, name

    @property
    def url(self) -> str:
        """Where it is."""
        return f"http://127.0.0.1:{self._port}"

    def cpu_s(self) -> float:
        """Processor seconds of everything but a ring process, until now."""
        head = psutil.Process(self._process.pid)
        others = [child for child in head.children(recursive=True) if "primad.ring.process" not in child.cmdline()]
        return sum(sum(each.cpu_times()[:2]) for each in [head, *others])

    def stream(self, prompt: Sequence[int], tokens: int, **more: Any) -> list[float]:
        """When each token of a completion of so many came, as ``time.perf_counter`` has it. Raises ``LabError``."""
        asked = {"model": self._name, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "stream": True, **more}
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=ANSWER_S)
        try:
            connection.request("POST", "/v1/completions", json.dumps(asked), {"Content-Type": "application/json"})
            answer = connection.getresponse()
            if answer.status != 200:
                raise LabError(f"{self.url} answers {answer.status}: {answer.read(300).decode(errors='replace')}")
            times = [time.perf_counter() for line in answer if line.startswith(b"data: {")]
        finally:
            connection.close()
        return times[:-1]  # the last event only ends the answer

    def wait(self, log: Path) -> None:
        """Wait until it serves; it writes to ``log``. Raises ``LabError`` when it does not."""
        until = time.monotonic() + START_S
        while time.monotonic() < until and self._process.poll() is None:
            connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=5)
            try:
                connection.request("GET", "/health")
                if connection.getresponse().status == 200:
                    return
            except OSError:
                pass
            finally:
                connection.close()
            time.sleep(0.2)
        raise LabError(f"{self.url} does not serve: {log.read_text(errors='replace')[-500:]}")


@contextmanager
def head_here(
    model: Path, homes: Path, workers: Sequence[str] = (), *, every: Sequence[str] = (), head: Sequence[str] = ()
) -> Iterator[HttpServer]:
    """A head and ``workers`` by name in a cluster of their own, each with a home in ``homes``.

    ``every`` one has these options, and the ``head`` some more. Raises ``LabError`` when it does not come.
    """
    cluster = f"bench-{secrets.token_hex(4)}"
    port = free_port()
    others = ["--wait", str(len(workers)), "--wait-timeout", "300"] if workers else ["--alone"]
    with ExitStack() as stack:

        def start(name: str, *words: str) -> subprocess.Popen[bytes]:
            log = stack.enter_context((homes / f"{name}.log").open("wb"))
            own = ["--home", str(homes / name), "--name", name, "--cluster", cluster]
            return stack.enter_context(daemon([*words, *own, *every], homes, stderr=log))

        for name in workers:
            start(name, "join")
        server = HttpServer(
            start("head", "serve", "--model", str(model), "--port", str(port), *others, *head), port, model_id(model)
        )
        server.wait(homes / "head.log")
        yield server
