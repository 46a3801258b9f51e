"""The control groups (version 1 or 2) around this process, which limit its resources on Linux."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Final

PROC: Final = Path("/proc/self/cgroup")
ROOT: Final = Path("/sys/fs/cgroup")


def folders(controller: str, proc: Path = PROC, root: Path = ROOT) -> Iterator[tuple[Path, int]]:
    """Every group of ``controller`` from ours up to the root, limited or not: its folder, and 1 or 2 for its version."""
    try:
        lines = proc.read_text(errors="surrogateescape").splitlines()
    except OSError:
        return
    for line in lines:
        if line.count(":") < 2:
            continue
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            base, version = root, 2
        elif controller in controllers.split(","):
            base, version = root / controller, 1
        else:
            continue
        folder = base / path.strip("/")
        while True:
            yield folder, version
            if folder == base or base not in folder.parents:
                break
            folder = folder.parent
