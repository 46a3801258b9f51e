"""Daemons of primad on this machine, as children of a tool: none of the user's settings, ended with the block."""

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
    """None of the user's own settings, nothing beyond ``host`` (None: every address), no trust in what else they run."""
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
    """``primad`` with these words, and those ``before`` it, if any; what it says goes to ``log``, or on as it is."""
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
    """A port of 127.0.0.1 that nobody listens on now: the one that is ``wanted`` if it is free."""
    try:
        free = socket.create_server(("127.0.0.1", wanted))
    except OSError:
        free = socket.create_server(("127.0.0.1", 0))
    with free:
        return int(free.getsockname()[1])
