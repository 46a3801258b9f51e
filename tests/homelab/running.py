"""Run commands on lab devices, reading their output as it comes."""

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
"""Timeout of things that take seconds, or much longer on a busy machine."""
PROBE = Path(__file__).with_name("probe.py")

MakeLab = Callable[..., Homelab]
"""Builds a lab of the given ``DeviceSpec``s; the lab is gone after the test."""


class Running:
    """A running command; ``lines`` is its output so far, both streams together, with the time of each line."""

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
        """Its output so far."""
        return "\n".join(line for _, line in self.lines)

    def last(self, count: int) -> str:
        """Return the last ``count`` lines of its output, which is complete if it has ended."""
        if self.process.poll() is not None:
            self._reader.join(1.0)
        return "\n".join(line for _, line in self.lines[-count:])

    def wait_for(self, pattern: str, timeout_s: float = PATIENCE_S, *, start: int = 0) -> re.Match[str]:
        """Wait for a line that matches ``pattern``, from line ``start``; return the match."""
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
        """Wait until it prints something or ends, for at most ``timeout_s``; may return early."""
        with self._news:
            if self._reader.is_alive():
                self._news.wait(timeout_s)

    def ask(self, line: str, pattern: str = ".*", timeout_s: float = PATIENCE_S) -> str:
        """Write a line to it; return the next matching line that it prints."""
        assert self.process.stdin is not None
        start = len(self.lines)
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()
        return self.wait_for(pattern, timeout_s, start=start).string

    def wait_end(self, timeout_s: float = PATIENCE_S) -> int:
        """Wait until it ends; return the exit code."""
        try:
            code = self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"it did not end within {timeout_s:g} s; printed:\n{self.output}") from None
        self._reader.join(timeout_s)
        return code

    def end(self) -> None:
        """Kill it if it still runs. Its children may hold its output open; the lab kills them."""
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
    """Run a command in the background; kill it at the end if it still runs."""
    started = Running(device, *argv, cwd=cwd, **env)
    try:
        yield started
    finally:
        started.end()


@contextmanager
def probe(device: Device, *words: object) -> Iterator[Running]:
    """Run ``probe.py`` with these words, and wait until it is ready."""
    with running(device, sys.executable, PROBE, *words) as started:
        started.wait_for("^ready")
        yield started
