"""Memory and time of streaming: the terms that the integer program, evaluator, simulator and engine share.

Of the L bytes that a device's CPU computes, s are not resident. They are read in the order of their use, the same share
of each layer, and at most a of them are in memory (read-ahead), so the device holds L - s + a. A token makes k stops at
the device (one a round; the tail and the next token's first window are one stop). While other devices compute, the disk
fills a. The stop then waits for the rest of its s/k, and has room for its first bytes only once its first layer was
computed and released. The bytes read last are computed after the last read. So the stops of a token take at least

    V >= compute + c * (s - k * a)     and, where s/k > a,     V >= rest + k * edge + (s - k * a) / disk,

where ``edge`` is the first and the last layer, ``rest`` the part of compute that is not layers on the CPU, and ``c``
the seconds of computing lost per byte read meanwhile. (On a machine that several devices share, all of s is read
meanwhile, as one device reads while another computes.) The head's stop with the tail is longer than its others and
counted separately. A whole token takes at least s / disk, summed over all devices of a machine. As a disk stops when a
is full, k - 1 rounds without the tail, and a stop, take at least (s - a) / disk. One more byte of a costs one more byte
of s and saves k bytes of waiting: with one round the smallest a is best, with more it is worth its memory.

The layer part being computed occupies a too, so only a minus that part may be read meanwhile. With one token that is as
much as the disk reads in that time (``read_ahead_steps``). With a prompt chunk a layer takes longer, and the disk waits
for it: each of n layers then takes its computing time and (2 s / n - a) / disk, except the first of a stop, whose bytes
are all there. So a holds two parts where the prompt is worth it.

During decode the compute buffer is idle and holds bytes of s: ``Phase.spare_bytes``.

Layers with experts stream by expert. A pass knows which experts it needs only once the layer's router has picked them,
so there is no read-ahead: V gets the picked bytes of s over disk. The most picked experts stay. With x = s / L, the
picked bytes of s are L times a convex function of x: the sum of the picked shares of the least picked experts
(``read_lines``).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final, NamedTuple

from halda.profile import LayerProfile, ModelProfile

MIN_READ_AHEAD_BYTES: Final = 16 << 20
"""Minimum read-ahead, or two layers where these are smaller: with less the disk waits between small parts."""
RESERVE_BYTES: Final = 16 << 20
"""Bytes that a streaming device leaves free, or two layers where these are smaller."""
_SHARES: Final = (1 / 8, 1 / 4, 1 / 2, 3 / 4, 1.0)
_SAME: Final = 1e-6
_ROUNDED: Final = 2
"""Bytes by which a figure of the integer program may be off."""


class ReadAheadStep(NamedTuple):
    """Minimum ``read_ahead_bytes`` while at most ``share`` of the streamable bytes stream.

    ``wide_bytes`` has room for the part of a layer that is being computed and all of the next one's.
    """

    share: float
    read_ahead_bytes: int
    wide_bytes: int

    def holds(self, streamed_bytes: float, streamable_bytes: float) -> bool:
        """Whether this step suffices when ``streamed_bytes`` of ``streamable_bytes`` stream."""
        return streamed_bytes <= self.share * streamable_bytes * (1 + _SAME) + 1


def read_ahead_steps(model: ModelProfile, layer_s: float, disk_bytes_per_s: float) -> tuple[ReadAheadStep, ...]:
    """Return the read-ahead that the engine needs: the layer part being computed, plus the bytes read meanwhile.

    It cannot use more than one further part, nor more than the disk reads while a layer is computed for one token
    (``layer_s``). The steps are by streamed share, so that the integer program can use them; in the last step
    everything streams. There is a single step where experts stream.
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
    """Return the minimum read-ahead, however little streams."""
    return min(MIN_READ_AHEAD_BYTES, 2 * model.largest_layer_bytes)


def reserve_bytes(model: ModelProfile) -> int:
    """Return the bytes that a streaming device leaves free: the system reads slightly past a part and must not run out
    of memory."""
    return min(RESERVE_BYTES, 2 * model.largest_layer_bytes)


def min_read_ahead_bytes(steps: Sequence[ReadAheadStep], streamed_bytes: float, streamable_bytes: float) -> int:
    """Return the read-ahead needed when ``streamed_bytes`` of ``streamable_bytes`` stream; 0 without streaming."""
    return _needed(steps, streamed_bytes, streamable_bytes).read_ahead_bytes if streamed_bytes > 0 else 0


def _needed(steps: Sequence[ReadAheadStep], streamed_bytes: float, streamable_bytes: float) -> ReadAheadStep:
    return next((step for step in steps if step.holds(streamed_bytes, streamable_bytes)), steps[-1])


def held_read_ahead(steps: Sequence[ReadAheadStep], step: ReadAheadStep, wanted_bytes: int) -> int:
    """Return the read-ahead to use when ``step`` is needed and ``wanted_bytes`` are requested: as much or slightly
    more.

    It is what some step needs, or at least wide. Between these a prompt's layers would wait slightly less for each
    other, which the program does not count.
    """
    if wanted_bytes >= step.wide_bytes - _ROUNDED:
        return max(wanted_bytes, step.read_ahead_bytes)
    minimum = max(step.read_ahead_bytes, wanted_bytes - _ROUNDED)
    return min([*(other.read_ahead_bytes for other in steps if other.read_ahead_bytes >= minimum), step.wide_bytes])


def is_held(
    steps: Sequence[ReadAheadStep], streamed_bytes: float, streamable_bytes: float, read_ahead_bytes: int
) -> bool:
    """Whether ``held_read_ahead`` can return ``read_ahead_bytes`` when ``streamed_bytes`` of ``streamable_bytes``
    stream."""
    return (
        held_read_ahead(steps, _needed(steps, streamed_bytes, streamable_bytes), read_ahead_bytes) == read_ahead_bytes
    )


def by_expert(model: ModelProfile) -> bool:
    """Whether layers have experts: then only these stream, one by one."""
    return any(layer.expert_bytes for layer in model.layers)


def streamable_bytes(layer: LayerProfile, model: ModelProfile) -> int:
    """Return the bytes of a layer that may stream: its experts where the model has any, otherwise all."""
    return layer.expert_bytes if by_expert(model) else layer.size_bytes


def pool_bytes(model: ModelProfile) -> int:
    """Return the minimum expert bytes in memory of a device that streams by expert: one layer's experts, which a prompt
    needs."""
    return max(layer.expert_bytes for layer in model.layers)


class ReadLine(NamedTuple):
    """Lower bound of the bytes that a pass reads, per streamed byte and per streamable byte (at most 0)."""

    of_streamed: float
    of_streamable: float


def read_lines(model: ModelProfile, rows: float) -> tuple[ReadLine, ...]:
    """Return the lines whose maximum is the bytes that a pass of ``rows`` tokens reads of what streams.

    That is everything, or the experts that at least one token picks. The least picked experts stream first.
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
    """Return the bytes that a pass reads when ``streamed_bytes`` of ``streamable_bytes`` stream."""
    return max(line.of_streamed * streamed_bytes + line.of_streamable * streamable_bytes for line in lines)


def edge_s(layers_s: tuple[float, ...]) -> float:
    """Seconds that a stop waiting for its disk needs besides reading; ``layers_s`` are the times of each layer kind."""
    return 2 * min(layers_s)
