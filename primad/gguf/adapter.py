"""LoRA adapters: a GGUF of small matrices that change a model's, cut by layer like the weights.

The adapter's tensors of one layer travel as one layer file, known by the hash of their content. A device joins those of
a window into a file of its own (``adapter_header`` followed by the weights), in which the layers have the window's
numbers, and llama.cpp loads it with the window. The part for the output matrix goes with the tail as one more layer.
The head looks up the part for rows of the token embedding (``engine/embedding_adapter.py``).
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b
from pathlib import Path
from typing import Annotated, Final

import msgspec
from msgspec import Meta

from primad.errors import ModelError, ProtocolError
from primad.gguf.architectures.layers import layer_count
from primad.gguf.architectures.tensors import layer_of
from primad.gguf.constants import GGUFValueType
from primad.gguf.header import Header, TensorInfo, read_header, scalar_value
from primad.gguf.layers import CHUNK_BYTES, MAX_WINDOW_LAYERS, LayerCut, LayerRef, cut, gguf_header

MAX_ADAPTERS: Final = 16
MAX: Final = 1e6
A: Final = ".lora_a"
B: Final = ".lora_b"
_PART: Final = re.compile(r"blk\.\*\.[\w.-]+\.lora_[ab]", re.ASCII)
_ALPHA: Final = "adapter.lora.alpha"
_TOKENS: Final = "adapter.alora.invocation_tokens"
_EMBEDDING: Final = "token_embd.weight"
OUTPUT: Final = "output.weight"


class AdapterSpec(msgspec.Struct, frozen=True, kw_only=True):
    """The part of an adapter for a window: layer file ``layers[i]`` belongs to layer ``numbers[i]``.

    The adapter is for ``architecture`` and is scaled by ``alpha`` and ``scale``. In the tail, the part for the output
    matrix follows the layers, with the next number.
    """

    architecture: Annotated[str, Meta(min_length=1, max_length=64)]
    alpha: Annotated[float, Meta(ge=-MAX, le=MAX)]
    scale: Annotated[float, Meta(ge=-MAX, le=MAX)]
    numbers: Annotated[tuple[int, ...], Meta(max_length=MAX_WINDOW_LAYERS)]
    layers: Annotated[tuple[LayerRef, ...], Meta(max_length=MAX_WINDOW_LAYERS)]


@dataclass(frozen=True)
class Adapter:
    """An adapter that fits the model. ``digest`` (hex) is the hash of the whole file."""

    header: Header
    layer_count: int
    scale: float
    digest: str

    @property
    def alpha(self) -> float:
        """The alpha that scales the adapter relative to its rank; 0 if it has none."""
        return self.header.number(_ALPHA, 0.0)

    @cached_property
    def strange(self) -> str | None:
        """A changed tensor outside layers, other than the token embedding and the output matrix, if any."""
        known = {stem + part for stem in (_EMBEDDING, OUTPUT) for part in (A, B)}
        return next((name for name in self._tensors if layer_of(name) is None and name not in known), None)

    @property
    def embedding(self) -> tuple[TensorInfo, TensorInfo] | None:
        """The part for the token embedding: a row (rank) for each token, and a matrix (rank, width)."""
        a, b = (self._tensors.get(_EMBEDDING + part) for part in (A, B))
        return None if a is None or b is None else (a, b)

    @property
    def changes_output(self) -> bool:
        """Whether it changes the output matrix."""
        return OUTPUT + A in self._tensors

    @cached_property
    def _tensors(self) -> dict[str, TensorInfo]:
        return {name: tensor for name, tensor in self.header.tensors.items() if name.endswith((A, B))}

    @cached_property
    def _refs(self) -> dict[int, LayerRef]:
        return {}

    @cached_property
    def _cuts(self) -> dict[str, LayerCut]:
        return {}

    def tensors_of(self, layer: int) -> list[TensorInfo]:
        """The adapter's matrices for ``layer``; the number after the last layer means the output matrix."""
        prefix = OUTPUT if layer == self.layer_count else f"blk.{layer}."
        return [tensor for name, tensor in self._tensors.items() if name.startswith(prefix)]

    def bytes_of(self, layer: int) -> int:
        """Bytes of the matrices of ``tensors_of(layer)``."""
        return sum(tensor.bytes for tensor in self.tensors_of(layer))

    def source(self, digest: str) -> LayerCut | None:
        """The adapter layer with this digest, if a window has needed it."""
        return self._cuts.get(digest)

    def spec(self, first: int, last: int) -> AdapterSpec | None:
        """The adapter's part for the window of these layers; None if it has none. Hashes layers not hashed before."""
        behind = last + 1 if last == self.layer_count else last
        layers = [layer for layer in range(first, behind) if self.bytes_of(layer)]
        if not layers:
            return None
        return AdapterSpec(
            architecture=self.header.text("general.architecture"),
            alpha=self.alpha,
            scale=self.scale,
            numbers=tuple(layer - first for layer in layers),
            layers=tuple(map(self._ref, layers)),
        )

    def _ref(self, layer: int) -> LayerRef:
        if layer not in self._refs:
            prefix = f"blk.{layer}."
            own = {tensor.name.replace(prefix, "blk.*."): tensor for tensor in self.tensors_of(layer)}
            layer_cut = cut(own).hashed()
            ref = self._refs[layer] = layer_cut.ref()
            self._cuts[ref.digest] = layer_cut
        return self._refs[layer]


