"""A model file as the solver sees it."""

from __future__ import annotations

from collections import Counter
from typing import Final

from halda import LayerProfile, ModelProfile
from primad.errors import ModelError
from primad.gguf.architectures import SUPPORTED, layer_count, layer_of
from primad.gguf.header import Header, TensorInfo
from primad.gguf.windows import token_embedding

KV_VALUE_BYTES: Final = 2
"""The KV cache holds F16."""


def model_profile(header: Header) -> ModelProfile:
    """The profile of the model. Raises ``ModelError`` when the header lacks what a language model needs.

    A model whose architecture cannot be cut still has a profile: it can be served whole, by one device.
    """
    name = header.text("general.architecture")
    layers = layer_count(header)
    weights: list[Counter[str]] = [Counter() for _ in range(layers)]
    outside = 0
    for tensor in header.tensors.values():
        layer = layer_of(tensor.name)
        if layer is None:
            outside += tensor.bytes
        elif layer < layers:
            weights[layer][tensor.type.name] += tensor.bytes
        else:
            raise ModelError(f"{header.path}: tensor '{tensor.name}' is beyond the model's {layers} layers")
    empty = next((layer for layer, by_type in enumerate(weights) if not by_type), None)
    if empty is not None:
        raise ModelError(f"{header.path}: has no tensors of layer {empty}; the file is not a complete model")
    embedding = token_embedding(header)
    return ModelProfile(
        name=header.text("general.name", header.path.stem),
        architecture=name,
        layers=tuple(
            LayerProfile(bytes_by_type=dict(by_type), kv_bytes_per_token=_kv_bytes(header, name, layer))
            for layer, by_type in enumerate(weights)
        ),
        embedding_bytes=embedding.bytes,
        output_bytes=_output_bytes(embedding, outside),
        width=embedding.shape[0],
        vocabulary=embedding.shape[1],
        context_tokens=header.count(f"{name}.context_length"),
        experts=header.count(f"{name}.expert_count", 0),
        experts_used=_first(header, f"{name}.expert_used_count", 0, 0),
        cut_multiple=SUPPORTED[name].cut_multiple if name in SUPPORTED else 1,
    )


def _output_bytes(embedding: TensorInfo, outside: int) -> int:
    """Bytes that the tail reads: the output matrix, which is the embedding itself where weights are tied."""
    rest = outside - embedding.bytes
    return rest if rest * 4 > embedding.bytes else rest + embedding.bytes


def _kv_bytes(header: Header, name: str, layer: int) -> int:
    heads = _first(header, f"{name}.attention.head_count", layer)
    kv_heads = _first(header, f"{name}.attention.head_count_kv", layer, heads)
    width = header.count(f"{name}.embedding_length")
    default = width // heads if heads else 0
    key = header.count(f"{name}.attention.key_length", default)
    value = header.count(f"{name}.attention.value_length", default)
    return kv_heads * (key + value) * KV_VALUE_BYTES


def _first(header: Header, key: str, layer: int, default: int | None = None) -> int:
    """The count at ``key`` for ``layer``, be it one number for all layers or an array with one for each."""
    value = header.values.get(key)
    if value is None or not value.is_array:
        return header.count(key, default, most=1 << 20)
    items = value.items()
    if layer >= len(items) or not isinstance(items[layer], int):
        raise ModelError(f"{header.path}: metadata key '{key}' has no whole number for layer {layer}")
    return int(items[layer])
