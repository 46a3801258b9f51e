"""One device's part of the ring: apply a step to a window, compute its rows, say what goes on to the next window.

Pure but for the windows themselves: steps and hidden states in, steps and hidden states out. The head uses the same two
functions for its own windows, so every window of a route obeys the step log in the same way.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
import numpy as np

from primad.engine.protocol import Hidden, HiddenWindow, RouteWindow, Rows, Tokens
from primad.errors import RingError
from primad.ring.messages import KvCopy, KvOp, KvRemove, Step


def apply(window: RouteWindow, op: KvOp) -> None:
    """Apply one KV operation."""
    match op:
        case KvRemove(sequence, start, end):
            window.kv_remove(sequence, start, end)
        case KvCopy(source, target, end):
            window.kv_copy(source, target, end)


def rows_of(step: Step, content: Tokens | Hidden) -> Rows:
    """The rows of ``step`` as a window takes them."""
    return Rows(content=content, positions=step.positions, sequences=step.sequences, outputs=step.outputs)


def visit(window: HiddenWindow, step: Step, content: Tokens | Hidden) -> tuple[Step, Hidden]:
    """Let ``step`` visit ``window``: the step for the next window of the route, and its hidden states (rows, width)."""
    for op in step.ops:
        apply(window, op)
    hidden = window.forward(rows_of(step, content)) if step.rows else np.empty((0, step.shape[1]), np.float32)
    return msgspec.structs.replace(step, window=step.window + 1), hidden


class Worker:
    """The windows of one worker. Steps that arrive are visits to one of them, in the order of the step log, from 0 on.

    Every hop keeps the order and loses nothing while its connection holds. One that breaks takes along what was on its way:
    then a number is missing, and to go on would be to compute without what that step would have left here.
    """

    def __init__(self, windows: Mapping[int, HiddenWindow]) -> None:
        self._windows = windows
        self._following: dict[int, int] = {}

    def receive(self, step: Step, hidden: Hidden) -> tuple[Step, Hidden]:
        """Compute ``step``, which is already judged (``decode_step``); what to send to the next device.

        Raises ``RingError`` when a step before it was lost, ``EngineError`` when the window fails.
        """
        expected = self._following.get(step.window, 0)
        if step.step != expected:
            raise RingError(f"step {expected} was lost on its way here; a connection of the ring was interrupted")
        self._following[step.window] = step.step + 1
        following, hidden = visit(self._windows[step.window], step, hidden)
        while following.window in self._windows:
            following, hidden = visit(self._windows[following.window], following, hidden)
        return following, hidden
