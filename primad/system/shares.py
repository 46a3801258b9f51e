"""What callers share: places in a queue, bytes in memory, turns. One that asks for all of it locks nobody out.

A caller may hold as much as is left. So one alone gets half, two that are greedy a third each, and whoever comes next always
finds room; nothing has to be taken from anybody, and nobody has to know how many callers there are. Pure.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Generic, TypeVar

T = TypeVar("T")


class Shares:
    """``room`` of something. A caller who holds none may always take ``minimum`` of it."""

    def __init__(self, room: int, *, minimum: int = 0) -> None:
        self._room, self._minimum = room, minimum
        self._held: Counter[str] = Counter()
        self._taken = 0

    def has_room(self, caller: str, amount: int = 1) -> bool:
        """Whether ``caller`` may take ``amount`` more."""
        after = self._held[caller] + amount
        return after <= max(self._minimum, self._room - self._taken - amount)

    def take(self, caller: str, amount: int = 1) -> None:
        """``caller`` holds ``amount`` more, whether or not there was room."""
        self._held[caller] += amount
        self._taken += amount

    def give_back(self, caller: str, amount: int = 1) -> None:
        """``caller`` holds ``amount`` less."""
        self._held[caller] -= amount
        self._taken -= amount
        assert self._held[caller] >= 0
        if not self._held[caller]:
            del self._held[caller]

    @contextmanager
    def held(self, caller: str, amount: int = 1) -> Iterator[None]:
        """``caller`` holds ``amount`` more meanwhile, whether or not there was room."""
        self.take(caller, amount)
        try:
            yield
        finally:
            self.give_back(caller, amount)


class Turns(Generic[T]):
    """What waits, by caller: one of each in turn, and of each what came first."""

    def __init__(self) -> None:
        self._waiting: dict[str, deque[T]] = {}
        self._last: str | None = None
        """Whose turn it was: whoever asked meanwhile comes before the next one of the same."""

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def waiting(self, caller: str) -> int:
        """How much of ``caller`` waits."""
        return len(self._waiting.get(caller, ()))

    def add(self, caller: str, item: T) -> None:
        """``item`` waits behind all others of ``caller``."""
        self._waiting.setdefault(caller, deque()).append(item)

    def next(self) -> T:
        """What is next; there is something."""
        found = self.next_but(())
        assert found is not None
        return found

    def next_but(self, left_out: Collection[str]) -> T | None:
        """What is next of callers that are not ``left_out``; None where there is nothing."""
        if self._last in self._waiting:
            self._waiting[self._last] = self._waiting.pop(self._last)
        caller = next((each for each in self._waiting if each not in left_out), None)
        if caller is None:
            return None
        self._last, items = caller, self._waiting[caller]
        item = items.popleft()
        if not items:
            del self._waiting[caller]
        return item
