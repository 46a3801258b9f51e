"""A model file as the solver sees it."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from halda import LayerProfile, ModelProfile
from primad.errors import ModelError
from primad.gguf.architectures.cuts import cut_points, tail_layers
from primad.gguf.architectures.layers import (
    attending_layers,
    block_count,
    count_at,
    indexed_layers,
    kv_heads,
    layer_count,
    layer_inputs,
    recurrent_layers,
    sharing_layers,
    sliding_layers,
)
from primad.gguf.architectures.stand_ins import holes, kinds_of, last_of, small_heads
from primad.gguf.architectures.table import SLIDING_KEYS, known
from primad.gguf.architectures.tensors import LAYER_INPUTS, LAYER_PROJECTION, layer_of
from primad.gguf.header import Header
from primad.gguf.windows import beside_values, token_embedding

KV_VALUE_BYTES: Final = 2
"""Bytes of an F16 value; the profile counts the KV cache in these."""
_EXPERTS: Final = re.compile(r"_exps\b")
_OF_INPUTS: Final = (LAYER_INPUTS, LAYER_PROJECTION)
_OF_EXPERTS: Final = frozenset(("ffn_down_exps",))
_FEED_FORWARD: Final = frozenset(("ffn_down", "ffn_down_shexp")) | _OF_EXPERTS


@dataclass(frozen=True, slots=True)
class _Weights:
    """Bytes by type: for each layer those that every token uses and those of ``experts``; and those ``outside`` of layers.

    ``shapes`` are the tensors of each layer by name, without its number and ``.weight``.
    """

    shared: list[Counter[str]]
    experts: list[Counter[str]]
    shapes: list[dict[str, tuple[int, ...]]]
    outside: Counter[str]


def model_profile(header: Header) -> ModelProfile:
    """The profile of the model. Raises ``ModelError`` when the header lacks what a language model needs.

    A model whose architecture cannot be cut still has a profile: it can be served whole, by one device.
    """
    name, layers = header.text("general.architecture"), layer_count(header)
    weights = _weights(header)
    places = cut_points(header)
    attends, remembers, indexed = attending_layers(header), recurrent_layers(header), indexed_layers(header)
    index_values, scored_bytes = _indexer(header, name)
    embedding, with_cells = token_embedding(header), layers - sharing_layers(header)
    of_inputs = [header.tensors[name] for name in _OF_INPUTS if layer_inputs(header) and name in header.tensors]
    beside = {each.type.name: each.bytes // layers for each in of_inputs if each.name == LAYER_PROJECTION}
    queries = [
        count_at(header, f"{name}.attention.head_count", layer) * _head_widths(header, name, layer)[0]
        for layer in range(layers)
    ]
    windows = _window_tokens(header, name)
    rest = weights.outside - Counter({embedding.type.name: embedding.bytes})
    tied = rest.total() * 4 <= embedding.bytes
    return ModelProfile(
        name=header.name,
        architecture=name,
        layers=tuple(
            LayerProfile(
                bytes_by_type=dict(weights.shared[layer]),
                expert_bytes_by_type=dict(weights.experts[layer]),
                kv_bytes_per_token=(
                    (_kv_bytes(header, name, layer) + index_values * KV_VALUE_BYTES * indexed[layer])
                    * attends[layer]
                    * (layer < with_cells)
                ),
                state_bytes=_state_bytes(header, name) if remembers[layer] else 0,
                row_values=_row_values(
                    header, name, layer, weights.shapes[layer], attends=attends[layer], remembers=remembers[layer]
                ),
                adapter_bytes=sum(beside.values()),
                adapter_reads=beside,
                attends=attends[layer],
                query_width=queries[layer] if queries[layer] < max(queries) else 0,
                window_tokens=windows[layer],
            )
            for layer in range(layers)
        ),
        embedding_bytes=embedding.bytes + sum(each.bytes for each in of_inputs),
        output_bytes_by_type={embedding.type.name: embedding.bytes} if tied else dict(rest),
        tied=tied,
        width=embedding.shape[0],
        vocabulary=embedding.shape[1],
        context_tokens=header.count(f"{name}.context_length"),
        experts=header.count(f"{name}.expert_count", 0),
        experts_used=count_at(header, f"{name}.expert_used_count", 0, 0),
        kv_head_width=math.gcd(*(width for layer in range(layers) for width in _head_widths(header, name, layer))),
        cut_multiple=places.step,
        cut_offset=places.start % places.step,
        query_width=max(queries),
        attention_share=_attention_share(header),
        heads=max(count_at(header, f"{name}.attention.head_count", layer) for layer in range(layers)),
        cell_bytes=scored_bytes if any(indexed) else 0,
        tail_layers=tail_layers(header),
        beside_values=beside_values(header),
        stand_in=_stand_in(header, name),
    )


def _stand_in(header: Header, name: str) -> LayerProfile | None:
    """The largest stand-in layer that may follow the layers of a window; None if the model needs no stand-ins."""
    layers = [layer for kind in kinds_of(header) if any(kind) and not all(kind) for layer in [last_of(kind)]]
    if not layers:
        return None
    weights = [sum(hole.size_bytes for hole in holes(header, layer, 0)) for layer in layers]
    cells = [
        _kv_bytes(header, name, layer) // small_heads(header, layer)
        for layer in layers
        if attending_layers(header)[layer]
    ]
    return LayerProfile(
        bytes_by_type={"IQ1_S": max(weights)},
        expert_bytes_by_type={},
        kv_bytes_per_token=max(cells, default=0),
        state_bytes=_state_bytes(header, name),
    )


def _weights(header: Header) -> _Weights:
    """The weights of each layer. Raises ``ModelError`` if a layer has none, or there are weights of more layers than
    the model has."""
    layers, has_inputs = layer_count(header), layer_inputs(header) > 0
    shared: list[Counter[str]] = [Counter() for _ in range(layers)]
    experts: list[Counter[str]] = [Counter() for _ in range(layers)]
    outside: Counter[str] = Counter()
    shapes: list[dict[str, tuple[int, ...]]] = [{} for _ in range(layers)]
    for tensor in header.tensors.values():
        layer = layer_of(tensor.name)
        if layer is None:
            if not (has_inputs and tensor.name in _OF_INPUTS):
                outside[tensor.type.name] += tensor.bytes
        elif layer < layers:
            of_experts = _EXPERTS.search(tensor.name) is not None
            (experts if of_experts else shared)[layer][tensor.type.name] += tensor.bytes
            shapes[layer][tensor.name.split(".", 2)[2].removesuffix(".weight")] = tensor.shape
        elif layer >= block_count(header):
            raise ModelError(f"{header.path}: tensor '{tensor.name}' is beyond the model's {layers} layers")
    empty = next((layer for layer in range(layers) if not shared[layer] and not experts[layer]), None)
    if empty is not None:
        raise ModelError(f"{header.path}: has no tensors of layer {empty}; the file is not a complete model")
    return _Weights(shared, experts, shapes, outside)


def _row_values(
    header: Header, name: str, layer: int, shapes: Mapping[str, tuple[int, ...]], *, attends: bool, remembers: bool
) -> int:
    """Values per row in the compute buffer, for parts of the layer that are computed one after another; 0 for unknown
    tensors.

    Measured as what llama.cpp allocates: three feed-forward widths with a gate, one without, and four widths of the
    hidden state; one more if feed-forward has no norm before it or one after it. Attention has its queries twice, keys
    and values twice, and three widths. This is up to 10 % too high for dense layers, and up to 28 % for mixtures of
    experts.
    """
    recurrent = _recurrent_values(header, name) if remembers else 0
    if not _FEED_FORWARD.issuperset(each for each in shapes if each.startswith("ffn_down") and "." not in each):
        return 0
    if remembers and not recurrent and not header.count(f"{name}.shortconv.l_cache", 0):
        return 0
    width, used = header.count(f"{name}.embedding_length"), count_at(header, f"{name}.expert_used_count", 0, 0)
    around = 4 + ("ffn_norm" not in shapes or "post_ffw_norm" in shapes)
    found = [recurrent, _latent_values(header, name, layer) if attends else 0, around * width]
    if attends and not _latent_key(header, name):
        heads, kv = (
            count_at(header, f"{name}.attention.head_count", layer),
            _kv_bytes(header, name, layer) // KV_VALUE_BYTES,
        )
        found.append(3 * width + 2 * heads * _head_widths(header, name, layer)[0] + kv)
    for down in _FEED_FORWARD & shapes.keys():
        forward, up = shapes[down][0], shapes.get(down.replace("down", "up"), (0, 0))
        rows = used if down in _OF_EXPERTS else 1
        gated = down.replace("down", "up") not in shapes or down.replace("down", "gate") in shapes or up[1] > forward
        beside = around + (down in _OF_EXPERTS and "ffn_down_shexp" in shapes)
        found.append((3 if gated else 1) * rows * forward + beside * width)
        if rows > 1:  # results are kept separate until they are summed, where they are large compared with the input
            found.append((2 * rows + 1) * width + (2 * rows * forward if 2 * forward < width else 0))
    inputs = layer_inputs(header) * layer_count(header)  # for as many layers as a window may have
    return max(max(found) + inputs, 3 * inputs + 4 * width if inputs else 0)


def _kv_bytes(header: Header, name: str, layer: int) -> int:
    key, value = _head_widths(header, name, layer)
    if _latent_key(header, name):
        value = 0  # llama.cpp reads the values from the keys
    return kv_heads(header, layer) * (key + value) * KV_VALUE_BYTES


def _window_tokens(header: Header, name: str) -> Sequence[int]:
    """For each layer the tokens of its sliding window; 0 if it attends to all, or that is unknown."""
    if known(header) is None:
        return (0,) * layer_count(header)
    return [header.count(f"{name}.{SLIDING_KEYS}", 0) * slides for slides in sliding_layers(header)]


def _indexer(header: Header, name: str) -> tuple[int, int]:
    """For an indexer, which chooses what attention sees: the values of a cell of its own cache (keys; for MiniMax M3
    also values), and the bytes per row in the compute buffer for each cell that it scores.

    Measured as what llama.cpp allocates: a score and its mask for DeepSeek V3.2; for MiniMax M3 two scores for each KV
    head and a mask (exact for one sequence, too much for several).
    """
    key = header.count(f"{name}.attention.indexer.key_length", 0)
    if name == "minimax-m3":
        return key + _head_widths(header, name, 0)[1], 8 * count_at(header, f"{name}.attention.head_count_kv", 0) + 4
    return key, 6


def _latent_key(header: Header, name: str) -> int:
    """The width of a head's key where the KV cache has one latent vector for all heads (MLA); 0 where it has heads."""
    return header.count(f"{name}.attention.key_length_mla", 0)


