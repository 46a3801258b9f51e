"""Shares of a model: the layers of a rank of a tensor-parallel group, as the header of a model of its own.

A rank holds some heads of each layer (rows of what makes queries, keys and values, columns of the output) and some of its
feed-forward values (rows of gate and up, columns of down), and rows of the output matrix. What its columns make of its rows
is a part of a sum over the ranks (``engine/llama/sums.py``); all else is whole on every rank. Columns are cut between blocks
of the quantisation. Of a bias that is added to a sum the first rank has the values and the others zeros.

Key heads are never cut: a rank holds whole groups of heads with their keys, or, where there are fewer groups than ranks, a
part of one group with a copy of its keys. Latent attention has one such group.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import cached_property
from typing import Final

from primad.gguf.architectures.cuts import cuttable
from primad.gguf.architectures.layers import count_at, kv_heads, layer_count, layer_inputs, recurrent_layers
from primad.gguf.architectures.table import ADVICE, NotCutError
from primad.gguf.architectures.tensors import TensorRole, layer_of, tensor_role, turns_by_context
from primad.gguf.constants import GGML_QUANT_SIZES, GGUFValueType
from primad.gguf.header import Header, TensorInfo, Value, array_value, scalar_value
from primad.gguf.slices import sliced, zeros
from primad.gguf.splits import MAX_RANKS, ShareUnits, cut_heads, keys_of, ranges_of
from primad.gguf.state_shares import STATE_COLUMNS, STATES_BY_HEADS, ScanGroups, StateHeads


class Part(Enum):
    """Which part of a tensor of a layer a rank holds. Rows are items of the last axis, or of the one before the experts'."""

    WHOLE = "all of it"
    HEADS = "rows by heads"
    KEYS = "rows by heads of keys"
    ALL_HEADS = "rows of queries, keys and values, one behind the other"
    HEAD_COLUMNS = "columns by heads"
    VALUES = "rows by feed-forward values, or as many of gate and up, one behind the other"
    VALUE_COLUMNS = "columns by feed-forward values"


_SUFFIXES: Final = (".weight", ".bias", ".scale", ".input_scale")
_SCALES: Final = ("scale", "input_scale")
_KINDS: Final = ("", "_exps", "_shexp", "_chexps")
"""Feed-forward networks that a layer may have: dense, of experts, shared by all tokens, and of chunks of experts."""
PARTS: Final[Mapping[str, Part]] = {
    **dict.fromkeys(("attn_q", "attn_q_b", "attn_k_b", "attn_v_b", "attn_kv_b", "attn_gate", "attn_sinks"), Part.HEADS),
    **dict.fromkeys(("attn_k", "attn_v"), Part.KEYS),
    "attn_qkv": Part.ALL_HEADS,
    "attn_output": Part.HEAD_COLUMNS,
    **{f"ffn_{name}{kind}": Part.VALUES for name in ("gate", "up", "gate_up") for kind in _KINDS},
    **{f"ffn_down{kind}": Part.VALUE_COLUMNS for kind in _KINDS},
    "ffn_act": Part.VALUES,
    **dict.fromkeys(("attn_q_a", "attn_kv_a_mqa", "attn_rot_embd", "exp_probs_b", "layer_output_scale"), Part.WHOLE),
    **dict.fromkeys(("ffn_gate_inp", "ffn_gate_inp_shexp", "rope_freqs"), Part.WHOLE),
    **dict.fromkeys(("ffn_latent_down", "ffn_latent_up"), Part.WHOLE),
}
"""By the name of a tensor. What has ``norm`` or ``indexer`` in its name is whole as well, but for norms over all heads."""
_HEAD_NORMS: Final = {"attn_q_norm": Part.HEADS, "attn_k_norm": Part.KEYS}
_OVER_ALL: Final = frozenset(("attn_sub_norm", "ffn_sub_norm"))
_LENGTHS: Final = {
    "": "feed_forward_length",
    "_exps": "expert_feed_forward_length",
    "_shexp": "expert_shared_feed_forward_length",
    "_chexps": "expert_chunk_feed_forward_length",
}
SAME_GRAPH: Final = {
    **dict.fromkeys(("phi3", "qwen", "qwen2"), "exaone"),
    **dict.fromkeys(("internlm2", "xverse"), "llama"),
    "qwen2vl": "paddleocr",
}
"""Architectures whose heads llama.cpp takes to be as wide as the hidden state together, with another one that has the same
graph for any number of them."""
_REASONS: Final[dict[str, tuple[str, ...]]] = {
    "the bias of its attention goes by the number of a head": ("refact", "jais", "mpt"),
    "each of its groups of heads needs an indexer": ("minimax-m3",),
    "some of its layers have no attention, or one without heads": ("deci",),
    "llama.cpp takes its heads to be as wide as the hidden state together": (
        *(
            "bailingmoe2",
            "chatglm",
            "codeshell",
            "cohere2",
            "command-r",
            "dbrx",
            "deepseek",
            "deepseek2-ocr",
            "exaone4",
        ),
        *("falcon", "gpt2", "gptneox", "grok", "nemotron", "olmo", "orion", "phi2", "phimoe", "plamo", "qwen2moe"),
        *("stablelm", "starcoder", "starcoder2"),
    ),
    "its dense network beside the experts is as wide as the hidden state": ("arctic",),
}
_REFUSED: Final = {name: reason for reason, names in _REASONS.items() for name in names}


