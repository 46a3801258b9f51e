"""Shares of layers that keep a state for each head, carried from token to token.

In a gated delta rule (``StateHeads``) a key head writes to the states of some value heads, and nothing passes from one
key head to another. So a rank holds some key heads with their value heads: rows of the matrices for both, of gates and
of the convolution before them, columns of the output. Where keys are ``tiled`` over values, the value heads of a key
head are as far apart as there are key heads.

A selective scan (``ScanGroups``, Mamba 2) has groups of heads, with the values that write to and read from the states
of each. If there is one group, it belongs to all heads, and a norm over it would see those of other ranks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Final

from primad.gguf.constants import GGML_QUANT_SIZES
from primad.gguf.header import Header, TensorInfo
from primad.gguf.slices import sliced

_DELTAS: Final = frozenset(("qwen35", "qwen35moe", "qwen3next"))
_SCANS: Final = frozenset(("nemotron_h", "nemotron_h_moe", "falcon-h1"))
STATES_BY_HEADS: Final = _DELTAS | _SCANS
"""Architectures whose states may be shared."""
_MIXED: Final = ("attn_qkv", "ssm_conv1d")
"""Rows of queries, keys and values, one after another."""
_VALUES: Final = ("attn_gate", "ssm_out")
_HEADS: Final = ("ssm_dt", "ssm_a", "ssm_beta", "ssm_alpha")
"""A row for each head of values."""
_GROUPED: Final = ("ssm_in", "ssm_ba")
"""All rows of a head of keys together, in files of older converters."""
STATE_COLUMNS: Final = "ssm_out"


@dataclass(frozen=True, slots=True)
class StateHeads:
    """How many heads of keys a layer with a state has, how many of values for each, and how wide both are."""

    tensors: ClassVar = frozenset((*_MIXED, *_VALUES, *_HEADS, *_GROUPED))
    """The tensors that are cut between ranks."""
    keys: int
    each: int
    key_width: int
    value_width: int
    tiled: bool

    @classmethod
    def of(cls, header: Header) -> StateHeads | None:
        """The state heads of the model of ``header``; None if its states are of another kind."""
        name = header.text("general.architecture")
        if name not in _DELTAS:
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

    def part(self, name: str, tensor: TensorInfo, own: range) -> TensorInfo:
        """The part of ``tensor``, named ``name`` and one of ``tensors``, for a rank with these key heads."""
        last = len(tensor.shape) - 1
        if name in _MIXED:
            keys = [range(at + own.start * self.key_width, at + own.stop * self.key_width) for at in self._before]
            return sliced(tensor, last, [*keys, *self._values(own, self.value_width, 2 * self.keys * self.key_width)])
        if name in _VALUES:
            return sliced(tensor, 0 if name == STATE_COLUMNS else last, self._values(own, self.value_width))
        if name in _HEADS:
            return sliced(tensor, last, self._values(own, 1))
        rows = tensor.shape[last] // self.keys
        return sliced(tensor, last, [range(own.start * rows, own.stop * rows)])

    @property
    def _before(self) -> tuple[int, int]:
        """Rows before those of queries, and of keys."""
        return 0, self.keys * self.key_width

    def _values(self, own: range, width: int, before: int = 0) -> list[range]:
        """The rows of the value heads of the key heads ``own``, with ``width`` rows per head."""
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


@dataclass(frozen=True, slots=True)
class ScanGroups:
    """The heads of a layer with a state in ``keys`` units that ranks share: groups of ``heads`` of ``width``, or, where
    the writing and reading values are ``whole``, single heads. It has as many values for each group."""

    tensors: ClassVar = frozenset(("ssm_in", "ssm_conv1d", "ssm_dt", "ssm_a", "ssm_d", "ssm_norm", STATE_COLUMNS))
    """The tensors that are cut between ranks."""
    keys: int
    heads: int
    width: int
    state: int
    whole: bool

    @classmethod
    def of(cls, header: Header) -> ScanGroups | None:
        """The scan groups of the model of ``header``; None if its states are of another kind or cannot be shared."""
        name = header.text("general.architecture")
        groups, heads, inner, state = (
            header.count(f"{name}.ssm.{key}", 0)
            for key in ("group_count", "time_step_rank", "inner_size", "state_size")
        )
        if name not in _SCANS or not groups or not heads or heads % groups or inner % heads:
            return None
        if groups > 1:
            return cls(groups, heads // groups, inner // groups, state, whole=False)
        has_norm = any(tensor.endswith(".ssm_norm.weight") for tensor in header.tensors)
        return None if has_norm else cls(heads, 1, inner // heads, state, whole=True)

    def unit(self, outputs: Sequence[TensorInfo]) -> int:
        """At which multiples of ``keys`` columns of all ``outputs`` can be cut between blocks."""
        blocks = [GGML_QUANT_SIZES[tensor.type][0] for tensor in outputs]
        return math.lcm(*(block // math.gcd(block, self.width) for block in blocks))

    def part(self, name: str, tensor: TensorInfo, own: range) -> TensorInfo:
        """As ``StateHeads.part``."""
        last, inner = len(tensor.shape) - 1, self.keys * self.width
        groups = 1 if self.whole else self.keys
        both = [self._each(range(1) if self.whole else own, self.state, before) for before in (0, groups * self.state)]
        match name:
            case "ssm_in":
                behind = 2 * inner
                ranges = [self._each(own, self.width, 0), self._each(own, self.width, inner)]
                ranges += [range(behind + each.start, behind + each.stop) for each in both]
                ranges.append(self._each(own, self.heads, behind + 2 * groups * self.state))
            case "ssm_conv1d":
                ranges = [self._each(own, self.width, 0)]
                ranges += [range(inner + each.start, inner + each.stop) for each in both]
            case "ssm_dt" | "ssm_a" | "ssm_d":
                ranges = [self._each(own, self.heads, 0)]
            case "ssm_norm":
                ranges = [own]
            case _:
                return sliced(tensor, 0, [self._each(own, self.width, 0)])
        return sliced(tensor, last, ranges)

    @staticmethod
    def _each(own: range, size: int, before: int) -> range:
        return range(before + own.start * size, before + own.stop * size)

    def counts(self, own: range) -> dict[str, int]:
        """As ``StateHeads.counts``."""
        return {
            "ssm.group_count": 1 if self.whole else len(own),
            "ssm.time_step_rank": len(own) * self.heads,
            "ssm.inner_size": len(own) * self.width,
        }
