"""How the chunks of a prompt follow each other through the rounds of a ring: one rule for the forecast and the program.

All chunks are there at the beginning, and nothing overtakes: a device computes all chunks in one round before the first in
the next. So it is enough to follow the first and the last chunk. At a stop the first begins when it has come and the last
one of the round before is through; the last leaves as long after it as the others take, or after its own way here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

Time = Any
"""Seconds or milliseconds, or an expression of a program."""


class Stop(NamedTuple):
    """What a chunk takes at a device in one round, and what it takes the device's machine in that round."""

    own: Time
    machine: Time


class Hop(NamedTuple):
    """What a chunk takes to the next device, and how long it occupies the link meanwhile, or in a round the air."""

    takes: Time
    occupied: Time


def all_chunks(
    ring_passes: Sequence[Sequence[Stop]],
    hops: Sequence[Hop],
    tail: Time,
    chunks: int,
    largest: Callable[..., Time],
) -> Time:
    """When the last of ``chunks`` leaves the tail.

    ``ring_passes`` are the rounds with the stops of each device in ring order, the head first; ``hops`` follow them.
    ``largest`` of some times is not before any of them.
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
