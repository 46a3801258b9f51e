"""Windows of synthetic layers with a recurrent state: two layers, the second with attention, as in some well-known
models.

They differ from other layers in how states are computed; there are few kinds. Matrices have one quantisation type,
small tensors the types that they have in files.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from halda import StateKind
from halda.assignment import in_memory
from primad.engine.protocol import WindowSource
from primad.gguf.constants import GGMLQuantizationType, GGUFValueType
from primad.gguf.header import Scalar, Value, array_value, scalar_value
from primad.gguf.layers import LayerTensor, SmallTensor, metadata_split
from primad.profiler.synthetic import laid_out, piece_of, write_layer

WIDTH: Final = 768
_FORWARD: Final = 1536
_HEADS, _KV_HEADS, _HEAD = 12, 4, 64
_Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Layers:
    """``matrices`` and ``small`` tensors of the layer with a state, and what the one that ``attends`` has besides."""

    architecture: str
    values: Mapping[str, int | list[Scalar]]
    matrices: Mapping[str, _Shape]
    small: Mapping[str, _Shape]
    attends: Mapping[str, _Shape]
    each: Mapping[str, _Shape]
    """Small tensors of both layers."""
    query: int = WIDTH
    norm: str = "output_norm"


_LAYERS: Final[dict[StateKind, _Layers]] = {
    "delta": _Layers(
        architecture="qwen35",
        values={
            "attention.head_count_kv": _KV_HEADS,
            "full_attention_interval": 2,
            "rope.dimension_sections": [11, 11, 10, 0],
            "ssm.conv_kernel": 4,
            "ssm.inner_size": 768,
            "ssm.state_size": 128,
            "ssm.time_step_rank": 6,
            "ssm.group_count": 2,
        },
        matrices={
            "attn_qkv.weight": (WIDTH, 1280),
            "attn_gate.weight": (WIDTH, 768),
            "ssm_out.weight": (768, WIDTH),
        },
        small={
            "ssm_conv1d.weight": (4, 1280),
            "ssm_dt.bias": (6,),
            "ssm_a": (6,),
            "ssm_beta.weight": (WIDTH, 6),
            "ssm_alpha.weight": (WIDTH, 6),
            "ssm_norm.weight": (128,),
        },
        attends={"attn_q_norm.weight": (_HEAD,), "attn_k_norm.weight": (_HEAD,)},
        each={"attn_norm.weight": (WIDTH,), "post_attention_norm.weight": (WIDTH,)},
        query=2 * WIDTH,
    ),
    "scan": _Layers(
        architecture="granitehybrid",
        values={
            "attention.head_count_kv": [0, _KV_HEADS],
            "ssm.conv_kernel": 4,
            "ssm.inner_size": 1536,
            "ssm.state_size": 128,
            "ssm.time_step_rank": 24,
            "ssm.group_count": 1,
        },
        matrices={"ssm_in.weight": (WIDTH, 3352), "ssm_out.weight": (1536, WIDTH)},
        small={
            "ssm_conv1d.weight": (4, 1792),
            "ssm_conv1d.bias": (1792,),
            "ssm_dt.bias": (24,),
            "ssm_a": (1, 24),
            "ssm_d": (1, 24),
            "ssm_norm.weight": (1536, 1),
        },
        attends={},
        each={"attn_norm.weight": (WIDTH,), "ffn_norm.weight": (WIDTH,)},
    ),
    "convolution": _Layers(
        architecture="lfm2",
        values={"attention.head_count_kv": [0, _KV_HEADS], "shortconv.l_cache": 3},
        matrices={"shortconv.in_proj.weight": (WIDTH, 3 * WIDTH), "shortconv.out_proj.weight": (WIDTH, WIDTH)},
        small={"shortconv.conv.weight": (3, WIDTH)},
        attends={"attn_q_norm.weight": (_HEAD,), "attn_k_norm.weight": (_HEAD,)},
        each={"attn_norm.weight": (WIDTH,), "ffn_norm.weight": (WIDTH,)},
        norm="token_embd_norm",
    ),
}


def write_state_window(folder: Path, state: StateKind, kind: str) -> WindowSource:
    """Write a window with such a ``state``, of matrices of type ``kind``, to ``folder``. Raises ``OSError``."""
    layers, paths, count = _LAYERS[state], [], 0
    for number in range(2):
        tensors = _tensors(layers, kind, attends=number == 1)
        count += len(tensors)
        path = folder / f"layer-{number}.gguf"
        write_layer(path, number, tensors, _data)
        paths.append(str(path))
    metadata = folder / "window.gguf"
    metadata.write_bytes(_metadata(layers, count))
    return WindowSource(
        window=0,
        metadata=str(metadata),
        layers=tuple(paths),
        assignment=in_memory(0, 2),
        extra_buffers=False,
    )


def _data(tensor: LayerTensor) -> bytes:
    if "norm" in tensor.name:
        return np.ones(math.prod(tensor.shape), np.float32).tobytes()
    data = piece_of(GGMLQuantizationType(tensor.type).name)
    if tensor.name.endswith("ssm_a"):  # states fade
        return (-np.abs(np.frombuffer(data, np.float32))).tobytes()
    return data


def _tensors(layers: _Layers, kind: str, *, attends: bool) -> list[LayerTensor]:
    keys = _KV_HEADS * _HEAD
    matrices: dict[str, _Shape] = {
        "ffn_gate.weight": (WIDTH, _FORWARD),
        "ffn_up.weight": (WIDTH, _FORWARD),
        "ffn_down.weight": (_FORWARD, WIDTH),
    }
    if attends:
        matrices |= {
            "attn_q.weight": (WIDTH, layers.query),
            "attn_k.weight": (WIDTH, keys),
            "attn_v.weight": (WIDTH, keys),
            "attn_output.weight": (WIDTH, WIDTH),
        }
    else:
        matrices |= layers.matrices
    sizes = {name: (GGMLQuantizationType[kind], shape) for name, shape in matrices.items()}
    small = {**layers.each, **(layers.attends if attends else layers.small)}
    sizes |= {name: (GGMLQuantizationType.F32, shape) for name, shape in small.items()}
    return laid_out(sizes)


def _metadata(layers: _Layers, tensors: int) -> bytes:
    numbers: dict[str, Scalar | list[Scalar]] = {
        "context_length": 4096,
        "embedding_length": WIDTH,
        "block_count": 2,
        "feed_forward_length": _FORWARD,
        "attention.head_count": _HEADS,
        "attention.key_length": _HEAD,
        "attention.value_length": _HEAD,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.dimension_count": _HEAD,
        "vocab_size": 1,
        **layers.values,
    }
    values = {f"{layers.architecture}.{key}": _value(number) for key, number in numbers.items()}
    values["general.architecture"] = scalar_value(GGUFValueType.STRING, layers.architecture)
    values["tokenizer.ggml.model"] = scalar_value(GGUFValueType.STRING, "none")
    row = np.ones(WIDTH, np.float32).tobytes()
    small = [
        SmallTensor(name=name, type=GGMLQuantizationType.F32, shape=shape, data=row)
        for name, shape in ((f"{layers.norm}.weight", (WIDTH,)), ("token_embd.weight", (WIDTH, 1)))
    ]
    return metadata_split(values, small, splits=3, tensors=len(small) + tensors)


def _value(number: Scalar | list[Scalar]) -> Value:
    if isinstance(number, list):
        return array_value(GGUFValueType.INT32, number)
    return scalar_value(GGUFValueType.FLOAT32 if isinstance(number, float) else GGUFValueType.UINT32, number)
