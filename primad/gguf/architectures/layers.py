"""What a model's header says about each layer: which slide, keep a state, attend, have an indexer."""

from __future__ import annotations

import re
from typing import Final

from primad.errors import ModelError
from primad.gguf.architecture import Recurrent, Sliding
from primad.gguf.architectures.table import (
    ATTENTION_INTERVAL,
    HEAD_COUNTS,
    INDEXER_TYPES,
    MAX_LAYERS,
    RECURRENT_LAYERS,
    SUPPORTED,
    known,
    refusal,
)
from primad.gguf.constants import GGUFValueType
from primad.gguf.header import Header

_GLM_5_2_CONTEXT: Final = 1 << 20
"""With at least this context, llama.cpp treats layers without that key as GLM 5.2's."""


_STATE_TENSOR: Final = re.compile(r"blk\.(\d+)\.(ssm|shortconv|time_mix)")


_KEY_TENSOR: Final = re.compile(r"blk\.(\d+)\.attn_(k|kv_a_mqa)\b")


def layer_count(header: Header) -> int:
    """Number of layers, without those for multi-token prediction, which come last.

    Raises ``ModelError`` when a key is missing or not a number llama.cpp accepts.
    """
    name = header.text("general.architecture")
    predicting = header.count(f"{name}.nextn_predict_layers", 0, maximum=MAX_LAYERS)
    layers = block_count(header)
    if predicting >= layers:
        raise ModelError(
            f"{header.path}: metadata key '{name}.nextn_predict_layers' leaves none of {layers} layers; the file is not a "
            "complete model"
        )
    return layers - predicting


def drafting_layers(header: Header) -> int:
    """The number of last layers that are for multi-token prediction and can draft: llama.cpp supports one, and ends the
    process if that one is incomplete."""
    entry, layers = known(header), layer_count(header)
    if entry is None or not entry.drafts or block_count(header) != layers + 1:
        return 0
    names = {"nextn.eh_proj", "nextn.enorm", "nextn.hnorm", "ffn_gate" if entry.name == "qwen35" else "ffn_gate_inp"}
    if entry.name == "deepseek2":
        names |= {"attn_q_a", "attn_k_b"}
        if header.number("deepseek2.attention.temperature_scale", 0.0):
            return 0
    return int(all(f"blk.{layers}.{name}.weight" in header.tensors for name in names))


def block_count(header: Header) -> int:
    """Number of all layers. Raises ``ModelError`` as ``layer_count``."""
    key = f"{header.text('general.architecture')}.block_count"
    layers = header.count(key, maximum=MAX_LAYERS)
    if layers == 0:
        raise ModelError(f"{header.path}: metadata key '{key}' is 0; the file is not a complete model")
    return layers


def sharing_layers(header: Header) -> int:
    """The number of last layers that use the KV cells of others. Raises ``ModelError`` for an invalid count."""
    architecture = known(header)
    key = architecture.shares_cells if architecture is not None else ""
    return header.count(f"{header.text('general.architecture')}.{key}", 0, maximum=MAX_LAYERS) if key else 0


def layer_inputs(header: Header) -> int:
    """Values that each layer takes in addition to the hidden state; 0 for most. Raises ``ModelError`` if it is not a
    count."""
    architecture = known(header)
    key = architecture.layer_inputs if architecture is not None else ""
    return header.count(f"{header.text('general.architecture')}.{key}", 0, maximum=1 << 16) if key else 0


def recurrent_layers(header: Header) -> tuple[bool, ...]:
    """For each layer whether it keeps a state. Raises ``ModelError`` for a key of an unknown kind."""
    name, layers = header.text("general.architecture"), layer_count(header)
    match kind := _recurrent(header, name):
        case Recurrent.INTERVAL:
            given = header.values.get(f"{name}.{RECURRENT_LAYERS}")
            if given is not None and given.is_array:
                return tuple(map(bool, counts_by_layer(header, RECURRENT_LAYERS, layers)))
            interval = header.count(f"{name}.{ATTENTION_INTERVAL}", 4)
            return tuple(interval == 0 or (layer + 1) % interval != 0 for layer in range(layers))
        case Recurrent.HEADS:
            heads, forward = counts_by_layer(header, HEAD_COUNTS, layers), [0] * layers
            given = header.values.get(f"{name}.feed_forward_length")
            if "feed_forward_length" in SUPPORTED[name].by_layer and given is not None and given.is_array:
                forward = counts_by_layer(header, "feed_forward_length", layers)  # a layer of a forward network alone
            return tuple(not any(each) for each in zip(heads, forward, strict=True))
        case Recurrent.TENSORS:
            return _with_tensors(header, _STATE_TENSOR, layers)
        case _:
            return (kind in (Recurrent.ALL, Recurrent.ONLY),) * layers