@dataclass(frozen=True, slots=True)
class LayerShare:
    """What a rank holds of a layer: heads, heads of keys, feed-forward values by the kind of network, and heads of keys
    of its states."""

    heads: range
    keys: range
    values: Mapping[str, range]
    states: range = range(0)


@dataclass(frozen=True)
class ShareRules:
    """How the layers of one model can be cut between ranks. Raises ``NotCutError`` where they cannot, by name and reason."""

    header: Header

    def __post_init__(self) -> None:
        header, name = self.header, cuttable(self.header).name
        reason = _REFUSED.get(name, "")
        if name in SAME_GRAPH and not reason:
            reason = self._differs(SAME_GRAPH[name])
        if any(recurrent_layers(header)) and self._states is None:
            reason = "its layers keep states"
        elif layer_inputs(header):
            reason = "its layers take inputs beside the hidden state"
        elif header.number(f"{name}.attention.max_alibi_bias", 0.0):
            reason = "the bias of its attention goes by the number of a head"
        elif (name, layer_count(header)) in (("gemma2", 46), ("gemma3", 62)):
            reason = "llama.cpp takes its attention scale from the number of heads"
        if reason:
            raise self._refusal(f"architecture '{name}'", reason)

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
        """The metadata of a rank's states, of which ``share`` has some."""
        return self._states.counts(share.states) if self._states is not None and share.states else {}

    def _refusal(self, subject: str, reason: str) -> NotCutError:
        return NotCutError(f"{self.header.path}: {subject} cannot be shared between devices: {reason}", ADVICE)

    def _differs(self, other: str) -> str:
        """Why the graph of ``other`` is not this model's."""
        header, name = self.header, self.header.text("general.architecture")
        each = header.count(f"{name}.embedding_length") // max(self._count("attention.head_count", 0), 1)
        if header.count(f"{name}.rope.dimension_count", each) != each:
            return (
                "llama.cpp takes its heads to be as wide as the hidden state together, and only a part of them rotates"
            )
        if turns_by_context(header):
            return "angles of positions follow from how large the context is"
        ends = ("output.bias", ".ffn_down.bias", ".ffn_up.bias", ".ffn_gate.bias")
        biases = [tensor for tensor in header.tensors if tensor.endswith(ends)]
        return f"the graph of '{other}', as which it could be, has no {biases[0]}" if biases else ""

    def _count(self, key: str, layer: int) -> int:
        return count_at(self.header, f"{self.header.text('general.architecture')}.{key}", layer)

    def heads(self, layer: int) -> tuple[int, int]:
        """The heads of ``layer``, of queries and of keys; without attention 0."""
        if f"blk.{layer}.attn_output.weight" not in self.header.tensors:
            return 0, 0
        return self._count("attention.head_count", layer), kv_heads(self.header, layer)

    def columns(self, layer: int, name: str) -> TensorInfo | None:
        """The matrix of ``layer`` of that name, if it has one."""
        return self.header.tensors.get(f"blk.{layer}.{name}.weight")

    @cached_property
    def _keys(self) -> dict[int, list[int]]:
        """By the heads of a layer the heads of keys of all layers with as many: one number in the metadata counts them."""
        found: dict[int, list[int]] = {}
        for layer in range(layer_count(self.header)):
            heads, keys = self.heads(layer)
            if keys not in found.setdefault(heads, []):
                found[heads].append(keys)
        return found

    @cached_property
    def _head_unit(self) -> int:
        """Heads at whose multiples the columns of every layer's output can be cut."""
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

    @cached_property
    def _value_units(self) -> dict[str, int]:
        """By kind of network the values at whose multiples its columns can be cut in every layer."""
        units = dict.fromkeys(_KINDS, 1)
        for layer in range(layer_count(self.header)):
            for kind in _KINDS:
                tensor = self.columns(layer, f"ffn_down{kind}")
                if tensor is not None:
                    units[kind] = math.lcm(units[kind], GGML_QUANT_SIZES[tensor.type][0])
        return units

    def shares(self, layer: int, weights: Sequence[int]) -> list[LayerShare]:
        """What each rank holds of ``layer``, in proportion to ``weights`` as far as its heads and blocks allow.

        Raises ``NotCutError`` for more ranks than that.
        """
        heads, keys = self.heads(layer)
        by_head: list[range] | None = [range(0)] * len(weights)
        if heads:
            by_head = cut_heads(heads, self._keys[heads], self._head_unit, weights)
        units, values = {**self._value_units}, dict[str, list[range]]()
        experts = self.columns(layer, "ffn_down_exps")
        for kind in _KINDS:
            tensor = self.columns(layer, f"ffn_down{kind}")
            if tensor is None:
                continue
            times = tensor.shape[0] // experts.shape[0] if experts is not None else 0
            if kind == "_exps":  # the shared ones are so many times as wide
                shared = self.columns(layer, "ffn_down_shexp")
                wide = max(shared.shape[0] // tensor.shape[0], 1) if shared is not None else 1
                block = units["_shexp"]
                units[kind] = math.lcm(units[kind], block // math.gcd(block, wide))
            found = ranges_of(tensor.shape[0], units[kind], weights)
            if kind == "_shexp" and experts is not None and times and times * experts.shape[0] == tensor.shape[0]:
                found = [range(each.start * times, each.stop * times) for each in values["_exps"]]
            if found is None:
                raise self._refusal(f"layer {layer}", f"{len(weights)} devices are more than its values allow")
            values[kind] = found
        if by_head is None:
            raise self._refusal(f"layer {layer}", f"{len(weights)} devices are more than its {heads} heads allow")
        states = self._cut_states(layer, weights)
        return [
            LayerShare(
                own,
                (keys_of(own, heads // keys) if heads else None) or range(0),
                {kind: each[rank] for kind, each in values.items()},
                states[rank],
            )
            for rank, own in enumerate(by_head)
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
        """What most of its layers are cut by; None where they have no attention or no network."""
        heads = max(self._keys, key=lambda count: (count > 0, len(self._keys[count])))
        sizes = {kind: sum(tensor.bytes for tensor in self._downs(kind)) for kind in _KINDS}
        kind = max(sizes, key=lambda each: sizes[each])
        if not heads or not sizes[kind]:
            return None
        return ShareUnits(
            heads=heads,
            keys=tuple(self._keys[heads]),
            head_unit=self._head_unit,
            values=self._downs(kind)[0].shape[0],
            value_unit=self._value_units[kind],
        )

    def _downs(self, kind: str) -> list[TensorInfo]:
        found = (self.columns(layer, f"ffn_down{kind}") for layer in range(layer_count(self.header)))
        return [tensor for tensor in found if tensor is not None]

    def cuts_columns(self, layer: int, tensor: TensorInfo) -> bool:
        """Whether a rank holds columns of the matrix ``tensor`` of ``layer``."""
        name = tensor.name.removeprefix(f"blk.{layer}.").removesuffix(".weight")
        if name == STATE_COLUMNS:
            return True
        return self._part_of(layer, name, "weight", tensor) in (Part.HEAD_COLUMNS, Part.VALUE_COLUMNS)

    def part(self, layer: int, tensor: TensorInfo, share: LayerShare, *, is_first: bool) -> TensorInfo:
        """What the rank of ``share`` holds of ``tensor``. Raises ``NotCutError`` by name for one that is not known."""
        name, suffix = tensor.name.removeprefix(f"blk.{layer}."), ""
        if name.endswith(_SUFFIXES):
            name, _, suffix = name.rpartition(".")
        if share.states and self._states is not None and suffix not in _SCALES:
            part_of_state = self._states.part(name, tensor, share.states)
            if part_of_state is not None:
                return part_of_state
        part = self._part_of(layer, name, suffix, tensor)
        kind = next((kind for kind in _KINDS[1:] if name.endswith(kind)), "")
        match part:
            case Part.WHOLE:
                return tensor
            case Part.HEAD_COLUMNS | Part.VALUE_COLUMNS if suffix == "bias":
                return tensor if is_first else zeros(tensor)
            case Part.HEAD_COLUMNS:
                return sliced(tensor, 0, self._scaled(layer, tensor, 0, share.heads, self.heads(layer)[0]))
            case Part.VALUE_COLUMNS:
                return sliced(tensor, 0, [share.values[kind]])
            case Part.VALUES:
                return self._values(layer, tensor, share.values.get(kind), kind)
            case Part.ALL_HEADS:
                return self._all_heads(layer, tensor, share)
        keys = part is Part.KEYS
        own, count = (share.keys, self.heads(layer)[1]) if keys else (share.heads, self.heads(layer)[0])
        axis = len(tensor.shape) - 1
        return sliced(tensor, axis, self._scaled(layer, tensor, axis, own, count))

    def _part_of(self, layer: int, name: str, suffix: str, tensor: TensorInfo) -> Part:
        heads = self.heads(layer)
        if suffix in _SCALES:
            return Part.WHOLE
        if name in _HEAD_NORMS:
            if len(tensor.shape) > 1:
                return _HEAD_NORMS[name]
            output = self.columns(layer, "attn_output")
            count = heads[0] if name == "attn_q_norm" else heads[1]
            if count > 1 and output is not None and tensor.shape[0] >= 2 * (output.shape[0] // heads[0]):
                raise self._refusal(f"tensor '{tensor.name}'", "it is a norm over all heads")
            return Part.WHOLE
        if name in _OVER_ALL:
            raise self._refusal(f"tensor '{tensor.name}'", "it is a norm over what is shared")
        if name in PARTS:
            return PARTS[name]
        if "norm" in name or name.startswith("indexer."):
            return Part.WHOLE
        raise self._refusal(f"tensor '{tensor.name}'", "its use is not known")

    def _scaled(self, layer: int, tensor: TensorInfo, axis: int, heads: range, count: int) -> list[range]:
        """The items of ``heads`` along ``axis``, of which each of ``count`` heads has as many."""
        if not count or tensor.shape[axis] % count:
            raise self._refusal(f"tensor '{tensor.name}'", f"it has not as much for each of {count} heads")
        each = tensor.shape[axis] // count
        return [range(heads.start * each, heads.stop * each)]

    def _values(self, layer: int, tensor: TensorInfo, own: range | None, kind: str) -> TensorInfo:
        down = self.columns(layer, f"ffn_down{kind}")
        is_of_experts = kind in ("_exps", "_chexps")
        axis = len(tensor.shape) - (2 if is_of_experts else 1)
        if down is None or own is None or axis < 0 or tensor.shape[axis] % down.shape[0]:
            raise self._refusal(f"tensor '{tensor.name}'", "it fits no columns of this layer")
        width, times = down.shape[0], tensor.shape[axis] // down.shape[0]
        return sliced(tensor, axis, [range(n * width + own.start, n * width + own.stop) for n in range(times)])

    def _all_heads(self, layer: int, tensor: TensorInfo, share: LayerShare) -> TensorInfo:
        (heads, keys), axis = self.heads(layer), len(tensor.shape) - 1
        if tensor.shape[axis] % (heads + 2 * keys):
            raise self._refusal(f"tensor '{tensor.name}'", "its heads are not all of one size")
        each, ranges = tensor.shape[axis] // (heads + 2 * keys), list[range]()
        for own, before in ((share.heads, 0), (share.keys, heads), (share.keys, heads + keys)):
            ranges.append(range((before + own.start) * each, (before + own.stop) * each))
        return sliced(tensor, axis, ranges)


def ranks_of_shape(architecture: str, heads: int, *, keeps_states: bool = False) -> int:
    """How many devices can share layers of a model of which no more is known; 0 heads are not known either."""
    is_refused = architecture in _REFUSED or (keeps_states and architecture not in STATES_BY_HEADS)
    return 1 if is_refused else min(MAX_RANKS, heads or MAX_RANKS)


def shared_ranks(header: Header, limit: int) -> int:
    """How many of ``limit`` devices can share each layer. Raises ``NotCutError`` where fewer than two can."""
    rules = ShareRules(header)
    found = rules.max_ranks(limit)
    if found < 2:
        rules.shares(0, [1, 1])
        raise NotCutError(f"{header.path}: has too few heads or values to be shared between devices", ADVICE)
    return found


def share_header(header: Header, weights: Sequence[int], rank: int) -> Header:
    """The model as ``rank`` of a group holds it, whose ranks have shares in proportion to ``weights``: a header of slices of
    ``header``'s tensors, from which windows are cut as from any other (``ModelCutter``). The token embedding has the rows of
    the rank's part of the output matrix.

    Raises ``NotCutError`` where the model cannot be shared so.
    """
    assert 0 <= rank < len(weights) <= MAX_RANKS
    rules, layers = ShareRules(header), layer_count(header)
    shares = [rules.shares(layer, weights)[rank] for layer in range(layers)]
    tensors = {}
    for name, tensor in header.tensors.items():
        layer, role = layer_of(name), tensor_role(header, name)
        if layer is not None and layer < layers:
            for own in parted(header, tensor):
                part = rules.part(layer, own, shares[layer], is_first=rank == 0)
                tensors[own.name] = part
            continue
        if role in (TensorRole.EMBEDDING, TensorRole.OUTPUT):
            tensor = sliced(tensor, len(tensor.shape) - 1, [vocabulary_share(tensor.shape[-1], weights, rank)])
        tensors[name] = tensor
    values = {**header.values, **_values_of(rules, shares)}
    name = header.text("general.architecture")
    if name in SAME_GRAPH:
        other = SAME_GRAPH[name]
        values = {
            f"{other}.{key.removeprefix(f'{name}.')}" if key.startswith(f"{name}.") else key: value
            for key, value in values.items()
        }
        values["general.architecture"] = share_name(header)
    return replace(header, tensors=tensors, values=values)


def share_name(header: Header) -> Value:
    """The architecture as which llama.cpp computes shares of the model."""
    name = header.text("general.architecture")
    return scalar_value(GGUFValueType.STRING, SAME_GRAPH.get(name, name))


def parted(header: Header, tensor: TensorInfo) -> list[TensorInfo]:
    """``tensor``, or gate and up, which lie in one, where the graph that stands for the model's has two."""
    if header.text("general.architecture") != "phi3" or not tensor.name.endswith(".ffn_up.weight"):
        return [tensor]
    half = tensor.shape[-1] // 2
    gate, up = sliced(tensor, 1, [range(half)]), sliced(tensor, 1, [range(half, 2 * half)])
    return [replace(gate, name=tensor.name.replace("ffn_up", "ffn_gate")), up]


def vocabulary_share(vocabulary: int, weights: Sequence[int], rank: int) -> range:
    """The tokens whose logits ``rank`` computes. Raises ``ValueError`` for fewer tokens than ranks."""
    found = ranges_of(vocabulary, max(min(32, vocabulary // len(weights)), 1), weights)
    if found is None:
        raise ValueError(f"{vocabulary} tokens for {len(weights)} ranks")
    return found[rank]


def _values_of(rules: ShareRules, shares: Sequence[LayerShare]) -> dict[str, Value]:
    """The metadata that says how many heads and values a rank's layers have."""
    header, name = rules.header, rules.header.text("general.architecture")
    found: dict[str, list[int | None]] = {}
    if any(share.heads for share in shares):
        found["attention.head_count"] = [len(share.heads) or None for share in shares]
        found["attention.head_count_kv"] = [len(share.keys) or None for share in shares]
    for kind, key in _LENGTHS.items():
        if any(kind in share.values for share in shares):
            found[key] = [len(share.values[kind]) if kind in share.values else None for share in shares]
    if not any("" in share.values for share in shares):  # some graphs take its length for that of experts
        whole = [rules.columns(layer, "ffn_down_exps") for layer in range(len(shares))]
        key = f"{name}.{_LENGTHS['']}"
        if all(each is not None and each.shape[0] == count_at(header, key, n, 0) for n, each in enumerate(whole)):
            found[_LENGTHS[""]] = found[_LENGTHS["_exps"]]
    values = {f"{name}.{key}": _counts(header, f"{name}.{key}", counts) for key, counts in found.items() if counts}
    for share in shares:
        for key, count in rules.state_counts(share).items():
            values[f"{name}.{key}"] = scalar_value(GGUFValueType.UINT32, count)
    width, heads = header.count(f"{name}.embedding_length"), rules.heads(0)[0]
    for key in ("attention.key_length", "attention.value_length"):
        if f"{name}.{key}" not in header.values and heads:
            values[f"{name}.{key}"] = scalar_value(GGUFValueType.UINT32, width // heads)
    return values


def _counts(header: Header, key: str, counts: Sequence[int | None]) -> Value:
    """``counts`` by layer in the form of what is at ``key``; None: as it is there."""
    old = header.values.get(key)
    if old is None or not old.is_array:
        return scalar_value(GGUFValueType.UINT32, next(count for count in counts if count is not None))
    items = old.items()
    own = [*counts, *[None] * (len(items) - len(counts))]
    return array_value(
        old.item_type, [item if count is None else count for item, count in zip(items, own, strict=True)]
    )
