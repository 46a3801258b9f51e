"""Run the ``primad`` command as users do: real processes, output read as it comes, none left at the end.

All waits are for a condition, with a deadline. Each process has a mark in its environment that its children inherit, so
processes that outlive it are found, even orphans.
"""

from __future__ import annotations

import os
import re
import secrets
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil

from primad.settings.config import LOOPBACK
from primad.trust.local_trust import VARIABLE as LOCAL_TRUST
from tests.forks import PROGRAM as PRIMAD
from tests.ports import free_port

PATIENCE_S = 180.0
"""Timeout of things that take seconds, or much longer on a busy machine."""
PATIENT = "suspect_after = 120\ngone_after = 240\n"
"""A head's configuration: no device is considered gone if the machine stalls for a while."""
STEADY = "replan_gain = 2\n"
"""Every head's configuration: it never changes to a better plan, which the timings of a busy machine may suggest at any
moment; the new ring would begin without counts and KV blocks. Devices that join are added all the same."""
SHORT_S, LONG_S, RARELY_S = 0.04, 0.1, 0.4
"""Poll intervals: they grow, since polling takes CPU time from the awaited processes."""
HTTP = httpx.Client(timeout=PATIENCE_S, limits=httpx.Limits(max_keepalive_connections=0))
"""One client for all: making one takes 50 ms of CPU time, too much for polling."""
_MARK = "PRIMAD_E2E_MARK"


def wait_until(condition: Callable[[], bool], what: str, timeout_s: float = PATIENCE_S, *, stays: bool = False) -> None:
    """Poll ``condition`` until it holds; less often if it ``stays`` true."""
    longest_s = RARELY_S if stays else LONG_S
    began = time.monotonic()
    while not condition():
        waited_s = time.monotonic() - began
        assert waited_s < timeout_s, f"not within {timeout_s:g} s: {what}"
        time.sleep(min(max(SHORT_S, waited_s / (8 if stays else 20)), longest_s))


def environment(mark: str, temporary: Path | None = None, **more: str) -> dict[str, str]:
    """Return this environment without the user's settings of primad: on loopback, with the tests' local trust."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith("PRIMAD_")}
    kept |= {"PRIMAD_HOST": LOOPBACK, LOCAL_TRUST: os.environ[LOCAL_TRUST]}
    if temporary is not None:
        kept |= {"TMPDIR": str(temporary)}
    return kept | {_MARK: mark} | more


def run_primad(*arguments: object) -> subprocess.CompletedProcess[str]:
    """Run a ``primad`` command without input to its end."""
    return subprocess.run(
        [PRIMAD, *map(str, arguments)],
        env=environment("command"),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )


def marked(mark: str) -> list[psutil.Process]:
    """Return the running processes with this mark."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(_MARK) == mark and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
            continue
    return found


class Primad:
    """A running ``primad`` command; ``lines`` is its output so far, both streams together."""

    def __init__(self, *arguments: object, temporary: Path | None = None, **more: str) -> None:
        self.mark = secrets.token_hex(8)
        self.lines: list[str] = []
        self._news = threading.Condition()
        printed, out = os.pipe()
        self.process = subprocess.Popen(
            [PRIMAD, *map(str, arguments)],
            env=environment(self.mark, temporary, **more),
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            start_new_session=True,
        )
        os.close(out)
        self._printed = os.fdopen(printed, errors="replace")
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        for line in self._printed:
            with self._news:
                self.lines.append(line.rstrip("\n"))
                self._news.notify_all()
        with self._news:
            self._news.notify_all()

    @property
    def output(self) -> str:
        """Its output so far."""
        return "\n".join(self.lines)

    def wait_for(self, pattern: str, timeout_s: float = PATIENCE_S, *, start: int = 0) -> re.Match[str]:
        """Wait for a line that matches ``pattern``, from line ``start``; return the match."""
        deadline = time.monotonic() + timeout_s
        with self._news:
            while True:
                for line in self.lines[start:]:
                    if (match := re.search(pattern, line)) is not None:
                        return match
                left = deadline - time.monotonic()
                assert left > 0, f"no line {pattern!r} within {timeout_s:g} s; printed:\n{self.output}"
                assert self._reader.is_alive(), f"it ended without a line {pattern!r}; printed:\n{self.output}"
                self._news.wait(min(left, 0.5))

    def processes(self) -> list[psutil.Process]:
        """Return its running processes: itself and all that it started."""
        return marked(self.mark)

    def send_signal(self, number: int) -> None:
        """Send a signal: SIGINT to its children too, as a terminal does, others to itself only."""
        if number == signal.SIGINT:
            os.killpg(self.process.pid, number)
        else:
            self.process.send_signal(number)

    def wait_end(self, timeout_s: float = PATIENCE_S) -> int:
        """Wait until it ends; return the exit code."""
        try:
            code = self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"it did not end within {timeout_s:g} s; printed:\n{self.output}") from None
        self._reader.join(PATIENCE_S)
        return code

    def stop(self, number: int = signal.SIGINT) -> int:
        """End it as its owner would; return the exit code."""
        self.send_signal(number)
        return self.wait_end()

    def kill(self) -> None:
        """Kill its own process only, as a crash would, and wait until it is gone."""
        self.process.kill()
        self.process.wait()

    def end(self) -> None:
        """Kill all that is left of it."""
        if self.process.poll() is None:
            self.kill()
        left = self.processes()
        for process in left:
            with suppress(psutil.NoSuchProcess):  # those it started end by themselves, some just now
                process.kill()
        # Its children are not ours: whoever inherits them lets their entries stand for seconds.
        wait_until(lambda: all(map(has_ended, left)), f"the end of {left}")
        self._reader.join(PATIENCE_S)
        self._printed.close()


