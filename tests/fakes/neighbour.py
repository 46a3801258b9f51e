"""A program beside primad that takes up to so many bytes of memory at random, holds them a moment and frees them.

    neighbour.py MOST SEED

Goes on until it is given a line or its input is closed; then prints how often it took some. ``Neighbour`` starts it.
"""

from __future__ import annotations

import random
import select
import subprocess
import sys
from contextlib import suppress
from types import TracebackType
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:  # the program itself is started without what is beside it
    from tools.lab.memory import LimitedGroup


END_S = 180.0
"""For what takes a moment: it may take much longer where other programs have most of the machine."""


class Neighbour:
    """The program in ``group``, taking at most ``max_bytes``; it ends with the block at the latest."""

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
        """End it: how often it took memory. Raises ``RuntimeError`` when it was gone already."""
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
        held = b"\1" * chance.randrange(maximum // 4, maximum)  # written to, so that it is there
        taken += 1
        if _closed(chance.uniform(0.05, 0.5)):
            break
        del held
    _report_line(str(taken))


def _report_line(line: str) -> None:
    """To whoever started it."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def _closed(wait_s: float) -> bool:
    """Whether there is a line or an end of input, awaited for so long."""
    return bool(select.select([sys.stdin], [], [], wait_s)[0])


if __name__ == "__main__":
    main()
