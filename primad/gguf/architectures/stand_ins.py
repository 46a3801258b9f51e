"""Stand-in layers after a window's own, for a kind of layer that the window lacks.

llama.cpp keeps the KV cache and the states of a hybrid in a memory of two parts, whose inputs it sets for every step,
and aborts over an input that no layer of the graph uses. So a window without attention layers, or without layers with a
state, has one more layer, of zeros, after the output at which its graph is stopped. It is never computed, and the pages
of its weights are given back; only its state, or the KV cache of one head, takes memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from primad.gguf.architecture import Recurrent
from primad.gguf.architectures.layers import attending_layers, kv_heads, layer_count, recurrent_layers
from primad.gguf.architectures.table import HEAD_COUNTS, known
from primad.gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType
from primad.gguf.header import Header, Value, array_value, scalar_value
from primad.gguf.layers import Hole

_TYPES: Final = (GGMLQuantizationType.IQ1_S, GGMLQuantizationType.Q5_0, GGMLQuantizationType.F16)
"""The smallest types for rows of whole blocks; llama.cpp repacks none of them."""
_OF_HEADS: Final = ("attn_k.weight", "attn_v.weight")


def kinds_of(header: Header) -> tuple[tuple[bool, ...], ...]:
    """For each kind of layer that every window needs, or a stand-in for it, which layers are of that kind; none for
    most models."""
    entry = known(header)
    if entry is None or entry.recurrent not in (Recurrent.INTERVAL, Recurrent.HEADS):
        return ()
    return recurrent_layers(header), attending_layers(header)


def stand_ins(header: Header, first: int, last: int) -> tuple[int, ...]:
    """The layers that are copied as stand-ins after those from ``first`` to ``last - 1``. A tail, which is computed to
    its end, has none."""
    missing = [kind for kind in kinds_of(header) if any(kind) and not any(kind[first:last])]
    return () if last == layer_count(header) else tuple(last_of(kind) for kind in missing)


def layers_of_both(header: Header) -> int:
    """The minimum number of layers with which a tail has one of each kind."""
    layers = layer_count(header)
    return max((layers - last_of(kind) for kind in kinds_of(header) if any(kind)), default=1)


def head_values(header: Header, layers: Sequence[int], own: int) -> dict[str, Value]:
    """The numbers of KV heads of ``layers``; the first ``own`` are the window's, the others are stand-ins."""
    entry = known(header)
    assert entry is not None
    small = [_has_heads(header, layer) for layer in layers[own:]]
    if not any(small):
        return {}
    key, counts = f"{entry.name}.{HEAD_COUNTS}", [0] * own
    if entry.recurrent is Recurrent.INTERVAL:  # its graph takes one number for all layers
        return {key: scalar_value(GGUFValueType.UINT32, 1)}
    return {key: array_value(GGUFValueType.UINT32, [*counts, *map(int, small)])}


def holes(header: Header, layer: int, number: int) -> list[Hole]:
    """The weights of a stand-in for ``layer``, as layer ``number`` of a window."""
    prefix, heads = f"blk.{layer}.", small_heads(header, layer)
    found = []
    for name, tensor in header.tensors.items():
        if not name.startswith(prefix):
            continue
        *rows, last = tensor.shape
        if name.removeprefix(prefix).startswith(("attn_k.", "attn_v.")):
            last //= heads
        shape = (*rows, last)
        is_matrix = len(shape) > 1 and tensor.type is not GGMLQuantizationType.F32
        kind = next(kind for kind in _TYPES if shape[0] % GGML_QUANT_SIZES[kind][0] == 0)
        found.append(
            Hole(
                name=f"blk.{number}.{name.removeprefix(prefix)}",
                type=kind if is_matrix else GGMLQuantizationType.F32,
                shape=shape,
            )
        )
    return found


def _has_heads(header: Header, layer: int) -> bool:
    """Whether ``layer`` attends with keys and values by head, so that one head suffices."""
    return attending_layers(header)[layer] and all(f"blk.{layer}.{name}" in header.tensors for name in _OF_HEADS)


def small_heads(header: Header, layer: int) -> int:
    """How many times as many KV heads ``layer`` has as its stand-in."""
    return max(1, kv_heads(header, layer)) if _has_heads(header, layer) else 1


def last_of(kind: Sequence[bool]) -> int:
    """The last layer of a ``kind``."""
    return max(layer for layer, is_one in enumerate(kind) if is_one)
