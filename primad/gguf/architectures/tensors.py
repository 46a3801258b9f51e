"""What each tensor of a model is needed for."""

from __future__ import annotations

import math
import re
from enum import Enum
from typing import Final

from primad.gguf.architecture import Embedding
from primad.gguf.architectures.layers import block_count, layer_count, layer_inputs
from primad.gguf.architectures.table import is_unknown, known, refusal
from primad.gguf.header import Header, single

LAYER_INPUTS: Final = "per_layer_token_embd.weight"


LAYER_PROJECTION: Final = "per_layer_model_proj.weight"


_SHARED: Final = frozenset(("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"))


_LAYER_TENSOR: Final = re.compile(r"blk\.(0|[1-9][0-9]{0,3})\.")


class TensorRole(Enum):
    """What a tensor is needed for."""

    LAYER = "the window that holds its layer"
    EMBEDDING = "the head, for its embedding rows"
    LAYER_INPUTS = "the head, for the rows that go to layers; in windows zeros stand for it"
    LAYER_PROJECTION = "every window, the part of its layers"
    POSITIONS = "the head, which adds it to the embedding; in windows a row of 0 stands for it"
    OUTPUT_NORM = "the tail window; in the others a placeholder that is never computed"
    OUTPUT = "the tail window"
    SHARED = "every window"
    UNUSED = "no window"


_OF_INPUTS: Final = {
    LAYER_INPUTS: TensorRole.LAYER_INPUTS,
    LAYER_PROJECTION: TensorRole.LAYER_PROJECTION,
    "per_layer_proj_norm.weight": TensorRole.SHARED,
}


def layer_of(tensor: str) -> int | None:
    """The layer a tensor name belongs to (``blk.N.``), or None."""
    match = _LAYER_TENSOR.match(tensor)
    return int(match[1]) if match else None


def is_shared_tensor(tensor: str) -> bool:
    """Whether ``tensor`` is one of the small ones outside the layers that every window needs."""
    return tensor in _SHARED


def tensor_roles(header: Header) -> dict[str, TensorRole]:
    """What each tensor is needed for. Raises ``ModelError`` as ``tensor_role``."""
    layers = layer_count(header)
    return {name: _role(header, name, layers) for name in header.tensors}


def tensor_role(header: Header, tensor: str) -> TensorRole:
    """What ``tensor`` is needed for. Raises ``ModelError`` by name for one outside the layers that is not known."""
    return _role(header, tensor, layer_count(header))


def _role(header: Header, tensor: str, layers: int) -> TensorRole:
    layer = layer_of(tensor)
    if layer is not None:
        if layer < layers:
            return TensorRole.LAYER
        if layer < (blocks := block_count(header)):
            return TensorRole.UNUSED
        raise refusal(header, f"tensor '{tensor}'", f"the model has {blocks} layers")
    match tensor:
        case "token_embd.weight":
            return TensorRole.EMBEDDING
        case "output_norm.weight" | "output_norm.bias":
            return TensorRole.OUTPUT_NORM
        case "token_embd_norm.weight" if _output_norm(header) == "token_embd_norm":
            return TensorRole.OUTPUT_NORM
        case "token_embd_norm.weight" | "token_embd_norm.bias" if _norms_tokens(header):
            return TensorRole.SHARED
        case "position_embd.weight" if _adds_positions(header):
            return TensorRole.POSITIONS
        case _ if layer_inputs(header) and tensor in _OF_INPUTS:
            return _OF_INPUTS[tensor]
        case "output.weight" | "output.bias":
            return TensorRole.OUTPUT
        case _ if is_shared_tensor(tensor) or header.derived is not None or is_unknown(header):
            return TensorRole.SHARED
        case _:
            raise refusal(header, f"tensor '{tensor}'", "it is outside the layers and its use is not known")


def _norms_tokens(header: Header) -> bool:
    entry = known(header)
    return entry is not None and len(entry.entries) > 1


def _adds_positions(header: Header) -> bool:
    entry = known(header)
    return entry is not None and entry.adds_positions


def _output_norm(header: Header) -> str:
    entry = known(header)
    return entry.output_norm if entry is not None else ""


def embedding_scale(header: Header) -> float:
    """The factor for embedding rows in the head, in float32; the value itself is exact in float32.

    1.0 means: do not multiply; where the entry was derived the graph itself does. The model must be ``cuttable``.
    """
    name, architecture = header.text("general.architecture"), known(header)
    if architecture is None:
        return 1.0
    if architecture.embedding is Embedding.SQRT_WIDTH:
        return single(math.sqrt(header.count(f"{name}.embedding_length")))
    if architecture.embedding is Embedding.KEY:
        return single(header.number(f"{name}.embedding_scale", architecture.default_embedding_scale)) or 1.0
    return 1.0


def turns_by_context(header: Header) -> bool:
    """Whether angles of positions follow from how large the context is: llama.cpp has two sets of factors for them."""
    return "rope_factors_long.weight" in header.tensors
