"""Requests to a child process that cannot reply."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Coroutine
from typing import Any, Final, TypeVar

Reply = TypeVar("Reply")
TURNS: Final = 50
"""Turns of the event loop until a request has reached the process."""


async def ask_stopped(pid: int, request: Coroutine[Any, Any, Reply]) -> asyncio.Task[Reply]:
    """Stop process ``pid``; return the task of ``request``, which waits for its reply."""
    os.kill(pid, signal.SIGSTOP)
    task = asyncio.create_task(request)
    for _ in range(TURNS):
        await asyncio.sleep(0)
    return task
