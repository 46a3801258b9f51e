"""A rank of a group but the first one: it does what the first rank does, with its own share of the same layers.

Of the ring only the first rank is seen: steps come to it, and its hidden states go on. It sends each step to the others
before it computes it, then the rows, which only it has; so a group is a window like any other, and the step log drives all
of its ranks. What a step keeps of the KV cache each rank keeps itself, of its own heads.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import numpy as np

from primad.engine.protocol import RouteWindow
from primad.errors import ProtocolError
from primad.ring.messages import Step, StepLimits, decode_route
from primad.ring.worker import WritesKv, apply, rows_of


class Follows(Protocol):
    """What hears of the first rank's steps."""

    def follow(self) -> bytes | None:
        """The next one; None where none has come."""


class GroupFollower:
    """Computes the steps of the first rank through ``windows``, by route index. ``limits`` say what it may ask for."""

    def __init__(
        self,
        windows: Mapping[int, RouteWindow],
        exchange: Follows,
        limits: StepLimits,
        kv_writer: WritesKv | None = None,
    ) -> None:
        self._windows, self._exchange = windows, exchange
        self._limits, self._kv_writer = limits, kv_writer

    def turn(self) -> Step | None:
        """Do one step; None where there was none.

        Raises ``ProtocolError`` for what is none, ``RingError`` where the group broke, ``EngineError`` where a window fails.
        """
        message = self._exchange.follow()
        if message is None:
            return None
        step = decode_route(message, None, self._limits)
        if not isinstance(step, Step):
            raise ProtocolError("the first rank of this group sent what is no step")
        window = self._windows[step.window]
        apply(window, step, self._kv_writer)
        if step.rows:
            window.forward(rows_of(step, np.empty(step.payload_shape, np.float32)))
        return step
