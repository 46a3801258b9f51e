"""A program next to primad that allocates random amounts of memory, holds them for a moment and frees them.

    neighbour.py MOST SEED

Runs until it gets a line or its input is closed; then prints the number of allocations. ``Neighbour`` starts it.
"""

from __future__ import annotations

import random
import select
import subprocess
import sys
from contextlib import suppress
from types import TracebackType
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:  # the program itself runs without the repository in its path
    from tools.lab.memory import LimitedGroup


END_S = 180.0
"""Timeout of short operations, which may take much longer while other programs use most of the machine."""


class Neighbour:
    """The program in ``group``, taking at most ``max_bytes``; it is ended with the block at the latest."""

    def __init__(self, group: LimitedGroup, max_bytes: int) -> None:
        self._group = group
        self.max_bytes = max_bytes
        self._process: subprocess.Popen[str]

    def __enter__(self) -> Self:
        argv = [sys.executable, "-I", __file__, str(self.max_bytes), "0"]
        self._process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        try:
            self._group.add(self._process.pid)
            assert self._process.stdout is not None
            if self._process.stdout.readline() != "ready\n":
                raise RuntimeError(f"the neighbour ended with code {self._process.wait(10)}")
        except BaseException:
            self._kill()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._kill()

    def end(self) -> int:
        """End it; the number of allocations. Raises ``RuntimeError`` if it was already gone."""
        printed, _ = self._process.communicate("\n", timeout=END_S)
        if self._process.returncode:
            raise RuntimeError(f"the neighbour ended with code {self._process.returncode}")
        return int(printed)

    def _kill(self) -> None:
        self._process.kill()
        with self._process, suppress(BrokenPipeError):
            pass  # closes its pipes and waits for it


def main() -> None:
    """The program."""
    maximum, chance = int(sys.argv[1]), random.Random(int(sys.argv[2]))
    _report_line("ready")
    taken = 0
    while not _closed(chance.uniform(0.01, 0.2)):
        held = b"\1" * chance.randrange(maximum // 4, maximum)  # written, so that it is resident
        taken += 1
        if _closed(chance.uniform(0.05, 0.5)):
            break
        del held
    _report_line(str(taken))


def _report_line(line: str) -> None:
    """Print a line for the parent process."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def _closed(wait_s: float) -> bool:
    """Whether there is a line or the end of input, after waiting at most ``wait_s``."""
    return bool(select.select([sys.stdin], [], [], wait_s)[0])


if __name__ == "__main__":
    main()
