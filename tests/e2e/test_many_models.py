"""Several models of one head on two workers: requests choose one, models are loaded and unloaded, devices die."""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil
import pytest

from tests.e2e.cluster import (
    HTTP,
    PATIENCE_S,
    Head,
    Primad,
    heading,
    joined,
    ring_processes,
    stopped,
    wait_until,
)
from tests.e2e.streams import LOOKS
from tools import synth

pytestmark = pytest.mark.slow

MODELS = {"amber": "llama", "birch": "qwen3", "cedar": "gemma3", "delta": "qwen35"}
"""Architectures by model name."""
NAMES = tuple(MODELS)
PROMPT = "Tell me of the sea."
LONG = {"max_tokens": 300, "logit_bias": {"0": -100, "2": -100}, "speculate": False}
"""Fields of a request that lasts."""
DIALECTS = {
    "/v1/chat/completions": lambda: {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": 8},
    "/v1/completions": lambda: {"prompt": PROMPT, "max_tokens": 8},
    "/v1/responses": lambda: {"input": PROMPT, "max_output_tokens": 16},
    "/v1/messages": lambda: {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": 8},
    "/api/chat": lambda: {
        "messages": [{"role": "user", "content": PROMPT}],
        "options": {"num_predict": 8, "temperature": 0},
    },
    "/api/generate": lambda: {"prompt": PROMPT, "options": {"num_predict": 8, "temperature": 0}},
}


def text_of(path: str, body: dict) -> tuple[str, str]:
    """Return the model's name in the response, and the text."""
    match path:
        case "/v1/chat/completions":
            text = body["choices"][0]["message"]["content"]
        case "/v1/completions":
            text = body["choices"][0]["text"]
        case "/v1/responses":
            text = "".join(part["text"] for item in body["output"] for part in item.get("content", ()))
        case "/v1/messages":
            text = "".join(part.get("text", "") for part in body["content"])
        case "/api/chat":
            text = body["message"]["content"]
        case _:
            text = body["response"]
    return body["model"], text


@dataclass
class Offered:
    """A head that offers four models, and its workers."""

    head: Head
    workers: list[Primad]
    cluster: str

    def ask(self, name: str, path: str, **fields: object) -> str:
        """Return a completion of model ``name`` in the dialect of ``path``."""
        body = {"model": name, "stream": False, "temperature": 0, **DIALECTS[path](), **fields}
        answer = HTTP.post(f"{self.head.url}{path}", json=body)
        assert answer.status_code == 200, answer.text
        called, text = text_of(path, answer.json())
        assert called == name
        assert text
        return text

    def states(self) -> dict[str, str]:
        listed = HTTP.get(f"{self.head.url}/v1/models").json()["data"]
        return {each["id"]: each["status"]["value"] for each in listed}

    def unload_all(self) -> None:
        """Unload all models and wait until no device has one."""
        for name in NAMES:
            assert HTTP.post(f"{self.head.url}/models/unload", json={"model": name}).json() == {"success": True}
        assert set(self.states().values()) == {"unloaded"}
        assert not ring_processes(self.head.run)
        for worker in self.workers:
            if worker.process.poll() is None:
                wait_until(lambda: not ring_processes(worker), "the worker's ring processes ended")  # noqa: B023


@pytest.fixture(scope="module")
def offered(smollm2: Path, module_home, tmp_path_factory) -> Iterator[Offered]:
    folder = tmp_path_factory.mktemp("models")
    for name, architecture in MODELS.items():
        synth.write_model(
            folder / f"{name}.gguf",
            architecture=architecture,
            layers=12,
            vocabulary=f"from:{smollm2}",
            tokens=synth.FEW_TOKENS,
        )
    cluster = f"many-{time.time_ns():x}"
    homes = [module_home(name) for name in ("first", "second")]
    options = ("--use-all", "--context", 512, "--batching", "exact", "--sequences", 2)
    with (
        heading(None, module_home("head"), cluster, *options, "--models", folder) as head,
        joined(homes[0], cluster) as first,
        joined(homes[1], cluster) as second,
    ):
        head.wait_serving()
        wait_until(lambda: len(head.status()["cluster"]) == 2, "both workers are here")
        yield Offered(head, [first, second], cluster)


def leaves(offered: Offered, name: str) -> None:
    """Request a long completion and disconnect early."""
    body = {"model": name, "prompt": PROMPT, "max_tokens": 400, "stream": True}
    with httpx.stream("POST", f"{offered.head.url}/v1/completions", json=body, timeout=PATIENCE_S) as answered:
        assert answered.status_code == 200, answered.read()
        for _ in answered.iter_lines():
            return


def resources_of(run: Primad) -> tuple[int, int]:
    """Return the number of descriptors and threads of a daemon."""
    (daemon,) = (each for each in run.processes() if each.pid == run.process.pid)
    return daemon.num_fds(), daemon.num_threads()


@pytest.mark.parametrize("count", [30, pytest.param(60, marks=pytest.mark.matrix)])
def test_requests_of_every_dialect_get_the_model_and_the_text_that_they_name(offered, count):
    rng = random.Random(48)
    expected = {}
    for name in NAMES:
        for path in DIALECTS:
            expected[name, path] = offered.ask(name, path)
        offered.unload_all()
    assert len({expected[name, "/v1/completions"] for name in NAMES}) == len(NAMES)
    before = [resources_of(each) for each in (offered.head.run, *offered.workers)]

    def one(number: int) -> None:
        name, path = rng.choice(NAMES), rng.choice(list(DIALECTS))
        if number % 6 == 0:
            leaves(offered, name)
        else:
            keep = {"keep_alive": rng.choice((0, -1, 300))} if path.startswith("/api") else {}
            got = offered.ask(name, path, **keep)
            assert got == expected[name, path], (name, path)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(one, range(count)))
    offered.unload_all()
    for (fds, threads), run in zip(before, (offered.head.run, *offered.workers), strict=True):
        wait_until(lambda: resources_of(run)[0] <= fds + 3, "nothing is left open")  # noqa: B023
        assert resources_of(run)[1] <= threads + 8, "threads of a pool may be begun, and no more"
    assert "Traceback" not in offered.head.run.output


def test_a_worker_killed_while_one_model_loads_or_two_serve_costs_no_request(offered, module_home):
    one = offered.ask("amber", "/v1/completions")
    expected = {name: offered.ask(name, "/v1/completions", **LONG) for name in ("amber", "birch")}
    offered.unload_all()
    second = offered.workers.pop()
    second.process.send_signal(signal.SIGSTOP)  # nothing loads there, so that it is still loaded when it is killed
    with ThreadPoolExecutor(3) as pool:
        first = pool.submit(offered.ask, "amber", "/v1/completions")
        wait_until(lambda: offered.states()["amber"] == "loading", "it is loaded")
        second.kill()
        assert first.result() == one
        with joined(module_home("third"), offered.cluster) as third:
            wait_until(lambda: "third" in str(offered.head.status()["cluster"]), "it is here")
            offered.unload_all()
            assert {name: offered.ask(name, "/v1/completions", **LONG) for name in expected} == expected
            rings, is_killed = ring_processes(third), False
            assert len(rings) == 2
            while not is_killed:  # a request was over before
                both = {name: pool.submit(offered.ask, name, "/v1/completions", **LONG) for name in expected}
                is_killed = kills(third, rings, offered.head, list(both.values()))
                assert {name: answer.result() for name, answer in both.items()} == expected
    assert "Traceback" not in offered.head.run.output


def kills(worker: Primad, rings: list[psutil.Process], head: Head, requests: list[Future[str]]) -> bool:
    """Kill a worker unless one of two requests is over before; whether it is killed. Its ring processes stand still."""
    wait_until(lambda: head.open_requests() == 2 or any(each.done() for each in requests), "both are open")
    with ExitStack() as stack:
        stand = [stack.enter_context(stopped(each)) for each in rings]
        if not all(stand) or not all(head.open_requests() == 2 for _ in range(LOOKS)):
            return False
        worker.kill()
        return True
