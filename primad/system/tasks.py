"""Groups of tasks that end together, and helpers to wait for their results."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any, ParamSpec, TypeVar

logger = logging.getLogger(__name__)


_Result = TypeVar("_Result")
_Arguments = ParamSpec("_Arguments")


def mistake(error: BaseException) -> str:
    """The message for an unexpected error, one that primad does not raise on purpose."""
    return f"internal error of the head: {type(error).__name__}: {error}"


def resolve(future: asyncio.Future[_Result], result: _Result) -> None:
    """Give ``future`` its ``result``, unless it is done or cancelled."""
    if not future.done():
        future.set_result(result)


async def to_its_end(work: Coroutine[Any, Any, _Result], cancelled: Callable[[], None] = lambda: None) -> _Result:
    """Complete ``work`` even if the waiting task is cancelled meanwhile; ``cancelled`` is called then and may hasten it."""
    task = asyncio.create_task(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        cancelled()
        # No caller waits for an error any more, even if this wait is cancelled as well.
        task.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
        await asyncio.wait([task])
        raise


async def in_thread(
    function: Callable[_Arguments, _Result], *arguments: _Arguments.args, **named: _Arguments.kwargs
) -> _Result:
    """Run ``function`` in a thread ``to_its_end``: once a cancelled caller has ended, the thread writes nothing more."""
    return await to_its_end(asyncio.to_thread(function, *arguments, **named))


class Tasks:
    """Tasks that are not awaited one by one. A failure is a bug, and is reported where it is noticed."""

    def __init__(self) -> None:
        self._running: set[asyncio.Task[None]] = set()

    def start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Begin ``work``."""
        return self.add(asyncio.create_task(work))

    def add(self, task: asyncio.Task[None]) -> asyncio.Task[None]:
        """Add ``task``, which is not awaited elsewhere."""
        self._running.add(task)
        task.add_done_callback(self._ended)
        return task

    async def wait(self) -> None:
        """Wait until all tasks have ended, including those that start meanwhile."""
        while self._running:
            await asyncio.wait(list(self._running))

    async def close(self) -> None:
        """Cancel all running tasks and wait for their ends."""
        tasks = list(self._running)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._running.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("a task failed", exc_info=error)
