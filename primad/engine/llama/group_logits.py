"""The logits of a group's tail, where each rank computes those of its own part of the vocabulary."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from primad.engine.protocol import GroupExchange, LogitsRow
from primad.errors import EngineError


class GroupLogits:
    """Gathers the logits of all ranks on rank 0. The model has ``vocabulary`` tokens."""

    def __init__(self, exchange: GroupExchange, vocabulary: int) -> None:
        self._exchange, self._vocabulary = exchange, vocabulary
        self._rows: dict[int, LogitsRow] = {}

    def gather(self, own: Mapping[int, LogitsRow]) -> None:
        """Exchange this rank's logits, by row. Raises ``EngineError`` if the group's do not add up to the
        vocabulary."""
        self._rows = {}
        if not own:
            return
        found = [part.reshape(len(own), -1) for part in self._exchange.gather(np.concatenate([*own.values()]))]
        if self._exchange.rank:
            return
        logits = np.concatenate(found, axis=1)
        if logits.shape[1] != self._vocabulary:
            raise EngineError(f"the devices of a group gave {logits.shape[1]} logits for {self._vocabulary} tokens")
        self._rows = dict(zip(own, logits, strict=True))

    def row(self, row: int) -> LogitsRow:
        """Return the logits of ``row``. Raises ``EngineError`` if it has none here."""
        if row not in self._rows:
            raise EngineError(f"row {row} of the last step has no logits on this device")
        return self._rows[row]
