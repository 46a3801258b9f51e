"""Names of devices: one name per key, and no two keys with the same name."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from itertools import chain, count
from typing import Final

_ROOM: Final = 57
"""Characters of a name of 62 that stay if a number is appended."""


def free_name(name: str, taken: Collection[str]) -> str:
    """Return ``name``, with a number appended if it is taken."""
    numbered = (f"{name[:_ROOM]}-{number}" for number in count(2))
    return next(each for each in chain([name], numbered) if each not in taken)


class Labels:
    """The labels that the device ``own`` uses for trusted devices: the names it trusts them under, whatever they
    announce.

    A label stays with its key while the key is trusted under one name: no other key gets it meanwhile.
    """

    def __init__(self, own: str) -> None:
        self._own = own
        self._given: dict[str, str] = {}

    def forget(self, key: str) -> None:
        """Forget the label of the device with ``key``, which the owner renamed."""
        self._given.pop(key, None)

    def of(self, trusted: Mapping[str, str]) -> dict[str, str]:
        """Return the labels of the ``trusted`` devices, by key, all different; ``trusted`` has their names, by key."""
        self._given = {key: label for key, label in self._given.items() if key in trusted}
        taken = {self._own, *self._given.values()}
        names = frozenset(trusted.values())
        for key, name in trusted.items():
            if key not in self._given:
                label = name if name not in taken else free_name(name, taken | names)
                self._given[key] = label
                taken.add(label)
        return dict(self._given)