def _latent_values(header: Header, name: str, layer: int) -> int:
    """Values per row of latent attention in the compute buffer; 0 for other attention.

    Each head has its query, the query against the latent vectors and the result, as wide as those. (Measured as what
    llama.cpp allocates: 1,280 to 1,350 a head and four widths for DeepSeek V3, of which this counts 1,344.)
    """
    latent = _latent_key(header, name)
    if not latent:
        return 0
    heads, width = count_at(header, f"{name}.attention.head_count", layer), _head_widths(header, name, layer)[0]
    return heads * (2 * width + latent) + 4 * header.count(f"{name}.embedding_length")


def _attention_share(header: Header) -> float:
    """The fraction of the layers' weights that belongs to attention or the recurrent part."""
    of_layers = {name: tensor.bytes for name, tensor in header.tensors.items() if name.startswith("blk.")}
    attention = sum(size for name, size in of_layers.items() if ".ffn_" not in name)
    return attention / max(sum(of_layers.values()), 1)


def _state_bytes(header: Header, name: str) -> int:
    """Bytes of a recurrent layer's convolution and state for one sequence, in float32."""
    short = header.count(f"{name}.shortconv.l_cache", 0)
    if short:
        return 4 * (short - 1) * header.count(f"{name}.embedding_length")
    head = header.count(f"{name}.wkv.head_size", 0)
    if head:
        return 4 * header.count(f"{name}.embedding_length") * (header.count(f"{name}.token_shift_count", 2) + head)
    delta, kernel = header.count(f"{name}.kda.head_dim", 0), header.count(f"{name}.ssm.conv_kernel", 0)
    if delta:
        return 4 * count_at(header, f"{name}.attention.head_count", 0) * delta * (3 * max(kernel - 1, 0) + delta)
    inner, state = header.count(f"{name}.ssm.inner_size", 0), header.count(f"{name}.ssm.state_size", 0)
    groups = header.count(f"{name}.ssm.group_count", 0)
    return state_bytes(kernel, inner, groups, state)


