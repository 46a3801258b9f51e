"""One device's part of the ring: apply a step to a window, compute its rows, say what goes on to the next window.

Pure but for the windows themselves: steps and hidden states in, steps and hidden states out. The head uses the same two
functions for its own windows, so every window of a route obeys the step log in the same way.
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
    """Where a ring process puts KV cells, and finds them; ``shapes`` says what those of its windows are made of."""

    shapes: list[CellShape]

    def keep(self, block: KvBlock, cells: Sequence[LayerCells]) -> None:
        """Hand over ``cells``, those of ``block`` in some layers that follow each other."""

    def chain(self, key: str, first: int, last: int) -> Sequence[Sequence[LayerCells]]:
        """Layers ``first <= layer < last`` of the blocks from position 0 to that of ``key``; none where one is lacking."""

    def flush(self) -> bool:
        """Wait, within bounds, until what was handed over can be read by others; whether it can."""

    def close(self) -> None:
        """Write what was handed over, and end."""


def apply(window: RouteWindow, step: Step, kv_writer: WritesKv | None) -> None:
    """Apply the KV operations of ``step``. One without rows ends when what it keeps is there for others.

    Where ``window`` is a share of its layers, the other ranks of its group hear of the step first (``ring/group``).

    Raises ``RingError`` for KV cells that are to be loaded and are not here, ``EngineError`` where the window cannot.
    """
    if window.exchange is not None and window.exchange.rank == 0:
        window.exchange.lead(encode(step))
    skipped = {sequence for of in step.sequences for sequence in of} if step.skipped else set()
    for op in step.ops:
        if not (isinstance(op, StateKeep) and op.sequence in skipped):  # that of rows which are not here
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
    """What ``op`` loads. The ring is formed again without a block that is not here, so the error names it."""
    layers = window.kv_layers
    blocks = kv_writer.chain(op.key, layers.start, layers.stop) if kv_writer is not None else []
    if not blocks or blocks[-1][0].end != op.end:
        raise RingError(
            f"KV block {op.key}, with layers {layers.start} to {layers.stop - 1} up to {op.end}, is not here"
        )
    return blocks


def rows_of(step: Step, content: Tokens | Hidden) -> Rows:
    """The rows of ``step`` as a window takes them."""
    return Rows(
        content=content,
        positions=step.positions,
        sequences=step.sequences,
        outputs=step.outputs,
        look_ahead=step.looks_ahead,
        rope=step.rope,
    )


FEW_NUMBERS: Final = 8192
"""A row of most models; BLAS adds up many more in several threads."""
NOT_NUMBERS: Final = "values that are not numbers (NaN or infinity)"


def is_finite(hidden: Hidden) -> bool:
    """Whether all are numbers. So they are where the sum of their squares is one, which of few takes half as long."""
    is_sure = hidden.size <= FEW_NUMBERS and math.isfinite(np.vdot(hidden, hidden))
    return is_sure or bool(np.isfinite(hidden).all())


def check_sent(step: Step, hidden: Hidden) -> None:
    """Look at hidden states that arrived before they reach a KV cache: one NaN there spoils what is computed after it.

    Costs 5 us for a row and 0.3 to 2 ms for 512 (width 4096 and 8192), less than 1 % of what computing them takes. Raises
    ``SenderError``.
    """
    if not is_finite(hidden):
        raise SenderError(f"{SENDER} sent {NOT_NUMBERS} in step {step.step}")


def visit(
    window: HiddenWindow, step: Step, content: Tokens | Hidden, kv_writer: WritesKv | None
) -> tuple[Step, Hidden]:
    """Let ``step`` visit ``window``: the step for the next window of the route, and its hidden states (rows, width).

    Raises ``NotFiniteError`` rather than have the next device find what is not finite: only this one knows whose it is.
    """
    apply(window, step, kv_writer)
    if not step.rows:
        return msgspec.structs.replace(step, window=step.window + 1), np.empty(step.payload_shape, np.float32)
    hidden = window.forward(rows_of(step, content))
    if not is_finite(hidden):
        raise not_finite(window)
    return msgspec.structs.replace(step, window=step.window + 1, shape=hidden.shape), hidden


def not_finite(window: RouteWindow) -> NotFiniteError:
    """The error of a window that was given numbers and gave none."""
    layers = window.layers
    return NotFiniteError(
        f"layers {layers.start} to {layers.stop - 1} gave {NOT_NUMBERS}: the model file is damaged, or the GPU or memory of "
        "this device fails; compare the file with where it came from, or try '--gpu off' here"
    )


def skipped(step: Step) -> Step:
    """``step`` with its operations, and rows that are not computed from here on."""
    return msgspec.structs.replace(step, skipped=True)


class Worker:
    """The windows of one worker. Steps that arrive are visits to one of them, in the order of the step log, from 0 on.

    Every hop keeps the order and loses nothing while its connection holds. One that breaks takes along what was on its way:
    then a number is missing, and to go on would be to compute without what that step would have left here.

    What is skipped is looked at when a step comes to a window. From then on none of that sequence's drafts behind it is
    computed there, so that no window has a hole where another one has cells.

    A step comes to the first of neighbouring windows, and to no window before it was in all before that: where it had not
    been, later steps would not find the cells that it leaves.
    """

    def __init__(self, windows: Mapping[int, HiddenWindow], kv_writer: WritesKv | None = None) -> None:
        self._windows = windows
        entries = [window for window in sorted(windows) if window - 1 not in windows]
        self._before = dict(zip(entries, [None, *entries], strict=False))
        """By window that steps come to: the one that they come to before."""
        self._kv_writer = kv_writer
        self._following: dict[int, int] = {}
        self._skips: deque[int] = deque(maxlen=4 * MAX_SKIPPED)

    def skip(self, skip: Skip) -> None:
        """Do not compute these steps where they have not been yet."""
        self._skips.extend(skip.steps)

    def receive(self, step: Step, hidden: Hidden) -> tuple[Step, Hidden]:
        """Compute ``step``, which is already judged (``decode_route``); what to send to the next device.

        Raises ``SenderError`` when a step before it was lost, it was to be elsewhere first, or it has no numbers;
        ``EngineError`` when the window fails.
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