def open_adapter(path: Path, scale: float, model: Header) -> Adapter:
    """Open the adapter in ``path``. Raises ``ModelError`` if it is not an adapter, or not one for ``model``."""
    header = read_header(path)
    kinds = header.text("general.type", "model"), header.text("adapter.type", "lora")
    if kinds[0] != "adapter":
        raise ModelError(
            f"{path}: is no adapter but a {kinds[0]}; --lora takes what llama.cpp's convert_lora_to_gguf.py makes"
        )
    if kinds[1] != "lora":
        raise ModelError(f"{path}: is an adapter of type {kinds[1]!r}; only LoRA adapters can be taken")
    if _TOKENS in header.values:
        raise ModelError(
            f"{path}: begins at tokens of its own (an activated LoRA), which primad does not support; use a plain one"
        )
    own, base = header.text("general.architecture"), model.text("general.architecture")
    if own != base:
        raise ModelError(f"{path}: is for {own!r}, and {model.path.name} is {base!r}; give an adapter of this model")
    header.number(_ALPHA, 0.0)
    pairs = dict(_pairs(header))
    if not pairs:
        raise ModelError(f"{path}: has no matrices; fetch the adapter again")
    for name, (a, b) in pairs.items():
        _check_pair(header, model, name, a, b)
    if _EMBEDDING in pairs and OUTPUT not in model.tensors:
        raise ModelError(
            f"{path}: changes the token embedding, which is the output matrix of {model.path.name} too; llama.cpp computes "
            "no such model, so give an adapter of layers"
        )
    return Adapter(header, layer_count(model), scale, _digest(header))


def _pairs(header: Header) -> Iterator[tuple[str, tuple[TensorInfo, TensorInfo]]]:
    """Yield each changed tensor's name and its two matrices. Norms are left out, as in llama.cpp."""
    tensors: Mapping[str, TensorInfo] = header.tensors
    for name, tensor in tensors.items():
        stem, other = name[: -len(A)], {A: B, B: A}.get(name[-len(A) :])
        if other is None:
            if name.endswith("_norm.weight"):
                continue
            raise ModelError(f"{header.path}: tensor '{name}' is not an adapter matrix; convert the adapter again")
        if stem + other not in tensors:
            raise ModelError(f"{header.path}: tensor '{name}' has no '{stem + other}'; fetch the adapter again")
        if other == B:
            yield stem, (tensor, tensors[stem + B])


def _check_pair(header: Header, model: Header, name: str, a: TensorInfo, b: TensorInfo) -> None:
    """Check a pair as llama.cpp does; llama.cpp would report it too late."""
    base = model.tensors.get(name)
    if base is None:
        raise ModelError(
            f"{header.path}: changes tensor '{name}', which is not in {model.path.name}; give one of its own"
        )
    wide, a_shape, b_shape = ((*each.shape, 1, 1)[:2] for each in (base, a, b))
    if name == "token_embd.weight":
        fits = wide == (b_shape[1], a_shape[1]) and a_shape[0] == b_shape[0]
    else:
        fits = wide == (a_shape[0], b_shape[1]) and a_shape[1] == b_shape[0]
    if not fits:
        raise ModelError(
            f"{header.path}: its matrices for '{name}' have the shapes {list(a.shape)} and {list(b.shape)}, which do not "
            f"change one of {list(base.shape)}; give an adapter of {model.path.name}"
        )


def _digest(header: Header) -> str:
    digest = blake2b(digest_size=16)
    try:
        with header.path.open("rb") as file:
            while chunk := file.read(CHUNK_BYTES):
                digest.update(chunk)
    except OSError as exc:
        raise ModelError(f"{header.path}: cannot be read: {exc.strerror or exc}") from exc
    return digest.hexdigest()


def adapter_header(spec: AdapterSpec) -> bytes:
    """The header of a file for llama.cpp that holds the weights of ``spec.layers`` one after another."""
    values = {
        key: scalar_value(GGUFValueType.STRING, text)
        for key, text in (
            ("general.type", "adapter"),
            ("general.architecture", spec.architecture),
            ("adapter.type", "lora"),
        )
    }
    values[_ALPHA] = scalar_value(GGUFValueType.FLOAT32, spec.alpha)
    return gguf_header(values, list(zip(spec.numbers, spec.layers, strict=True)))


def check_adapter(spec: AdapterSpec, layers: int) -> None:
    """Check a spec from a peer, for a window of ``layers`` layers; its refs are checked elsewhere.

    Raises ``ProtocolError``.
    """
    ordered = sorted(set(spec.numbers)) == list(spec.numbers)
    if not spec.numbers or len(spec.numbers) != len(spec.layers) or not ordered:
        raise ProtocolError("adapter whose layers are not in order")
    if not 0 <= spec.numbers[0] <= spec.numbers[-1] < layers:
        raise ProtocolError(f"adapter with layers beyond the {layers} of its window")
    for ref in spec.layers:
        for tensor in ref.tensors:
            if not _PART.fullmatch(tensor.name):
                raise ProtocolError(f"layer {ref.digest[:12]} of an adapter has a tensor {tensor.name!r}")
    if not math.isfinite(spec.alpha) or not spec.architecture.isascii():
        raise ProtocolError("adapter of an impossible weight or architecture")
