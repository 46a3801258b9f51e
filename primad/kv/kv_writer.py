"""The ring process's side of the KV store: a second thread writes the kept cells, its own thread only copies them."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Sequence
from typing import Final

from primad.errors import DiskError
from primad.kv.cells import CellShape, LayerCells
from primad.kv.keys import KvBlock
from primad.kv.store import KvStore

logger = logging.getLogger(__name__)

MAX_WAITING_BYTES: Final = 64 << 20
"""No more than this, and a state, waits to be written; beyond that, the ring's thread waits for the disk."""
PATIENCE_S: Final = 10.0
"""A disk that takes longer has stopped; cells that would wait for it are not kept."""


class KvWriter:
    """Keeps blocks in ``store`` and returns them, for windows whose cells have ``shapes``.

    One thread uses it; ``close`` ends the writing thread.
    """

    def __init__(self, store: KvStore, shapes: Sequence[CellShape] = ()) -> None:
        self._store = store
        self.shapes = list(shapes)
        self._may_wait_bytes = MAX_WAITING_BYTES + sum(
            shape.key_bytes + shape.value_bytes for shape in shapes if shape.is_state
        )
        store.expect(shapes)
        self._waiting: deque[tuple[KvBlock, Sequence[LayerCells], int]] = deque()
        self._waiting_bytes = 0
        self._changed = threading.Condition()
        self._is_closed = False
        self._has_failed = False
        self._writer = threading.Thread(target=self._write, name="kv-writer", daemon=True)
        self._writer.start()

    def keep(self, block: KvBlock, cells: Sequence[LayerCells]) -> None:
        """Have ``cells`` of ``block`` written. Waits while the disk is far behind, at most ``PATIENCE_S``."""
        size_bytes = sum(len(each.keys) + len(each.values) for each in cells)
        with self._changed:
            if not self._changed.wait_for(lambda: self._has_room(size_bytes), PATIENCE_S):
                self._failed(block, "the disk does not take what was kept before")
                return
            self._waiting.append((block, cells, size_bytes))
            self._waiting_bytes += size_bytes
            self._changed.notify_all()

    def chain(self, key: str, first: int, last: int) -> list[list[LayerCells]]:
        """Layers ``first <= layer < last`` of the blocks from position 0 to block ``key``; empty if one is missing.

        Raises ``DiskError`` when the disk cannot read them.
        """
        self.flush()
        chain: list[list[LayerCells]] = []
        while key:
            block, cells = self._store.read_block(key, first, last)
            if block is None or not cells or (chain and block.end != chain[-1][0].start):
                return []
            chain.append(cells)
            key = block.before
        return chain[::-1]

    def flush(self) -> bool:
        """Wait until everything kept is written, at most ``PATIENCE_S``; return whether it is."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._waiting_bytes, PATIENCE_S)

    def close(self) -> None:
        """Write what waits, and end."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        self._writer.join(PATIENCE_S)

    def _has_room(self, size_bytes: int) -> bool:
        return not self._waiting_bytes or self._waiting_bytes + size_bytes <= self._may_wait_bytes

    def _write(self) -> None:
        while self._write_next():
            pass

    def _write_next(self) -> bool:
        """Write the next block; return False at the end. Holds no cells while it waits."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._is_closed)
            if not self._waiting:
                return False
            block, cells, size_bytes = self._waiting.popleft()
        try:
            self._store.put(block, cells)
        except DiskError as exc:
            self._failed(block, str(exc))
        with self._changed:
            self._waiting_bytes -= size_bytes
            self._changed.notify_all()
        return True

    def _failed(self, block: KvBlock, why: str) -> None:
        """Log one line, which is enough: a missing block only costs time."""
        logger.log(
            logging.DEBUG if self._has_failed else logging.WARNING,
            "positions %d to %d of a request's KV cache are not kept: %s; they are computed again when needed",
            *(block.start, block.end, why),
        )
        self._has_failed = True
