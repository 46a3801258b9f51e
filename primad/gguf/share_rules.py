"""How the layers of a model are cut between the ranks of a tensor-parallel group: by heads, states and network values.

KV heads are never cut: a rank holds whole groups of heads with their keys, or, if there are fewer groups than ranks, a
part of one group with a copy of its keys. Latent attention has one such group.

Where heads cannot be cut, attention is whole on every rank, and only networks are cut (``whole_attention.py``).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import cached_property
from typing import Final

from primad.gguf.architectures.cuts import cuttable
from primad.gguf.architectures.layers import count_at, kv_heads, layer_count, recurrent_layers
from primad.gguf.architectures.table import ADVICE, NotCutError
from primad.gguf.architectures.tensors import layer_of
from primad.gguf.constants import GGML_QUANT_SIZES
from primad.gguf.header import Header, TensorInfo
from primad.gguf.network_shares import KINDS, NetworkShares
from primad.gguf.slices import sliced, zeros
from primad.gguf.splits import MAX_RANKS, ShareUnits, cut_heads, keys_of, ranges_of
from primad.gguf.state_shares import STATE_COLUMNS, ScanGroups, StateHeads
from primad.gguf.whole_attention import SAME_GRAPH, why_attention_whole


class Part(Enum):
    """Which part of a tensor of a layer a rank holds. Rows are items of the last axis, or of the one before the experts'."""

    WHOLE = "all of it"
    FIRST = "all of it on the first rank, zeros on others"
    STATE = "rows by heads of states"
    STATE_COLUMNS = "columns by heads of states"
    HEADS = "rows by heads"
    KEYS = "rows by heads of keys"
    ALL_HEADS = "rows of queries, keys and values, one after the other"
    HEAD_COLUMNS = "columns by heads"
    VALUES = "rows by feed-forward values, or equally many of gate and up, one after the other"
    VALUE_COLUMNS = "columns by feed-forward values"


_SUFFIXES: Final = (".weight", ".bias", ".scale", ".input_scale")
_SCALES: Final = ("scale", "input_scale")
PARTS: Final[Mapping[str, Part]] = {
    **dict.fromkeys(("attn_q", "attn_q_b", "attn_k_b", "attn_v_b", "attn_kv_b", "attn_gate", "attn_sinks"), Part.HEADS),
    **dict.fromkeys(("attn_k", "attn_v"), Part.KEYS),
    "attn_qkv": Part.ALL_HEADS,
    "attn_output": Part.HEAD_COLUMNS,
    **{f"ffn_{name}{kind}": Part.VALUES for name in ("gate", "up", "gate_up") for kind in KINDS},
    **{f"ffn_down{kind}": Part.VALUE_COLUMNS for kind in KINDS},
    **dict.fromkeys(("ffn_act", "ffn.act.scales"), Part.VALUES),
    **dict.fromkeys(("attn_q_a", "attn_kv_a_mqa", "attn_rot_embd", "exp_probs_b", "layer_output_scale"), Part.WHOLE),
    **dict.fromkeys(("ffn_gate_inp", "ffn_gate_inp_shexp", "rope_freqs"), Part.WHOLE),
    **dict.fromkeys(("ffn_latent_down", "ffn_latent_up", "inp_gate", "proj"), Part.WHOLE),
}
"""By the name of a tensor. A tensor with ``norm`` or ``indexer`` in its name is whole as well, except for norms over
all heads."""
_HEAD_NORMS: Final = {"attn_q_norm": Part.HEADS, "attn_k_norm": Part.KEYS}
_OVER_ALL: Final = frozenset(("attn_sub_norm", "ffn_sub_norm"))
_OUTPUTS: Final = frozenset(("attn_output", STATE_COLUMNS, "shortconv.out_proj", "time_mix_output"))
"""Tensors that compute the result of attention or of a state if that is whole on each rank."""


@dataclass(frozen=True, slots=True)
class LayerShare:
    """A rank's part of a layer: heads, KV heads, key heads of its states, and feed-forward values by the kind of
    network. Attention that is whole on each rank is not included."""

    heads: range
    keys: range
    states: range
    values: Mapping[str, range]


_NO_HEADS: Final = (range(0),) * 3


