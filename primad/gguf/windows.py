"""Cut a model into windows: for each, the metadata split and the layers it is loaded from.

Every window takes hidden states, so none needs the token embedding; llama.cpp still requires one and gets a single row.
The tail's output matrix has the embedding's name (see ``engine/llama``), or is next to a copy of the embedding if the
architecture does not fall back on tied weights.

If layers take inputs in addition to the hidden state (``layer_inputs``), the window's part of the matrix that makes
them is one more layer file, the last one. The head has the table in which they are looked up; windows have zeros
instead. In the tail, whose matrices all have a row for each token, the zeros are a hole after its metadata.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Annotated, Final

import msgspec
from msgspec import Meta
from msgspec.structs import astuple
from msgspec.structs import replace as replace_fields

from halda import WindowAssignment
from primad.errors import ModelError
from primad.gguf.adapter import MAX_ADAPTERS, AdapterSpec
from primad.gguf.architecture import Architecture
from primad.gguf.architectures.cuts import cut_points, cuttable
from primad.gguf.architectures.layers import block_count, layer_count, layer_inputs, sliding_layers
from primad.gguf.architectures.stand_ins import holes, stand_ins
from primad.gguf.architectures.table import known
from primad.gguf.architectures.tensors import LAYER_INPUTS, LAYER_PROJECTION, TensorRole, is_shared_tensor, tensor_roles
from primad.gguf.architectures.values import window_values
from primad.gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType, TokenType
from primad.gguf.digests import LayerDigests
from primad.gguf.header import Header, TensorInfo, Value
from primad.gguf.layers import (
    MAX_WINDOW_LAYERS,
    Hole,
    LayerCut,
    LayerRef,
    LayerTensor,
    SmallTensor,
    StopHashing,
    cut,
    cut_layer,
    metadata_split,
    never,
)

TOKEN_EMBEDDING: Final = "token_embd.weight"
POSITIONS: Final = "position_embd.weight"
OUTPUT: Final = "output.weight"
OUTPUT_BIAS: Final = "output.bias"
_OUTPUT_BESIDE: Final = -1
"""The key, among known digests, of an output matrix that is separate from the embedding."""
MAX_SMALL_BYTES: Final = 1 << 20
MAX_HOLE_BYTES: Final = 1 << 40
_HOLES: Final = (GGMLQuantizationType.IQ1_S, GGMLQuantizationType.Q4_0, GGMLQuantizationType.F16)
"""The smallest types for rows of whole blocks."""


class WindowSpec(msgspec.Struct, frozen=True, kw_only=True):
    """All that a device must know to load window ``window`` of the route: layers ``first <= layer < last``.

    ``metadata`` is the content of the metadata split, followed by ``hole_bytes`` zero bytes. ``layers`` are the layer
    files in split order, in the tail followed by the output matrix; ``adapters`` change them.
    """

    window: int
    first: int
    last: int
    metadata: bytes
    layers: Annotated[tuple[LayerRef, ...], Meta(max_length=MAX_WINDOW_LAYERS)]
    adapters: Annotated[tuple[AdapterSpec, ...], Meta(max_length=MAX_ADAPTERS)] = ()
    hole_bytes: Annotated[int, Meta(ge=0, le=MAX_HOLE_BYTES)] = 0

    def write_metadata(self, path: Path) -> None:
        """Write the metadata split. Raises ``OSError``."""
        with path.open("wb") as file:
            file.write(self.metadata)
            file.truncate(len(self.metadata) + self.hole_bytes)

    @property
    def files(self) -> tuple[LayerRef, ...]:
        """All layer files that the window needs, including those of adapters."""
        return (*self.layers, *(ref for adapter in self.adapters for ref in adapter.layers))


class WindowPlan(msgspec.Struct, frozen=True, kw_only=True):
    """A window for a device to load: ``spec`` has its files, ``assignment`` its GPU part and resident bytes.

    ``extra_buffers`` lets llama.cpp keep repacked or AMX copies of its weights.
    """

    spec: WindowSpec
    assignment: WindowAssignment
    extra_buffers: bool

    @property
    def content(self) -> WindowPlan:
        """This plan without its place in the route and its memory residency, to compare windows by content."""
        assignment = replace(self.assignment, output="none", layer_bytes=0, output_bytes=0, resident_bytes=0)
        spec = replace_fields(self.spec, window=0, metadata=b"", hole_bytes=0)
        return replace_fields(self, spec=spec, assignment=assignment)


@dataclass(frozen=True)
class ModelCutter:
    """Cuts one model and remembers hashes, so no layer is read twice. ``digests`` stores them across runs.

    Windows have a row of ``stand_in`` as their token embedding. If the output matrix ``keeps_name``, by which adapters
    address it, the tail also has the embedding, which it never reads. It also has the embedding if the tail
    ``predicts``, that is, has the layers for multi-token prediction, which look tokens up.
    """

    header: Header
    digests: LayerDigests | None = None
    stand_in: float = 0.0
    keeps_name: bool = False
    predicts: bool = False

    def __post_init__(self) -> None:
        _ = self._architecture  # raises where it cannot be cut

    @cached_property
    def _architecture(self) -> Architecture:
        return cuttable(self.header)

    @cached_property
    def _roles(self) -> dict[str, TensorRole]:
        return tensor_roles(self.header)

    @cached_property
    def _refs(self) -> dict[int, LayerRef]:
        return {}

    @cached_property
    def _cuts(self) -> dict[str, LayerCut]:
        return {}

    def ref(self, layer: int, stop: StopHashing = never) -> LayerRef:
        """The layer file of ``layer``, hashed on first use. ``layer`` equal to the layer count is the output matrix.

        Raises ``HashingStopped`` at ``stop``.
        """
        if layer not in self._refs:
            is_beside = self._keeps_name and layer == layer_count(self.header)
            number = _OUTPUT_BESIDE if is_beside else layer
            known = self.digests.get(number) if self.digests is not None else None
            layer_cut = self.cut(layer).hashed(known, stop)
            ref = layer_cut.ref()
            if self.digests is not None:
                self.digests.put(number, layer_cut.tree())
            self._refs[layer] = ref
            self._cuts[ref.digest] = layer_cut
        return self._refs[layer]

    @property
    def _keeps_name(self) -> bool:
        return self.keeps_name or self.predicts

    @property
    def _predicting(self) -> Sequence[int]:
        """The numbers of the tail's layer files for multi-token prediction, which follow all others."""
        if not self.predicts:
            return ()
        layers = layer_count(self.header)
        first = self.projection_layer(layers, layers) + 1
        return range(first, first + block_count(self.header) - layers)

    @property
    def embedding_layer(self) -> int:
        """The number of the layer file with the embeddings of tokens, positions and layers: the output matrix's, or the one
        after it."""
        output, embedding = self._output, token_embedding(self.header)
        has_all = output[TOKEN_EMBEDDING].name == embedding.name and not self._beside_embedding()
        return layer_count(self.header) + (not has_all)

    def _beside_embedding(self) -> dict[str, TensorInfo]:
        """Tensors besides the token embedding that the head looks up."""
        found = {POSITIONS: position_embedding(self.header), LAYER_INPUTS: layer_table(self.header)}
        return {name: tensor for name, tensor in found.items() if tensor is not None}

    def projection_layer(self, first: int, last: int) -> int:
        """The number of the layer file that has the projection of inputs for layers ``first`` to ``last - 1``."""
        layers = layer_count(self.header)
        return layers + 2 + first * (layers + 1) + last

    def _projection(self, first: int, last: int) -> LayerCut:
        whole, layers = self.header.tensors[LAYER_PROJECTION], layer_count(self.header)
        part = whole.bytes // layers
        shape = (whole.shape[0], whole.shape[1] // layers * (last - first))
        own = replace(whole, shape=shape, offset=whole.offset + part * first, bytes=part * (last - first))
        return cut({LAYER_PROJECTION: own})

    def cut(self, layer: int) -> LayerCut:
        """Where the weights of ``layer`` (or of the output matrix, the embedding) lie in the model file; hashes nothing."""
        layers = layer_count(self.header)
        if layer in self._predicting:
            return cut_layer(self.header, layers + self._predicting.index(layer))
        if layer > layers + 1:
            return self._projection(*divmod(layer - layers - 2, layers + 1))
        if layer == layers + 1:
            return cut({TOKEN_EMBEDDING: token_embedding(self.header), **self._beside_embedding()})
        return cut(self._output) if layer == layers else cut_layer(self.header, layer)

    def source(self, digest: str) -> LayerCut | None:
        """The layer of this content, if it has been hashed."""
        return self._cuts.get(digest)

    def layers_of(self, first: int, last: int) -> Sequence[int]:
        """Layer files of window ``first..last``: its layers; in the tail, the output matrix and the layers for multi-token
        prediction; and the projection of the layers' inputs."""
        own: Sequence[int] = range(first, last)
        if last == layer_count(self.header):
            own = [*own, *self._predicting, last]
        return [*own, self.projection_layer(first, last)] if layer_inputs(self.header) else own

    def spec(
        self, window: int, first: int, last: int, change: Callable[[dict[str, Value]], None] | None = None
    ) -> WindowSpec:
        """The spec of window number ``window``, with a ``change`` of its metadata; hashes what was not hashed before."""
        layers = tuple(self.ref(layer) for layer in self.layers_of(first, last))
        small = self._small(first, last)
        hole = self._stand_ins(first, last) if last < layer_count(self.header) else self._hole(first, last)
        values = window_metadata(self.header, first, last, predicts=self.predicts)
        if change is not None:
            change(values)
        metadata = metadata_split(
            values,
            [*small, *hole],
            splits=1 + len(layers),
            tensors=len(small) + len(hole) + sum(len(layer.tensors) for layer in layers),
        )
        hole_bytes = sum(each.padded_bytes for each in hole)
        return WindowSpec(
            window=window, first=first, last=last, metadata=metadata, layers=layers, hole_bytes=hole_bytes
        )

    @property
    def layers_of_all(self) -> tuple[int, ...]:
        """Layer files of ``without_text``: the layers, the output matrix, and the token embedding if it is separate."""
        layers = layer_count(self.header)
        return tuple(dict.fromkeys([*self.layers_of(0, layers), self.embedding_layer]))

    def without_text(self) -> WindowSpec:
        """The whole model as one window that takes tokens, without their texts, for a device that drafts."""
        return self._one_window(window_metadata(self.header, 0, layer_count(self.header)))

    def _one_window(self, values: dict[str, Value]) -> WindowSpec:
        layers = layer_count(self.header)
        output, embedding = self.ref(layers), self.embedding_layer
        behind, is_tied = [output], self._output[TOKEN_EMBEDDING].name == TOKEN_EMBEDDING
        if embedding != layers:
            named = tuple(
                LayerTensor(OUTPUT if each.name == TOKEN_EMBEDDING else each.name, *astuple(each)[1:])
                for each in output.tensors
            )
            untied = [] if is_tied else [LayerRef(output.digest, output.size_bytes, named)]
            behind = [*untied, self.ref(embedding)]
        behind += [self.ref(layer) for layer in self.layers_of(0, layers) if layer > layers]
        refs = (*(self.ref(layer) for layer in range(layers)), *behind)
        small = [tensor for tensor in self._small(0, layers) if tensor.name != POSITIONS]
        context = f"{self.header.text('general.architecture')}.context_length"
        values = {**values, context: self.header.values[context]}
        metadata = metadata_split(
            values, small, splits=1 + len(refs), tensors=len(small) + sum(len(ref.tensors) for ref in refs)
        )
        return WindowSpec(window=0, first=0, last=layers, metadata=metadata, layers=refs)

    @cached_property
    def _output(self) -> dict[str, TensorInfo]:
        tensors = self.header.tensors
        embedding = token_embedding(self.header)
        output = {name: tensor for name, tensor in tensors.items() if self._roles[name] is TensorRole.OUTPUT}
        matrix = output.pop(OUTPUT, None)
        if matrix is None:
            return {TOKEN_EMBEDDING: embedding, **output}
        if self._architecture.tied_output_fallback and not self._keeps_name:
            return {TOKEN_EMBEDDING: matrix, **output}
        return {TOKEN_EMBEDDING: embedding, OUTPUT: matrix, **output}

    def _small(self, first: int, last: int) -> list[SmallTensor]:
        architecture, small = self._architecture, []
        shares = not (architecture.shares_where_full and all(sliding_layers(self.header)[first:last]))
        for name, tensor in self.header.tensors.items():
            role = self._roles[name]
            is_used = shares or not is_shared_tensor(name)
            if role is TensorRole.OUTPUT_NORM or (role is TensorRole.SHARED and is_used):
                small.append(SmallTensor(name=name, type=tensor.type, shape=tensor.shape, data=_content(tensor)))
        width = token_embedding(self.header).shape[0]
        if position_embedding(self.header) is not None:
            row = bytes(4 * width)
            small.append(SmallTensor(name=POSITIONS, type=GGMLQuantizationType.F32, shape=(width, 1), data=row))
        if last < layer_count(self.header):
            shapes: dict[str, tuple[int, ...]] = {TOKEN_EMBEDDING: (width, 1)}
            if not architecture.tied_output_fallback:
                shapes[OUTPUT] = (width, 1)
            if OUTPUT_BIAS in self.header.tensors:
                shapes[OUTPUT_BIAS] = (1,)
            if layer_inputs(self.header):
                shapes[LAYER_INPUTS] = (layer_inputs(self.header) * (last - first), 1)
            for name, shape in shapes.items():
                row = struct.pack("<f", self.stand_in if name in (TOKEN_EMBEDDING, LAYER_INPUTS) else 0.0) * shape[0]
                small.append(SmallTensor(name=name, type=GGMLQuantizationType.F32, shape=shape, data=row))
        return small

    def _stand_ins(self, first: int, last: int) -> list[Hole]:
        """The weights of the stand-in layers that follow a window's own."""
        behind = enumerate(stand_ins(self.header, first, last), start=last - first)
        return [hole for number, layer in behind for hole in holes(self.header, layer, number)]

    def _hole(self, first: int, last: int) -> list[Hole]:
        """The tail's placeholder for the table of the layers' additional inputs."""
        values = layer_inputs(self.header) * (last - first)
        kind = next(kind for kind in _HOLES if values % GGML_QUANT_SIZES[kind][0] == 0)
        shape = (values, vocabulary_size(self.header))
        return [Hole(name=LAYER_INPUTS, type=kind, shape=shape)] if values else []


def token_embedding(header: Header) -> TensorInfo:
    """The token embedding, shape (width, vocabulary). Raises ``ModelError`` when it is missing."""
    tensor = header.tensors.get(TOKEN_EMBEDDING)
    if tensor is None or len(tensor.shape) != 2:
        raise ModelError(f"{header.path}: has no token embedding; give a complete language model")
    return tensor


def position_embedding(header: Header, table: Header | None = None) -> TensorInfo | None:
    """The table that the head adds to the embedding by position, shape (width, positions); None for most models.
    ``table`` is the header of its file, if that is another one.

    Raises ``ModelError`` if it has another width.
    """
    entry = known(header)
    file = table if table is not None else header
    tensor = file.tensors.get(POSITIONS) if entry is not None and entry.adds_positions else None
    if tensor is not None and (len(tensor.shape) != 2 or tensor.shape[0] != token_embedding(file).shape[0]):
        raise ModelError(f"{header.path}: tensor '{POSITIONS}' is of another width than the token embedding")
    return tensor


def layer_table(header: Header) -> TensorInfo | None:
    """The table of the layers' inputs in addition to the hidden state, a row per token; None for most models."""
    return header.tensors.get(LAYER_INPUTS) if layer_inputs(header) else None


def sent_layers(header: Header) -> int:
    """Number of layers that may be in windows before the tail."""
    return max(cut_points(header), default=0)


def beside_values(header: Header) -> int:
    """Values sent between windows with each hidden state (``engine/layer_inputs.py``); 0 for most models."""
    each = layer_inputs(header)
    return token_embedding(header).shape[0] + each * sent_layers(header) + 1 if each else 0


def window_metadata(header: Header, first: int, last: int, *, predicts: bool = False) -> dict[str, Value]:
    """The metadata of a window; only the tail has the vocabulary. Raises ``ModelError`` as ``window_values``."""
    tail = last == layer_count(header)
    return window_values(header, first, last, vocabulary=vocabulary_size(header) if tail else 1, predicts=predicts)


def vocabulary_size(header: Header) -> int:
    """Number of tokens."""
    return token_embedding(header).shape[1]


def control_tokens(header: Header) -> frozenset[int]:
    """The tokens that are not text; in a chat each message begins with one. Empty if the file does not mark them."""
    types = header.values.get("tokenizer.ggml.token_type")
    if types is None or not types.is_array:
        return frozenset()
    return frozenset(token for token, kind in enumerate(types.items()) if kind == TokenType.CONTROL)


def _content(tensor: TensorInfo) -> bytes:
    if tensor.bytes > MAX_SMALL_BYTES:
        raise ModelError(
            f"{tensor.path}: tensor '{tensor.name}' of {tensor.bytes} bytes is too large to go with every window"
        )
    return cut({tensor.name: tensor}).read(0, tensor.bytes)
