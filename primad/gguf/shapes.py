"""Shapes of well-known models, to plan for a model without its file. Data: ``profiles/models/*.json``.

A shape says how many weights of which matrix there are; the bytes follow from the quantisation in the name's suffix:
``-q4k`` (and without a suffix) is Q4_K with the output matrix in Q6_K, ``-q4_0`` Q4_0 with the same, ``-q6_k``, ``-q8``
and ``-f16`` are Q6_K, Q8_0 and F16 throughout. That is llama.cpp's ``llama-quantize --pure`` but for the output.
``-q4_k_m`` and ``-q5_k_m`` are the files of that name: value and down matrices are in Q6_K in half of the layers
(``use_more_bits`` of llama.cpp's llama-quant.cpp). A model that exists only as one file, such as gpt-oss, has that file's
types for every suffix except ``-f16``. Norms, biases and routers are F32, as in llama.cpp.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Final, Literal

import msgspec

from halda import LayerProfile, ModelProfile
from halda.quantisation import bytes_per_weight
from primad.errors import ConfigError
from primad.gguf.architectures.table import SUPPORTED
from primad.gguf.profile import KV_VALUE_BYTES, recurrent_values, state_bytes
from primad.gguf.projectors import memory_bytes, picture_flop

PROFILES_VERSION: Final = 1
_PLAIN: Final = "q4k"
_BLOCK: Final = {"Q4_K": 256, "Q5_K": 256, "Q6_K": 256}
_WITHOUT_WHOLE_BLOCKS: Final = {"Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0"}
"""The type that llama.cpp uses for a matrix whose rows are not a multiple of 256 weights."""
_EIGHT: Final = 8
"""With this many experts, as in Mixtral, keys and values are in Q8_0 in a Q4_K_M file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Types:
    """The quantisation types of a file: matrices, output matrix, ``experts`` and ``embedding``.

    ``some`` is the type of the value and down matrices in about half of the layers.
    """

    matrix: str
    output: str
    some: str = ""
    experts: str = ""
    embedding: str = ""

    def of_values(self, layer: int, layers: int, experts: int) -> str:
        """The type of the matrix that gives values in ``layer``."""
        if self.some and experts == _EIGHT:
            return "Q8_0"
        return self._some(layer, layers) or self.matrix

    def of_down(self, layer: int, layers: int, *, of_experts: bool = False) -> str:
        """The type of the down projection."""
        plain = self.experts or self.matrix if of_experts else self.matrix
        return self._some(layer, layers) or plain

    def _some(self, layer: int, layers: int) -> str:
        eighth = layers // 8
        more = layer < eighth or layer >= 7 * layers // 8 or (layer - eighth) % 3 == 2
        return self.some if more else ""


_TYPES: Final = {
    "q4k": Types(matrix="Q4_K", output="Q6_K"),
    "q4_k_m": Types(matrix="Q4_K", output="Q6_K", some="Q6_K"),
    "q5_k_m": Types(matrix="Q5_K", output="Q6_K", some="Q6_K"),
    "q6_k": Types(matrix="Q6_K", output="Q6_K"),
    "q4_0": Types(matrix="Q4_0", output="Q6_K"),
    "q8": Types(matrix="Q8_0", output="Q8_0"),
    "f16": Types(matrix="F16", output="F16"),
}
SUFFIXES: Final = tuple(_TYPES)
"""The suffixes that a name may have."""
_UNQUANTISED: Final = "f16"


