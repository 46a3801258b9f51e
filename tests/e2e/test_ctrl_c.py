"""Ctrl-C or a termination signal ends any command, with no process, socket or temporary file left.

Only a computing worker takes longer, since it hands over first; a second Ctrl-C ends it at once.
"""

from __future__ import annotations

import itertools
import re
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx
import psutil
import pytest

from tests.e2e.cluster import (
    PATIENCE_S,
    Head,
    Primad,
    command_of,
    heading,
    joined,
    marked,
    primad,
    ring_process,
    serving,
    stopped,
    wait_until,
)
from tests.e2e.streams import ask, is_open
from tests.figures import note
from tools.synth import FEW_TOKENS, write_model

pytestmark = pytest.mark.slow

started_by_a_shell = pytest.mark.usefixtures("started_by_a_shell")
"""One case of each command and state starts as users start it; forking the others saves a second of CPU time each."""
interrupted = pytest.mark.parametrize("number", [signal.SIGINT], ids=["SIGINT"])
terminated = pytest.mark.parametrize("number", [signal.SIGTERM], ids=["SIGTERM"])
LONG_CONTEXT = ("--context", 8192, "--rope-scale", 2)
SHARED = ("--windows", "4,10")
"""The worker gets most of the large model."""
SLOWLY = 'transfer_limit = "1MB/s"\n'
"""The configuration of a worker: its layers of the large model are not there before the test is over."""
both_signals = pytest.mark.parametrize(
    "number",
    [
        pytest.param(signal.SIGINT, id="SIGINT"),
        pytest.param(signal.SIGTERM, id="SIGTERM", marks=pytest.mark.matrix),
    ],
)
"""Both signals act alike, so most states are tested with one of them; ``tools/faults`` tests these with both."""


@pytest.fixture
def temporary(tmp_path: Path) -> Path:
    """The temporary folder of a test's processes."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    return folder


@pytest.fixture(scope="module")
def large(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A model of about 550 MB, so that hashing, shipping and loading take long enough to be interrupted."""
    path = tmp_path_factory.mktemp("large") / "large.gguf"
    write_model(path, preset="1b-q4k", vocabulary=f"from:{smollm2}", tokens=FEW_TOKENS)
    yield path
    path.unlink()


def assert_ends(run: Primad, number: int, temporary: Path, home: Path | None = None) -> None:
    """Send the signal and check what is left at the end of a daemon, which has a ``home``, or of another command. It may
    stand still before."""
    ports = listening(run)
    start = time.monotonic()
    run.send_signal(number)
    run.process.send_signal(signal.SIGCONT)
    code = run.wait_end()
    note("stop", time.monotonic() - start)
    assert code == (130 if home is None else 0), run.output
    assert "Traceback" not in run.output
    left = [command_of(process) for process in marked(run.mark)]
    assert left == []
    for port in ports:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("127.0.0.1", port))
    assert [path.name for path in temporary.rglob("*")] == []
    if home is not None:
        assert [path.name for path in (home / "run").iterdir() if not is_last_word(path)] == []
        # What was fetched in part is gone on with at the next start.
        assert {path.suffix for path in home.glob("cache/layers/partial/*")} <= {".part", ".journal"}
        assert list(home.glob("profile-trial-*")) == []


def is_last_word(path: Path) -> bool:
    """Whether the file ``path`` is a ring process's log with contents."""
    return path.name.startswith("ring-") and path.suffix == ".log" and path.stat().st_size > 0


def listening(run: Primad) -> set[int]:
    """Return the TCP ports on which it and its children listen."""
    found = set()
    for process in run.processes():
        with suppress(psutil.NoSuchProcess):  # trials come and go
            ends = process.net_connections("tcp")
            found |= {each.laddr.port for each in ends if each.status == psutil.CONN_LISTEN}
    return found