def has_ended(process: psutil.Process) -> bool:
    """Whether a process is gone, or a zombie."""
    try:
        return bool(process.status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True


def command_of(process: psutil.Process) -> list[str]:
    """Return its arguments; none if it has just ended."""
    try:
        return process.cmdline()
    except psutil.NoSuchProcess:  # a zombie is one too
        return []


def steady_processes(run: Primad) -> list[psutil.Process]:
    """Return the processes of a daemon that live as long as it serves: all but solver processes, which come and go."""
    commands = [(process, command_of(process)) for process in run.processes()]
    return [process for process, command in commands if command and "primad.planning.solver_process" not in command]


def ring_processes(run: Primad) -> list[psutil.Process]:
    """Return the ring processes of a daemon: one, or two while the next ring forms, or the previous one ends or is kept
    loaded (``keep_loaded``)."""
    return [process for process in run.processes() if "primad.ring.process" in command_of(process)]


def ring_process(run: Primad) -> psutil.Process:
    """Wait until a daemon has exactly one ring process; return it."""
    found: list[psutil.Process] = []

    def is_one() -> bool:
        found[:] = ring_processes(run)
        return len(found) == 1

    wait_until(is_one, "there is one ring process")
    return found[0]


@contextmanager
def stopped(process: psutil.Process) -> Iterator[bool]:
    """``process`` stands still in the block, unless it has ended; whether it does."""
    try:
        process.suspend()
        wait_until(lambda: has_ended(process) or process.status() == psutil.STATUS_STOPPED, f"{process} stands still")
        stands = not has_ended(process)
    except psutil.NoSuchProcess:
        stands = False
    try:
        yield stands
    finally:
        with suppress(psutil.NoSuchProcess):
            process.resume()


@contextmanager
def primad(*arguments: object, temporary: Path | None = None, **more: str) -> Iterator[Primad]:
    """Run a ``primad`` command in the background; kill it at the end if it still runs."""
    running = Primad(*arguments, temporary=temporary, **more)
    try:
        yield running
    finally:
        running.end()


@contextmanager
def joining(
    home: Path, cluster: str, *arguments: object, temporary: Path | None = None, **more: str
) -> Iterator[Primad]:
    """Start a worker, named like its home folder, without waiting; see ``wait_joined``."""
    base = ("join", "--home", home, "--name", home.name, "--cluster", cluster)
    with primad(*base, *arguments, temporary=temporary, **more) as worker:
        yield worker


def wait_joined(worker: Primad, home: Path) -> None:
    """Wait until a worker waits for a head."""
    worker.wait_for("waiting for a head")
    wait_until((home / "run" / "admin.json").exists, "it can be asked to leave")


@contextmanager
def joined(
    home: Path, cluster: str, *arguments: object, temporary: Path | None = None, **more: str
) -> Iterator[Primad]:
    """Start a worker, named like its home folder, and wait until it waits for a head."""
    with joining(home, cluster, *arguments, temporary=temporary, **more) as worker:
        wait_joined(worker, home)
        yield worker


@contextmanager
def all_joined(homes: Sequence[Path], cluster: str, *arguments: object, **more: str) -> Iterator[list[Primad]]:
    """Start workers concurrently, and wait until they wait for a head."""
    with ExitStack() as stack:
        workers = [stack.enter_context(joining(home, cluster, *arguments, **more)) for home in homes]
        for worker, home in zip(workers, homes, strict=True):
            wait_joined(worker, home)
        yield workers


def control_port(worker: Primad) -> int:
    """Return the port on which a worker reports that it listens."""
    return int(worker.wait_for(r"waiting for a head .*port (\d+)\)")[1])


@dataclass(frozen=True)
class Head:
    """A head and its endpoint."""

    run: Primad
    url: str

    @property
    def port(self) -> int:
        """Its HTTP port."""
        return int(self.url.rsplit(":", 1)[1])

    def health(self) -> tuple[int, str]:
        """Return status and detail of the health check; status 0 without a response."""
        try:
            answer = HTTP.get(f"{self.url}/health")
        except httpx.TransportError:
            return 0, ""
        return answer.status_code, answer.text

    def status(self) -> dict[str, Any]:
        """Return ``/status``."""
        return dict(HTTP.get(f"{self.url}/status").json())

    def open_requests(self) -> int:
        """The number of running and waiting requests, at most the number of sequences."""
        return sum(slot["is_processing"] for slot in HTTP.get(f"{self.url}/slots").json())

    def answers(self) -> bool:
        """Whether a request is open."""
        return self.open_requests() > 0

    def wait_serving(self, timeout_s: float = PATIENCE_S) -> set[int]:
        """Wait until it serves; return the other statuses of the health check seen meanwhile."""
        seen = set()

        def serves() -> bool:
            assert self.run.process.poll() is None, "the head ended"
            seen.add(status := self.health()[0])
            return status == 200

        try:
            wait_until(serves, "it serves", timeout_s, stays=True)
        except AssertionError as exc:
            exc.add_note(self.run.output)
            raise
        return seen - {200}

    def wait_health(self, detail: str, timeout_s: float = PATIENCE_S) -> None:
        """Wait until the health check reports ``detail``."""
        wait_until(lambda: detail in self.health()[1], f"the health check says {detail!r}", timeout_s)


@contextmanager
def heading(
    model: Path | None,
    home: Path,
    cluster: str,
    *arguments: object,
    temporary: Path | None = None,
    config: str = PATIENT,
    **more: str,
) -> Iterator[Head]:
    """Start a head, named like its home folder, without waiting. Extra buffers are off. Without a ``model`` it offers
    several."""
    (home / "config.toml").write_text(STEADY + config)
    port = free_port()
    chosen = () if model is None else ("--model", model)
    base = ("serve", *chosen, "--home", home, "--name", home.name, "--cluster", cluster, "--port", port)
    extra = () if "--extra-buffers" in arguments else ("--extra-buffers", "off")
    with primad(*base, *extra, *arguments, temporary=temporary, **more) as run:
        yield Head(run, f"http://127.0.0.1:{port}")


@contextmanager
def serving(model: Path, home: Path, cluster: str, *arguments: object) -> Iterator[Head]:
    """Start a head and wait until it serves."""
    with heading(model, home, cluster, *arguments) as head:
        head.wait_serving()
        yield head


@contextmanager
def ring(model: Path, homes: list[Path], cluster: str, *arguments: object) -> Iterator[tuple[Head, list[Primad]]]:
    """A head in the first home and workers in the others, serving; all of them compute.

    Processes of one machine are no faster together than one alone, so the plan by itself would leave workers out.
    """
    everyone = () if "--windows" in arguments else ("--use-all",)
    with ExitStack() as stack:
        workers = stack.enter_context(all_joined(homes[1:], cluster))
        head = stack.enter_context(serving(model, homes[0], cluster, "--wait", len(workers), *everyone, *arguments))
        yield head, workers


def snapshot(folder: Path) -> dict[str, tuple[int, int, int]]:
    """Return every file under ``folder`` with inode, size and modification time, and every folder with zeros."""
    return {
        str(path.relative_to(folder)): (0, 0, 0)
        if path.is_dir()
        else (path.stat().st_ino, path.stat().st_size, path.stat().st_mtime_ns)
        for path in sorted(folder.rglob("*"))
    }
