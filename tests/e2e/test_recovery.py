"""Devices die, hang, leave and return during a completion, which resumes in the same stream without a changed token.

One cluster serves most of the tests. Each begins with two computing workers; lost ones are replaced first.
"""

from __future__ import annotations

import json
import secrets
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest

from tests.e2e.cluster import (
    Head,
    Primad,
    all_joined,
    heading,
    ring_process,
    run_primad,
    wait_until,
)
from tests.e2e.streams import CompletionOverError, ask
from tests.figures import note

pytestmark = pytest.mark.slow

TOKENS, LONG = 240, 480
"""Most are sampled after the event, of the longer completion even if a command must start for it."""


class Lab:
    """A head that uses all devices, and workers that come and go."""

    def __init__(self, stack: ExitStack, model: Path, make_home: Callable[[str], Path]) -> None:
        self._stack, self._make_home = stack, make_home
        self.cluster = f"lab-{secrets.token_hex(6)}"
        self._count = 0
        self.workers: dict[str, Primad] = {}
        self._homes: dict[str, Path] = {}
        self.add(2)
        arguments = ("--wait", 2, "--use-all", "--context", 512)
        self.head: Head = stack.enter_context(heading(model, make_home("head"), self.cluster, *arguments, config=""))
        self.head.wait_serving()
        self.at_once = self.head.status()["sequences"]
        self.undisturbed = {tokens: ask(self.head, tokens=tokens).text for tokens in (TOKENS, LONG)}

    def add(self, count: int) -> list[str]:
        """Start more workers concurrently; return their names."""
        names = [f"w{self._count + 1 + each}" for each in range(count)]
        self._count += count
        self._homes |= {name: self._make_home(name) for name in names}
        runs = self._stack.enter_context(all_joined([self._homes[name] for name in names], self.cluster))
        self.workers |= dict(zip(names, runs, strict=True))
        return names

    def home(self, name: str) -> Path:
        """Return the home folder of a worker."""
        return self._homes[name]

    def computing(self) -> set[str]:
        """Return the workers that compute now."""
        return {device["name"] for device in self.head.status().get("devices", ()) if device["role"] == "worker"}

    def wait_computing(self, *names: str) -> None:
        """Wait until exactly these workers compute."""
        try:
            wait_until(lambda: self.computing() == set(names), f"{names} compute", stays=True)
        except AssertionError as exc:
            exc.add_note(self.head.run.output)
            raise

    def two(self) -> tuple[str, str]:
        """Wait until exactly two workers compute; return their names, the older worker first."""
        for name in [name for name, run in self.workers.items() if run.process.poll() is not None]:
            del self.workers[name]
        self.add(2 - len(self.workers))
        first, second = self.workers
        self.wait_computing(first, second)
        return first, second

    def continues_after(
        self,
        act: Callable[[], object],
        what: str,
        printed: str | None = None,
        *,
        limit: str = "recovery",
        still: bool = True,
        tokens: int = TOKENS,
    ) -> None:
        """Call ``act`` during a completion and check the text; the head must print a line that matches ``printed``."""
        before = len(self.head.run.lines)
        reported = ask(self.head, act, still=still, tokens=tokens)
        note(limit, reported.gap_s, what)
        assert (reported.text, reported.finish, reported.error) == (self.undisturbed[tokens], "length", None), (
            self.head.run.output
        )
        assert self.head.health()[0] == 200
        wait_until(lambda: self.head.status().get("sequences") == self.at_once, "it has as many sequences as before")
        if printed is not None:
            self.head.run.wait_for(printed, start=before)
        assert "Traceback" not in self.head.run.output


@pytest.fixture(scope="module")
def lab(quick_model: Path, module_home) -> Iterator[Lab]:
    with ExitStack() as stack:
        yield Lab(stack, quick_model, module_home)


def command(*arguments: object) -> str:
    """Run a ``primad`` command to its end; return its output."""
    run = run_primad(*arguments)
    assert (run.returncode, run.stderr) == (0, ""), run
    return run.stdout


def freeze(run: Primad, number: int = signal.SIGSTOP) -> None:
    """Stop all processes of a worker, as on a sleeping machine."""
    for process in run.processes():
        process.send_signal(number)


def test_a_worker_is_killed(lab):
    stays, lost = lab.two()
    lab.continues_after(lab.workers[lost].kill, "kill -9 of a worker", f"^{lost} is gone: its primad ended$")
    wait_until(lambda: lab.workers[lost].processes() == [], "its ring process ends by itself")
    lab.wait_computing(stays)


def test_a_worker_freezes_and_returns(lab):
    stays, lost = lab.two()
    run = lab.workers[lost]
    try:
        lab.continues_after(
            lambda: freeze(run),
            "SIGSTOP of a worker",
            f"^{lost} is gone: no message",
            limit="recovery from silence",
        )
    finally:
        freeze(run, signal.SIGCONT)
    lab.wait_computing(stays, lost)
    assert ask(lab.head, tokens=TOKENS).text == lab.undisturbed[TOKENS]


