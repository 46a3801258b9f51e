"""``primad`` commands, each in a process of its own that need not import everything anew: that takes a second of a core."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from multiprocessing import get_context
from multiprocessing.reduction import DupFd
from tempfile import TemporaryFile
from typing import Any

from primad.cli.main import main

PATIENCE_S = 180.0
NETWORK = 0x40000000
"""CLONE_NEWNET."""
_FORKS = get_context("forkserver")
_FORKS.set_forkserver_preload(
    [__name__, "primad.cli.chat", "primad.daemon.run", "primad.head.serve", "primad.worker.daemon"]
)


class _File:
    """A file descriptor that goes to the process that is started."""

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def __getstate__(self) -> Any:
        return DupFd(self.fd)

    def __setstate__(self, sent: Any) -> None:
        self.fd = sent.detach()


class Forked:
    """A running command with what its user needs of ``subprocess.Popen``; it leads a session of its own."""

    def __init__(self, arguments: Sequence[object], variables: Mapping[str, str], out: int, errors: int) -> None:
        command = list(map(str, arguments))
        with _network() as network:
            self._process = _FORKS.Process(
                target=_primad, args=(command, dict(variables), _File(out), _File(errors), network), daemon=True
            )
            self._process.start()
        assert self._process.pid is not None
        self.pid: int = self._process.pid

    def poll(self) -> int | None:
        """Its exit code, if it has ended."""
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        """Its exit code, awaited."""
        self._process.join(timeout)
        if (code := self._process.exitcode) is None:
            raise subprocess.TimeoutExpired("primad", timeout or 0)
        return code

    def send_signal(self, number: int) -> None:
        """To itself only."""
        with suppress(ProcessLookupError):
            if self.poll() is None:
                os.kill(self.pid, number)

    def kill(self) -> None:
        """As a crash does."""
        self.send_signal(signal.SIGKILL)


def run_forked(arguments: Sequence[object], variables: Mapping[str, str]) -> tuple[int, str, str]:
    """Run ``primad`` with ``arguments`` in an environment to its end: exit code, standard output and error."""
    with TemporaryFile() as out, TemporaryFile() as errors:
        process = Forked(arguments, variables, out.fileno(), errors.fileno())
        try:
            code = process.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            raise AssertionError(f"primad {arguments} did not end within {PATIENCE_S:g} s") from None
        return code, _text(out), _text(errors)


def _text(file: Any) -> str:
    file.seek(0)
    return str(file.read().decode())


@contextmanager
def _network() -> Iterator[_File | None]:
    """The network of this thread, which ``tests/e2e/conftest.py`` may have made; that of the fork server is another."""
    if sys.platform != "linux" or os.geteuid() != 0:
        yield None
        return
    fd = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
    try:
        yield _File(fd)
    finally:
        os.close(fd)


def _primad(arguments: list[str], variables: dict[str, str], out: _File, errors: _File, network: _File | None) -> None:
    os.setsid()
    if network is not None:
        assert ctypes.CDLL(None).setns(network.fd, NETWORK) == 0
        os.close(network.fd)
    os.environ.clear()
    os.environ.update(variables)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for number, fd in ((0, nothing), (1, out.fd), (2, errors.fd)):
        os.dup2(fd, number)
    for fd in {nothing, out.fd, errors.fd} - {0, 1, 2}:
        os.close(fd)
    # Those of the fork server have closed, or are of another kind.
    sys.stdin, sys.stdout = os.fdopen(0), os.fdopen(1, "w", closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, errors="backslashreplace", closefd=False)
    sys.argv = ["primad", *arguments]
    main()
