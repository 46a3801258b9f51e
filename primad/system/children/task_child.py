"""A child process that gets one task at a time, each a line of JSON, and replies with one line.

A crash or a hang of the child is a result, too, and the next task gets a new child.
"""

from __future__ import annotations

import contextlib
import subprocess
import tempfile
import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Final, TypeVar

import msgspec

from primad.system.children.child import begin_piped
from primad.system.children.spawn import how_it_ended
from primad.system.processors import OwnTime

Answer = TypeVar("Answer")
_LOOK_S: Final = 1.0


class TaskChild:
    """Children that run ``module`` with these environment ``variables``, one at a time; ``close`` ends it.

    ``what`` names a task, at the beginning of the error for one that took longer than ``timeout_s`` or ended the child.
    Time in which the child waits for a processor does not count.
    """

    def __init__(self, module: str, what: str, variables: Mapping[str, str], *, timeout_s: float) -> None:
        self._module, self._what, self._variables = module, what, variables
        self.timeout_s = timeout_s
        self._child: subprocess.Popen[bytes] | None = None
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115  (closed by ``close``)

    def close(self) -> None:
        """End the child, even during a task."""
        if self._child is not None:
            self._child.kill()
            self._bury(self._child)
        self._errors.close()

    def _start(self) -> None:
        self._errors.seek(0)
        self._errors.truncate()
        self._child = begin_piped(self._module, self._variables, self._errors)

    def ask(self, task: msgspec.Struct, kind: type[Answer]) -> Answer | str:
        """The reply to ``task``, or one line on how the child ended during it."""
        if self._child is not None and self._child.poll() is not None:  # between two tasks
            self._bury(self._child)
        if self._child is None:
            with ThreadPoolExecutor(1) as pool:  # where no Ctrl-C can lose a child that has just begun
                pool.submit(self._start).result()
        child = self._child
        assert child is not None
        assert child.stdin is not None
        assert child.stdout is not None
        answered, late = threading.Event(), threading.Event()

        def give_up() -> None:
            own = OwnTime(child.pid)
            while (left_s := own.left_s(self.timeout_s)) > 0:
                if answered.wait(min(left_s, _LOOK_S)):
                    return
            late.set()
            child.kill()

        guard = threading.Thread(target=give_up, daemon=True)
        guard.start()
        try:
            with contextlib.suppress(OSError):  # the child may have ended: then there is no reply
                child.stdin.write(msgspec.json.encode(task) + b"\n")
                child.stdin.flush()
            answer = child.stdout.readline()
        finally:
            answered.set()
            guard.join()
        if answer.endswith(b"\n"):
            return msgspec.json.decode(answer, type=kind)
        code = self._bury(child)
        if late.is_set():
            return f"{self._what} did not end within {self.timeout_s:g} s"
        last_line = self._last_line()
        return f"{self._what} {how_it_ended(code)}" + (f": {last_line}" if last_line else "")

    def _bury(self, child: subprocess.Popen[bytes]) -> int:
        self._child = None
        code = child.wait()
        for stream in (child.stdin, child.stdout):
            assert stream is not None
            with contextlib.suppress(OSError):
                stream.close()
        return code

    def _last_line(self) -> str:
        self._errors.seek(0)
        lines = self._errors.read().decode("utf-8", errors="replace").strip().splitlines()
        return lines[-1].strip() if lines else ""
