"""Where a model may be cut into windows, and why one cannot be."""

from __future__ import annotations

import math
from typing import Final

from primad.errors import ModelError
from primad.gguf.architecture import Architecture, Recurrent, Sliding
from primad.gguf.architectures.layers import (
    attending_layers,
    block_count,
    counts_by_layer,
    indexed_layers,
    layer_count,
    layer_inputs,
    recurrent_layers,
    sharing_layers,
    sliding_layers,
)
from primad.gguf.architectures.stand_ins import kinds_of, layers_of_both
from primad.gguf.architectures.table import (
    DEEPSEEK2,
    INDEXER_TYPES,
    PER_LAYER,
    REFUSED,
    SLIDING_KEYS,
    NotCutError,
    known,
    refusal,
)
from primad.gguf.architectures.tensors import LAYER_INPUTS, LAYER_PROJECTION, TensorRole, layer_of, tensor_roles
from primad.gguf.constants import GGUFValueType
from primad.gguf.header import Header, scalar_value

_FOREIGN: Final = (
    ("attention.key_length_swa", "sliding layers with heads of another size"),
    ("attention.value_length_swa", "sliding layers with heads of another size"),
    ("rope.dimension_count_swa", "sliding layers that rotate another number of dimensions"),
    ("rope.dimension_sections", "rotary positions of several sections"),
    ("deepstack_mapping", "layers that take image features"),
    ("pooling_type", "pooled output: this is an embedding model"),
    ("classifier.output_labels", "a classifier's output"),
)


LEFT_TO_TRIAL: Final = frozenset(key for key, _ in _FOREIGN) - {"pooling_type", "classifier.output_labels"}
"""Keys that prevent cutting with an entry of the table, but with which a derived entry is tried."""


def why_whole(header: Header) -> str:
    """Why the model cannot be cut. Empty if it can, and for a file that is not a complete model: that is reported where
    it is read.
    """
    try:
        cuttable(header)
    except NotCutError as exc:
        return exc.reason
    except ModelError:
        pass
    return ""


def cuttable(header: Header) -> Architecture:
    """The entry for the model, after checking that this very model can be cut exactly.

    Raises ``ModelError`` naming the architecture, the key or the tensor that stands in the way, and what to do.
    """
    name = header.text("general.architecture")
    architecture = known(header)
    if architecture is None:
        raise refusal(header, f"architecture {name[:64]!r}", REFUSED.get(name, "it is not known to be exact"))
    layers = layer_count(header)
    if not architecture.predicts and _is_set(header, f"{name}.nextn_predict_layers"):
        raise refusal(
            header, f"key '{name}.nextn_predict_layers'", "its graph has no layers for multi-token prediction"
        )
    for key, meaning in (*_FOREIGN, *architecture.refuses):
        if key not in architecture.knows and _is_set(header, f"{name}.{key}"):
            raise refusal(header, f"key '{name}.{key}'", f"it means {meaning}")
    if header.values.get(f"{name}.attention.causal", scalar_value(GGUFValueType.BOOL, True)).raw == b"\0":
        raise refusal(header, f"key '{name}.attention.causal'", "attention that is not causal needs the whole prompt")
    if "general.tensor_extra.name" in header.values:
        raise refusal(header, "key 'general.tensor_extra.name'", "it sets the precision of tensors by layer number")
    _check_arrays(header, architecture)
    check_count(header, architecture, layers)
    _check_inputs(header, layers)
    slides = sliding_layers(header)
    if name == "laguna" and any(slides) and slides != tuple(layer % 4 > 0 for layer in range(layers)):
        reason = "llama.cpp rotates layers that do not slide as a window's first layer does"
        raise refusal(header, f"key '{name}.{SLIDING_KEYS}_pattern'", reason)
    roles = tensor_roles(header)
    present = {layer_of(tensor) for tensor, role in roles.items() if role is TensorRole.LAYER}
    missing = sorted(set(range(layers)) - present)
    if missing:
        raise ModelError(f"{header.path}: layer {missing[0]} has no tensors; the file is not a complete model")
    needed = ["token_embd.weight"]
    if architecture.output_norm:
        needed.append(f"{architecture.output_norm}.weight")
    if not architecture.tied_output_fallback:
        needed.append("output.weight")
    for tensor in needed:
        if tensor not in header.tensors:
            raise ModelError(f"{header.path}: tensor '{tensor}' is missing; the file is not a complete model")
    return architecture


