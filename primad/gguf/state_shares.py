"""Shares of layers that keep a state for each head, with which a gated delta rule goes on from token to token.

A head of keys writes to the states of some heads of values, and nothing goes from one head of keys to another. So a rank
holds some heads of keys with their heads of values: rows of what makes both, of gates and of the convolution before them,
columns of the output. Where keys are ``tiled`` over values, those of a head of keys are as far apart as there are heads of
keys.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from primad.gguf.constants import GGML_QUANT_SIZES
from primad.gguf.header import Header, TensorInfo
from primad.gguf.slices import sliced

STATES_BY_HEADS: Final = frozenset(("qwen35", "qwen35moe", "qwen3next"))
_MIXED: Final = ("attn_qkv", "ssm_conv1d")
"""Rows of queries, keys and values, one behind the other."""
_VALUES: Final = ("attn_gate", "ssm_out")
_HEADS: Final = ("ssm_dt", "ssm_a", "ssm_beta", "ssm_alpha")
"""A row for each head of values."""
_GROUPED: Final = ("ssm_in", "ssm_ba")
"""All rows of a head of keys together, in files of older converters."""
STATE_COLUMNS: Final = "ssm_out"


@dataclass(frozen=True, slots=True)
class StateHeads:
    """How many heads of keys a layer with a state has, how many of values for each, and how wide both are."""

    keys: int
    each: int
    key_width: int
    value_width: int
    tiled: bool

    @classmethod
    def of(cls, header: Header) -> StateHeads | None:
        """Those of the model of ``header``; None where its states are of another kind."""
        name = header.text("general.architecture")
        if name not in STATES_BY_HEADS:
            return None
        keys, values, inner, width = (
            header.count(f"{name}.ssm.{key}", 0)
            for key in ("group_count", "time_step_rank", "inner_size", "state_size")
        )
        if not keys or not values or values % keys or inner % values:
            return None
        return cls(keys, values // keys, width, inner // values, name != "qwen3next")

    def unit(self, outputs: Sequence[TensorInfo]) -> int:
        """Heads of keys at whose multiples columns of all ``outputs`` can be cut between blocks."""
        unit = 1
        for tensor in outputs:
            block = GGML_QUANT_SIZES[tensor.type][0]
            together = self.value_width if self.tiled else self.value_width * self.each
            if self.tiled and self.keys * self.value_width % block:
                return self.keys
            unit = math.lcm(unit, block // math.gcd(block, together))
        return unit

    def part(self, name: str, tensor: TensorInfo, own: range) -> TensorInfo | None:
        """What of ``tensor``, called so, a rank with these heads of keys holds; None for one that is no state's."""
        last = len(tensor.shape) - 1
        if name in _MIXED:
            keys = [range(at + own.start * self.key_width, at + own.stop * self.key_width) for at in self._before]
            return sliced(tensor, last, [*keys, *self._values(own, self.value_width, 2 * self.keys * self.key_width)])
        if name in _VALUES:
            return sliced(tensor, 0 if name == STATE_COLUMNS else last, self._values(own, self.value_width))
        if name in _HEADS:
            return sliced(tensor, last, self._values(own, 1))
        if name in _GROUPED:
            rows = tensor.shape[last] // self.keys
            return sliced(tensor, last, [range(own.start * rows, own.stop * rows)])
        return None

    @property
    def _before(self) -> tuple[int, int]:
        """Rows before those of queries, and of keys."""
        return 0, self.keys * self.key_width

    def _values(self, own: range, width: int, before: int = 0) -> list[range]:
        """The rows of so much ``width`` for each head of values."""
        if not self.tiled:
            first, last = own.start * self.each, own.stop * self.each
            return [range(before + first * width, before + last * width)]
        tiles = (before + tile * self.keys * width for tile in range(self.each))
        return [range(at + own.start * width, at + own.stop * width) for at in tiles]

    def counts(self, own: range) -> dict[str, int]:
        """The metadata of a rank with these heads of keys."""
        heads = len(own) * self.each
        return {
            "ssm.group_count": len(own),
            "ssm.time_step_rank": heads,
            "ssm.inner_size": heads * self.value_width,
        }