@contextmanager
def streaming(head: Head) -> Iterator[None]:
    """Run a client that reads a long completion, and wait for its first lines. It is not over before the block is."""
    lines: list[str] = []

    def read() -> None:
        asked = {"prompt": "Once upon a time", "max_tokens": 3000, "temperature": 1, "seed": 1}
        body = {**asked, "stream": True, "speculate": False, "logit_bias": {"0": -100, "2": -100}}
        try:
            with httpx.stream("POST", f"{head.url}/v1/completions", json=body, timeout=PATIENCE_S) as answer:
                lines.append(f"status: {answer.status_code}")
                for line in answer.iter_lines():
                    lines.append(line)
        except httpx.HTTPError as exc:
            lines.append(f"error: {exc!r}")

    reader = threading.Thread(target=read)
    reader.start()
    wait_until(lambda: len(lines) > 4, "an answer is under way")
    yield
    reader.join(PATIENCE_S)
    assert not reader.is_alive(), "the client still waits"
    assert lines[0] == "status: 200"
    assert not any('"finish_reason":"length"' in line for line in lines), "the completion was over before"


@started_by_a_shell
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["SIGINT", "SIGTERM"])
def test_worker_idle(new_home, cluster, temporary, number):
    home = new_home("worker")
    with joined(home, cluster, temporary=temporary) as worker:
        assert_ends(worker, number, temporary, home)


@both_signals
def test_single_device_that_serves(quick_model, new_home, cluster, temporary, number):
    home = new_home("head")
    with heading(quick_model, home, cluster, "--alone", temporary=temporary) as head:
        head.wait_serving()
        assert_ends(head.run, number, temporary, home)


@interrupted
def test_head_that_waits_for_devices(quick_model, new_home, cluster, temporary, number):
    home = new_home("head")
    with heading(quick_model, home, cluster, "--wait", 1, temporary=temporary) as head:
        head.wait_health("looking for devices")
        assert_ends(head.run, number, temporary, home)


@both_signals
def test_head_and_worker_that_measure_links(quick_model, new_home, cluster, temporary, number):
    for number_of_try in itertools.count():
        home, other, another = (new_home(f"{name}-{number_of_try}") for name in ("head", "first", "second"))
        with (
            joined(other, cluster, temporary=temporary) as worker,
            joined(another, cluster) as second,
            heading(quick_model, home, cluster, "--wait", 2, temporary=temporary) as head,
        ):
            if not is_seen(head, "measuring links"):
                continue
            second.process.send_signal(signal.SIGSTOP)  # it answers nobody any more, so whoever measures waits for it
            if "measuring links" not in head.health()[1]:  # it was over before
                continue
            assert_ends(head.run, number, temporary, home)
            assert_ends(worker, number, temporary, other)
            return


@both_signals
def test_head_that_loads(large, new_home, cluster, temporary, number):
    for number_of_try in itertools.count():
        home = new_home(f"head-{number_of_try}")
        with heading(large, home, cluster, "--alone", temporary=temporary) as head:
            if not is_seen(head, "loading"):
                continue
            wait_until(lambda: len(head.run.processes()) > 1, "the ring process is there")
            assert_ends(head.run, number, temporary, home)
            if " is served at " not in head.run.output:  # nor was it when the signal came
                return


def is_seen(head: Head, detail: str) -> bool:
    """Whether the health check of a head shows ``detail`` before it serves; that may be too quick to be seen."""
    seen: list[tuple[int, str]] = []

    def shows_detail_or_serves() -> bool:
        seen.append(head.health())
        return detail in seen[-1][1] or seen[-1][0] == 200

    wait_until(shows_detail_or_serves, detail)
    return seen[-1][0] != 200


@terminated
def test_head_that_reads_layers(large, new_home, cluster, temporary, number):
    for number_of_try in itertools.count():
        home, worker_home = new_home(f"head-{number_of_try}"), slow_home(new_home, f"worker-{number_of_try}")
        with (
            joined(worker_home, cluster),
            heading(large, home, cluster, "--wait", 1, *SHARED, temporary=temporary) as head,
        ):
            head.wait_health("loading")
            assert_ends(head.run, number, temporary, home)
            if "reading layers: done" not in head.run.output:
                return


