"""Findings of checks, and queries of the system that never take long."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Literal, TypeVar

COMMAND_TIMEOUT_S: Final = 3.0
_MAX_OUTPUT: Final = 1 << 20

Severity = Literal["ok", "note", "warning", "error"]
"""A note is information, a warning costs something, an error keeps this device from serving."""
_Result = TypeVar("_Result")


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One line of the report. ``check`` is its group, ``next`` the command that helps, or None."""

    check: str
    level: Severity
    text: str
    next: str | None


def finding(check: str, level: Severity, text: str, next_command: str | None = None) -> Finding:
    """A ``Finding``."""
    return Finding(check=check, level=level, text=text, next=next_command)


def gib(count: int) -> str:
    """Return bytes in readable form."""
    return f"{count / (1 << 30):.1f} GiB"


async def in_thread(ask: Callable[[], _Result]) -> _Result:
    """Run ``ask`` in a thread that is not joined at exit: a dead network file system blocks its reader for good."""
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[_Result] = loop.create_future()

    def resolve(result: _Result | None, error: BaseException | None) -> None:
        if answer.done():
            return
        if error is not None:
            answer.set_exception(error)
        else:
            answer.set_result(result)  # type: ignore[arg-type]

    def run() -> None:
        result, error = None, None
        try:
            result = ask()
        except BaseException as exc:  # noqa: BLE001  (raised again where the answer is awaited)
            error = exc
        with contextlib.suppress(RuntimeError):  # the loop was closed meanwhile: no one awaits the result
            loop.call_soon_threadsafe(resolve, result, error)

    threading.Thread(target=run, name="primad-doctor", daemon=True).start()
    return await answer


def output_of(*command: str, timeout_s: float = COMMAND_TIMEOUT_S) -> str | None:
    """Return what ``command`` prints when it succeeds, in English; None if it is missing, fails or takes too long."""
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=os.environ | {"LC_ALL": "C"},
            timeout=timeout_s,
            check=True,
        )
    except (OSError, subprocess.SubprocessError, ValueError):
        return None
    return done.stdout[:_MAX_OUTPUT].decode("utf-8", errors="replace")
