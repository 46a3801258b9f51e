"""The metadata of a window."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

from primad.errors import ModelError
from primad.gguf.architecture import Architecture, Embedding, Recurrent, Sliding
from primad.gguf.architectures.cuts import check_count, cut_points, is_deepseek2_lite, tail_layers, vocabulary_size
from primad.gguf.architectures.layers import (
    block_count,
    indexed_layers,
    layer_count,
    recurrent_layers,
    sliding_layers,
)
from primad.gguf.architectures.stand_ins import head_values, stand_ins
from primad.gguf.architectures.table import (
    DEEPSEEK2,
    ENTRY_KEY,
    EXIT_KEY,
    INDEXER_TYPES,
    LAST_EXIT_KEY,
    PER_LAYER,
    RECURRENT_LAYERS,
    SLIDING_KEYS,
    known,
)
from primad.gguf.constants import GGUFValueType
from primad.gguf.header import Header, Value, array_value, scalar_value, single

_ENDLESS_WINDOW: Final = 1 << 22
"""Positions no context reaches, and times 256 sequences (LLAMA_MAX_SEQ) still within llama.cpp's uint32."""


_KEPT_GENERAL: Final = frozenset(
    ("general.architecture", "general.name", "general.file_type", "general.quantization_version")
)


def window_values(
    header: Header, first: int, last: int, *, vocabulary: int, predicts: bool = False
) -> dict[str, Value]:
    """The metadata of the window that holds the layers ``first`` to ``last - 1``, without ``split.*``.

    ``vocabulary`` is the number of rows of the window's ``token_embd.weight`` (1 for the placeholder). A tail that
    ``predicts`` has the layers for multi-token prediction after its own. The model must be ``cuttable``. Raises
    ``ModelError`` for the few cuts that are not exact, naming the layers.
    """
    name = header.text("general.architecture")
    architecture, layers = known(header), layer_count(header)
    assert architecture is not None
    assert 0 <= first < last <= layers
    _check_first(header, first)
    check_count(header, architecture, last - first)
    prefix = f"{name}."
    end = block_count(header) if predicts and last == layers else last
    held = [*range(first, end), *stand_ins(header, first, last)]
    values = _values_of_layers(header, architecture, held)
    values |= head_values(header, held, end - first)
    values[f"{prefix}block_count"] = _uint32(len(held))
    values[f"{prefix}vocab_size"] = _uint32(vocabulary)
    values.pop(f"{prefix}nextn_predict_layers", None)
    if end > last:
        values[f"{prefix}nextn_predict_layers"] = _uint32(end - last)
    if architecture.shares_cells and last < layers:
        values[f"{prefix}{architecture.shares_cells}"] = _uint32(0)
    values["tokenizer.ggml.model"] = scalar_value(GGUFValueType.STRING, "none")
    if f"{prefix}leading_dense_block_count" in values:
        dense = header.count(f"{prefix}leading_dense_block_count")
        values[f"{prefix}leading_dense_block_count"] = _uint32(min(max(dense - first, 0), last - first))
    if architecture.embedding is Embedding.KEY and not architecture.is_fed:
        values[f"{prefix}embedding_scale"] = _float32(0.0)
    if architecture.recurrent is Recurrent.INTERVAL:
        states = (*recurrent_layers(header), *[False] * (block_count(header) - layers))
        values[f"{prefix}{RECURRENT_LAYERS}"] = array_value(GGUFValueType.BOOL, [states[layer] for layer in held])
    if architecture.sliding not in (Sliding.NEVER, Sliding.FIXED):
        values.update(_sliding_values(header, architecture, first, last))
    if name == "deci":
        values = {**_head_values(header), **values}
    if name == "glm-dsa":
        types = array_value(GGUFValueType.UINT32, [int(each) for each in indexed_layers(header)[first:last]])
        values[f"{prefix}{INDEXER_TYPES}"] = types
    if architecture.adds_positions:
        values[f"{prefix}context_length"] = _uint32(1)
    if header.derived is None:
        values.update(_derived_values(header, name, layers))
    if architecture.entries:
        names = {
            ENTRY_KEY: architecture.entries[0 if first == 0 else -1],
            EXIT_KEY: architecture.exit,
            LAST_EXIT_KEY: architecture.last_exit,
        }
        values.update({key: scalar_value(GGUFValueType.STRING, text) for key, text in names.items()})
    return values


