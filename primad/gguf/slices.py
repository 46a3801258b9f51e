"""Parts of a tensor: what a rank of a tensor-parallel group holds of it, read from the model file in place.

A slice takes ranges along one axis. Along the last one it is a few runs of bytes; along another one it is as many for each
item of the axes behind it, so the columns of a matrix are a run a row.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from primad.gguf.constants import GGML_QUANT_SIZES
from primad.gguf.header import TensorInfo


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSlice(TensorInfo):
    """A part of a tensor whose item of the axes before the cut has ``item_bytes``: ``ranges`` of each ``extent`` items."""

    item_bytes: int
    extent: int
    ranges: tuple[range, ...]

    def runs(self, start: int, size: int) -> Iterator[tuple[int, int, int]]:
        each = sum(map(len, self.ranges)) * self.item_bytes
        end = start + size
        for outer in range(start // each, -(-end // each)):
            at, from_ = outer * each, self.offset + outer * self.extent * self.item_bytes
            for part in self.ranges:
                count = len(part) * self.item_bytes
                first, last = max(at, start), min(at + count, end)
                if first < last:
                    yield first - start, from_ + part.start * self.item_bytes + first - at, last - first
                at += count


@dataclass(frozen=True, slots=True, kw_only=True)
class ZeroTensor(TensorInfo):
    """Zeros in the place of a tensor, which are in no file."""

    def runs(self, start: int, size: int) -> Iterator[tuple[int, int, int]]:
        return iter(())


def sliced(tensor: TensorInfo, axis: int, ranges: Sequence[range]) -> TensorInfo:
    """The ``ranges`` of ``tensor`` along ``axis`` in ggml order, the first one in whole blocks of its type."""
    assert not isinstance(tensor, TensorSlice)
    extent, (block, block_bytes) = tensor.shape[axis], GGML_QUANT_SIZES[tensor.type]
    assert all(0 <= part.start < part.stop <= extent and part.step == 1 for part in ranges)
    shape = (*tensor.shape[:axis], sum(map(len, ranges)), *tensor.shape[axis + 1 :])
    size = math.prod(shape) // block * block_bytes
    item = math.prod(tensor.shape[:axis]) // block * block_bytes
    if axis == 0:
        assert all(part.start % block == part.stop % block == 0 for part in ranges)
        ranges = [range(part.start // block, part.stop // block) for part in ranges]
        extent, item = extent // block, block_bytes
    if axis == len(tensor.shape) - 1 and len(ranges) == 1:
        return replace(tensor, shape=shape, bytes=size, offset=tensor.offset + ranges[0].start * item)
    return TensorSlice(
        name=tensor.name,
        type=tensor.type,
        shape=shape,
        offset=tensor.offset,
        bytes=size,
        path=tensor.path,
        item_bytes=item,
        extent=extent,
        ranges=tuple(ranges),
    )


def zeros(tensor: TensorInfo) -> TensorInfo:
    """Zeros of the type and shape of ``tensor``."""
    return ZeroTensor(
        name=tensor.name, type=tensor.type, shape=tensor.shape, offset=0, bytes=tensor.bytes, path=tensor.path
    )
