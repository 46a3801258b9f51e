"""Ends streams that have no end when the server shuts down."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import suppress
from typing import TypeVar

T = TypeVar("T")


async def until(ended: asyncio.Event, items: AsyncIterator[T]) -> AsyncGenerator[T, None]:
    """Yield ``items`` as they come, until there are no more or ``ended`` is set."""
    end = asyncio.ensure_future(ended.wait())
    upcoming: asyncio.Future[T] | None = None
    try:
        while True:
            upcoming = asyncio.ensure_future(anext(items))
            await asyncio.wait((end, upcoming), return_when=asyncio.FIRST_COMPLETED)
            if not upcoming.done():
                return
            try:
                item = upcoming.result()
            except StopAsyncIteration:
                return
            yield item
    finally:
        for each in (end, upcoming):
            if each is not None:
                each.cancel()
                with suppress(asyncio.CancelledError, StopAsyncIteration):
                    await each
        if isinstance(items, AsyncGenerator):
            await items.aclose()