def slow_home(new_home: Callable[[str], Path], name: str = "worker") -> Path:
    """The home of a worker whose layers are on their way for minutes."""
    home = new_home(name)
    (home / "config.toml").write_text(SLOWLY)
    return home


@both_signals
def test_head_and_worker_that_ship_layers(large, new_home, cluster, temporary, number):
    home, worker_home = new_home("head"), slow_home(new_home)
    with (
        joined(worker_home, cluster, temporary=temporary) as worker,
        heading(large, home, cluster, "--wait", 1, *SHARED, temporary=temporary) as head,
    ):
        head.run.wait_for("reading layers: done")
        assert_ends(head.run, number, temporary, home)
        assert_ends(worker, number, temporary, worker_home)


@interrupted
def test_head_whose_worker_was_killed_while_loading(large, new_home, cluster, temporary, number):
    """The head waits for the worker to return, up to ``--wait-timeout``."""
    home = new_home("head")
    with (
        joined(slow_home(new_home), cluster) as worker,
        heading(large, home, cluster, "--wait", 1, "--wait-timeout", 3600, *SHARED, temporary=temporary) as head,
    ):
        head.run.wait_for("reading layers: done")
        worker.send_signal(signal.SIGKILL)
        head.run.wait_for("^worker is left out: ")
        assert_ends(head.run, number, temporary, home)
    assert not list(home.glob("run/window-*"))


@terminated
def test_worker_that_fetches(large, new_home, cluster, temporary, number):
    worker_home = slow_home(new_home)
    with (
        joined(worker_home, cluster, temporary=temporary) as worker,
        heading(large, new_home("head"), cluster, "--wait", 1, *SHARED) as head,
    ):
        head.run.wait_for("reading layers: done")
        wait_until(lambda: any(worker_home.glob("cache/layers/partial/*")), "a layer is on its way")
        assert_ends(worker, number, temporary, worker_home)


@started_by_a_shell
@both_signals
@pytest.mark.parametrize("command", ["join", "serve"])
def test_first_profile(quick_model, tmp_path, cluster, temporary, command, number):
    arguments = ("serve", "--model", quick_model, "--port", 0) if command == "serve" else ("join",)
    for number_of_try in itertools.count():
        home, cache = tmp_path / f"home-{number_of_try}", tmp_path / f"cache-{number_of_try}"
        new = {"XDG_CACHE_HOME": str(cache)}  # this machine was never measured
        with primad(*arguments, "--home", home, "--cluster", cluster, temporary=temporary, **new) as run:
            if not is_measured(run, home):
                continue
            assert_ends(run, number, temporary, home)
            if not (home / "profile.json").exists():  # nor was it when the signal came
                return


def is_measured(run: Primad, home: Path) -> bool:
    """Whether a trial is seen to run before there is a profile in ``home``."""
    seen: list[bool] = []

    def tries_or_is_over() -> bool:
        assert run.process.poll() is None, run.output
        seen.append(any("primad.profiler.trial" in command_of(process) for process in run.processes()))
        return seen[-1] or (home / "profile.json").exists()

    wait_until(tries_or_is_over, "a trial runs")
    return seen[-1]


@started_by_a_shell
@both_signals
def test_head_and_worker_that_generate(quick_model, new_home, cluster, temporary, number):
    home, worker_home = new_home("head"), new_home("worker")
    with (
        joined(worker_home, cluster, temporary=temporary) as worker,
        heading(quick_model, home, cluster, "--wait", 1, "--use-all", temporary=temporary) as head,
    ):
        head.wait_serving()
        with streaming(head):
            assert_ends(head.run, number, temporary, home)
        assert_ends(worker, number, temporary, worker_home)


