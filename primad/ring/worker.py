"""One device's part of the ring: apply a step to a window, compute its rows, and return what goes to the next window.

Pure except for the windows themselves: steps and hidden states in, steps and hidden states out. The head uses the same
two functions for its own windows, so every window of a route follows the step log in the same way.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Final, Protocol

import msgspec
import numpy as np

from primad.engine.protocol import Hidden, HiddenWindow, RouteWindow, Rows, Tokens
from primad.errors import NotFiniteError, RingError, SenderError
from primad.kv.cells import CellShape, LayerCells
from primad.kv.keys import KvBlock
from primad.ring.messages import (
    MAX_SKIPPED,
    SENDER,
    KvCopy,
    KvKeep,
    KvLoad,
    KvOp,
    KvRemove,
    Skip,
    StateKeep,
    StateRestore,
    Step,
)
from primad.system.wire import encode


class WritesKv(Protocol):
    """A ring process's store of KV cells; ``shapes`` are the shapes of the cells of its windows."""

    shapes: list[CellShape]

    def keep(self, block: KvBlock, cells: Sequence[LayerCells]) -> None:
        """Hand over ``cells``, those of ``block`` in some consecutive layers."""

    def chain(self, key: str, first: int, last: int) -> Sequence[Sequence[LayerCells]]:
        """Return layers ``first <= layer < last`` of the blocks from position 0 to block ``key``; empty if one is
        missing."""

    def flush(self) -> bool:
        """Wait, within bounds, until what was handed over can be read by others; return whether it can."""

    def close(self) -> None:
        """Write what was handed over, and end."""


def apply(window: RouteWindow, step: Step, kv_writer: WritesKv | None) -> None:
    """Apply the KV operations of ``step``. A step without rows waits until the cells it keeps can be read by others.

    If ``window`` has a share of its layers, the step is first sent to the other ranks of its group (``ring/group``).

    Raises ``RingError`` if KV cells to load are not here, ``EngineError`` if the window fails.
    """
    if window.exchange is not None and window.exchange.rank == 0:
        window.exchange.lead(encode(step))
    skipped = {sequence for of in step.sequences for sequence in of} if step.skipped else set()
    for op in step.ops:
        if not (isinstance(op, StateKeep) and op.sequence in skipped):  # its rows are not here
            _apply(window, op, kv_writer)
    if kv_writer is not None and not step.shape[0]:
        kv_writer.flush()


def _apply(window: RouteWindow, op: KvOp, kv_writer: WritesKv | None) -> None:
    match op:
        case KvRemove(sequence, start, end):
            window.kv_remove(sequence, start, end)
        case KvCopy(source, target, end):
            window.kv_copy(source, target, end)
        case KvKeep(sequence, block):
            if kv_writer is not None:
                kv_writer.keep(block, window.kv_cells(sequence, block.start, block.end))
        case StateKeep(sequence, number, end):
            window.state_keep(number, sequence, end)
        case StateRestore(sequence, number, end):
            window.state_restore(number, sequence, end)
        case KvLoad():
            window.kv_restore(op.sequence, _chain(window, op, kv_writer))


def _chain(window: RouteWindow, op: KvLoad, kv_writer: WritesKv | None) -> Sequence[Sequence[LayerCells]]:
    """Return the blocks that ``op`` loads. If a block is not here the ring is formed again without it, so the error
    names it."""
    layers = window.kv_layers
    blocks = kv_writer.chain(op.key, layers.start, layers.stop) if kv_writer is not None else []
    if not blocks or blocks[-1][0].end != op.end:
        raise RingError(
            f"KV block {op.key}, with layers {layers.start} to {layers.stop - 1} up to {op.end}, is not here"
        )
    return blocks


def rows_of(step: Step, content: Tokens | Hidden) -> Rows:
    """The rows of ``step`` in the form that a window takes."""
    return Rows(
        content=content,
        positions=step.positions,
        sequences=step.sequences,
        outputs=step.outputs,
        look_ahead=step.looks_ahead,
        rope=step.rope,
    )


FEW_NUMBERS: Final = 8192
"""One row of most models; BLAS sums many more in several threads."""
NOT_NUMBERS: Final = "values that are not numbers (NaN or infinity)"