@dataclass(frozen=True, slots=True, kw_only=True)
class StateShape:
    """A recurrent layer's replacement for attention: ``inner`` values in ``heads``, with a state of ``width`` for each.

    Keys have ``groups`` of that width, and a short convolution has ``kernel``; each head gets ``scalars`` values per
    row.
    """

    inner: int
    heads: int
    groups: int
    width: int
    kernel: int
    scalars: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentShape:
    """Attention with one latent vector for all heads: ``rank`` values, and ``rope`` values that encode the position.

    Queries are computed through ``query_rank`` values (0: directly); each head's query has ``plain`` and ``rope`` values,
    and its result ``value``.
    """

    query_rank: int
    rank: int
    rope: int
    plain: int
    value: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerKind:
    """How some layers differ from the rest of the shape. ``gate`` counts values per head that multiply the output of
    attention; without ``has_values`` the keys are the values, without ``has_cells`` keys and values are those of
    another layer. A layer with a ``state`` does not attend. ``window`` is the number of tokens of a sliding window."""

    heads: int | None = None
    kv_heads: int | None = None
    head_width: int | None = None
    gate: int = 0
    has_values: bool = True
    has_cells: bool = True
    attends: bool = True
    state: StateShape | None = None
    forward: Literal["experts", "dense", "none"] | None = None
    feed_forward: int | None = None
    window: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderShape:
    """The encoder of a model that ``sees`` or ``hears``: a file of ``file_bytes`` that turns a picture into ``patches``
    of ``width``.

    Its ``layers`` have a feed-forward width of ``feed_forward``. ``source`` says where the figures are from.
    """

    sees: bool
    file_bytes: int
    layers: int
    patches: int
    width: int
    feed_forward: int
    source: str
    hears: bool = False

    @property
    def memory_bytes(self) -> int:
        """Memory of the process that has it loaded."""
        return memory_bytes(self.file_bytes, self.patches, self.width, self.feed_forward)

    @property
    def picture_flop(self) -> float:
        """Operations to encode a picture."""
        return picture_flop(self.layers, self.patches, self.width, self.feed_forward)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """The sizes of a model; ``feed_forward`` is that of one expert where there are experts. ``source`` says where they
    are from.

    In a mixture of experts the first ``dense_layers`` have a feed-forward of ``dense_feed_forward`` instead, and the
    others one of ``shared_feed_forward`` next to the experts, which compute on ``expert_width`` values, converted from
    the hidden state and back by two matrices (0: on the hidden state itself). Where layers are of several ``kinds``,
    ``pattern`` names each layer's kind with a letter, and repeats. A feed-forward that is not ``gated`` has two
    matrices. Windows begin at multiples of ``cut_multiple``. Each layer may take ``layer_inputs`` values in addition to
    the hidden state, from a table with a row for each token. A ``popular`` model is one that many people ask for. Its
    file of about four bits is ``hub`` by name and has ``file_bytes``, where that is known; ``also`` are other models of
    this shape. ``file`` has the types of the only file that exists; ``expert_bias`` and ``sinks`` are of gpt-oss:
    biases of each expert, one a head. With ``latent`` attention ``kv_heads`` and ``head_width`` mean nothing. All
    layers except the last of a period of the architecture attend to a ``window`` of tokens. Its published files come
    with an ``encoder``, if there is one.
    """

    version: int
    name: str
    source: str
    architecture: str
    layers: int
    width: int
    heads: int
    kv_heads: int
    head_width: int
    feed_forward: int
    vocabulary: int
    context_tokens: int
    experts: int
    experts_used: int
    attention_bias: bool
    head_norms: bool
    tied: bool = False
    dense_layers: int = 0
    dense_feed_forward: int = 0
    shared_feed_forward: int = 0
    expert_width: int = 0
    pattern: str = ""
    kinds: Mapping[str, LayerKind] = field(default_factory=dict)
    gated: bool = True
    cut_multiple: int = 1
    layer_inputs: int = 0
    popular: bool = True
    hub: str = ""
    file_bytes: int = 0
    also: tuple[str, ...] = ()
    file: Types | None = None
    expert_bias: bool = False
    sinks: bool = False
    latent: LatentShape | None = None
    window: int = 0
    encoder: EncoderShape | None = None

    def kind_of(self, layer: int) -> LayerKind:
        """The kind of layer ``layer``."""
        kind = self.kinds[self.pattern[layer % len(self.pattern)]] if self.pattern else LayerKind()
        if self.window and (layer + 1) % SUPPORTED[self.architecture].sliding_period:
            kind = replace(kind, window=self.window)
        if kind.forward is not None:
            return kind
        has_experts = self.experts > 0 and layer >= self.dense_layers
        return replace(kind, forward="experts" if has_experts else "dense")


