"""Child processes that inherit only one end of a socket pair, or pipes."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Mapping
from typing import IO


def begin_child(
    module: str, theirs: socket.socket, variables: Mapping[str, str], errors: IO[bytes] | None
) -> subprocess.Popen[bytes]:
    """Run ``module`` with the end ``theirs``; its output goes to ``errors``, or else to ours. Raises ``OSError``."""
    options: dict[str, object] = {"stderr": errors, "stdout": errors}
    argument = str(theirs.fileno())
    if sys.platform == "win32":
        argument = str(len(theirs.share(os.getpid())))
        options["stdin"] = subprocess.PIPE
    else:
        options |= {"stdin": subprocess.DEVNULL, "pass_fds": (theirs.fileno(),)}
    process: subprocess.Popen[bytes] = subprocess.Popen(
        [sys.executable, "-m", module, argument],
        env=dict(variables),
        **options,  # type: ignore[call-overload]
    )
    if sys.platform == "win32":
        assert process.stdin is not None
        process.stdin.write(theirs.share(process.pid))
        process.stdin.close()
    return process


def begin_piped(
    module: str, variables: Mapping[str, str] | None = None, errors: IO[bytes] | int | None = None
) -> subprocess.Popen[bytes]:
    """Run ``module`` with pipes as its standard input and output. Raises ``OSError``.

    It has a session of its own: Ctrl-C in a terminal must not end it, which would look like a crash.
    """
    return subprocess.Popen(
        [sys.executable, "-m", module],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=errors,
        env=variables,
        start_new_session=True,
    )


def inherited(argument: str) -> socket.socket:
    """The child's end: an inherited descriptor, or on Windows a shared handle read from standard input."""
    if sys.platform == "win32":
        return socket.fromshare(sys.stdin.buffer.read(int(argument)))
    return socket.socket(fileno=int(argument))
