"""Which layers are in use, and by which process: layers of a running daemon are never pruned.

    <folder>/in-use-<pid>.json    the layers that process ``pid`` holds; invalid once that process has ended

A process id is reused sooner or later, so the file also says when its process started (``start_of``).
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Final

import msgspec

from primad.system.files import write_whole
from primad.system.process_start import start_of, still_runs

logger = logging.getLogger(__name__)

_PATTERN: Final = "in-use-*.json"


class _InUse(msgspec.Struct, frozen=True, kw_only=True):
    pid: int
    started: float
    since_boot: float
    holds: dict[str, list[str]]


class Leases:
    """The layers (digests) of the cache in ``folder`` that processes hold, by owner, a name for the user of the layers."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._own: dict[str, frozenset[str]] = {}

    def lease(self, owner: str, digests: Iterable[str]) -> None:
        """Protect ``digests`` for ``owner``, in place of what it held before."""
        self._own[owner] = frozenset(digests)
        self._save()

    def end(self, owner: str) -> None:
        """``owner`` uses no layer any more."""
        if self._own.pop(owner, None) is not None:
            self._save()

    def held(self) -> frozenset[str]:
        """The layers that any living process holds."""
        found = set().union(*self._own.values())
        for other in self._others():
            found.update(*other.holds.values())
        return frozenset(found)

    def others_live(self) -> bool:
        """Whether another living process holds anything."""
        return any(other.holds for other in self._others())

    def _others(self) -> list[_InUse]:
        living = []
        for path in sorted(self._folder.glob(_PATTERN)):
            if path == self._path():
                continue
            try:
                other = msgspec.json.decode(path.read_bytes(), type=_InUse)
            except FileNotFoundError:
                continue  # released concurrently
            except (OSError, msgspec.DecodeError) as exc:
                logger.warning("%s: cannot be read (%s), so it protects no layer; remove it", path, exc)
                continue
            if still_runs(other.pid, other.started, other.since_boot):
                living.append(other)
            else:
                path.unlink(missing_ok=True)
        return living

    def _path(self) -> Path:
        return self._folder / f"in-use-{os.getpid()}.json"

    def _save(self) -> None:
        path = self._path()
        try:
            if not self._own:
                path.unlink(missing_ok=True)
                return
            holds = {owner: sorted(digests) for owner, digests in self._own.items()}
            started, since_boot = start_of(os.getpid())
            note = _InUse(pid=os.getpid(), started=started, since_boot=since_boot, holds=holds)
            write_whole(path, msgspec.json.encode(note))
        except OSError as exc:  # this process still has them in memory; only pruning by another process would miss them
            logger.warning("%s: cannot be written: %s; do not prune while this daemon runs", path, exc.strerror or exc)
