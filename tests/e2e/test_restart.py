"""Restarts: loaded or shipped layers are used again; without workers the endpoint waits for one."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from tests.e2e.cluster import (
    PATIENCE_S,
    Head,
    Primad,
    all_joined,
    heading,
    joined,
    marked,
    ring_process,
    snapshot,
    stopped,
    wait_until,
)
from tests.e2e.streams import ask, is_open
from tests.figures import note

pytestmark = pytest.mark.slow

BY_HAND = ("--wait", 2, "--windows", "4,5,4", "--context", 512, "--no-auth")
"""Options with a fixed plan, which does not work with fewer devices."""

ONE_ATTENTION = ("--kv-type", "q8_0")
"""It needs flash attention. Of f16, a plan that is made while nobody asks may have either, by the memory it has left over,
and the text differs."""

RELAYED = ("--api", "--api-port", 0)


@dataclass
class Three:
    """A head and two workers, each of which can be restarted with its home folder."""

    stack: ExitStack
    model: Path
    homes: dict[str, Path]
    cluster: str
    head: Head
    workers: dict[str, Primad]

    def start_head(self) -> None:
        """Start the head again, at another endpoint, and wait until it serves."""
        self.head = self.stack.enter_context(heading(self.model, self.homes["head"], self.cluster, *BY_HAND))
        self.head.wait_serving()

    def start_worker(self, name: str) -> None:
        """Start a worker again."""
        self.workers[name] = self.stack.enter_context(joined(self.homes[name], self.cluster, *RELAYED))

    def relayed(self, name: str) -> Head:
        """Return the head as clients of a relaying worker see it."""
        run = self.workers[name]
        return Head(run, run.wait_for("^requests to (http://.*) are relayed to the head$")[1])


@pytest.fixture(scope="module")
def three(quick_model: Path, module_home) -> Iterator[Three]:
    with ExitStack() as stack:
        cluster = f"three-{secrets.token_hex(6)}"
        homes = {name: module_home(name) for name in ("head", "one", "two")}
        one, two = stack.enter_context(all_joined([homes["one"], homes["two"]], cluster, *RELAYED))
        workers = {"one": one, "two": two}
        head = stack.enter_context(heading(quick_model, homes["head"], cluster, *BY_HAND))
        head.wait_serving()
        for name in workers:
            head.run.wait_for(f"^{name}: shipping layers: done")
        yield Three(stack, quick_model, homes, cluster, head, workers)


def layer_files(home: Path) -> dict[str, tuple[int, int, int]]:
    """Return the layer files in the cache of ``home``, without the files that record their last use."""
    return {name: facts for name, facts in snapshot(home / "cache").items() if name.endswith(".gguf")}


def test_a_restarted_worker_is_sent_no_layer_again(three):
    before = len(three.head.run.lines)
    expected, layers = ask(three.head, tokens=24).text, layer_files(three.homes["two"])
    three.workers["two"].kill()
    three.head.run.wait_for("^nothing can be served: .*--windows 4,5,4 is for 3 devices; found 2", start=before)
    assert three.head.health()[0] == 503
    three.start_worker("two")
    start = time.monotonic()
    three.head.wait_serving()
    note("serving again", time.monotonic() - start, "a worker restarted")
    assert ask(three.head, tokens=24).text == expected
    assert [line for line in three.head.run.lines[before:] if "shipping" in line] == []
    assert layer_files(three.homes["two"]) == layers


def test_a_worker_relays_the_heads_stream_and_the_departure_of_a_client(three):
    relayed, path = three.relayed("two"), "/v1/chat/completions"
    body = {"messages": [{"role": "user", "content": "Hi"}], "temperature": 0, "stream": True, "max_tokens": 24}
    direct, through = (
        [json.loads(line[6:])["choices"] for line in answer.text.splitlines() if line.startswith("data: {")]
        for answer in (httpx.post(f"{to.url}{path}", json=body, timeout=PATIENCE_S) for to in (three.head, relayed))
    )
    assert len(direct) > 12
    assert through == direct
    body |= {"max_tokens": 400, "speculate": False, "logit_bias": {"0": -100, "2": -100}}
    ring, is_left = ring_process(three.head.run), False
    while not is_left:  # it was over before
        with ExitStack() as stack:
            with httpx.stream("POST", f"{relayed.url}{path}", json=body, timeout=PATIENCE_S) as answer:
                assert answer.status_code == 200, answer.read()
                lines = answer.iter_lines()  # the end of which would be that of the stream
                next(lines)
                is_left = stack.enter_context(stopped(ring)) and is_open(relayed)
            wait_until(lambda: not relayed.answers(), "the sequence is free")
    member = next(each for each in three.head.status()["cluster"] if each["device"] == "two")
    assert member["api"] == relayed.url


def test_a_head_that_restarts_finds_the_layers_in_the_memory_of_the_workers(three):
    expected, relayed = ask(three.head, tokens=24).text, three.relayed("one")
    pids = {name: ring_process(run).pid for name, run in three.workers.items()}
    broken = ask(relayed, three.head.run.kill, still=True, middle=8)
    assert broken.error is not None
    assert "the head went away" in broken.error["message"]
    assert relayed.health()[0] == 503
    wait_until(lambda: marked(three.head.run.mark) == [], "the ring process of the killed head ends")
    start = time.monotonic()
    three.start_head()
    note("serving again", time.monotonic() - start, "the head restarted")
    assert ask(three.head, tokens=24).text == expected
    assert ask(relayed, tokens=24).text == expected
    assert "shipping" not in three.head.run.output
    assert {name: ring_process(run).pid for name, run in three.workers.items()} == pids
    for run in (three.head.run, *three.workers.values()):
        assert "Traceback" not in run.output


def test_without_a_plan_a_request_ends_with_an_error_and_the_endpoint_waits_for_devices(smollm2, new_home, cluster):
    worker_home = new_home("worker")
    limited = ("--max-ram", "130MB", "--context", 2048, "--wait", 1, *ONE_ATTENTION)
    with ExitStack() as stack:
        worker = stack.enter_context(joined(worker_home, cluster))
        head = stack.enter_context(heading(smollm2, new_home("head"), cluster, *limited))
        head.wait_serving()
        expected = ask(head, tokens=24).text
        died: list[float] = []

        def die() -> None:
            worker.kill()
            died.append(time.monotonic())

        reported = ask(head, die, still=True)
        note("error without a plan", time.monotonic() - died[0])
        assert reported.error is not None
        assert (reported.error["type"], reported.finish) == ("server_error", None)
        assert "head" in reported.error["message"]

        refused = httpx.post(f"{head.url}/v1/completions", json={"prompt": "Hi", "max_tokens": 1}, timeout=PATIENCE_S)
        assert refused.status_code == 503
        assert int(refused.headers["Retry-After"]) > 0
        assert refused.json()["error"]["type"] == "server_error"
        health = httpx.get(f"{head.url}/health", timeout=PATIENCE_S)
        assert (health.status_code, json.loads(health.text)["status"]) == (503, "loading")
        assert int(health.headers["Retry-After"]) > 0

        stack.enter_context(joined(worker_home, cluster))
        head.wait_serving()
        assert ask(head, tokens=24).text == expected
        assert "Traceback" not in head.run.output
