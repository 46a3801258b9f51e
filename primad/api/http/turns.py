"""Work that grows with a response, done in portions: the loop has all other clients to serve."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable
from typing import Final, TypeVar

T = TypeVar("T")
TURN_S: Final = 0.005
"""For work that is done in portions."""


async def in_turns(items: Iterable[T]) -> list[T]:
    """All ``items``, each of which takes some work to build; every few milliseconds others have their turn."""
    made: list[T] = []
    until_s = time.perf_counter() + TURN_S
    for item in items:
        made.append(item)
        if time.perf_counter() > until_s:
            await asyncio.sleep(0)
            until_s = time.perf_counter() + TURN_S
    return made