def test_the_ring_process_of_a_worker_is_killed(lab):
    stays, lost = lab.two()
    run = lab.workers[lost]
    lab.continues_after(lambda: ring_process(run).kill(), "kill -9 of a worker's ring process", f"^{lost}: .*SIGKILL")
    lab.wait_computing(stays, lost)


def test_the_ring_process_of_a_worker_freezes(lab):
    stays, lost = lab.two()
    hung: list[psutil.Process] = []

    def hang() -> None:
        hung.append(ring_process(lab.workers[lost]))
        hung[0].suspend()

    lab.continues_after(hang, "SIGSTOP of a worker's ring process", limit="recovery from silence")
    wait_until(lambda: not hung[0].is_running(), "the process that hung is ended")
    lab.wait_computing(stays, lost)


def test_the_ring_process_of_the_head_is_killed(lab):
    lab.two()
    lab.continues_after(lambda: ring_process(lab.head.run).kill(), "kill -9 of the head's ring process", "SIGKILL")


def test_structured_output_still_matches_its_schema_after_a_death(lab):
    """The head's ring process has the grammar's state; a new one rebuilds it from the tokens so far."""
    _, lost = lab.two()
    schema = {"type": "array", "items": {"type": "string", "maxLength": 9}, "minItems": 40, "maxItems": 40}
    fields = {"json_schema": schema, "temperature": 1, "seed": 5, "tokens": LONG, "middle": 10}
    undisturbed = ask(lab.head, **fields)
    if undisturbed.finish == "stop":  # white space may use up all tokens
        assert len(json.loads(undisturbed.text)) == 40
    for act in (lambda: ring_process(lab.head.run).kill(), lab.workers[lost].kill):
        reported = ask(lab.head, act, still=True, **fields)
        assert (reported.text, reported.finish, reported.error) == (undisturbed.text, undisturbed.finish, None)


@pytest.mark.parametrize("version", [pytest.param(1, marks=pytest.mark.matrix), 2])
def test_the_state_of_mirostat_is_not_lost(lab, version):
    """Its state depends on probabilities of tokens that are not sampled again, so it moves with them."""
    _, lost = lab.two()
    fields = {"mirostat": version, "mirostat_tau": 2.0, "temperature": 1.5, "seed": 5, "tokens": TOKENS, "middle": 20}
    undisturbed = ask(lab.head, **fields)
    act = lab.workers[lost].kill if version == 1 else lambda: ring_process(lab.head.run).kill()
    reported = ask(lab.head, act, still=True, **fields)
    assert (reported.text, reported.finish, reported.error) == (undisturbed.text, undisturbed.finish, None)


def test_a_worker_leaves(lab):
    def leave() -> None:
        _, leaves = lab.two()
        if not lab.head.answers():
            raise CompletionOverError
        before = len(lab.head.run.lines)
        assert command("leave", "--home", lab.home(leaves)) == f"{leaves} hands over and ends\n"
        assert lab.workers[leaves].wait_end() == 0
        lab.head.run.wait_for(f"^{leaves} leaves", start=before)
        if not lab.head.answers():
            raise CompletionOverError

    lab.continues_after(leave, "primad leave", still=False, tokens=LONG)
    lab.wait_computing(*(name for name, run in lab.workers.items() if run.process.poll() is None))


def test_a_worker_is_interrupted(lab):
    stays, leaves = lab.two()
    run = lab.workers[leaves]
    lab.continues_after(lambda: run.process.send_signal(signal.SIGINT), "Ctrl-C on a worker", f"^{leaves} leaves")
    assert run.wait_end() == 0
    assert run.lines[-1] == "stopped"
    lab.wait_computing(stays)


def test_a_worker_pauses_and_resumes(lab):
    stays, paused = lab.two()
    home = lab.home(paused)

    def pause() -> None:
        command("pause", "--home", home)
        lab.wait_computing(stays)
        if not lab.head.answers():
            command("resume", "--home", home)
            lab.wait_computing(stays, paused)
            raise CompletionOverError

    lab.continues_after(pause, "primad pause", still=False, tokens=LONG)
    lab.wait_computing(stays)
    assert lab.workers[paused].process.poll() is None
    command("resume", "--home", home)
    lab.wait_computing(stays, paused)
    assert ask(lab.head, tokens=TOKENS).text == lab.undisturbed[TOKENS]


def test_a_worker_joins(lab):
    first, second = lab.two()
    (third,) = lab.add(1)
    gaps: list[float] = []

    def all_compute() -> bool:
        reported = ask(lab.head, tokens=TOKENS)
        assert (reported.text, reported.finish, reported.error) == (lab.undisturbed[TOKENS], "length", None)
        gaps.append(reported.gap_s)
        return lab.computing() == {first, second, third}

    wait_until(all_compute, f"{third} computes too")
    note("recovery", max(gaps), f"a third worker, {len(gaps)} answers")
    run = lab.workers.pop(third)
    run.send_signal(signal.SIGINT)
    assert run.wait_end() == 0, "it computes, so it hands over first, which takes a ring to be formed"
    lab.wait_computing(first, second)
