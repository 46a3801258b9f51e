"""The logits of a group's tail, of which each rank computes those of its own tokens."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from primad.engine.protocol import GroupExchange, LogitsRow
from primad.errors import EngineError


class GroupLogits:
    """Brings the logits of all ranks together on the first one, which knows ``vocabulary`` tokens."""

    def __init__(self, exchange: GroupExchange, vocabulary: int) -> None:
        self._exchange, self._vocabulary = exchange, vocabulary
        self._rows: dict[int, LogitsRow] = {}

    def gather(self, own: Mapping[int, LogitsRow]) -> None:
        """Swap this rank's logits, by row. Raises ``EngineError`` where those of the group are not one for each token."""
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
        """Those of ``row``. Raises ``EngineError`` where it has none here."""
        if row not in self._rows:
            raise EngineError(f"row {row} of the last step has no logits on this device")
        return self._rows[row]
