"""Asks llama.cpp which tensors a model with some metadata has: llama.cpp can create such a model without a file.

It may abort on metadata that it does not understand, so untrusted metadata is checked in a child process.
"""

from __future__ import annotations

import ctypes
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from primad.engine.binding import why
from primad.engine.llama.tap import ggml_base, node_name
from primad.engine.tensor import Tensor
from primad.errors import EngineError
from primad.gguf.constants import GGUFValueType
from primad.gguf.header import Value, scalar_value
from primad.gguf.layers import metadata_split
from primad.system.allocator import without_top

with without_top("llama_cpp"):
    from llama_cpp import llama_cpp as llama

TensorShape = tuple[int, ...]
"""In ggml order."""


class _InitParams(ctypes.Structure):
    """``struct gguf_init_params`` (gguf.h)."""

    _fields_ = (("no_alloc", ctypes.c_bool), ("context", ctypes.c_void_p))


ggml_base.gguf_init_from_file.restype = ctypes.c_void_p
ggml_base.gguf_init_from_file.argtypes = [ctypes.c_char_p, _InitParams]
ggml_base.gguf_free.restype, ggml_base.gguf_free.argtypes = None, [ctypes.c_void_p]
_NORMS: Final = ("enorm", "hnorm", "shared_head_norm")
_MATRICES: Final = ("embed_tokens", "shared_head_head")
"""Tensors that only a multi-token prediction layer has."""


def wanted_tensors(values: Mapping[str, Value]) -> dict[str, TensorShape]:
    """Return names and shapes of all tensors that a model of this metadata has or may have.

    Multi-token prediction layers contain an ordinary layer, so they are queried as one. Raises ``EngineError`` if
    llama.cpp does not accept the metadata.
    """
    name = str(values["general.architecture"].scalar())
    predicting = int(values[f"{name}.nextn_predict_layers"].scalar()) if f"{name}.nextn_predict_layers" in values else 0
    layers = int(values[f"{name}.block_count"].scalar()) - predicting
    if predicting:
        values = {**values, f"{name}.block_count": scalar_value(GGUFValueType.UINT32, layers)}
        del values[f"{name}.nextn_predict_layers"]
    found = _asked(values)
    last = {tensor: shape for tensor, shape in found.items() if tensor.startswith(f"blk.{layers - 1}.")}
    for layer in range(layers, layers + predicting):
        width = found["token_embd.weight"][0]
        found |= {tensor.replace(f"blk.{layers - 1}.", f"blk.{layer}."): shape for tensor, shape in last.items()}
        found[f"blk.{layer}.nextn.eh_proj.weight"] = (2 * width, width)
        found |= {f"blk.{layer}.nextn.{norm}.weight": (width,) for norm in _NORMS}
        found |= {f"blk.{layer}.nextn.{matrix}.weight": found["token_embd.weight"] for matrix in _MATRICES}
    return found


def _asked(values: Mapping[str, Value]) -> dict[str, TensorShape]:
    found: dict[str, TensorShape] = {}

    def note(tensor: int, _: int) -> None:
        shape = list(Tensor.from_address(tensor).elements)
        while len(shape) > 1 and shape[-1] == 1:
            shape.pop()
        found[node_name(tensor).decode()] = tuple(shape)

    callback = llama.llama_model_set_tensor_data_t(note)
    params = llama.llama_model_default_params()
    params.n_gpu_layers = 0
    params.use_extra_bufts = False
    with tempfile.TemporaryDirectory(prefix="primad-header-") as folder:
        path = Path(folder) / "header.gguf"
        path.write_bytes(metadata_split(values, [], splits=1, tensors=0))
        metadata: Any = ggml_base.gguf_init_from_file(str(path).encode(), _InitParams(True, None))
    if not metadata:
        raise EngineError("llama.cpp cannot read the metadata of a tiny model")
    model = llama.llama_model_init_from_user(metadata, callback, None, params)
    ggml_base.gguf_free(metadata)
    if not model:
        raise EngineError(f"llama.cpp does not take this metadata: {why('it does not say why')}")
    llama.llama_model_free(model)
    return found