def _check_first(header: Header, first: int) -> None:
    """Raises ``ModelError`` where no window begins at layer ``first``."""
    layers, places = layer_count(header), cut_points(header)
    if first > layers - tail_layers(header):
        raise ModelError(
            f"{header.path}: the last window has at least {tail_layers(header)} of {layers} layers, so none begins at layer "
            f"{first}; choose other windows"
        )
    if first and first not in places:
        name = header.text("general.architecture")
        more = f" and {places.start} more" if places.start < places.step else ""
        raise ModelError(
            f"{header.path}: a window of '{name}' has to begin at a multiple of {places.step} layers{more}, "
            f"not at layer {first}; choose other windows"
        )


def _values_of_layers(header: Header, architecture: Architecture, held: Sequence[int]) -> dict[str, Value]:
    """The model's own metadata that its windows keep; values by layer only for those ``held``."""
    prefix, values = f"{header.text('general.architecture')}.", dict[str, Value]()
    for key, value in header.values.items():
        if key in _KEPT_GENERAL:
            values[key] = value
        elif key.startswith(prefix) or key in architecture.by_layer:
            short = key.removeprefix(prefix)
            slides = short.startswith(SLIDING_KEYS)
            if short in architecture.drops or (slides and architecture.sliding is not Sliding.FIXED):
                continue
            is_by_layer = value.is_array and (slides or short in PER_LAYER or short in architecture.by_layer)
            if is_by_layer:
                items = value.items()
                value = array_value(value.item_type, [items[layer] for layer in held if layer < len(items)])
            values[key] = value
    return values


def _sliding_values(header: Header, architecture: Architecture, first: int, last: int) -> dict[str, Value]:
    prefix = f"{architecture.name}."
    slides = sliding_layers(header)[first:last]
    if any(slides):
        return {
            f"{prefix}attention.sliding_window": header.values[f"{prefix}attention.sliding_window"],
            f"{prefix}attention.sliding_window_pattern": array_value(GGUFValueType.BOOL, list(slides)),
        }
    if architecture.sliding in (Sliding.OPTIONAL, Sliding.NEEDED_IF_ANY):
        return {}
    values = {
        f"{prefix}attention.sliding_window": _uint32(_ENDLESS_WINDOW),
        f"{prefix}attention.sliding_window_pattern": array_value(GGUFValueType.BOOL, [True] * (last - first)),
    }
    if architecture.name != "cohere2":
        values[f"{prefix}rope.freq_base_swa"] = _float32(header.number(f"{prefix}rope.freq_base", 10_000.0))
    else:
        values[f"{prefix}rope.scaling.type"] = scalar_value(GGUFValueType.STRING, "linear")
        values[f"{prefix}rope.scaling.factor"] = _float32(float("inf"))
    return values


def _head_values(header: Header) -> dict[str, Value]:
    """For DeciLM: values that llama.cpp would derive from the heads of a window's first layer, which may have none."""
    width, heads = header.count("deci.embedding_length"), header.values["deci.attention.head_count"]
    items = heads.items() if heads.is_array else [heads.scalar()]
    each = width // next((item for item in items if isinstance(item, int) and item > 0), 1)
    rotated = header.count("deci.attention.key_length", each)
    found = {"attention.key_length": each, "attention.value_length": each, "rope.dimension_count": rotated}
    return {f"deci.{key}": _uint32(count) for key, count in found.items()}


def _derived_values(header: Header, name: str, layers: int) -> dict[str, Value]:
    """Values llama.cpp would derive from the number of layers or the vocabulary, written out for the whole model."""
    values: dict[str, Value] = {}
    if name == "minicpm" and "minicpm.residual_scale" not in header.values:
        values["minicpm.residual_scale"] = _float32(single(1.4) / single(math.sqrt(layers)))
    if name in DEEPSEEK2:
        if is_deepseek2_lite(header, layers):
            values[f"{name}.attention.q_lora_rank"] = _uint32(0)
        if header.count(f"{name}.expert_gating_func", 0) == 0:
            sigmoid = layers in (47, 48) and vocabulary_size(header) == 154_880
            values[f"{name}.expert_gating_func"] = _uint32(2 if sigmoid else 1)
    return values


def _uint32(number: int) -> Value:
    return scalar_value(GGUFValueType.UINT32, number)


def _float32(number: float) -> Value:
    return scalar_value(GGUFValueType.FLOAT32, number)
