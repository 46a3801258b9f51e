"""The choices of one request, written at once as far as the model writes several answers: they share their prompt."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from typing import TypeVar

T = TypeVar("T")


async def together(
    begins: Sequence[Callable[[], AsyncGenerator[T, None]]], at_once: int
) -> AsyncGenerator[tuple[int, T], None]:
    """What all of them give as it comes, so many ``at_once``, with the place of the one that gave it.

    Each begins when it has its turn, and waits while what it gave is not taken. What one raises is raised here and ends
    all; closed, this closes them. One alone is given as it is, at no cost.
    """
    if len(begins) == 1:
        async with aclosing(begins[0]()) as parts:
            async for part in parts:
                yield 0, part
        return
    turns, room = asyncio.Semaphore(at_once), asyncio.Semaphore(1)
    given = asyncio.Queue[tuple[int, T] | None](1 + len(begins))

    async def give(place: int) -> None:
        async with turns, aclosing(begins[place]()) as parts:
            async for part in parts:
                await room.acquire()
                given.put_nowait((place, part))

    tasks = [asyncio.create_task(give(place)) for place in range(len(begins))]
    for task in tasks:
        task.add_done_callback(lambda _: given.put_nowait(None))
    try:
        left = len(tasks)
        while left:
            got = await given.get()
            if got is not None:
                room.release()
                yield got
                continue
            left -= 1
            for task in tasks:
                if task.done():
                    task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
