"""Generates the choices of one request concurrently, as far as the model allows; they share their prompt."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from typing import TypeVar

T = TypeVar("T")


async def together(
    begins: Sequence[Callable[[], AsyncGenerator[T, None]]], at_once: int
) -> AsyncGenerator[tuple[int, T], None]:
    """Yield the merged output of all streams, at most ``at_once`` at a time, each item with the index of its stream.

    Each stream starts in turn and waits until its output is consumed. An exception of one is raised here and ends all;
    closing this generator closes them. A single stream is passed through at no cost.
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
