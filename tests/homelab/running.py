"""A command that runs on a device of a lab, its output read as it comes."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from tools.lab import Homelab
from tools.lab.device import Device

PATIENCE_S = 180.0
"""For what takes seconds: it may take much longer where other programs have most of the machine."""
PROBE = Path(__file__).with_name("probe.py")

MakeLab = Callable[..., Homelab]
"""Builds a lab of the ``DeviceSpec``s that it is given; it is gone after the test."""


class Running:
    """One running command; ``lines`` is what it printed so far with the time of each, both streams together."""

    def __init__(self, device: Device, *argv: object, cwd: Path | None = None, **env: str) -> None:
        self.device = device
        self.lines: list[tuple[float, str]] = []
        self._news = threading.Condition()
        self.process = device.popen(
            [str(word) for word in argv],
            env=env,
            cwd=cwd,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            bufsize=1,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            with self._news:
                self.lines.append((time.monotonic(), line.rstrip("\n")))
                self._news.notify_all()
        with self._news:
            self._news.notify_all()

    @property
    def output(self) -> str:
        """Everything it printed so far."""
        return "\n".join(line for _, line in self.lines)

    def last(self, count: int) -> str:
        """The last ``count`` lines that it printed; after its end, of all that it printed."""
        if self.process.poll() is not None:
            self._reader.join(1.0)
        return "\n".join(line for _, line in self.lines[-count:])

    def wait_for(self, pattern: str, timeout_s: float = PATIENCE_S, *, start: int = 0) -> re.Match[str]:
        """The first line from number ``start`` on in which ``pattern`` is found, awaited."""
        deadline = time.monotonic() + timeout_s
        with self._news:
            while True:
                for _, line in self.lines[start:]:
                    if (match := re.search(pattern, line)) is not None:
                        return match
                left = deadline - time.monotonic()
                assert left > 0, f"no line {pattern!r} within {timeout_s:g} s; printed:\n{self.output}"
                assert self._reader.is_alive(), f"it ended without a line {pattern!r}; printed:\n{self.output}"
                self._news.wait(min(left, 0.5))

    def wait_news(self, timeout_s: float) -> None:
        """Wait until it prints something or ends, at most ``timeout_s``; may return early."""
        with self._news:
            if self._reader.is_alive():
                self._news.wait(timeout_s)

    def ask(self, line: str, pattern: str = ".*", timeout_s: float = PATIENCE_S) -> str:
        """Write a line to it; the next line that it prints and that matches."""
        assert self.process.stdin is not None
        start = len(self.lines)
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()
        return self.wait_for(pattern, timeout_s, start=start).string

    def wait_end(self, timeout_s: float = PATIENCE_S) -> int:
        """Its exit code, awaited."""
        try:
            code = self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"it did not end within {timeout_s:g} s; printed:\n{self.output}") from None
        self._reader.join(timeout_s)
        return code

    def end(self) -> None:
        """Kill it if it still runs. Whoever it started holds its output open and is the lab's to kill."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(PATIENCE_S)
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        self._reader.join(1.0)
        if not self._reader.is_alive():
            self.process.stdout.close()


@contextmanager
def running(device: Device, *argv: object, cwd: Path | None = None, **env: str) -> Iterator[Running]:
    """A command in the background, killed at the end if it still runs."""
    started = Running(device, *argv, cwd=cwd, **env)
    try:
        yield started
    finally:
        started.end()


@contextmanager
def probe(device: Device, *words: object) -> Iterator[Running]:
    """``probe.py`` with these words, ready."""
    with running(device, sys.executable, PROBE, *words) as started:
        started.wait_for("^ready")
        yield started
