"""Sums over a group's ranks, each connected to each, without an event loop or another thread in between.

A rank waits for parts in the middle of llama.cpp's graph, some 60 times a token, mostly for less than a tenth of a
millisecond: it polls for a while, and then sleeps until something comes. Parts are added in the order of ranks, on
every rank or on the one that makes the total for all, so totals are bit-identical, and the same each time.

Small parts go from each rank to each. For large ones, those of a prompt, each rank adds up a slice and sends its total
to the others, so a rank sends less than twice a part's size, however many ranks there are. Frames of parts and totals
follow each other without a pause, and are sealed, opened and added up while others are in flight: a sum takes as long
as the network or the processor needs for it, not both. The chunk is not computed further meanwhile, which would hide a
third of a prompt between four small devices with 1 Gbit/s: llama.cpp computes the nodes of a graph in order, and a
second context would need its own keys and values. ``--wire f16`` halves that time.
"""

from __future__ import annotations

import select
import struct
import time
from collections import deque
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from primad.engine.protocol import Hidden
from primad.ring.group.frames import FRAME_BYTES, LENGTH, LOGITS, PART, STEP, TOTAL, VALUES
from primad.ring.group.patience import PeerPatience
from primad.ring.group.peer import RankPeer
from primad.ring.messages import MAX_HEADER_BYTES

SLICED_BYTES: Final = 1 << 16
"""Parts of this size and above are summed slice by slice."""
MAX_LOGITS_BYTES: Final = 1 << 28
_LENGTH: Final = struct.Struct("<Q")
OnWire: TypeAlias = "NDArray[np.float32] | NDArray[np.float16]"
_HALVED_BY: Final = np.float32(16)
"""Divisor of values that are sent in 16 bits: a million fits in, and the loss of small values is below a millionth."""


