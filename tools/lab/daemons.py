"""Daemons of primad on this machine, as children of a tool: without the user's settings, ended with the block."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Final

from primad.settings.config import LOOPBACK
from primad.trust.local_trust import VARIABLE

PRIMAD: Final = Path(sys.executable).with_name("primad")
STOP_S: Final = 30.0


def environment(homes: Path, host: str | None = LOOPBACK) -> dict[str, str]:
    """Return an environment without the user's settings: only ``host`` (None: every address), and its own folder for
    trust."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith("PRIMAD_")}
    return kept | {VARIABLE: str(homes / "local-trust")} | ({} if host is None else {"PRIMAD_HOST": host})


@contextmanager
def daemon(
    words: Sequence[str | Path],
    homes: Path,
    log: IO[bytes] | None,
    *,
    before: Sequence[str] = (),
    host: str | None = LOOPBACK,
) -> Iterator[subprocess.Popen[bytes]]:
    """Run ``primad`` with these words, after those in ``before``, if any; its output goes to ``log``, or is passed
    on."""
    command = [*before, PRIMAD, *words]
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=log, env=environment(homes, host))
    try:
        yield process
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def free_port(wanted: int = 0) -> int:
    """Return a free port of 127.0.0.1: the ``wanted`` one if it is free."""
    try:
        free = socket.create_server(("127.0.0.1", wanted))
    except OSError:
        free = socket.create_server(("127.0.0.1", 0))
    with free:
        return int(free.getsockname()[1])
