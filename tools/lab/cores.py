"""A share of a core for each of several processes: cgroups with quotas, on cores in turn."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from tools.lab.cgroups import Cgroups, here
from tools.lab.names import new_id
from tools.lab.record import Owner, Record
from tools.lab.removal import remove, remove_abandoned
from tools.lab.requirements import require


class Cores:
    """The place for each named process. ``with shared_cores(...)`` makes it."""

    def __init__(self, groups: Cgroups, places: Mapping[str, int]) -> None:
        self._groups, self._places = groups, places

    def add(self, name: str, pid: int) -> None:
        """Move a process that has just started to its place; its children start there too."""
        os.sched_setaffinity(pid, {self._places[name]})
        for path in self._groups.procs(name):
            path.write_text(str(pid), encoding="ascii")


@contextmanager
def shared_cores(names: list[str], share: float) -> Iterator[Cores]:
    """Give each of ``names`` this ``share`` of a core, as many on each as fit. Raises ``LabError`` without cgroups for
    it."""
    require()
    lab, at = new_id(), here()
    remove_abandoned(at)
    Record(lab=lab, owner=Owner.this(), devices=()).create()
    cores, groups = sorted(os.sched_getaffinity(0)), Cgroups(lab, at)
    try:
        for name in names:
            groups.create(name)
            groups.limit_cpu(name, share)
        yield Cores(groups, {name: cores[place % len(cores)] for place, name in enumerate(names)})
    finally:
        remove(lab, at)
