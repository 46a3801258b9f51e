"""Shares of feed-forward networks: each rank has some values, as rows of gate and up and columns of down."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final

from primad.gguf.architectures.layers import layer_count
from primad.gguf.architectures.table import ADVICE, NotCutError
from primad.gguf.constants import GGML_QUANT_SIZES
from primad.gguf.header import Header, TensorInfo
from primad.gguf.slices import sliced
from primad.gguf.splits import ranges_of

KINDS: Final = ("", "_exps", "_shexp", "_chexps")
"""Networks that a layer may have: dense, of experts, shared by all tokens, and of chunks of experts."""
LENGTHS: Final = {
    "": "feed_forward_length",
    "_exps": "expert_feed_forward_length",
    "_shexp": "expert_shared_feed_forward_length",
    "_chexps": "expert_chunk_feed_forward_length",
}
_WHOLE_DENSE: Final = frozenset(("arctic",))
"""Architectures whose dense network next to the experts is as wide as the hidden state, and therefore not cut."""


@dataclass(frozen=True)
class NetworkShares:
    """The networks of the layers of one model."""

    header: Header

    @cached_property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of networks that are cut."""
        return tuple(kind for kind in KINDS if kind or self._architecture not in _WHOLE_DENSE)

    @property
    def _architecture(self) -> str:
        return self.header.text("general.architecture")

    def down(self, layer: int, kind: str) -> TensorInfo | None:
        """The down projection of the network of ``kind`` in ``layer``, if any; its columns are the network's values."""
        return self.header.tensors.get(f"blk.{layer}.ffn_down{kind}.weight")

    def downs(self, kind: str) -> list[TensorInfo]:
        """The down projections of all layers."""
        found = (self.down(layer, kind) for layer in range(layer_count(self.header)))
        return [tensor for tensor in found if tensor is not None]

    @cached_property
    def units(self) -> dict[str, int]:
        """By kind, the number of values at whose multiples every layer's columns can be cut."""
        units = {kind: math.lcm(*(GGML_QUANT_SIZES[each.type][0] for each in self.downs(kind))) for kind in KINDS}
        if f"{self._architecture}.{LENGTHS['_exps']}" not in self.header.values:  # one number counts both
            units[""] = units["_exps"] = math.lcm(units[""], units["_exps"])
        return units

    def cut(self, layer: int, weights: Sequence[int]) -> list[dict[str, range]]:
        """For each rank, its values of the networks of ``layer``, by kind. Raises ``NotCutError`` for too many ranks."""
        units, values = {**self.units}, dict[str, list[range]]()
        experts = self.down(layer, "_exps")
        for kind in self.kinds:
            tensor = self.down(layer, kind)
            if tensor is None:
                continue
            times = tensor.shape[0] // experts.shape[0] if experts is not None else 0
            if kind == "_exps":  # shared experts are this many times as wide
                shared = self.down(layer, "_shexp")
                wide = max(shared.shape[0] // tensor.shape[0], 1) if shared is not None else 1
                block = units["_shexp"]
                units[kind] = math.lcm(units[kind], block // math.gcd(block, wide))
            found = ranges_of(tensor.shape[0], units[kind], weights)
            if kind == "_shexp" and experts is not None and times and times * experts.shape[0] == tensor.shape[0]:
                found = [range(each.start * times, each.stop * times) for each in values["_exps"]]
            if found is None:
                reason = f"{len(weights)} devices are more than its values allow"
                raise NotCutError(
                    f"{self.header.path}: layer {layer} cannot be shared between devices: {reason}", ADVICE
                )
            values[kind] = found
        return [{kind: each[rank] for kind, each in values.items()} for rank in range(len(weights))]

    def rows(self, layer: int, tensor: TensorInfo, kind: str, own: range | None) -> TensorInfo | None:
        """The rows of ``tensor`` of ``layer`` for a rank's ``own`` values; None if the tensor is not of such a network."""
        down = self.down(layer, kind)
        axis = len(tensor.shape) - (2 if kind in ("_exps", "_chexps") else 1)
        if down is None or own is None or axis < 0 or tensor.shape[axis] % down.shape[0]:
            return None
        width, times = down.shape[0], tensor.shape[axis] // down.shape[0]
        return sliced(tensor, axis, [range(n * width + own.start, n * width + own.stop) for n in range(times)])