def attending_layers(header: Header) -> tuple[bool, ...]:
    """For each layer whether it has a KV cache by position. Raises as ``recurrent_layers``."""
    name, layers = header.text("general.architecture"), layer_count(header)
    if name in SUPPORTED and SUPPORTED[name].skips_attention:
        heads = header.values.get(f"{name}.{HEAD_COUNTS}")
        return (
            tuple(map(bool, counts_by_layer(header, HEAD_COUNTS, layers)))
            if heads and heads.is_array
            else (True,) * layers
        )
    match _recurrent(header, name):
        case Recurrent.HEADS:
            return tuple(heads > 0 for heads in counts_by_layer(header, HEAD_COUNTS, layers))
        case Recurrent.INTERVAL:
            return tuple(not state for state in recurrent_layers(header))
        case Recurrent.TENSORS:
            both = zip(recurrent_layers(header), _with_tensors(header, _KEY_TENSOR, layers), strict=True)
            return tuple(has_key or not state for state, has_key in both)
        case _:
            return (_recurrent(header, name) is not Recurrent.ONLY,) * layers


def indexed_layers(header: Header) -> tuple[bool, ...]:
    """For each layer whether it has its own indexer, which chooses the positions that attention sees, and a cache of
    keys for it. Raises as ``recurrent_layers``."""
    name, layers = header.text("general.architecture"), layer_count(header)
    if f"{name}.attention.indexer.key_length" not in header.values:
        return (False,) * layers
    if name == "minimax-m3":
        dense = header.count(f"{name}.leading_dense_block_count", 0)
        return tuple(layer >= dense for layer in range(layers))
    types = header.values.get(f"{name}.{INDEXER_TYPES}")
    if name != "glm-dsa" or (types is not None and not types.is_array):
        return (True,) * layers
    if types is not None:
        return tuple(map(bool, counts_by_layer(header, INDEXER_TYPES, layers)))
    is_old = header.count(f"{name}.context_length") < _GLM_5_2_CONTEXT
    return tuple(is_old or layer < 2 or layer % 4 == 2 for layer in range(layers))


def _with_tensors(header: Header, pattern: re.Pattern[str], layers: int) -> tuple[bool, ...]:
    """For each layer whether it has a tensor whose name matches ``pattern``."""
    found = {int(match[1]) for match in map(pattern.match, header.tensors) if match is not None}
    return tuple(layer in found for layer in range(layers))


def _recurrent(header: Header, name: str) -> Recurrent:
    """In an unknown architecture every layer is assumed to keep a state if one does."""
    entry = known(header)
    if entry is not None:
        return entry.recurrent
    keeps = any(key.startswith((f"{name}.ssm.", f"{name}.wkv.")) for key in header.values)
    return Recurrent.ALL if keeps else Recurrent.NEVER


def counts_by_layer(header: Header, short: str, layers: int) -> list[int]:
    """The whole numbers, or flags, of a key that has one for each layer at least."""
    key = f"{header.text('general.architecture')}.{short}"
    value = header.values.get(key)
    items = value.items() if value is not None and value.is_array else []
    if len(items) < layers or not all(isinstance(each, int) for each in items):
        raise refusal(header, f"key '{key}'", f"one count for each of {layers} layers is expected")
    return [int(each) for each in items[:layers]]


def count_at(header: Header, key: str, layer: int, default: int | None = None) -> int:
    """The count at ``key`` for ``layer``, be it one number for all layers or an array with one for each."""
    value = header.values.get(key)
    if value is None or not value.is_array:
        return header.count(key, default, maximum=1 << 20)
    item = None if value.item_type == GGUFValueType.STRING or layer >= len(value) else value.item(layer)
    if not isinstance(item, int):
        raise ModelError(f"{header.path}: metadata key '{key}' has no whole number for layer {layer}")
    return int(item)


def kv_heads(header: Header, layer: int) -> int:
    """The heads of keys and values of ``layer``, as many as of queries where the file does not say it."""
    name = header.text("general.architecture")
    return count_at(header, f"{name}.{HEAD_COUNTS}", layer, count_at(header, f"{name}.attention.head_count", layer))


def sliding_layers(header: Header) -> tuple[bool, ...]:
    """For each layer whether it attends only to a sliding window, as llama.cpp's ``load_swa_pattern`` decides it.

    Raises ``ModelError`` for a pattern that does not fit the model.
    """
    name = header.text("general.architecture")
    architecture, layers = known(header), layer_count(header)
    assert architecture is not None
    size_key, pattern_key = f"{name}.attention.sliding_window", f"{name}.attention.sliding_window_pattern"
    if architecture.sliding in (Sliding.ALWAYS, Sliding.NEEDED) and header.count(size_key) == 0:
        raise ModelError(f"{header.path}: metadata key '{size_key}' is 0; the file is not a complete model")
    if architecture.sliding in (Sliding.NEVER, Sliding.FIXED) or header.count(size_key, 0) == 0:
        return (False,) * layers
    pattern = header.values.get(pattern_key)
    if pattern is not None and pattern.is_array:
        if len(pattern) != block_count(header) or pattern.item_type in (GGUFValueType.STRING, GGUFValueType.FLOAT32):
            raise refusal(header, f"key '{pattern_key}'", f"one flag for each of {layers} layers is expected")
        slides = tuple(bool(flag) for flag in pattern.items()[:layers])
    else:
        period = header.count(pattern_key, architecture.sliding_period)
        full = 0 if architecture.slides_last else period - 1
        slides = tuple(period == 0 or layer % period != full for layer in range(layers))
    if not any(slides):
        raise refusal(header, f"key '{pattern_key}'", "no layer slides although the model has a sliding window")
    return slides
