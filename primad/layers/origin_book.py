"""What layers of a hub turned out to be: a digest by the name of an origin, so that none is drawn again after a stop."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Final

import msgspec

from primad.system.whole_file import write_whole

MOST: Final = 10_000
"""Of so many layers it is remembered, the latest."""


class OriginBook:
    """The digests of layers that were drawn, in the file ``memory``. One process at a time writes to it."""

    def __init__(self, memory: Path) -> None:
        self._memory = memory
        self._known: dict[str, str] | None = None

    def _read(self) -> dict[str, str]:
        if self._known is None:
            self._known = {}
            with contextlib.suppress(OSError, msgspec.DecodeError):
                self._known = msgspec.json.decode(self._memory.read_bytes(), type=dict[str, str])
        return self._known

    def get(self, name: str) -> str | None:
        """The digest of the layer of this origin, if it was drawn here."""
        return self._read().get(name)

    def put(self, name: str, digest: str) -> None:
        """The layer of this origin turned out to be ``digest``. A disk that refuses costs another fetch, nothing else."""
        known = self._read()
        known.pop(name, None)
        self._known = dict(list(known.items())[-(MOST - 1) :]) | {name: digest}
        with contextlib.suppress(OSError):
            write_whole(self._memory, msgspec.json.encode(self._known))