@interrupted
def test_worker_that_hands_over_and_is_interrupted_again(quick_model, new_home, cluster, temporary, number):
    worker_home = new_home("worker")
    with (
        joined(worker_home, cluster, temporary=temporary) as worker,
        heading(quick_model, new_home("head"), cluster, "--wait", 1, "--use-all") as head,
    ):
        head.wait_serving()

        def interrupt_twice() -> None:
            with stopped(psutil.Process(head.run.process.pid)):  # so that it finds no replacement
                worker.send_signal(number)
                worker.wait_for("handing over .*Ctrl-C again ends at once")
                assert worker.process.poll() is None
                assert_ends(worker, number, temporary, worker_home)

        reported = ask(head, interrupt_twice, still=True, tokens=400, middle=10)
        assert (reported.finish, reported.error) == ("length", None), "the request continues without the worker"


@terminated
def test_head_in_a_long_prompt(quick_model, new_home, cluster, temporary, number):
    for number_of_try in itertools.count():
        home = new_home(f"head-{number_of_try}")
        with heading(quick_model, home, cluster, "--alone", *LONG_CONTEXT, temporary=temporary) as head:
            head.wait_serving()
            if ends_in_a_prompt(head, number, temporary, home):
                return


def ends_in_a_prompt(head: Head, number: int, temporary: Path, home: Path) -> bool:
    """End a head that computes a long prompt; whether the prompt was not computed before."""
    messages = [{"role": "user", "content": "word " * 7500}]
    body = {"messages": messages, "max_tokens": 1, "stream": True, "return_progress": True}
    is_read = threading.Event()
    lines: list[str] = []

    def read() -> None:
        with (
            suppress(httpx.HTTPError),
            httpx.stream("POST", f"{head.url}/v1/chat/completions", json=body, timeout=PATIENCE_S) as answer,
        ):
            for line in answer.iter_lines():
                lines.append(line)
                if "prompt_progress" in line:
                    is_read.set()

    client = threading.Thread(target=read)
    client.start()
    wait_until(is_read.is_set, "the prompt is computed")
    assert_ends(head.run, number, temporary, home)
    client.join(PATIENCE_S)
    assert not client.is_alive()
    return not any('"finish_reason":"length"' in line for line in lines)


@started_by_a_shell
@both_signals
def test_devices(cluster, temporary, number):
    with primad("devices", "--seconds", 600, "--cluster", cluster, temporary=temporary) as run:
        wait_until(lambda: bool(sockets(run)), "it listens to mDNS")
        assert_ends(run, number, temporary)


def sockets(run: Primad) -> list[object]:
    found: list[object] = []
    for process in run.processes():
        with suppress(psutil.NoSuchProcess):  # what it starts to look at this machine comes and goes
            found += process.net_connections("udp")
    return found


@both_signals
def test_chat(quick_model, new_home, cluster, temporary, number):
    with serving(quick_model, new_home("head"), cluster, "--alone") as head:
        seeds = itertools.count(1)
        # A head whose ring stands still for seconds forms another one, which may end the answer before its client leaves.
        while not (chat_is_ended(head, next(seeds), number, temporary) and has_noticed(head)):
            continue


def has_noticed(head: Head) -> bool:
    """Whether the head has counted a client that left; its only sequence is free in any case."""
    answer = httpx.post(f"{head.url}/v1/completions", json={"prompt": "Hi", "max_tokens": 1}, timeout=PATIENCE_S)
    assert answer.status_code == 200
    metrics = httpx.get(f"{head.url}/metrics", timeout=PATIENCE_S).text
    # If it counts one after this look, the chat is ended again, and there are two.
    return re.search(r'^primad_answers_total\{end="left"\} [1-9]', metrics, re.MULTILINE) is not None


def chat_is_ended(head: Head, seed: int, number: int, temporary: Path) -> bool:
    """End a chat in the middle of its answer; whether that was not over before: with some seeds it is short."""
    ring = ring_process(head.run)
    arguments = ("--url", head.url, "--max-tokens", 3000, "--seed", seed)
    with primad("chat", "Tell me a long story.", *arguments, temporary=temporary) as run:

        def is_answered() -> bool:
            return run.process.poll() is not None or head.answers()

        wait_until(is_answered, "it is answered")
        with stopped(ring), stopped(psutil.Process(run.process.pid)) as stands:
            if not stands or not is_open(head):
                return False
            assert_ends(run, number, temporary)
            return True
