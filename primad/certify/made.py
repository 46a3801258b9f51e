"""Write a tiny model: tensors with the real one's names, in the sizes that llama.cpp wants, with random content.

The embedding of token 0 is NaN. Windows after the first are fed with tokens 0, whose hidden states are overwritten;
anything that bypassed this would be NaN too. For child processes: llama.cpp may abort over a file's content.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from primad.certify.tiny import tiny_values
from primad.engine.wanted import TensorShape, wanted_tensors
from primad.errors import EngineError, ModelError
from primad.gguf.constants import GGMLQuantizationType
from primad.gguf.header import Header
from primad.gguf.layers import SmallTensor, metadata_split
from primad.gguf.windows import OUTPUT, TOKEN_EMBEDDING

MAX_BYTES: Final = 400 << 20
_TOGETHER: Final = {
    "attn_qkv": ("attn_q", "attn_k", "attn_v"),
    "ffn_gate_up_exps": ("ffn_gate_exps", "ffn_up_exps"),
}
"""Matrices that some files hold as one and others separately: without a file llama.cpp names one of both forms."""


def write_tiny(header: Header, path: Path, way: str) -> None:
    """Write a tiny model like that of ``header`` to ``path``, with the metadata of ``tiny_values``.

    Raises ``EngineError`` if llama.cpp rejects its metadata, ``ModelError`` for a tensor that it does not want.
    """
    values = tiny_values(header, way)
    shapes = dict(_shapes(header, wanted_tensors(values)))
    size = 4 * sum(math.prod(shape) for shape in shapes.values())
    if size > MAX_BYTES:
        raise EngineError(f"a tiny model of it would take {size} bytes")
    tensors = [
        SmallTensor(name=name, type=GGMLQuantizationType.F32, shape=shape, data=_weights(name, shape).tobytes())
        for name, shape in shapes.items()
    ]
    path.write_bytes(metadata_split(values, tensors, splits=1, tensors=len(tensors)))


def _shapes(header: Header, wanted: Mapping[str, TensorShape]) -> Iterator[tuple[str, TensorShape]]:
    for name in header.tensors:
        shape = wanted.get(name, _together(name, wanted))
        if shape is None:
            raise ModelError(f"{header.path}: llama.cpp wants no tensor '{name}' for its metadata")
        yield name, shape


def _together(name: str, wanted: Mapping[str, TensorShape]) -> TensorShape | None:
    """Return the shape of matrices, or biases, that are one in the file; or of a half of some that llama.cpp wants as
    one."""
    for one, several in _TOGETHER.items():
        parts = [wanted[each] for each in (name.replace(f".{one}.", f".{part}.") for part in several) if each in wanted]
        if f".{one}." in name and len(parts) > 1:
            place = min(len(parts[0]) - 1, 1)
            return (*parts[0][:place], sum(part[place] for part in parts), *parts[0][place + 1 :])
        for part in several if len(several) == 2 else ():
            whole = wanted.get(name.replace(f".{part}.", f".{one}."))
            if f".{part}." in name and whole is not None:
                return (whole[0], whole[1] // 2, *whole[2:])
    return None


def _weights(name: str, shape: TensorShape) -> NDArray[np.float32]:
    """Return random weights that roughly keep the size of a hidden state."""
    noise = np.random.Generator(np.random.SFC64(zlib.crc32(name.encode())))
    content = noise.standard_normal(shape[::-1], np.float32)
    stem = name.removesuffix(".weight").rpartition(".")[2]
    if stem == "ssm_a":
        return -1 + np.float32(0.1) * content
    if name.endswith(".bias"):
        return np.float32(0.1) * content
    if len(shape) == 1 or "norm" in stem:
        return 1 + np.float32(0.1) * content
    if name in (TOKEN_EMBEDDING, OUTPUT):
        content *= np.float32(0.2)
        content[0] = np.nan
        return content
    return content * np.float32(2 / math.sqrt(shape[0]))
