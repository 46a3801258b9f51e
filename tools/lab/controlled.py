"""A model whose own layer for multi-token prediction is right: each next token depends only on the one before it.

Attention and feed-forward add nothing, so the layers' output is the token's embedding. The layer after them passes on
its token's embedding instead of the state, with enough noise to reach the wanted acceptance of its drafts. Drafts are
sampled with the seeds of their tokens: without noise all are accepted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from gguf import quants
from gguf.constants import GGMLQuantizationType as GgufType
from numpy.typing import NDArray

from primad.gguf.architectures.layers import layer_count
from primad.gguf.constants import GGUFValueType
from primad.gguf.header import Header, TensorInfo, Value, read_header, scalar_value
from tools import synth

ADDS: tuple[str, ...] = (
    "attn_output.weight",
    "ssm_out.weight",
    "ffn_down.weight",
    "ffn_down_exps.weight",
    "ffn_down_shexp.weight",
)


LIKELIEST = 0.7
"""Probability with which the likeliest token is sampled."""
DRAWN: Mapping[str, float] = {"top_k": 0, "top_p": 1, "min_p": 0}
"""Sampling options of a request besides the temperature, so that the acceptance is as wanted: tokens are sampled in
vocabulary order. If the likeliest are sorted first, two drafts of another order are accepted less often: 61 % of those
meant for 70."""


def write_controlled(
    path: Path,
    architecture: str = "glm4moe",
    *,
    right: float = 1.0,
    values: Mapping[str, Value] | None = None,
    **shape: Any,
) -> float:
    """Write a model of ``shape`` and ``values``, as ``synth.write_model`` takes them. Return the temperature at which
    the share ``right`` of its drafts is accepted.
    """
    every = {f"{architecture}.nextn_predict_layers": scalar_value(GGUFValueType.UINT32, 1), **(values or {})}
    synth.write_model(path, architecture=architecture, values=every, **shape)
    header = read_header(path)
    hidden, matrix = _normed(_content(header, "token_embd.weight")), _matrix(header)
    temperature = _bisected(lambda each: float(_likely(hidden, matrix, each).max(axis=1).mean()), LIKELIEST)
    width = hidden.shape[1]
    noise = np.random.default_rng(1).normal(0, width**-0.5, (width, width)).astype(np.float32)
    if right < 1:
        exact = _likely(hidden, matrix, temperature)

        def held(size: float) -> float:
            return _drawn_alike(
                exact, _likely(_normed(hidden + hidden @ (np.float32(size) * noise).T), matrix, temperature)
            )

        noise *= np.float32(_bisected(held, right))
    else:
        noise *= 0
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
                projection = np.eye(width, 2 * width, dtype=np.float32)
                projection[:, :width] += noise
                put(tensor, _packed(projection, tensor))
            elif name == f"{predicting}nextn.enorm.weight":
                put(tensor, _packed(np.ones(tensor.shape, np.float32), tensor))
            elif name == f"{predicting}nextn.shared_head_norm.weight":
                put(tensor, _packed(_content(header, "output_norm.weight"), tensor))
    return temperature


def _packed(content: NDArray[np.float32], tensor: TensorInfo) -> bytes:
    return quants.quantize(content, GgufType(int(tensor.type))).tobytes()


def _content(header: Header, name: str) -> NDArray[np.float32]:
    tensor = header.tensors[name]
    packed = np.memmap(tensor.path, np.uint8, mode="r", offset=tensor.offset, shape=(tensor.bytes,))
    rows = tuple(reversed(tensor.shape))
    return quants.dequantize(packed, GgufType(int(tensor.type))).reshape(rows).astype(np.float32)


def _normed(rows: NDArray[np.float32]) -> NDArray[np.float32]:
    normed: NDArray[np.float32] = rows / np.sqrt((rows**2).mean(axis=1, keepdims=True))
    return normed


def _matrix(header: Header) -> NDArray[np.float32]:
    """Return the matrix by which a normed state is multiplied for its logits."""
    name = "output.weight" if "output.weight" in header.tensors else "token_embd.weight"
    return (_content(header, name) * _content(header, "output_norm.weight")).T


def _likely(hidden: NDArray[np.float32], matrix: NDArray[np.float32], temperature: float) -> NDArray[np.float64]:
    """Return the probability of each token after each state."""
    logits = (hidden @ matrix).astype(np.float64) / temperature
    found = np.exp(logits - logits.max(axis=1, keepdims=True))
    likely: NDArray[np.float64] = found / found.sum(axis=1, keepdims=True)
    return likely


def _drawn_alike(one: NDArray[np.float64], other: NDArray[np.float64]) -> float:
    """Return how often one random number samples the same token from both, after the tokens of a text sampled from
    ``one``."""
    ends, other_ends = one.cumsum(axis=1), other.cumsum(axis=1)
    begins, other_begins = ends - one, other_ends - other
    alike = np.clip(np.minimum(ends, other_ends) - np.maximum(begins, other_begins), 0, None).sum(axis=1)
    tokens = np.full(len(one), 1 / len(one))
    for _ in range(64):
        tokens = tokens @ one
    return float(tokens @ alike)


def _bisected(falls: Callable[[float], float], wanted: float) -> float:
    """Return where the falling function ``falls`` has the value ``wanted``."""
    low, high = 1e-3, 1e3
    for _ in range(40):
        middle = (low * high) ** 0.5
        low, high = (middle, high) if falls(middle) > wanted else (low, middle)
    return low