def profiles_directory() -> Path:
    """The directory ``profiles/``: next to the code in an installed package, next to the package in a checkout."""
    package = Path(__file__).resolve().parent.parent
    installed = package / "_profiles"
    return installed if installed.is_dir() else package.parent / "profiles"


def shape_names() -> tuple[str, ...]:
    """The models with a built-in shape, without suffixes, smallest name first."""
    return tuple(sorted(path.stem for path in (profiles_directory() / "models").glob("*.json")))


def popular_shapes() -> tuple[str, ...]:
    """The popular ones among ``shape_names``, without those that exist for published figures."""
    return tuple(name for name in shape_names() if read_shape(name).popular)


def _near(name: str) -> str:
    """The names closest to ``name``: a list of all names would fill the screen and hide the error."""
    near = get_close_matches(name, shape_names(), n=4)
    return f", but {', '.join(near)}" if near else ""


def shape(name: str) -> ModelProfile:
    """The profile of a model by name, such as ``llama3-70b`` or ``llama3-70b-q8``. Raises ``ConfigError``."""
    model, suffix = _split(name)
    if model not in shape_names():
        suffixes = ", ".join(f"-{known}" for known in _TYPES)
        raise ConfigError(
            f"no built-in model shape '{name}'{_near(model)}; 'primad fit' names them, as in llama3-70b, each also with "
            f"{suffixes} as a suffix"
        )
    found, types = read_shape(model), _TYPES[suffix]
    if found.file is not None and suffix != _UNQUANTISED:
        return _profile(found, found.file, found.file.experts)
    return _profile(found, types, f"{types.matrix}_M" if types.some else types.matrix)


def _split(name: str) -> tuple[str, str]:
    """The model and the suffix of ``name``; the plain suffix if it has none."""
    stem, _, last = name.lower().rpartition("-")
    return (stem, last) if last in _TYPES and name.lower() not in shape_names() else (name.lower(), _PLAIN)


def sizes_of(name: str) -> Shape | None:
    """The sizes of the model ``name``, as in ``shape``; None if there is no such model."""
    model, _ = _split(name)
    return read_shape(model) if model in shape_names() else None


@cache
def read_shape(name: str) -> Shape:
    """The sizes of one of ``shape_names``, whose file is read once. Raises ``ConfigError`` for a damaged file."""
    path = profiles_directory() / "models" / f"{name}.json"
    try:
        found = msgspec.json.decode(path.read_bytes(), type=Shape)
    except (OSError, msgspec.MsgspecError) as exc:
        raise ConfigError(f"{path}: not a model shape: {exc}") from exc
    if found.version != PROFILES_VERSION:
        raise ConfigError(f"{path}: format version {found.version}; this primad reads version {PROFILES_VERSION}")
    return found


