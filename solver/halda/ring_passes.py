"""How prompt chunks follow each other through the rounds of a ring: one rule for the forecast and the integer program.

All chunks are ready at the start and none overtakes another: a device computes all chunks of one round before the first
of the next. So it is enough to follow the first and the last chunk. At a stop, the first chunk starts when it has
arrived and the last chunk of the previous round is done. The last chunk leaves after the first one's end plus the time
of the others, or after its own arrival and computation, whichever is later.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

Time = Any
"""Seconds, milliseconds or an expression of the integer program."""


class Stop(NamedTuple):
    """Time of a chunk at a device in one round, and the time that it occupies the device's machine in that round."""

    own: Time
    machine: Time


class Hop(NamedTuple):
    """Time of a chunk to the next device, and how long it occupies the link, or per round the shared air."""

    takes: Time
    occupied: Time


def all_chunks(
    ring_passes: Sequence[Sequence[Stop]],
    hops: Sequence[Hop],
    tail: Time,
    chunks: int,
    largest: Callable[..., Time],
) -> Time:
    """Return the time at which the last of ``chunks`` leaves the tail.

    ``ring_passes`` are the rounds, each with the stops of the devices in ring order, the head first; ``hops`` follow
    the stops. ``largest`` returns a time that is no earlier than any of its arguments.
    """
    others, first, last = chunks - 1, 0, 0
    free, sent = list[Sequence[Time]](), list[Time]()
    for r, ring_pass in enumerate(ring_passes):
        for i, (stop, hop) in enumerate(zip(ring_pass, hops, strict=True)):
            begin = largest(first, *free[i]) if r else first
            done = begin + stop.own
            last = largest(last + stop.own, done + others * stop.machine)
            free[i : i + 1] = [(last, begin + chunks * stop.machine)]
            send = largest(done, sent[i]) if r else done
            last = largest(last, send + others * hop.occupied)
            sent[i : i + 1] = [last + hop.occupied]
            first, last = send + hop.takes, last + hop.takes
    begin = largest(first, *free[0])
    return largest(last + tail, begin + chunks * tail)