def cut_points(header: Header) -> range:
    """The layers at which windows after the first may begin; any for a model that cannot be cut.

    Raises ``ModelError`` as ``sliding_layers``.
    """
    layers, architecture, multiple = layer_count(header), known(header), _multiple(header)
    chooses = indexed_layers(header) if architecture is not None and architecture.takes_over else ()
    if not any(chooses):
        return range(multiple, layers - tail_layers(header) + 1, multiple)
    for step in range(1, layers):
        for first in (step, *range(1, step)):
            if all(chooses[first::step]):
                return range(first, layers, step)
    return range(layers, layers, layers)


def cut_multiple(header: Header) -> int:
    """How many layers lie between two ``cut_points`` that follow each other."""
    return cut_points(header).step


def _multiple(header: Header) -> int:
    """The least multiple of layers at which each window that begins there has what it needs."""
    architecture = known(header)
    if architecture is None:
        return 1
    step = header.count(f"{architecture.name}.{architecture.step}", 1) if architecture.step else 1
    multiple = base = math.lcm(architecture.cut_multiple, max(step, 1))
    slides = sliding_layers(header)
    behind = layer_count(header) - tail_layers(header) + 1 if architecture.shares_cells else len(slides)
    needs = architecture.sliding is Sliding.NEEDED or (architecture.sliding is Sliding.NEEDED_IF_ANY and any(slides))
    needed = [slides] if needs else []
    if architecture.needs and f"{architecture.name}.{architecture.needs}" in header.values:
        needed.append(tuple(map(bool, counts_by_layer(header, architecture.needs, layer_count(header)))))
    if architecture.skips_attention:
        needed.append(attending_layers(header))
    if architecture.needs_indexer and any(indexed_layers(header)):
        needed.append(indexed_layers(header))
    if architecture.recurrent is Recurrent.TENSORS:
        needed += [each for each in (recurrent_layers(header), attending_layers(header)) if any(each)]
    needed += [each for each in kinds_of(header) if not any(each)]  # which have no stand-in
    while True:
        multiple = _multiple_with([each[:behind] for each in needed], multiple, base)
        if multiple >= len(slides) or _is_cut_point(header, architecture, multiple, slides=any(slides)):
            return multiple
        multiple += base


def tail_layers(header: Header) -> int:
    """The minimum number of layers of the tail of several windows. Raises ``ModelError`` as ``sharing_layers``."""
    sharing = sharing_layers(header)
    return sharing + 2 if sharing else layers_of_both(header)


def _is_cut_point(header: Header, architecture: Architecture, multiple: int, *, slides: bool) -> bool:
    """Whether windows may begin at each multiple of ``multiple``, given what llama.cpp derives from a window's layers.

    Of a SmallThinker window with 4 layers it rotates all, not three of four. If some layers have no attention, the
    first layer of a window must have heads, since llama.cpp takes widths from them.
    """
    layers = layer_count(header)
    heads = header.values.get(f"{architecture.name}.attention.head_count")
    if architecture.skips_attention and heads is not None and heads.is_array:
        return all(counts_by_layer(header, "attention.head_count", layers)[multiple::multiple])
    return architecture.name != "smallthinker" or not slides or (multiple != 4 and layers % multiple != 4)


def multiple_that_slides(header: Header) -> int:
    """Windows that begin at multiples of this number all have a sliding layer, where the graph always slides.

    1 where it does not. Raises ``ModelError`` as ``sliding_layers``.
    """
    architecture = known(header)
    always = architecture is not None and architecture.sliding is Sliding.ALWAYS
    return _multiple_with([sliding_layers(header)], 1, 1) if always else 1


def _multiple_with(needed: list[tuple[bool, ...]], multiple: int, base: int) -> int:
    """The least multiple of ``base``, from ``multiple`` on, at which each of ``needed`` has a layer in every window."""
    layers = max(map(len, needed), default=0)
    while multiple < layers and not all(
        any(each[first : first + multiple]) for each in needed for first in range(0, layers, multiple)
    ):
        multiple += base
    return multiple


