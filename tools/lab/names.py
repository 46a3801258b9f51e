"""Names of a lab's parts, so that everything that belongs to one can be found by name, even after a crash."""

from __future__ import annotations

import re
import secrets
from pathlib import Path
from typing import Final

from primad.errors import PrimadError

PREFIX: Final = "primad-lab-"
"""Prefix of every cgroup and folder of a lab, followed by its id; loop devices and mounts are on files in that
folder."""

ROOTS: Final = Path("/var/tmp")  # a fixed place: a lab is found again whatever TMPDIR says
_ID: Final = re.compile(r"[0-9a-f]{6}")


class LabError(PrimadError):
    """A lab that cannot be built or queried; the text is one line for the user."""


def new_id() -> str:
    """An id that no other lab has, short enough to type."""
    return secrets.token_hex(3)


def root(lab: str) -> Path:
    """The folder of a lab."""
    return ROOTS / f"{PREFIX}{lab}"


def lab_ids(folder: Path) -> set[str]:
    """The ids of the labs that have an entry in ``folder``."""
    if not folder.is_dir():
        return set()
    found = (entry.name.removeprefix(PREFIX) for entry in folder.glob(f"{PREFIX}*"))
    return {name for name in found if _ID.fullmatch(name)}