def is_finite(hidden: Hidden) -> bool:
    """Whether all values are finite. They are if the sum of their squares is, which takes half as long for few
    values."""
    is_sure = hidden.size <= FEW_NUMBERS and math.isfinite(np.vdot(hidden, hidden))
    return is_sure or bool(np.isfinite(hidden).all())


def check_sent(step: Step, hidden: Hidden) -> None:
    """Check hidden states that arrived before they reach a KV cache: one NaN there spoils everything computed after it.

    Costs 5 us for a row and 0.3 to 2 ms for 512 (width 4096 and 8192), less than 1 % of the time of computing them.
    Raises ``SenderError``.
    """
    if not is_finite(hidden):
        raise SenderError(f"{SENDER} sent {NOT_NUMBERS} in step {step.step}")


def visit(
    window: HiddenWindow, step: Step, content: Tokens | Hidden, kv_writer: WritesKv | None
) -> tuple[Step, Hidden]:
    """Compute ``step`` in ``window``; return the step for the next window of the route, and its hidden states (rows,
    width).

    Raises ``NotFiniteError`` for results that are not finite, rather than let the next device find them: only this
    device knows that they are its own.
    """
    apply(window, step, kv_writer)
    if not step.rows:
        return msgspec.structs.replace(step, window=step.window + 1), np.empty(step.payload_shape, np.float32)
    hidden = window.forward(rows_of(step, content))
    if not is_finite(hidden):
        raise not_finite(window)
    return msgspec.structs.replace(step, window=step.window + 1, shape=hidden.shape), hidden


def not_finite(window: RouteWindow) -> NotFiniteError:
    """The error of a window that got finite values and returned others."""
    layers = window.layers
    return NotFiniteError(
        f"layers {layers.start} to {layers.stop - 1} gave {NOT_NUMBERS}: the model file is damaged, or the GPU or memory of "
        "this device fails; compare the file with where it came from, or try '--gpu off' here"
    )


def skipped(step: Step) -> Step:
    """Return ``step`` with its operations, but with rows that are not computed from here on."""
    return msgspec.structs.replace(step, skipped=True)


class Worker:
    """The windows of one worker. Steps that arrive are visits to one of them, in the order of the step log, from 0 on.

    Every hop keeps the order and loses nothing while its connection holds. A connection that breaks loses the messages
    in flight: a step number is then missing, and continuing would compute without the cells that step would have left
    here.

    Whether a step is skipped is checked when it comes to a window. From then on none of that sequence's later drafts is
    computed there, so that no window has a hole where another one has cells.

    A step comes to the first of neighbouring windows, and to no window before it was in all earlier ones: otherwise
    later steps would not find the cells that it leaves.
    """

    def __init__(self, windows: Mapping[int, HiddenWindow], kv_writer: WritesKv | None = None) -> None:
        self._windows = windows
        entries = [window for window in sorted(windows) if window - 1 not in windows]
        self._before = dict(zip(entries, [None, *entries], strict=False))
        """By window that steps come to: the previous window that they come to."""
        self._kv_writer = kv_writer
        self._following: dict[int, int] = {}
        self._skips: deque[int] = deque(maxlen=4 * MAX_SKIPPED)

    def skip(self, skip: Skip) -> None:
        """Do not compute these steps in windows that they have not reached yet."""
        self._skips.extend(skip.steps)

    def receive(self, step: Step, hidden: Hidden) -> tuple[Step, Hidden]:
        """Compute ``step``, which ``decode_route`` has checked; return what to send to the next device.

        Raises ``SenderError`` if an earlier step was lost, the step had to visit another window first, or it has values
        that are not finite; ``EngineError`` if the window fails.
        """
        expected = self._following.get(step.window, 0)
        if step.step != expected:
            raise SenderError(
                f"{SENDER} sent step {step.step} but not step {expected}, or a connection was interrupted"
            )
        before = self._before.get(step.window, step.window)
        if before is not None and self._following.get(before, 0) <= step.step:
            raise SenderError(f"{SENDER} sent step {step.step} for window {step.window} before it was in all others")
        self._following[step.window] = step.step + 1
        check_sent(step, hidden)
        if step.step in self._skips:
            step = skipped(step)
        following, hidden = visit(self._windows[step.window], step, hidden, self._kv_writer)
        while following.window in self._windows:
            following, hidden = visit(self._windows[following.window], following, hidden, self._kv_writer)
        return following, hidden