def check_count(header: Header, architecture: Architecture, count: int) -> None:
    """Refuse a whole model, or a window, of ``count`` layers for which llama.cpp takes another graph."""
    name, layers = architecture.name, layer_count(header)
    if header.derived is not None:
        return  # it was tried with every number of layers
    if name == "gemma3" and 62 in (count, layers):
        width, heads = header.count("gemma3.embedding_length"), header.count("gemma3.attention.head_count")
        head = header.count("gemma3.attention.key_length", width // max(heads, 1))
        if width // max(heads, 1) != head:
            raise refusal(header, "gemma3 with 62 layers", "llama.cpp takes its attention scale from that number")
    if name == "exaone4" and 64 in (count, layers):
        raise refusal(header, "exaone4 with 64 layers", "llama.cpp makes layers slide at that number only")
    if name == "command-r" and layers >= 64:
        raise refusal(header, "command-r with 64 layers", "llama.cpp expects norms from that number on only")
    if name == "gemma2" and 46 in (count, layers):
        raise refusal(header, "gemma2 with 46 layers", "llama.cpp takes its attention scale from that number")
    if name in DEEPSEEK2 and not is_deepseek2_lite(header, layers) and is_deepseek2_lite(header, count):
        raise ModelError(
            f"{header.path}: llama.cpp takes {count} layers of '{name}' for the lite model; choose other windows"
        )


def _check_inputs(header: Header, layers: int) -> None:
    each = layer_inputs(header)
    if not each:
        return
    width = header.count(f"{header.text('general.architecture')}.embedding_length")
    tokens = header.tensors.get("token_embd.weight")
    vocabulary = tokens.shape[-1] if tokens is not None else 0
    shapes = {LAYER_INPUTS: (each * layers, vocabulary), LAYER_PROJECTION: (width, each * layers)}
    for tensor, shape in shapes.items():
        if tensor not in header.tensors or header.tensors[tensor].shape != shape:
            raise ModelError(
                f"{header.path}: tensor '{tensor}' has not {each} values for each of {layers} layers; the file is not a "
                "complete model"
            )


def is_deepseek2_lite(header: Header, layers: int) -> bool:
    """Whether llama.cpp takes that many layers for DeepSeek V2 Lite or a like model, whose queries are one matrix."""
    return layers in (26, 27) or (layers == 48 and vocabulary_size(header) == 128_256)


def counts_vocabulary(header: Header) -> bool:
    """Whether llama.cpp distinguishes the model from others by the size of its vocabulary."""
    return header.text("general.architecture") in DEEPSEEK2 and vocabulary_size(header) in (128_256, 154_880)


def vocabulary_size(header: Header) -> int:
    tokens = header.values.get("tokenizer.ggml.tokens")
    name = header.text("general.architecture")
    return header.count(f"{name}.vocab_size", len(tokens) if tokens is not None and tokens.is_array else 0)


def _check_arrays(header: Header, architecture: Architecture) -> None:
    name, layers = architecture.name, block_count(header)
    for key, value in header.values.items():
        if not value.is_array or not (key.startswith(f"{name}.") or key in architecture.by_layer):
            continue
        short = key.removeprefix(f"{name}.")
        is_text = value.item_type == GGUFValueType.STRING
        if short in architecture.by_layer:
            of_all = (layers, layer_count(header)) if short == INDEXER_TYPES else (layers,)
            if len(value) not in of_all or is_text:
                raise refusal(header, f"key '{key}'", f"one value for each of {layers} layers is expected")
            if architecture.skips_attention and short == "feed_forward_length" and 0 in value.items():
                raise refusal(header, f"key '{key}'", "a layer without a feed-forward network is left out of the graph")
        elif short in PER_LAYER:
            if len(value) != layers or is_text or len(set(value.items())) != 1:
                raise refusal(header, f"key '{key}'", f"the same value for each of {layers} layers is expected")
        elif short not in ("attention.sliding_window_pattern", *architecture.knows) and len(value) == layers:
            raise refusal(header, f"key '{key}'", "it has one value a layer and its use is not known")


def _is_set(header: Header, key: str) -> bool:
    value = header.values.get(key)
    if value is None:
        return False
    return any(value.items()) if value.is_array else bool(value.scalar())
