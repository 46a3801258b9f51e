"""Keeps across runs how often the experts of each layer were picked: one small file a layer.

A damaged or unknown file counts as missing, and a disk error loses the counts of one run. When files were added, those
that were written longest ago are removed, so that the folder stays bounded.
"""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Iterable
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Final

import msgspec

from primad.engine.streaming.experts import ExpertUsage
from primad.system.files import write_whole

MAX_FILES: Final = 4096
"""Enough for about fifty models with as many layers as the largest; about 8 MB."""
MAX_AGE_S: Final = 180 * 86_400.0
LEFT_S: Final = 3600.0
"""A file that is incomplete after this time was left by a killed process."""


class StoredUsage(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``counts`` of picks of each expert over ``rows`` tokens that picked ``used`` each; older tokens count less."""

    counts: list[float]
    rows: float
    used: int


def whole_model_key(model: Path, layer: int) -> str:
    """Return the key of layer ``layer`` of a whole-model file; for a layer file the key is its digest."""
    path = model.resolve()
    text = f"{path}\n{path.stat().st_size}\n{layer}"
    return blake2b(text.encode(errors="surrogateescape"), digest_size=16).hexdigest()


_decoder = msgspec.json.Decoder(StoredUsage)


class UsageFolder:
    """The files in ``folder``, one for each key; with None nothing is stored."""

    def __init__(self, folder: Path | None, *, max_files: int = MAX_FILES) -> None:
        self._folder, self._max_files = folder, max_files
        self._grew = False

    def load(self, key: str, experts: int) -> ExpertUsage:
        """Return the stored usage of the layer ``key`` with ``experts`` experts."""
        if self._folder is None:
            return ExpertUsage(experts)
        try:
            stored = _decoder.decode((self._folder / f"{key}.json").read_bytes())
        except (OSError, msgspec.DecodeError, ValueError):
            return ExpertUsage(experts)
        numbers = (*stored.counts, stored.rows)
        if len(stored.counts) != experts or not 0 < stored.used <= experts:
            return ExpertUsage(experts)
        if not all(math.isfinite(number) and number >= 0 for number in numbers) or max(stored.counts) > stored.rows + 1:
            return ExpertUsage(experts)
        return ExpertUsage.stored(stored.counts, stored.rows, stored.used)

    def save(self, key: str, usage: ExpertUsage) -> None:
        """Store ``usage`` of the layer ``key``."""
        if self._folder is None or not usage.used:
            return
        path = self._folder / f"{key}.json"
        counts = [round(float(count), 3) for count in usage.counts]
        with contextlib.suppress(OSError):
            self._folder.mkdir(parents=True, exist_ok=True)
            self._grew |= not path.exists()
            write_whole(path, msgspec.json.encode(StoredUsage(counts, round(usage.rows, 3), usage.used)))

    def bound(self) -> None:
        """Remove the oldest files if some were added and there are too many."""
        if self._folder is not None and self._grew:
            self._grew = False
            remove(excess(stored(self._folder), time.time(), max_files=self._max_files))


@dataclass(frozen=True, slots=True)
class StoredFile:
    """A file of the folder; ``written_s`` is Unix time."""

    path: Path
    written_s: float

    @property
    def is_complete(self) -> bool:
        """Whether the file may be read; otherwise it is being written, or its writer was killed."""
        return self.path.suffix == ".json"


def stored(folder: Path) -> list[StoredFile]:
    """Return all files in ``folder``, which may not exist."""
    found = []
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            with contextlib.suppress(OSError):  # replaced or removed meanwhile
                status = entry.stat(follow_symlinks=False)
                found.append(StoredFile(folder / entry.name, status.st_mtime))
    return found


def excess(
    files: Iterable[StoredFile],
    now: float,
    *,
    max_files: int = MAX_FILES,
    max_age_s: float = MAX_AGE_S,
) -> list[StoredFile]:
    """Return those of ``files`` that are too old or too many at ``now``, or left by killed processes; the newest
    stay."""
    chosen, count = [], 0
    for file in sorted(files, key=lambda each: (-each.written_s, each.path.name)):
        age_s = now - file.written_s
        if not file.is_complete:
            chosen += [file] if age_s > min(LEFT_S, max_age_s) else []
            continue
        count += 1
        if count > max_files or age_s > max_age_s:
            chosen.append(file)
    return chosen


def remove(files: Iterable[StoredFile]) -> None:
    """Remove ``files``; a later run counts from zero."""
    for file in files:
        with contextlib.suppress(OSError):
            file.path.unlink(missing_ok=True)
