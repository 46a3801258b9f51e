"""Compute a tiny model as two ranks with shares of its layers, in threads of one process, and compare the logits.

They cannot be bit-identical: sums are added in another order.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Final, TypeVar

import numpy as np

from primad.certify.keys import nothing
from primad.certify.route import Logits, TinyRoute, steps_of, whole_logits
from primad.engine.protocol import Hidden, KvType
from primad.errors import EngineError
from primad.gguf.architectures.layers import layer_count
from primad.gguf.header import Header
from primad.gguf.share_rules import ShareRules
from primad.gguf.shares import share_header
from primad.gguf.windows import ModelCutter

WEIGHTS: Final = (1, 1)
MAX_DIFFERENCE: Final = 0.01
"""As a share of the largest logit: rounding of KV values causes a tenth of that, a wrong share many times as much."""
_PATIENCE_S: Final = 60.0
_T = TypeVar("_T")


class _Meeting:
    """Point at which two ranks swap arrays."""

    def __init__(self) -> None:
        self._barrier = threading.Barrier(len(WEIGHTS), timeout=_PATIENCE_S)
        self._brought: list[Hidden] = [np.empty(0, np.float32) for _ in WEIGHTS]

    def swap(self, rank: int, values: Hidden) -> list[Hidden]:
        """Return the arrays of all ranks. Raises ``EngineError`` if one does not arrive."""
        self._brought[rank] = values.copy()
        try:
            self._barrier.wait()
            found = [*self._brought]
            self._barrier.wait()
        except threading.BrokenBarrierError as exc:
            raise EngineError("the other rank computes no such sum") from exc
        return found

    def leave(self) -> None:
        """Let the other ranks stop waiting."""
        self._barrier.abort()


class _Exchange:
    """The exchange of ``rank``, with the interface that a window uses."""

    def __init__(self, meeting: _Meeting, rank: int) -> None:
        self._meeting, self.rank = meeting, rank

    def lead(self, message: bytes) -> None:
        """Do nothing: each rank does all steps by itself."""

    def spread(self, values: Hidden) -> None:
        """Do nothing: all ranks have the values."""

    def sum(self, values: Hidden) -> None:
        found = self._meeting.swap(self.rank, values)
        if len({each.shape for each in found}) > 1:
            raise EngineError("the ranks have parts of different shapes")
        values[:] = found[0] + found[1]

    def gather(self, values: Hidden) -> list[Hidden]:
        found = self._meeting.swap(self.rank, values)
        return [] if self.rank else found


def shares_difference(header: Header, folder: Path, kv_type: KvType) -> str:
    """Return in words how far the logits of two ranks are from the whole model's; empty if they hardly differ.

    Raises ``NotCutError`` for a model that cannot be shared, ``EngineError``.
    """
    rules = ShareRules(header)
    cutters = [ModelCutter(share_header(rules, WEIGHTS, rank), stand_in=float("nan")) for rank in range(len(WEIGHTS))]
    expected, meeting = whole_logits(header, kv_type), _Meeting()

    def computed(rank: int) -> Logits:
        own = folder / f"rank-{rank}"
        own.mkdir(exist_ok=True)
        layers = layer_count(header)
        route = TinyRoute(
            cutters[rank],
            (0, layers),
            own,
            kv_type,
            nothing,
            whole=header,
            exchange=_Exchange(meeting, rank),
        )
        try:
            return route.share_logits(steps_of(header))
        finally:
            route.release()

    found = _in_threads(computed, meeting)[0]
    for number, (logits, wanted) in enumerate(zip(found, expected, strict=True)):
        size = np.abs(wanted[1:]).max()
        difference = np.abs(logits[1:] - wanted[1:]).max()
        if not difference <= MAX_DIFFERENCE * size:
            return (
                f"logits {number + 1} of {len(expected)} of two shares differ by {difference / size:.2g} of the largest"
            )
    return ""


def _in_threads(run: Callable[[int], _T], meeting: _Meeting) -> list[_T]:
    """Return the result of ``run`` for each rank. Raises the first error that is not a consequence of another."""
    results, errors = dict[int, _T](), list[Exception]()

    def rank(number: int) -> None:
        try:
            results[number] = run(number)
        except Exception as exc:  # noqa: BLE001  (raised by the caller)
            errors.append(exc)
            meeting.leave()

    threads = [threading.Thread(target=rank, args=(number,)) for number in range(len(WEIGHTS))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return [results[number] for number in range(len(WEIGHTS))]
