"""Fair shares of queue places, memory and turns: a caller that asks for everything locks out no other.

A caller may hold as much as is left free. So one caller gets half, two greedy ones a third each, and a new one always
finds room; no share has to be revoked, and the number of callers need not be known. Pure.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Generic, TypeVar

T = TypeVar("T")


class Shares:
    """Shares of ``room`` units. A caller that holds none may always take ``minimum``."""

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
    """Waiting items by caller: one of each in turn, and for each in order of arrival."""

    def __init__(self) -> None:
        self._waiting: dict[str, deque[T]] = {}
        self._last: str | None = None
        """The caller of the last turn: callers that queued an item meanwhile come before its next one."""

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def waiting(self, caller: str) -> int:
        """Number of waiting items of ``caller``."""
        return len(self._waiting.get(caller, ()))

    def add(self, caller: str, item: T) -> None:
        """Queue ``item`` after all others of ``caller``."""
        self._waiting.setdefault(caller, deque()).append(item)

    def next(self) -> T:
        """The next item; there must be one."""
        found = self.next_but(())
        assert found is not None
        return found

    def next_but(self, left_out: Collection[str]) -> T | None:
        """The next item of callers that are not ``left_out``; None if there is none."""
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
