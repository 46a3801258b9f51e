"""Remove what a lab has on this machine, by its name alone: it may be up, half built, crashed or already gone."""

from __future__ import annotations

import shutil
import time
from typing import Final

from tools.lab import disk, record
from tools.lab.cgroups import Cgroups, Hierarchies
from tools.lab.names import LabError, root

_GONE_S: Final = 30.0


def remove(lab: str, hierarchies: Hierarchies) -> None:
    """Remove everything that a lab has on this machine, in any state. Raises ``LabError`` if something stays."""
    Cgroups(lab, hierarchies).remove()
    folder = root(lab)
    deadline = time.monotonic() + _GONE_S
    while disk.detach_loops(folder) and time.monotonic() < deadline:
        time.sleep(0.01)
    while folder.exists():
        try:
            shutil.rmtree(folder)
        except FileNotFoundError:
            continue
        except OSError as exc:  # a mount vanishes a moment after the last process of its namespace
            if time.monotonic() >= deadline:
                raise LabError(f"{folder}: cannot be removed: {exc.strerror}; see what is mounted there") from exc
            time.sleep(0.02)


def remove_abandoned(hierarchies: Hierarchies) -> list[str]:
    """Remove the labs whose owner is gone. Return their ids."""
    gone = [lab for lab in record.labs(hierarchies) if record.owner_lives(lab) is False]
    for lab in gone:
        remove(lab, hierarchies)
    return gone
