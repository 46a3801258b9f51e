"""Work that grows with a response, done in portions: the event loop must serve other clients meanwhile."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable
from typing import Final, TypeVar

T = TypeVar("T")
TURN_S: Final = 0.005
"""The longest portion of such work."""


async def in_turns(items: Iterable[T]) -> list[T]:
    """Return all ``items``, each of which takes some work to build; let other tasks run every few milliseconds."""
    made: list[T] = []
    until_s = time.perf_counter() + TURN_S
    for item in items:
        made.append(item)
        if time.perf_counter() > until_s:
            await asyncio.sleep(0)
            until_s = time.perf_counter() + TURN_S
    return made