class RankExchange:
    """The exchange of ``rank`` with its ``peers``, all other ranks. A part that takes longer than ``timeout_s`` is
    late. If it ``halves`` sums, their parts are sent in 16 bits."""

    def __init__(self, rank: int, peers: Sequence[RankPeer], *, timeout_s: float, halves: bool = False) -> None:
        assert peers
        assert sorted([rank, *(peer.rank for peer in peers)]) == [*range(len(peers) + 1)]
        self.rank, self._peers = rank, sorted(peers, key=lambda peer: peer.rank)
        self._ranks = len(peers) + 1
        self._halves, self.patience = halves, PeerPatience(timeout_s)
        self._parts: list[OnWire] = [np.empty(0, np.float32)] * self._ranks
        self._length = bytearray(_LENGTH.size)

    def lead(self, message: bytes) -> None:
        """Send ``message``, a step, to the other ranks. Raises ``RankError``."""
        self.patience.begin(time.monotonic())
        for peer in self._peers:
            peer.send(LENGTH, memoryview(_LENGTH.pack(len(message))))
            peer.send(STEP, memoryview(message))
        self._run()

    def follow(self) -> bytes | None:
        """Return the next message of the first rank; None if nothing has come. Raises ``RankError``."""
        first = self._peers[0]
        if first.has_all:
            first.expect(LENGTH, memoryview(self._length))
        first.pull()
        if not first.has_all:
            return None
        (size,) = _LENGTH.unpack(self._length)
        if not 0 < size <= MAX_HEADER_BYTES:
            raise first.error(f"sent a step of {size} bytes")
        message = bytearray(size)
        self.patience.begin(time.monotonic())
        first.expect(STEP, memoryview(message))
        self._run()
        return bytes(message)

    def fileno(self) -> int:
        """The descriptor that becomes readable when the first rank may have sent something."""
        return self._peers[0].connection.fileno()

    def spread(self, values: Hidden) -> None:
        """Copy the first rank's ``values`` (n,) over those of every other rank. Raises ``RankError``."""
        if self.rank:
            self._peers[0].expect(VALUES, _bytes(values))
        for peer in self._peers if self.rank == 0 else ():
            peer.send(VALUES, _bytes(values))
        self._run()

    def sum(self, values: Hidden) -> None:
        """Replace ``values`` (n,) with their total over all ranks. Raises ``RankError``."""
        packed = _halved(values) if self._halves else values
        if values.nbytes >= SLICED_BYTES:
            self._sum_slices(values, packed)
            return
        for peer in self._peers:
            peer.send(PART, _bytes(packed))
            peer.expect(PART, _bytes(self._part(peer, packed)))
        self._run()
        self._add(packed, values)

    def _sum_slices(self, values: Hidden, packed: OnWire) -> None:
        """Sum slice by slice: a piece of this rank's slice is added up when all ranks' parts of it have come, and its
        total is sent immediately."""
        spans = [*pairwise(len(values) * rank // self._ranks for rank in range(self._ranks + 1))]
        slices, (begin, end) = [packed[begin:end] for begin, end in spans], spans[self.rank]
        own, total, behind = slices[self.rank], values[begin:end], dict[int, int]()
        for peer in self._peers:
            peer.send(PART, _bytes(slices[peer.rank]))
            peer.expect(PART, _bytes(self._part(peer, own)))
            parts = peer.due
            peer.expect(TOTAL, _bytes(slices[peer.rank]))
            behind[peer.rank] = peer.due - parts
        step = FRAME_BYTES // own.itemsize
        pieces = deque(range(0, len(own), step))

        def add() -> None:
            while len(pieces) > max(0, *(peer.due - behind[peer.rank] for peer in self._peers)):
                at = pieces.popleft()
                piece, summed = own[at : at + step], total[at : at + step]
                self._add(piece, summed, at)
                if self._halves:
                    piece[:] = _halved(summed)
                for peer in self._peers:
                    peer.send(TOTAL, _bytes(piece))

        self._run(add)
        if self._halves:
            np.multiply(packed, _HALVED_BY, out=values)

    def _part(self, peer: RankPeer, own: OnWire) -> OnWire:
        """Return a buffer for a part of ``peer`` as large as ``own``: allocating one each time costs more than
        adding."""
        if len(self._parts[peer.rank]) < len(own):
            self._parts[peer.rank] = np.empty_like(own)
        return self._parts[peer.rank][: len(own)]

    def _add(self, own: OnWire, values: Hidden, at: int = 0) -> None:
        """Write to ``values`` the sum of all parts, in rank order, from place ``at`` on; ``own`` is this rank's
        part."""
        parts = [own if rank == self.rank else part[at : at + len(own)] for rank, part in enumerate(self._parts)]
        total: OnWire = parts[0]
        for rank, part in enumerate(parts[1:], 1):
            is_free = self._halves or rank >= self.rank  # else ``values`` are this rank's part, which is due later
            total = np.add(total, part, out=values if is_free else parts[0], dtype=np.float32)
        if self._halves:
            values *= _HALVED_BY

    def gather(self, values: Hidden) -> list[Hidden]:
        """Return the ``values`` (n,) of every rank on the first one, an empty list on the others. Raises
        ``RankError``."""
        if self.rank:
            self._peers[0].send(LENGTH, memoryview(_LENGTH.pack(values.nbytes)))
            self._peers[0].send(LOGITS, _bytes(values))
            self._run()
            return []
        lengths = [bytearray(_LENGTH.size) for _ in self._peers]
        for peer, length in zip(self._peers, lengths, strict=True):
            peer.expect(LENGTH, memoryview(length))
        self._run()
        found = [values]
        for peer, length in zip(self._peers, lengths, strict=True):
            (size,) = _LENGTH.unpack(length)
            if not 0 < size <= MAX_LOGITS_BYTES or size % 4:
                raise peer.error(f"sent {size} bytes of logits")
            found.append(np.empty(size // 4, np.float32))
            peer.expect(LOGITS, _bytes(found[-1]))
        self._run()
        return found

    def _run(self, add: Callable[[], None] | None = None) -> None:
        """Send and receive everything that is queued. With ``add`` there is much to receive, and polling would be
        pointless."""
        began = now = time.monotonic()
        spin_s = self.patience.spin_s if add is None else 0.0
        while open_ := [peer for peer in self._peers if not (peer.has_sent and peer.has_all)]:
            moved = False
            for peer in open_:
                moved = peer.push() or moved
                moved = peer.pull() or moved
            if add is not None:
                add()
            if moved:
                now = time.monotonic()
            elif time.monotonic() - now >= spin_s:
                self._sleep(open_, began, self.patience.until(began, now))
        self.patience.ended(began, time.monotonic())

    def _sleep(self, peers: Sequence[RankPeer], began: float, until: float) -> None:
        left_s = until - time.monotonic()
        if left_s <= 0:
            late = next((peer for peer in peers if not peer.has_all), peers[0])
            raise late.error(f"did not give its part within {until - began:.3g} s")
        reads = [peer.connection for peer in peers if not peer.has_all]
        select.select(reads, [peer.connection for peer in peers if not peer.has_sent], [], left_s)

    def close(self) -> None:
        """End the connections: other ranks notice immediately."""
        for peer in self._peers:
            peer.connection.close()


def _bytes(values: OnWire) -> memoryview:
    return values.data.cast("B")


def _halved(values: Hidden) -> OnWire:
    """Return ``values`` as they are sent in 16 bits; a rank adds its own part in this form too."""
    return np.multiply(values, 1 / _HALVED_BY).astype(np.float16)
