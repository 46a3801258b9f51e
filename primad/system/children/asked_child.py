"""A child process that gets one task at a time, each a frame, and replies with one frame (``reply_stream.py``)."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from asyncio.subprocess import DEVNULL, PIPE
from collections.abc import Awaitable, Callable, Mapping
from typing import Final, Self, TypeVar

import msgspec
import psutil

from primad.errors import RingError
from primad.system.children.channel import frame
from primad.system.children.spawn import how_it_ended, read_frame
from primad.system.memory import staying
from primad.system.processors import OwnTime

GRACE_S: Final = 60.0
"""Time limit for the end of a process that no longer replies."""
Reply = TypeVar("Reply")


class EndedError(RingError):
    """The process has ended; the text says how."""


async def twice(attempt: Callable[[], Awaitable[Reply]]) -> Reply:
    """Return the result of ``attempt``, which is repeated once if the process ended: it need not be the task's fault.

    Raises ``EndedError`` for the second end.
    """
    try:
        return await attempt()
    except EndedError:
        return await attempt()


class AskedChild:
    """``start``, ``ask`` and ``end`` it, also after ``ask`` raised: a late reply would be taken for the next one."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process, self.pid = process, process.pid

    @classmethod
    async def start(cls, module: str, variables: Mapping[str, str], what: str) -> Self:
        """Start a process that runs ``module``; ``what`` names it in errors. Raises ``RingError`` on failure."""
        try:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", module),
                stdin=PIPE,
                stdout=PIPE,
                stderr=DEVNULL,
                env=variables,
                start_new_session=True,
            )
        except OSError as exc:  # for example, no memory or processes are left
            raise RingError(f"{what} cannot be started: {exc.strerror or exc}") from exc
        staying.add(process.pid)
        return cls(process)

    @property
    def is_alive(self) -> bool:
        """Whether the process still runs."""
        return self._process.returncode is None

    async def ask(
        self, task: msgspec.Struct, look: Callable[[OwnTime], None] = lambda _: None, look_s: float | None = None
    ) -> bytes:
        """The reply to ``task``; ``look`` is called now and then and may raise. Raises ``EndedError``."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        reading = asyncio.ensure_future(read_frame(self._process.stdout))
        own = OwnTime(self.pid)
        try:
            self._process.stdin.write(frame(task))
            while not reading.done():
                await asyncio.wait([reading], timeout=look_s)
                if not reading.done():
                    look(own)
            return await reading
        except (ConnectionError, asyncio.IncompleteReadError):
            with contextlib.suppress(TimeoutError):  # killing an ending process would hide how it ended
                await asyncio.wait_for(self._process.wait(), GRACE_S)
            raise EndedError(how_it_ended(await self.end())) from None
        finally:
            reading.cancel()

    async def answer(self, task: msgspec.Struct, what: str, timeout_s: float) -> bytes:
        """The reply to ``task``; ``what`` names the process. Raises ``EndedError`` if it ended, ``RingError`` if it did not
        reply in time."""
        try:
            async with asyncio.timeout(timeout_s):
                return await self.ask(task)
        except TimeoutError:
            raise RingError(f"{what} did not respond within {timeout_s:g} s") from None
        except EndedError as exc:
            raise EndedError(f"{what} {exc}") from None

    def rss_bytes(self) -> int:
        """The resident memory of the process."""
        try:
            return int(psutil.Process(self.pid).memory_info().rss) if self.is_alive else 0
        except psutil.Error:
            return 0

    async def end(self) -> int:
        """End the process, even while it computes, and drop unsent tasks; return its exit code."""
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        assert self._process.stdin is not None
        if not self._process.stdin.transport.is_closing():
            self._process.stdin.transport.abort()
        code = await self._process.wait()
        staying.discard(self.pid)
        return code