@dataclass(frozen=True)
class ShareRules:
    """How the layers of one model can be cut between ranks. Raises ``NotCutError``, with the reason, if they cannot."""

    header: Header

    def __post_init__(self) -> None:
        name = cuttable(self.header).name
        for layer, tensors in enumerate(self._tensors):
            for tensor in tensors:
                self._part_of(layer, tensor)  # raises
        if self.why_whole and not any(self._networks.downs(kind) for kind in self._networks.kinds):
            raise self._refusal(f"architecture '{name}'", f"its layers have no networks, and {self.why_whole}")

    @cached_property
    def why_whole(self) -> str:
        """Why attention is whole on every rank; empty if its heads are cut."""
        keeps_states = any(self._recurrent) and self._states is None
        if found := why_attention_whole(self.header, keeps_states=keeps_states):
            return found
        halves = [1, 1]
        try:
            for layer, tensors in enumerate(self._tensors):
                share = LayerShare(*self._cut_heads(layer, halves)[0], self._networks.cut(layer, halves)[0])
                for tensor in tensors:
                    self._slice(self._part_by_heads(layer, tensor), layer, tensor, share, is_first=True)
        except NotCutError as exc:
            return exc.reason
        return ""

    @cached_property
    def _networks(self) -> NetworkShares:
        return NetworkShares(self.header)

    @property
    def graph(self) -> str:
        """The architecture whose graph llama.cpp uses for shares."""
        name = self.header.text("general.architecture")
        return name if self.why_whole else SAME_GRAPH.get(name, name)

    @cached_property
    def _tensors(self) -> list[list[TensorInfo]]:
        """The tensors of each layer."""
        found: list[list[TensorInfo]] = [[] for _ in range(layer_count(self.header))]
        for name, tensor in self.header.tensors.items():
            layer = layer_of(name)
            if layer is not None and layer < len(found):
                found[layer].append(tensor)
        return found

    @cached_property
    def _states(self) -> StateHeads | ScanGroups | None:
        return StateHeads.of(self.header) or ScanGroups.of(self.header)

    @cached_property
    def _recurrent(self) -> tuple[bool, ...]:
        return recurrent_layers(self.header)

    def _cut_states(self, layer: int, weights: Sequence[int]) -> list[range]:
        """The heads of keys of the states of ``layer`` that each rank has."""
        if self._states is None or not self._recurrent[layer]:
            return [range(0)] * len(weights)
        outputs = [self.columns(each, STATE_COLUMNS) for each, keeps in enumerate(self._recurrent) if keeps]
        unit = self._states.unit([each for each in outputs if each is not None])
        found = ranges_of(self._states.keys, unit, weights)
        if found is None:
            raise self._refusal(f"layer {layer}", f"{len(weights)} devices are more than the heads of its states allow")
        return found

    def state_counts(self, share: LayerShare) -> dict[str, int]:
        """The metadata of a rank's states; ``share`` must have states."""
        return self._states.counts(share.states) if self._states is not None and share.states else {}

    def _refusal(self, subject: str, reason: str) -> NotCutError:
        return NotCutError(f"{self.header.path}: {subject} cannot be shared between devices: {reason}", ADVICE)

    def _count(self, key: str, layer: int) -> int:
        return count_at(self.header, f"{self.header.text('general.architecture')}.{key}", layer)

    def heads(self, layer: int) -> tuple[int, int]:
        """The numbers of query heads and KV heads of ``layer`` that are cut; 0 without attention."""
        if f"blk.{layer}.attn_output.weight" not in self.header.tensors:
            return 0, 0
        return self._count("attention.head_count", layer), kv_heads(self.header, layer)

    def columns(self, layer: int, name: str) -> TensorInfo | None:
        """The matrix of ``layer`` of that name, if it has one."""
        return self.header.tensors.get(f"blk.{layer}.{name}.weight")

    @cached_property
    def _keys(self) -> dict[int, list[int]]:
        """By the number of heads of a layer, the KV heads of all layers with that number: the metadata counts them with
        one value."""
        found: dict[int, list[int]] = {}
        for layer in range(layer_count(self.header)):
            heads, keys = self.heads(layer)
            if keys not in found.setdefault(heads, []):
                found[heads].append(keys)
        return found

    @cached_property
    def _head_unit(self) -> int:
        """The number of heads at whose multiples every layer's output columns can be cut."""
        unit = 1
        for layer in range(layer_count(self.header)):
            tensor, heads = self.columns(layer, "attn_output"), self.heads(layer)[0]
            if tensor is not None:
                if not heads or tensor.shape[0] % heads:
                    raise self._refusal(
                        f"layer {layer}", f"its output has not as many columns for each of {heads} heads"
                    )
                block = GGML_QUANT_SIZES[tensor.type][0]
                unit = math.lcm(unit, block // math.gcd(block, tensor.shape[0] // heads))
        return unit

    def shares(self, layer: int, weights: Sequence[int]) -> list[LayerShare]:
        """Each rank's part of ``layer``, in proportion to ``weights`` as far as its heads and blocks allow.

        Raises ``NotCutError`` for more ranks than that.
        """
        by_head = [_NO_HEADS] * len(weights) if self.why_whole else self._cut_heads(layer, weights)
        values = self._networks.cut(layer, weights)
        return [LayerShare(*own, of_network) for own, of_network in zip(by_head, values, strict=True)]

    def _cut_heads(self, layer: int, weights: Sequence[int]) -> list[tuple[range, range, range]]:
        """The heads of ``layer`` that each rank has, of queries, of keys, and of keys of states."""
        (heads, keys), states = self.heads(layer), self._cut_states(layer, weights)
        if not heads:
            return [(range(0), range(0), own) for own in states]
        found = cut_heads(heads, self._keys[heads], self._head_unit, weights)
        if found is None:
            raise self._refusal(f"layer {layer}", f"{len(weights)} devices are more than its {heads} heads allow")
        return [
            (own, keys_of(own, heads // keys) or range(0), of_state)
            for own, of_state in zip(found, states, strict=True)
        ]

    def max_ranks(self, limit: int = MAX_RANKS) -> int:
        """How many devices can share each layer, at most ``limit``."""
        for ranks in range(min(limit, MAX_RANKS), 1, -1):
            try:
                for layer in range(layer_count(self.header)):
                    self.shares(layer, [1] * ranks)
            except NotCutError:
                continue
            return ranks
        return 1

    @property
    def units(self) -> ShareUnits | None:
        """The units that most of its layers are cut by; None if they have no attention or no network."""
        sizes = {kind: sum(tensor.bytes for tensor in self._networks.downs(kind)) for kind in self._networks.kinds}
        kind = max(sizes, key=lambda each: sizes[each])
        if not sizes[kind]:
            return None
        values, value_unit = self._networks.downs(kind)[0].shape[0], self._networks.units[kind]
        if self.why_whole:
            return ShareUnits(heads=0, keys=(), head_unit=1, values=values, value_unit=value_unit)
        heads = max(self._keys, key=lambda count: (count > 0, len(self._keys[count])))
        if not heads:
            return None
        return ShareUnits(
            heads=heads,
            keys=tuple(self._keys[heads]),
            head_unit=self._head_unit,
            values=values,
            value_unit=value_unit,
        )

    def cuts_columns(self, layer: int, tensor: TensorInfo) -> bool:
        """Whether a rank holds columns of the matrix ``tensor`` of ``layer``."""
        part = self._part_of(layer, tensor)
        return part in (Part.HEAD_COLUMNS, Part.VALUE_COLUMNS, Part.STATE_COLUMNS, Part.FIRST)

    def part(self, layer: int, tensor: TensorInfo, share: LayerShare, *, is_first: bool) -> TensorInfo:
        """The part of ``tensor`` that the rank of ``share`` holds. Raises ``NotCutError`` by name for an unknown
        tensor."""
        return self._slice(self._part_of(layer, tensor), layer, tensor, share, is_first=is_first)

    def _slice(self, part: Part, layer: int, tensor: TensorInfo, share: LayerShare, *, is_first: bool) -> TensorInfo:
        kind = next((kind for kind in KINDS[1:] if _named(tensor)[0].endswith(kind)), "")
        match part:
            case Part.WHOLE:
                return tensor
            case Part.FIRST:
                return tensor if is_first else zeros(tensor)
            case Part.STATE | Part.STATE_COLUMNS:
                assert self._states is not None
                return self._states.part(_named(tensor)[0], tensor, share.states)
            case Part.HEAD_COLUMNS:
                return sliced(tensor, 0, self._scaled(layer, tensor, 0, share.heads, self.heads(layer)[0]))
            case Part.VALUE_COLUMNS:
                return sliced(tensor, 0, [share.values[kind]])
            case Part.VALUES:
                rows = self._networks.rows(layer, tensor, kind, share.values.get(kind))
                if rows is None:
                    raise self._refusal(f"tensor '{tensor.name}'", "it fits no columns of this layer")
                return rows
            case Part.ALL_HEADS:
                return self._all_heads(layer, tensor, share)
        keys = part is Part.KEYS
        own, count = (share.keys, self.heads(layer)[1]) if keys else (share.heads, self.heads(layer)[0])
        axis = len(tensor.shape) - 1
        return sliced(tensor, axis, self._scaled(layer, tensor, axis, own, count))

    def _part_of(self, layer: int, tensor: TensorInfo) -> Part:
        name, suffix = _named(tensor)
        if not self.why_whole:
            return self._part_by_heads(layer, tensor)
        if name in _OUTPUTS and suffix not in _SCALES:
            return Part.FIRST
        if not name.startswith("ffn"):
            return Part.WHOLE
        part = self._part_by_heads(layer, tensor)
        if part in (Part.VALUES, Part.VALUE_COLUMNS) and not name.endswith(self._networks.kinds):
            return Part.FIRST if part is Part.VALUE_COLUMNS else Part.WHOLE
        return part

    def _part_by_heads(self, layer: int, tensor: TensorInfo) -> Part:
        name, suffix = _named(tensor)
        if suffix in _SCALES:
            return Part.WHOLE
        if self._recurrent[layer] and self._states is not None and name in self._states.tensors:
            return Part.STATE_COLUMNS if name == STATE_COLUMNS else Part.STATE
        part = PARTS.get(name)
        if suffix == "bias" and part in (Part.HEAD_COLUMNS, Part.VALUE_COLUMNS):
            return Part.FIRST
        if name in _HEAD_NORMS:
            return self._part_of_norm(layer, name, tensor)
        if name in _OVER_ALL:
            raise self._refusal(f"tensor '{tensor.name}'", "it is a norm over what is shared")
        if part is not None:
            return part
        if "norm" in name or name.startswith("indexer."):
            return Part.WHOLE
        raise self._refusal(f"tensor '{tensor.name}'", "its use is not known")

    def _part_of_norm(self, layer: int, name: str, tensor: TensorInfo) -> Part:
        if len(tensor.shape) > 1:
            return _HEAD_NORMS[name]
        heads, output = self.heads(layer), self.columns(layer, "attn_output")
        count = heads[0] if name == "attn_q_norm" else heads[1]
        if count > 1 and output is not None and tensor.shape[0] >= 2 * (output.shape[0] // heads[0]):
            raise self._refusal(f"tensor '{tensor.name}'", "it is a norm over all heads")
        return Part.WHOLE

    def parted(self, tensor: TensorInfo) -> list[TensorInfo]:
        """``tensor``, or its two halves (gate and up) if the graph used for shares has separate ones."""
        is_of_both = self.header.text("general.architecture") == "phi3" and tensor.name.endswith(".ffn_up.weight")
        if self.why_whole or not is_of_both:
            return [tensor]
        half = tensor.shape[-1] // 2
        gate, up = sliced(tensor, 1, [range(half)]), sliced(tensor, 1, [range(half, 2 * half)])
        return [replace(gate, name=tensor.name.replace("ffn_up", "ffn_gate")), up]

    def _scaled(self, layer: int, tensor: TensorInfo, axis: int, heads: range, count: int) -> list[range]:
        """The items of ``heads`` along ``axis``, where each of ``count`` heads has equally many."""
        if not count or tensor.shape[axis] % count:
            raise self._refusal(f"tensor '{tensor.name}'", f"it has not as much for each of {count} heads")
        each = tensor.shape[axis] // count
        return [range(heads.start * each, heads.stop * each)]

    def _all_heads(self, layer: int, tensor: TensorInfo, share: LayerShare) -> TensorInfo:
        (heads, keys), axis = self.heads(layer), len(tensor.shape) - 1
        if tensor.shape[axis] % (heads + 2 * keys):
            raise self._refusal(f"tensor '{tensor.name}'", "its heads are not all of one size")
        each, ranges = tensor.shape[axis] // (heads + 2 * keys), list[range]()
        for own, before in ((share.heads, 0), (share.keys, heads), (share.keys, heads + keys)):
            ranges.append(range((before + own.start) * each, (before + own.stop) * each))
        return sliced(tensor, axis, ranges)


def _named(tensor: TensorInfo) -> tuple[str, str]:
    """The name of ``tensor`` within its layer, and its suffix."""
    _, _, name = tensor.name.split(".", 2)
    if not name.endswith(_SUFFIXES):
        return name, ""
    name, _, suffix = name.rpartition(".")
    return name, suffix
