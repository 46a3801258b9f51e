"""What streaming asks of memory and takes in time: the terms that program, evaluator, simulator and engine share.

Of the L bytes that a device's CPU computes, s do not stay. They are read in the order of their use, the same share of each
layer, and at most a of them are in memory, so the device holds L - s + a. A token makes k stops at the device (a round each;
the tail and the next token's first window are one). While others compute, the disk fills a; the stop then waits for the
rest of its s/k, and can take the first bytes of it only when its first layer was computed and let its part go. What was read
last is computed behind it. So the stops of a token take at least

    V >= compute + c * (s - k * a)     and, where s/k > a,     V >= rest + k * edge + (s - k * a) / disk,

where ``edge`` is the first and the last layer, ``rest`` what is not computed by the CPU's layers, and ``c`` what each byte
costs computing that is read meanwhile (on a machine that several devices share all of s is, as one reads while another
computes). The head's stop with the tail is longer than its others, and counted by itself. A token as a whole takes at
least s / disk, of all devices of a machine together; and as a disk stands still when a is full, the k - 1 rounds without the
tail, and a stop, take at least (s - a) / disk. A byte more of a costs a byte more of s, and saves k in what is waited for:
with one round a is as small as can be, with more it is worth its room.

Beside the part of a layer that is computed, only a less that part may be read meanwhile. For one row that is as much as the
disk reads in that time (``read_ahead_steps``). A layer takes longer for a chunk of a prompt, and the disk waits for it:
each of n layers then takes what it computes and (2 s / n - a) / disk, but for the first of a stop, for which all is
there. So a holds two parts where the prompt is worth it.

While tokens are drawn, the compute buffer lies idle, and as much of s stays in its room: ``decode_bytes``.

A layer with experts streams by expert. What a pass needs of them is known when the layer's router has picked, so nothing is
read ahead: V gets what is picked of s over disk. The experts that are picked most stay, so with x = s / L what is picked of
s is L times a convex function of x, the sum of what the rows pick of the experts that are picked least (``read_lines``).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final, NamedTuple

from halda.profile import LayerProfile, ModelProfile

MIN_READ_AHEAD_BYTES: Final = 16 << 20
"""So much is read ahead at least, or two layers where they are smaller: with less the disk waits between small parts."""
RESERVE_BYTES: Final = 16 << 20
"""So much a device that streams leaves free, or two layers where they are smaller."""
_SHARES: Final = (1 / 8, 1 / 4, 1 / 2, 3 / 4, 1.0)
_SAME: Final = 1e-6
_ROUNDED: Final = 2
"""Bytes that a figure of the program may be off."""


class ReadAheadStep(NamedTuple):
    """Where at most ``share`` of what may stream does, at least ``read_ahead_bytes`` are read ahead.

    With ``wide_bytes`` there is room for the part of a layer that is computed and all of the next one's.
    """

    share: float
    read_ahead_bytes: int
    wide_bytes: int

    def holds(self, streamed_bytes: float, streamable_bytes: float) -> bool:
        """Whether this is enough where ``streamed_bytes`` of ``streamable_bytes`` stream."""
        return streamed_bytes <= self.share * streamable_bytes * (1 + _SAME) + 1


def read_ahead_steps(model: ModelProfile, layer_s: float, disk_bytes_per_s: float) -> tuple[ReadAheadStep, ...]:
    """What the engine needs: the part of a layer that is computed, and beside it what is read meanwhile.

    More than another part it cannot use, nor more than the disk reads while a layer is computed for one row, ``layer_s``. In
    steps of the share that streams, so that a program of whole numbers can count it; the last step is that all streams. One
    step where experts stream.
    """
    if by_expert(model):
        return (ReadAheadStep(1.0, 0, 0),)
    minimum, found = smallest_read_ahead_bytes(model), list[ReadAheadStep]()
    for share in _SHARES:
        part = share * model.largest_layer_bytes
        needed = max(minimum, math.ceil(part + min(part, layer_s * disk_bytes_per_s)))
        step = ReadAheadStep(share, needed, max(needed, math.ceil(2 * part)))
        if found and found[-1].read_ahead_bytes == step.read_ahead_bytes:
            found.pop()
        found.append(step)
    return tuple(found)


def smallest_read_ahead_bytes(model: ModelProfile) -> int:
    """What is read ahead at least, however little streams."""
    return min(MIN_READ_AHEAD_BYTES, 2 * model.largest_layer_bytes)


def reserve_bytes(model: ModelProfile) -> int:
    """What a device that streams leaves free: the system reads a little behind a part, and must not run dry over it."""
    return min(RESERVE_BYTES, 2 * model.largest_layer_bytes)


def min_read_ahead_bytes(steps: Sequence[ReadAheadStep], streamed_bytes: float, streamable_bytes: float) -> int:
    """What has to be read ahead where ``streamed_bytes`` of ``streamable_bytes`` stream; 0 where nothing does."""
    return _needed(steps, streamed_bytes, streamable_bytes).read_ahead_bytes if streamed_bytes > 0 else 0


def _needed(steps: Sequence[ReadAheadStep], streamed_bytes: float, streamable_bytes: float) -> ReadAheadStep:
    return next((step for step in steps if step.holds(streamed_bytes, streamable_bytes)), steps[-1])


def held_read_ahead(steps: Sequence[ReadAheadStep], step: ReadAheadStep, wanted_bytes: int) -> int:
    """What is read ahead where ``step`` is needed and ``wanted_bytes`` are asked for: as much or a little more.

    What a step needs, or as much as is wide or more; between them a prompt's layers would wait a little less for each other,
    which the program does not count.
    """
    if wanted_bytes >= step.wide_bytes - _ROUNDED:
        return max(wanted_bytes, step.read_ahead_bytes)
    minimum = max(step.read_ahead_bytes, wanted_bytes - _ROUNDED)
    return min([*(other.read_ahead_bytes for other in steps if other.read_ahead_bytes >= minimum), step.wide_bytes])


def is_held(
    steps: Sequence[ReadAheadStep], streamed_bytes: float, streamable_bytes: float, read_ahead_bytes: int
) -> bool:
    """Whether ``read_ahead_bytes`` is one of what ``held_read_ahead`` gives where so much of ``streamable_bytes``
    streams."""
    return (
        held_read_ahead(steps, _needed(steps, streamed_bytes, streamable_bytes), read_ahead_bytes) == read_ahead_bytes
    )


def by_expert(model: ModelProfile) -> bool:
    """Whether layers have experts: then they stream alone, one by one."""
    return any(layer.expert_bytes for layer in model.layers)


def streamable_bytes(layer: LayerProfile, model: ModelProfile) -> int:
    """What of a layer may stream: all, but where a model has experts only those."""
    return layer.expert_bytes if by_expert(model) else layer.size_bytes


def pool_bytes(model: ModelProfile) -> int:
    """What a device that streams by expert holds of them at the least: the experts of a layer, which a prompt needs."""
    return max(layer.expert_bytes for layer in model.layers)


class ReadLine(NamedTuple):
    """A pass reads at least so much of each byte that streams, and of each byte that may (at most 0)."""

    of_streamed: float
    of_streamable: float


def read_lines(model: ModelProfile, rows: float) -> tuple[ReadLine, ...]:
    """What a pass of ``rows`` rows reads of what streams: the most that a line says.

    All of it; of experts those that a row picks at least once. Those that are picked least stream first.
    """
    if not by_expert(model):
        return (ReadLine(1.0, 0.0),)
    uses = sorted(model.expert_use or (model.experts_used / model.experts,))
    lines, streamed, read = dict[float, ReadLine](), 0.0, 0.0
    for use in uses:
        picked = 1 - math.pow(1 - use, rows)
        lines.setdefault(picked, ReadLine(picked, read - picked * streamed))
        streamed, read = streamed + 1 / len(uses), read + picked / len(uses)
    return tuple(lines.values())


def read_bytes(lines: Sequence[ReadLine], streamed_bytes: float, streamable_bytes: float) -> float:
    """What a pass reads where ``streamed_bytes`` of ``streamable_bytes`` stream."""
    return max(line.of_streamed * streamed_bytes + line.of_streamable * streamable_bytes for line in lines)


def edge_s(layers_s: tuple[float, ...]) -> float:
    """Seconds of a stop that waits for its disk beside reading, where layers of the kinds take ``layers_s``."""
    return 2 * min(layers_s)
