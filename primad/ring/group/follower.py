"""A rank of a group other than the first: it follows the first rank's steps, with its own share of the same layers.

The ring sees only the first rank: steps come to it, and its hidden states travel on. It sends each step to the others
before it computes it, then the hidden states, which only it has; so a group is a window like any other, and the step
log drives all of its ranks. Each rank keeps the KV cache of its own heads.
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
    """Receives the first rank's steps."""

    def follow(self) -> bytes | None:
        """Return the next step; None if none has come."""


class GroupFollower:
    """Computes the steps of the first rank through ``windows``, by route index. ``limits`` bound what it may ask
    for."""

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
        """Compute one step; None if there was none.

        Raises ``ProtocolError`` for an invalid step, ``RingError`` if the group broke, ``EngineError`` if a window
        fails.
        """
        message = self._exchange.follow()
        if message is None:
            return None
        step = decode_route(message, None, self._limits)
        if not isinstance(step, Step):
            raise ProtocolError("the first rank of this group sent something that is not a step")
        window = self._windows[step.window]
        apply(window, step, self._kv_writer)
        if step.rows:
            window.forward(rows_of(step, np.empty(step.payload_shape, np.float32)))
        return step
