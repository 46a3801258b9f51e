"""How often the experts of each layer were picked, kept from run to run: one small file a layer.

A file that is damaged or of another kind is as good as none, and a disk that refuses costs the memory of one run.
"""

from __future__ import annotations

import contextlib
import math
import os
from pathlib import Path

import msgspec

from primad.engine.experts import Usage


class StoredUsage(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``counts`` of picks of each expert in ``rows`` rows that picked ``used`` each; older rows count less."""

    counts: list[float]
    rows: float
    used: int


_decoder = msgspec.json.Decoder(StoredUsage)


class UsageFolder:
    """The files in ``folder``, one for each key; nothing is kept where it is None."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder

    def load(self, key: str, experts: int) -> Usage:
        """What is known of the layer ``key`` of so many ``experts``."""
        if self._folder is None:
            return Usage(experts)
        try:
            stored = _decoder.decode((self._folder / f"{key}.json").read_bytes())
        except (OSError, msgspec.DecodeError, ValueError):
            return Usage(experts)
        numbers = (*stored.counts, stored.rows)
        if len(stored.counts) != experts or not 0 < stored.used <= experts:
            return Usage(experts)
        if not all(math.isfinite(number) and number >= 0 for number in numbers) or max(stored.counts) > stored.rows + 1:
            return Usage(experts)
        return Usage.stored(stored.counts, stored.rows, stored.used)

    def save(self, key: str, usage: Usage) -> None:
        """Keep ``usage`` of the layer ``key``."""
        if self._folder is None or not usage.used:
            return
        path = self._folder / f"{key}.json"
        partial = path.with_name(f"{path.name}.{os.getpid()}")
        counts = [round(float(count), 3) for count in usage.counts]
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            partial.write_bytes(msgspec.json.encode(StoredUsage(counts, round(usage.rows, 3), usage.used)))
            partial.replace(path)
        except OSError:
            with contextlib.suppress(OSError):
                partial.unlink(missing_ok=True)
