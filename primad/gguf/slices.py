"""Parts of a tensor for a rank of a tensor-parallel group, read from the model file in place.

A slice takes ranges along one axis. Along the last axis it is a few runs of bytes; along another axis, the same number
of runs for each item of the axes after it, so the columns of a matrix are one run per row.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Final

import msgspec
from msgspec import Meta

from primad.gguf.constants import GGML_QUANT_SIZES
from primad.gguf.header import TensorInfo

MAX_RANGES: Final = 18
"""For queries, keys and values in one tensor; the values are in as many ranges as each KV head has."""
_Count = Annotated[int, Meta(ge=1, le=1 << 40)]
_Bound = Annotated[int, Meta(ge=0, le=1 << 40)]


class TensorCut(msgspec.Struct, frozen=True, array_like=True):
    """Which bytes of a tensor a slice has: ``ranges`` (first item, and one past the last) of each ``extent`` items of
    ``item_bytes``. Without ranges it consists of zeros, which are in no file."""

    item_bytes: _Count
    extent: _Count
    ranges: Annotated[tuple[tuple[_Bound, _Bound], ...], Meta(max_length=MAX_RANGES)]

    @property
    def own_bytes(self) -> int:
        """Its bytes of each ``extent`` items."""
        return self.item_bytes * sum(stop - start for start, stop in self.ranges)

    def runs(self, start: int, size: int) -> Iterator[tuple[int, int, int]]:
        """Where ``size`` bytes from ``start`` of the slice are: for each run its distance from ``start``, its offset in
        the tensor, and its size."""
        each, end = self.own_bytes, start + size
        for outer in range(start // each, -(-end // each)) if each else ():
            at, begin = outer * each, outer * self.extent * self.item_bytes
            for first, stop in self.ranges:
                count = (stop - first) * self.item_bytes
                low, high = max(at, start), min(at + count, end)
                if low < high:
                    yield low - start, begin + first * self.item_bytes + low - at, high - low
                at += count


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSlice(TensorInfo):
    """A part of a tensor, or zeros in its place; ``offset`` is that of the whole tensor."""

    cut: TensorCut

    def runs(self, start: int, size: int) -> Iterator[tuple[int, int, int]]:
        for at, place, count in self.cut.runs(start, size):
            yield at, self.offset + place, count


def sliced(tensor: TensorInfo, axis: int, ranges: Sequence[range]) -> TensorInfo:
    """The ``ranges`` of ``tensor`` along ``axis`` in ggml order, the first one in whole blocks of its type."""
    extent, (block, block_bytes) = tensor.shape[axis], GGML_QUANT_SIZES[tensor.type]
    assert not isinstance(tensor, TensorSlice)
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
    bounds = tuple((part.start, part.stop) for part in ranges)
    return _slice(tensor, shape, size, TensorCut(item, extent, bounds))


def zeros(tensor: TensorInfo) -> TensorInfo:
    """Zeros of the type and shape of ``tensor``."""
    return _slice(tensor, tensor.shape, tensor.bytes, TensorCut(1, 1, ()))


def _slice(tensor: TensorInfo, shape: tuple[int, ...], size: int, cut: TensorCut) -> TensorSlice:
    return TensorSlice(
        name=tensor.name,
        type=tensor.type,
        shape=shape,
        offset=tensor.offset,
        bytes=size,
        path=tensor.path,
        cut=cut,
    )


def cut_of(tensor: TensorInfo) -> TensorCut | None:
    """The bytes that ``tensor`` takes of the tensor at its offset; None for all of them."""
    return tensor.cut if isinstance(tensor, TensorSlice) else None