def _profile(model: Shape, types: Types, named: str) -> ModelProfile:
    kinds = [model.kind_of(layer) for layer in range(model.layers)]
    table = Counter(_matrix(types.output, model.vocabulary, model.width))
    table["F32"] += 4 * model.width
    attending = [kind for kind in kinds if kind.attends]
    widths = [_cell_values(model, kind) // (1 if model.latent else 2 * _kv_heads(model, kind)) for kind in attending]
    widest = max(_queries(model, kind) for kind in attending)
    sharing = sum(not kind.has_cells for kind in kinds)
    inputs, tail_layers = model.layer_inputs * model.layers, sharing + 2 if sharing else _tail_of_both(kinds)
    stand_in = _stand_in(model, kinds, types) if any(kind.state for kind in kinds) else None
    sent = (model.layers - tail_layers) // model.cut_multiple * model.cut_multiple
    embedding = types.output if model.tied and types.some else types.embedding or types.matrix
    looked_up = Counter(_matrix(embedding, model.vocabulary, model.width))
    if inputs:
        looked_up += Counter(_matrix(types.matrix, model.vocabulary, inputs))
        looked_up += Counter(_matrix(types.matrix, model.width, inputs))
    return ModelProfile(
        name=f"{model.name} {named}",
        architecture=model.architecture,
        layers=tuple(_layer(model, kind, types, layer, widest) for layer, kind in enumerate(kinds)),
        embedding_bytes=looked_up.total(),
        output_bytes_by_type=dict(table),
        tied=model.tied,
        width=model.width,
        vocabulary=model.vocabulary,
        context_tokens=model.context_tokens,
        experts=model.experts,
        experts_used=model.experts_used,
        kv_head_width=math.gcd(*widths),
        cut_multiple=model.cut_multiple,
        query_width=widest,
        tail_layers=tail_layers,
        beside_values=model.width + model.layer_inputs * sent + 1 if inputs else 0,
        stand_in=stand_in,
    )


def _tail_of_both(kinds: Sequence[LayerKind]) -> int:
    """The smallest number of last layers that includes one with attention and one with a state, if some have a state."""
    found = [[i for i, kind in enumerate(kinds) if has(kind)] for has in (lambda kind: kind.attends, _has_state)]
    return len(kinds) - min(each[-1] for each in found) if all(found) else 1


def _has_state(kind: LayerKind) -> bool:
    return kind.state is not None


def _stand_in(model: Shape, kinds: Sequence[LayerKind], types: Types) -> LayerProfile:
    """The layer that may stand in after the layers of a window: the smallest possible weights, and one KV head."""
    layers = [_layer(model, kind, types, layer, 0) for layer, kind in enumerate(kinds)]
    weights = [sum(map(_count, (each.bytes_by_type, each.expert_bytes_by_type))) for each in layers]
    return LayerProfile(
        bytes_by_type={"IQ1_S": math.ceil(max(weights) * bytes_per_weight("IQ1_S"))},
        expert_bytes_by_type={},
        kv_bytes_per_token=max(
            each.kv_bytes_per_token // _kv_heads(model, kind) for each, kind in zip(layers, kinds, strict=True)
        ),
        state_bytes=max(each.state_bytes for each in layers),
    )


def _count(bytes_by_type: Mapping[str, int]) -> float:
    """The number of weights in these bytes."""
    return sum(size / bytes_per_weight(kind) for kind, size in bytes_by_type.items())


def _queries(model: Shape, kind: LayerKind) -> int:
    """Channels of all heads' queries, as they meet the KV cache."""
    width = model.latent.rank + model.latent.rope if model.latent else kind.head_width or model.head_width
    return (kind.heads or model.heads) * width


def _kv_heads(model: Shape, kind: LayerKind) -> int:
    return kind.kv_heads or model.kv_heads


def _cell_values(model: Shape, kind: LayerKind) -> int:
    """Values of a token in the KV cache of a layer; for a latent vector llama.cpp reads the values from the keys."""
    if model.latent is not None:
        return model.latent.rank + model.latent.rope
    return 2 * _kv_heads(model, kind) * (kind.head_width or model.head_width)


def _layer(model: Shape, kind: LayerKind, types: Types, layer: int, widest: int) -> LayerProfile:
    has_experts, state = kind.forward == "experts", kind.state
    kv_bytes = _cell_values(model, kind) * KV_VALUE_BYTES
    makes_inputs = _matrix(types.matrix, model.layer_inputs, model.width) if model.layer_inputs else {}
    return LayerProfile(
        bytes_by_type=_shared_bytes(model, kind, types, layer),
        expert_bytes_by_type=_expert_bytes(model, types, layer) if has_experts else {},
        kv_bytes_per_token=kv_bytes if kind.attends and kind.has_cells else 0,
        state_bytes=0 if state is None else state_bytes(state.kernel, state.inner, state.groups, state.width),
        row_values=0 if state is None else recurrent_values(state.inner, state.groups, state.width, model.width),
        adapter_bytes=sum(makes_inputs.values()),
        adapter_reads=makes_inputs,
        attends=kind.attends,
        query_width=_queries(model, kind) if _queries(model, kind) < widest else 0,
        window_tokens=kind.window,
    )


def _expert_bytes(model: Shape, types: Types, layer: int) -> dict[str, int]:
    """Bytes by type of all experts of a layer."""
    matrix, down = types.experts or types.matrix, types.of_down(layer, model.layers, of_experts=True)
    width = model.expert_width or model.width
    sizes = Counter(_feed_forward_bytes(model, matrix, down, model.feed_forward, model.experts, width))
    if model.expert_bias:
        sizes["F32"] += 4 * model.experts * (2 * model.feed_forward + model.width)
    return dict(sizes)


def _shared_bytes(model: Shape, kind: LayerKind, types: Types, layer: int) -> dict[str, int]:
    """Bytes by type of the weights of one layer that every row uses."""
    sizes: Counter[str] = Counter()
    matrix, f32 = types.matrix, 2 * model.width
    if kind.attends and model.latent is not None:
        sizes.update(_latent_bytes(model, model.latent, matrix))
        f32 += model.latent.query_rank + model.latent.rank
    elif kind.attends:
        width = kind.head_width or model.head_width
        queries, keys = (kind.heads or model.heads) * width, (kind.kv_heads or model.kv_heads) * width
        gates = kind.gate * queries // width
        sizes.update(_matrix(matrix, queries + gates + keys * kind.has_cells, model.width))
        if kind.has_values and kind.has_cells:
            sizes.update(_matrix(types.of_values(layer, model.layers, model.experts), keys, model.width))
        sizes.update(_matrix(matrix, model.width, queries))
        f32 += queries + 2 * keys if model.attention_bias else 0
        f32 += 2 * width if model.head_norms else 0
        f32 += model.width + (kind.heads or model.heads) if model.sinks else 0
    if (state := kind.state) is not None:
        mixed = state.inner + 2 * state.groups * state.width
        sizes.update(_matrix(matrix, mixed + state.inner + state.scalars * state.heads, model.width))
        sizes.update(_matrix(matrix, model.width, state.inner))
        f32 += state.kernel * mixed + 3 * state.heads + state.inner // state.heads
    f32 += (model.width + model.sinks) * model.experts if kind.forward == "experts" else 0
    sizes["F32"] += 4 * f32
    if model.layer_inputs:
        sizes.update(_matrix(matrix, model.layer_inputs, model.width))
        sizes.update(_matrix(matrix, model.width, model.layer_inputs))
    dense = kind.feed_forward or (model.dense_feed_forward if model.experts else model.feed_forward)
    forward = {"experts": model.shared_feed_forward, "dense": dense, "none": 0}[kind.forward or "none"]
    if forward:
        sizes.update(_feed_forward_bytes(model, matrix, types.of_down(layer, model.layers), forward, 1, model.width))
    if kind.forward == "experts" and model.expert_width:
        sizes.update(_matrix(matrix, model.expert_width, model.width))
        sizes.update(_matrix(matrix, model.width, model.expert_width))
    return dict(sizes)


def _latent_bytes(model: Shape, latent: LatentShape, matrix: str) -> Counter[str]:
    """Bytes by type of the matrices of latent attention."""
    queries = model.heads * (latent.plain + latent.rope)
    sizes = Counter(_matrix(matrix, latent.rank + latent.rope, model.width))
    if latent.query_rank:
        sizes.update(_matrix(matrix, latent.query_rank, model.width))
    sizes.update(_matrix(matrix, queries, latent.query_rank or model.width))
    sizes.update(_matrix(matrix, model.heads * latent.rank, latent.plain))
    sizes.update(_matrix(matrix, model.heads * latent.value, latent.rank))
    sizes.update(_matrix(matrix, model.width, model.heads * latent.value))
    return sizes


def _feed_forward_bytes(
    model: Shape, matrix: str, down: str, feed_forward: int, copies: int, width: int
) -> dict[str, int]:
    """Bytes by type of gate, up and down of ``copies`` feed-forward networks on ``width`` values; some have no gate."""
    if not copies:
        return {}
    sizes: Counter[str] = Counter()
    sizes.update(_matrix(matrix, (2 if model.gated else 1) * copies * feed_forward, width))
    sizes.update(_matrix(down, copies * width, feed_forward))
    return dict(sizes)


def _matrix(kind: str, rows: int, columns: int) -> dict[str, int]:
    """Bytes of a matrix of ``rows`` times ``columns`` weights, by the type that it really gets."""
    if columns % _BLOCK.get(kind, 1):
        kind = _WITHOUT_WHOLE_BLOCKS[kind]
    return {kind: round(rows * columns * bytes_per_weight(kind))}
