"""What devices are called: a key has one name, and no other key has that one too."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from itertools import chain, count
from typing import Final

_ROOM: Final = 57
"""Characters of a name of 62 that stay where a number is put behind it."""


def free_name(name: str, taken: Collection[str]) -> str:
    """``name``, with a number behind it where it is taken."""
    numbered = (f"{name[:_ROOM]}-{number}" for number in count(2))
    return next(each for each in chain([name], numbered) if each not in taken)


class Labels:
    """What the device ``own`` calls those that it trusts: by the name that it trusts them under, whatever they say.

    A label stays with its key while that is trusted under one name: nobody else gets it meanwhile.
    """

    def __init__(self, own: str) -> None:
        self._own = own
        self._given: dict[str, str] = {}

    def forget(self, key: str) -> None:
        """The owner calls the device with ``key`` otherwise now."""
        self._given.pop(key, None)

    def of(self, trusted: Mapping[str, str]) -> dict[str, str]:
        """The labels of those that are ``trusted`` now, by key; that has the names of all, by key, no two the same."""
        self._given = {key: label for key, label in self._given.items() if key in trusted}
        taken = {self._own, *self._given.values()}
        names = frozenset(trusted.values())
        for key, name in trusted.items():
            if key not in self._given:
                label = name if name not in taken else free_name(name, taken | names)
                self._given[key] = label
                taken.add(label)
        return dict(self._given)