def state_bytes(kernel: int, inner: int, groups: int, state: int) -> int:
    """State bytes of a recurrent layer with ``inner`` values, a ``state`` for each, keys of that width in ``groups``,
    and a short convolution."""
    return 4 * (max(kernel - 1, 0) * (inner + 2 * groups * state) + state * inner)


def _recurrent_values(header: Header, name: str) -> int:
    """Values that a row of a layer with a state has in the compute buffer, besides the state; 0 for a short convolution."""
    inner, state = header.count(f"{name}.ssm.inner_size", 0), header.count(f"{name}.ssm.state_size", 0)
    groups = header.count(f"{name}.ssm.group_count", 0)
    return recurrent_values(inner, groups, state, header.count(f"{name}.embedding_length")) if inner else 0


def recurrent_values(inner: int, groups: int, state: int, width: int) -> int:
    """Values that a row of such a layer has in the compute buffer, of a model of this ``width``.

    Measured as what llama.cpp allocates: this is 7 % below it to 13 % above for Mamba of several sizes, and a quarter above
    for gated delta nets.
    """
    return 11 * inner // 2 + 4 * groups * state + 3 * width


def _head_widths(header: Header, name: str, layer: int) -> tuple[int, int]:
    """Values of one head's key and of its value."""
    heads = count_at(header, f"{name}.attention.head_count", layer)
    default = header.count(f"{name}.embedding_length") // heads if heads else 0
    key = header.count(f"{name}.attention.key_length", default)
    value = header.count(f"{name}.attention.value_length", default)
    if f"{name}.attention.key_length_swa" in header.values and known(header) and sliding_layers(header)[layer]:
        key = header.count(f"{name}.attention.key_length_swa")
        value = header.count(f"{name}.attention.value_length_swa", key)
    return key, value
