"""A model whose own layer for multi-token prediction is right: each next token follows from the one before it alone.

Attention and feed-forward add nothing, so what comes out of the layers is the token's embedding, and the layer behind them
hands on the embedding of its token in place of the state. Sampled at a temperature, its drafts hold as often as the most
likely token is drawn.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from gguf import quants
from gguf.constants import GGMLQuantizationType as GgufType
from numpy.typing import NDArray

from primad.gguf.architectures.layers import layer_count
from primad.gguf.constants import GGUFValueType
from primad.gguf.header import Header, TensorInfo, read_header, scalar_value
from tools import synth

ADDS: tuple[str, ...] = (
    "attn_output.weight",
    "ssm_out.weight",
    "ffn_down.weight",
    "ffn_down_exps.weight",
    "ffn_down_shexp.weight",
)


def write_controlled(path: Path, architecture: str = "glm4moe", **shape: Any) -> float:
    """Write one of ``shape``, as ``synth.write_model`` takes it; the temperature at which 7 drafts of 10 hold."""
    values = {f"{architecture}.nextn_predict_layers": scalar_value(GGUFValueType.UINT32, 1)}
    synth.write_model(path, architecture=architecture, values=values, **shape)
    header = read_header(path)
    predicting = f"blk.{layer_count(header)}."
    with path.open("r+b") as file:

        def put(tensor: TensorInfo, content: bytes) -> None:
            assert len(content) == tensor.bytes
            file.seek(tensor.offset)
            file.write(content)

        for name, tensor in header.tensors.items():
            if name.endswith(ADDS):
                put(tensor, bytes(tensor.bytes))
            elif name == f"{predicting}nextn.eh_proj.weight":
                width = tensor.shape[1]
                put(tensor, _packed(np.eye(width, 2 * width, dtype=np.float32), tensor))
            elif name == f"{predicting}nextn.enorm.weight":
                put(tensor, _packed(np.ones(tensor.shape, np.float32), tensor))
            elif name == f"{predicting}nextn.shared_head_norm.weight":
                put(tensor, _packed(_content(header, "output_norm.weight"), tensor))
    return _temperature(header, 0.7)


def _packed(content: NDArray[np.float32], tensor: TensorInfo) -> bytes:
    return quants.quantize(content, GgufType(int(tensor.type))).tobytes()


def _content(header: Header, name: str) -> NDArray[np.float32]:
    tensor = header.tensors[name]
    packed = np.memmap(tensor.path, np.uint8, mode="r", offset=tensor.offset, shape=(tensor.bytes,))
    rows = tuple(reversed(tensor.shape))
    return quants.dequantize(packed, GgufType(int(tensor.type))).reshape(rows).astype(np.float32)


def _temperature(header: Header, share: float) -> float:
    """At which the likeliest token is drawn in the ``share`` of cases."""
    rows = _content(header, "token_embd.weight")
    rows = rows / np.sqrt((rows**2).mean(axis=1, keepdims=True)) * _content(header, "output_norm.weight")
    logits = rows @ _content(header, "output.weight" if "output.weight" in header.tensors else "token_embd.weight").T
    logits -= logits.max(axis=1, keepdims=True)
    low, high = 1e-3, 1e3
    for _ in range(40):
        middle = (low * high) ** 0.5
        held = float((1 / np.exp(logits / middle).sum(axis=1)).mean())
        low, high = (middle, high) if held > share else (low, middle)
    return low
