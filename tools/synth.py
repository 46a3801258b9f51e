"""Write a synthetic GGUF: a supported architecture in any shape, random weights, a small valid tokenizer.

    .venv/bin/python tools/synth.py --preset 1b-q4k --out 1b.gguf
    .venv/bin/python tools/synth.py --architecture qwen3moe --out tiny.gguf
    .venv/bin/python tools/synth.py --preset 1b-q4k --vocabulary from:SmolLM2.gguf --out 1b.gguf

Quantised weights are random block bytes with scales chosen so that activations keep their magnitude. No quantiser runs,
so a model is written at the speed of the disk, 8 MiB at a time, and every layer has different bytes. The layers' output
outweighs the embedding, so greedy text varies instead of repeating its last token. The text means nothing.
"""

from __future__ import annotations

import argparse
import math
import struct
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO, Final

import numpy as np
from gguf import GGML_QUANT_SIZES, GGUFValueType
from gguf import GGMLQuantizationType as Type

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from primad.gguf.header import MAGIC, Value, array_value, read_header, scalar_value
from tools.lab import zoo

ALIGNMENT: Final = 32
_ADDED_OR_MULTIPLIED: Final = frozenset(("ffn_gate_inp", "ssm_d", "time_mix_first"))
"""Matrices that llama.cpp only accepts in float32."""
CHUNK_BYTES: Final = 8 << 20
BYTE_TOKENS: Final = 259
"""Smallest vocabulary: <unk>, <s>, </s> and one token per byte."""
FEW_TOKENS: Final = 4096
"""Number of first tokens of a vocabulary that cover all bytes and common words: a head takes half a second to scan all.
"""
TEMPLATE: Final = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """The sizes of a model; counts of elements. ``tied`` leaves out ``output.weight``.

    The rows of a router have equal norms, so it picks all experts alike. With a ``router_spread`` above 0 the
    logarithms of the norms have that spread, and rows with larger norms win more often: with 0.4 and 8 of 128 experts,
    a quarter of them gets 60 % of all picks.
    """

    architecture: str
    width: int = 64
    layers: int = 6
    heads: int = 4
    heads_kv: int = 2
    head_width: int = 16
    feed_forward: int = 128
    vocabulary: int = 320
    context: int = 4096
    experts: int = 4
    experts_used: int = 2
    expert_feed_forward: int = 64
    leading_dense: int = 0
    sliding_window: int = 0
    rope_base: float = 10_000.0
    tied: bool = False
    router_spread: float = 0.0

    def sizes(self) -> dict[str, int]:
        """The sizes that the letters in ``_LAYERS`` stand for."""
        q, k = self.heads * self.head_width, self.heads_kv * self.head_width
        half = self.head_width // 2
        return {
            "d": self.width, "q": q, "k": k, "Q": q + 2 * k, "h": self.head_width, "n": self.heads, "f": self.feed_forward,
            "F": 2 * self.feed_forward, "e": self.experts, "x": self.expert_feed_forward, "s": self.expert_feed_forward,
            "r": half, "l": 2 * self.head_width, "a": 2 * self.head_width + half, "b": self.heads * (self.head_width + half),
        }  # fmt: skip


# Tensors of a layer: name and dimensions in ggml order; ``.weight`` unless the name says otherwise.
_NORM = "attn_norm:d ffn_norm:d "
_BIASED = _NORM + "attn_norm.bias:d ffn_norm.bias:d "
_POST = "post_attention_norm:d post_ffw_norm:d "
_ATTENTION = "attn_q:d,q attn_k:d,k attn_v:d,k attn_output:q,d "
_QKV_BIAS = "attn_q.bias:q attn_k.bias:k attn_v.bias:k "
_HEAD_NORMS = "attn_q_norm:h attn_k_norm:h "
_ROW_NORMS = "attn_q_norm:q attn_k_norm:k "
_GATED = "ffn_gate:d,f ffn_up:d,f ffn_down:f,d "
_PLAIN = "ffn_up:d,f ffn_down:f,d "
_EXPERTS = "ffn_gate_inp:d,e ffn_gate_exps:d,x,e ffn_up_exps:d,x,e ffn_down_exps:x,d,e "
_SHARED_EXPERT = "ffn_gate_shexp:d,s ffn_up_shexp:d,s ffn_down_shexp:s,d "
_MLA = "attn_kv_a_norm:l attn_kv_a_mqa:d,a attn_k_b:h,l,n attn_v_b:l,h,n attn_output:q,d "
_LAYERS: Final[dict[str, str]] = {
    "llama": _NORM + _ATTENTION + _GATED,
    "llama-moe": _NORM + _ATTENTION + _EXPERTS,
    "mistral3": _NORM + _ATTENTION + _GATED,
    "qwen2": _NORM + _ATTENTION + _QKV_BIAS + _GATED,
    "qwen2moe": _NORM + _ATTENTION + _QKV_BIAS + _EXPERTS + _SHARED_EXPERT + "ffn_gate_inp_shexp:d",
    "qwen3": _NORM + _ATTENTION + _HEAD_NORMS + _GATED,
    "qwen3moe": _NORM + _ATTENTION + _HEAD_NORMS + _EXPERTS,
    "gemma3": _NORM + _POST + _ATTENTION + _HEAD_NORMS + _GATED,
    "phi3": _NORM + "attn_qkv:d,Q attn_output:q,d ffn_up:d,F ffn_down:f,d",
    "olmo2": _POST + _ATTENTION + _ROW_NORMS + _GATED,
    "olmoe": _NORM + _ATTENTION + _ROW_NORMS + _EXPERTS,
    "granite": _NORM + _ATTENTION + _GATED,
    "granitemoe": _NORM + _ATTENTION + _EXPERTS + _SHARED_EXPERT,
    "minicpm": _NORM + _ATTENTION + _GATED,
    "smollm3": _NORM + _ATTENTION + _GATED,
    "starcoder2": _BIASED + _ATTENTION + _QKV_BIAS + "attn_output.bias:d " + _PLAIN + "ffn_up.bias:f ffn_down.bias:d",
    "stablelm": _BIASED + _ATTENTION + _GATED,
    "internlm2": _NORM + _ATTENTION + _GATED,
    "arcee": _NORM + _ATTENTION + _PLAIN,
    "seed_oss": "attn_norm:d post_attention_norm:d " + _ATTENTION + _GATED,
    "exaone": _NORM + _ATTENTION + _GATED,
    "exaone4": _POST + _ATTENTION + _HEAD_NORMS + _GATED,
    "command-r": "attn_norm:d " + _ATTENTION + _GATED,
    "cohere2": "attn_norm:d " + _ATTENTION + _GATED,
    "gpt-oss": "attn_norm:d post_attention_norm:d " + _ATTENTION + _QKV_BIAS + "attn_output.bias:d attn_sinks:n "
    + _EXPERTS + "ffn_gate_inp.bias:e ffn_gate_exps.bias:x,e ffn_up_exps.bias:x,e ffn_down_exps.bias:d,e",
    "deepseek": _NORM + _ATTENTION + _EXPERTS + _SHARED_EXPERT,
    "deepseek2": _NORM + "attn_q_a_norm:l attn_q_a:d,l attn_q_b:l,b " + _MLA + _EXPERTS + _SHARED_EXPERT,
    "deepseek2-lite": _NORM + "attn_q:d,b " + _MLA + _EXPERTS + _SHARED_EXPERT,
    "dots1": _NORM + _ATTENTION + _HEAD_NORMS + _EXPERTS + _SHARED_EXPERT + "exp_probs_b.bias:e",
    "hunyuan-moe": _NORM + _ATTENTION + _HEAD_NORMS + _EXPERTS + _SHARED_EXPERT,
    "minimax-m2": _NORM + _ATTENTION + _ROW_NORMS + _EXPERTS + "exp_probs_b.bias:e",
}  # fmt: skip
_VARIANTS: Final = {"llama-moe": "llama", "deepseek2-lite": "deepseek2"}
"""Names for a second layout of one architecture."""
_UNTIED: Final = frozenset(
    ("qwen2moe", "olmo2", "olmoe", "stablelm", "internlm2", "gpt-oss", "dots1", "minimax-m2", "llama")
)
_EQUAL_HEADS: Final = frozenset(("olmoe", "dots1", "deepseek"))

_TINY_SLIDING: Final = {"gemma3": 24, "olmo2": 24, "cohere2": 24, "gpt-oss": 24}
_KEYS: Final[dict[str, dict[str, float | int | bool]]] = {
    "granite": {"embedding_scale": 12.0, "residual_scale": 0.22, "attention.scale": 0.25, "logit_scale": 4.0},
    "granitemoe": {"embedding_scale": 12.0, "residual_scale": 0.22, "attention.scale": 0.25, "logit_scale": 4.0},
    "mistral3": {"attention.temperature_scale": 0.1, "rope.scaling.original_context_length": 64},
    "phi3": {"rope.scaling.original_context_length": 64, "rope.scaling.attn_factor": 1.19},
    "gemma3": {"rope.freq_base_swa": 1000.0},
    "cohere2": {"logit_scale": 0.25},
    "command-r": {"logit_scale": 0.25},
    "gpt-oss": {"rope.scaling.factor": 32.0, "rope.scaling.original_context_length": 64},
    "deepseek": {"expert_shared_count": 1, "expert_weights_scale": 1.0},
    "deepseek2": {"expert_shared_count": 1, "expert_weights_scale": 2.5, "expert_weights_norm": True,
                  "rope.scaling.factor": 40.0, "rope.scaling.yarn_log_multiplier": 0.1,
                  "rope.scaling.original_context_length": 64},
    "dots1": {"expert_shared_count": 1, "expert_weights_scale": 2.5, "expert_weights_norm": True, "expert_gating_func": 2},
    "minimax-m2": {"expert_gating_func": 2},
}  # fmt: skip
_YARN: Final = frozenset(("gpt-oss", "deepseek2"))

PRESETS: Final[dict[str, Shape]] = {
    "1b-q4k": Shape(
        architecture="llama", width=2048, layers=16, heads=32, heads_kv=8, head_width=64, feed_forward=8192,
        vocabulary=128_256, context=131_072, rope_base=500_000.0, tied=True,
    ),
    "deep-q4k": Shape(
        architecture="llama", width=1024, layers=64, heads=16, heads_kv=1, head_width=64, feed_forward=4096,
        vocabulary=4096, context=8192,
    ),
    "3b-q4k": Shape(
        architecture="llama", width=3072, layers=28, heads=24, heads_kv=8, head_width=128, feed_forward=8192,
        vocabulary=128_256, context=131_072, rope_base=500_000.0, tied=True,
    ),
    "8b-q4k": Shape(
        architecture="llama", width=4096, layers=32, heads=32, heads_kv=8, head_width=128, feed_forward=14_336,
        vocabulary=128_256, context=8192, rope_base=500_000.0,
    ),
    "30b-a3b-q4k": Shape(
        architecture="qwen3moe", width=2048, layers=48, heads=32, heads_kv=4, head_width=128, feed_forward=6144,
        vocabulary=151_936, context=40_960, experts=128, experts_used=8, expert_feed_forward=768, rope_base=1_000_000.0,
    ),
}  # fmt: skip
PRESETS["30b-a3b-skewed-q4k"] = replace(PRESETS["30b-a3b-q4k"], router_spread=0.4)


def tiny(architecture: str) -> Shape:
    """Return a model of ``architecture`` for tests: 6 layers, well under 1 MB.

    ``llama-moe`` is Mixtral's layout, ``deepseek2-lite`` (26 or 27 layers) that of DeepSeek V2 Lite.
    """
    if architecture in zoo.ALL:
        return Shape(architecture=architecture, layers=zoo.layers_of(architecture), width=zoo.WIDTH)
    shape = Shape(architecture=architecture, tied=architecture not in _UNTIED)
    if architecture in _TINY_SLIDING:
        shape = replace(shape, sliding_window=_TINY_SLIDING[architecture])
    if architecture in _EQUAL_HEADS:
        shape = replace(shape, heads_kv=shape.heads)
    if architecture in ("deepseek", "deepseek2", "deepseek2-lite", "dots1"):
        shape = replace(shape, leading_dense=2)
    if architecture in ("hunyuan-moe", "olmoe", "minimax-m2", "llama-moe", "granitemoe"):
        shape = replace(shape, feed_forward=shape.expert_feed_forward)
    return replace(shape, heads_kv=1) if architecture.startswith("deepseek2") else shape


def has_experts(architecture: str) -> bool:
    """Whether a tiny model of ``architecture`` is a mixture of experts."""
    if architecture in zoo.ALL:
        return "expert_count" in zoo.ALL[architecture]
    return "ffn_gate_exps" in _LAYERS[architecture]


def write_model(
    path: Path,
    *,
    architecture: str = "llama",
    preset: str = "tiny",
    quantisation: str | None = None,
    seed: int = 0,
    vocabulary: str = "bytes",
    tokens: int | None = None,
    values: Mapping[str, Value] | None = None,
    is_empty: bool = False,
    words: Sequence[str] = (),
    **overrides: Any,
) -> Shape:
    """Write a model to ``path`` and return its shape.

    ``preset`` is ``tiny`` (of ``architecture``) or a name of ``PRESETS``; ``overrides`` replace fields of its
    ``Shape``. ``quantisation`` is ``q4_k_m`` or a ggml type's name; the default is ``q8_0`` for tiny models, ``q4_k_m``
    otherwise. ``vocabulary`` is ``bytes`` or ``from:FILE``, which takes the tokenizer, template and size of another
    GGUF, or only its first ``tokens``; the result is consistent if each merge has the position of its token. ``values``
    adds or replaces metadata. A vocabulary of bytes includes ``words``. The weights of an ``is_empty`` model are 0, and
    take no disk space on most file systems. The same arguments give the same bytes.
    """
    shape = replace(tiny(architecture) if preset == "tiny" else PRESETS[preset], **overrides)
    kinds = _Quantisation(quantisation or ("q8_0" if preset == "tiny" else "q4_k_m"))
    if vocabulary.startswith("from:"):
        source = read_header(Path(vocabulary.removeprefix("from:"))).values
        tokenizer = _first_tokens({key: each for key, each in source.items() if key.startswith("tokenizer.")}, tokens)
        shape = replace(shape, vocabulary=len(tokenizer["tokenizer.ggml.tokens"]))
    else:
        tokenizer = _byte_tokenizer(shape.vocabulary, words)
    given = dict(values or {})
    pairs = {**_metadata(shape), **given, **tokenizer, **given}  # as converters do, keys of the model come first
    tensors = list(_tensors(shape, kinds) if architecture not in zoo.ALL else _asked_tensors(pairs, shape, kinds))
    infos, offset = [], 0
    for tensor in tensors:
        infos.append(_info(tensor, offset))
        offset += -(-tensor.size_bytes // ALIGNMENT) * ALIGNMENT
    head = MAGIC + struct.pack("<IQQ", 3, len(tensors), len(pairs))
    head += b"".join(_text(key) + struct.pack("<I", value.type) + value.raw for key, value in pairs.items())
    head += b"".join(infos)
    with path.open("wb") as file:
        file.write(head + bytes(-len(head) % ALIGNMENT))
        if is_empty:
            file.truncate(file.tell() + offset)
            tensors.clear()
        for number, tensor in enumerate(tensors):
            _write_weights(file, tensor, np.random.Generator(np.random.SFC64([seed, number])))
    return shape


def _first_tokens(tokenizer: dict[str, Value], count: int | None) -> dict[str, Value]:
    """Return ``tokenizer`` without the tokens after the first ``count``, and the merges that produce them."""
    if count is None:
        return tokenizer
    fewer = len(tokenizer["tokenizer.ggml.tokens"]) - count
    return {
        key: array_value(value.item_type, value.items()[: len(value) - fewer]) if value.is_array else value
        for key, value in tokenizer.items()
    }


def layers_for(size_bytes: int, preset: str) -> int:
    """Smallest number of layers with which the weights of ``preset`` take ``size_bytes``."""
    layers = 1
    while weight_bytes(preset, layers) < size_bytes:
        layers += 1
    return layers


def weight_bytes(preset: str, layers: int) -> int:
    """Bytes of the weights of ``preset`` with another number of layers; the file is slightly larger."""
    tensors = _tensors(replace(PRESETS[preset], layers=layers), _Quantisation("q4_k_m"))
    return sum(tensor.size_bytes for tensor in tensors)


@dataclass(frozen=True, slots=True)
class _Tensor:
    name: str
    shape: tuple[int, ...]
    type: Type
    mean: float
    deviation: float
    row_spread: float = 0.0

    @property
    def size_bytes(self) -> int:
        block, block_bytes = GGML_QUANT_SIZES[self.type]
        return math.prod(self.shape) // block * block_bytes


@dataclass(frozen=True, slots=True)
class _Quantisation:
    """The type of each matrix: one for all, or llama.cpp's Q4_K_M mix."""

    name: str

    def pick(self, tensor: str, row: int, layer: int, layers: int) -> Type:
        kind = Type[self.name.upper()] if self.name != "q4_k_m" else Type.Q4_K
        if self.name == "q4_k_m":
            more = layer < layers // 8 or layer >= 7 * layers // 8 or (layer - layers // 8) % 3 == 2
            if tensor == "output" or (more and tensor in ("attn_v", "ffn_down", "ffn_down_exps")):
                kind = Type.Q6_K
        if row % GGML_QUANT_SIZES[kind][0] == 0:
            return kind
        return Type.Q8_0 if row % 32 == 0 else Type.F16


def _tensors(shape: Shape, kinds: _Quantisation) -> Iterator[_Tensor]:
    name, width, layers = _VARIANTS.get(shape.architecture, shape.architecture), shape.width, shape.layers
    scale = {"gemma3": math.sqrt(width), "minicpm": 12.0}
    embedding = 0.2 / float(_KEYS.get(name, {}).get("embedding_scale", scale.get(name, 1.0)))
    rows, root = (width, shape.vocabulary), math.sqrt(width)
    matrix, norm = ("output", 3 / (embedding * root)) if shape.tied else ("token_embd", 1.0)
    yield _Tensor("token_embd.weight", rows, kinds.pick(matrix, width, 0, layers), 0.0, embedding)
    yield _Tensor("output_norm.weight", (width,), Type.F32, norm, 0.1 * norm)
    if name in ("starcoder2", "stablelm"):
        yield _Tensor("output_norm.bias", (width,), Type.F32, 0.0, 0.1)
    if not shape.tied:
        yield _Tensor("output.weight", rows, kinds.pick("output", width, 0, layers), 0.0, 3 / root)
    if name in ("llama", "exaone", "arcee"):
        yield _Tensor("rope_freqs.weight", (shape.head_width // 2,), Type.F32, 2.0, 0.2)
    if name == "phi3":
        yield _Tensor("rope_factors_long.weight", (shape.head_width // 2,), Type.F32, 4.0, 0.2)
        yield _Tensor("rope_factors_short.weight", (shape.head_width // 2,), Type.F32, 1.0, 0.02)
    for layer in range(layers):
        yield from _layer_tensors(shape, kinds, layer)


def _asked_tensors(pairs: Mapping[str, Value], shape: Shape, kinds: _Quantisation) -> Iterator[_Tensor]:
    """Yield the tensors that llama.cpp asks for."""
    asked = {key: value for key, value in pairs.items() if not key.startswith("tokenizer.")}
    asked["tokenizer.ggml.model"] = _value("none")
    for name, dimensions in zoo.tensors_of(asked, has_both=shape.architecture in zoo.HAS_BOTH):
        is_layer = name.startswith("blk.")
        layer = int(name.split(".")[1]) if is_layer else 0
        stem, _, suffix = (name.split(".", 2)[2] if is_layer else name).rpartition(".")
        stem = stem or suffix  # some have no ".weight"
        if name == "token_embd.weight":
            yield _Tensor(name, dimensions, kinds.pick(stem, dimensions[0], 0, shape.layers), 0.0, 0.2)
        elif stem == "ssm_a":
            yield _Tensor(name, dimensions, Type.F32, -1.0, 0.1)
        elif len(dimensions) == 1 or suffix == "bias":
            yield _Tensor(name, dimensions, Type.F32, 0.0 if suffix == "bias" else 1.0, 0.1)
        elif any(part in stem for part in ("conv", "lerp", "norm")) or stem in _ADDED_OR_MULTIPLIED:
            yield _Tensor(name, dimensions, Type.F32, 0.0, 2 / math.sqrt(dimensions[0]))
        else:
            kind = kinds.pick(stem, dimensions[0], layer, shape.layers)
            yield _Tensor(name, dimensions, kind, 0.0, 2 / math.sqrt(dimensions[0]))


def _layer_tensors(shape: Shape, kinds: _Quantisation, layer: int) -> Iterator[_Tensor]:
    sizes = shape.sizes()
    specification = _LAYERS[shape.architecture]
    if layer < shape.leading_dense:
        specification = " ".join(s for s in specification.split() if not s.startswith(("ffn_", "exp_")))
        specification += " ffn_norm:d " + _GATED
    for entry in specification.split():
        name, _, letters = entry.partition(":")
        dimensions = tuple(sizes[letter] for letter in letters.split(","))
        stem, _, suffix = name.partition(".")
        full = f"blk.{layer}.{stem}.{suffix or 'weight'}"
        if suffix == "bias":
            yield _Tensor(full, dimensions, Type.F32, 0.0, 0.03)
        elif len(dimensions) == 1:
            mean = 0.0 if stem in ("attn_sinks", "ffn_gate_inp_shexp") else 1.0
            yield _Tensor(full, dimensions, Type.F32, mean, 0.1)
        elif stem == "ffn_gate_inp":
            yield _Tensor(full, dimensions, Type.F32, 0.0, 2 / math.sqrt(dimensions[0]), shape.router_spread)
        else:
            gain = 3.0 if stem.startswith("ffn_down") else 1.5 if stem == "attn_output" else 1.0
            kind = kinds.pick(stem, dimensions[0], layer, shape.layers)
            yield _Tensor(full, dimensions, kind, 0.0, gain / math.sqrt(dimensions[0]))


def _metadata(shape: Shape) -> dict[str, Value]:
    if shape.architecture in zoo.ALL:
        asked = zoo.keys_of(shape.architecture, shape.layers, shape.width // zoo.WIDTH)
        name = zoo.VARIANTS.get(shape.architecture, shape.architecture)
        return _with_general(name, {**asked, f"{name}.vocab_size": shape.vocabulary})
    name = _VARIANTS.get(shape.architecture, shape.architecture)
    moe = "ffn_gate_exps" in _LAYERS[shape.architecture]
    numbers: dict[str, float | int | bool | str] = {
        "context_length": shape.context,
        "embedding_length": shape.width,
        "block_count": shape.layers,
        "feed_forward_length": shape.feed_forward,
        "attention.head_count": shape.heads,
        "attention.head_count_kv": shape.heads_kv,
        "attention.key_length": shape.head_width,
        "attention.value_length": shape.head_width,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "attention.layer_norm_epsilon": 1e-5,
        "rope.dimension_count": shape.head_width,
        "rope.freq_base": shape.rope_base,
        "vocab_size": shape.vocabulary,
        **_KEYS.get(name, {}),
    }
    if moe:
        numbers |= {
            "expert_count": shape.experts,
            "expert_used_count": shape.experts_used,
            "expert_feed_forward_length": shape.expert_feed_forward,
            "expert_shared_feed_forward_length": shape.expert_feed_forward
            if "_shexp" in _LAYERS[shape.architecture]
            else 0,
        }
    if shape.leading_dense:
        numbers["leading_dense_block_count"] = shape.leading_dense
    if shape.sliding_window:
        numbers["attention.sliding_window"] = shape.sliding_window
    if name in _YARN:
        numbers["rope.scaling.type"] = "yarn"
    if name == "deepseek2":
        rank, half = 2 * shape.head_width, shape.head_width // 2
        numbers |= {
            "attention.q_lora_rank": rank,
            "attention.kv_lora_rank": rank,
            "attention.key_length": rank + half,
            "attention.value_length": rank,
            "attention.key_length_mla": shape.head_width + half,
            "attention.value_length_mla": shape.head_width,
            "rope.dimension_count": half,
        }
    if shape.architecture == "deepseek2-lite":
        del numbers["attention.q_lora_rank"]
    return _with_general(name, {f"{name}.{key}": number for key, number in numbers.items()})


def _with_general(name: str, keys: Mapping[str, zoo.Content]) -> dict[str, Value]:
    general: dict[str, zoo.Content] = {
        "general.architecture": name,
        "general.name": "synthetic",
        "general.alignment": ALIGNMENT,
    }
    return {key: _value(content) for key, content in (general | dict(keys)).items()}


def _byte_tokenizer(size: int, given: Sequence[str] = ()) -> dict[str, Value]:
    """A SentencePiece-like vocabulary of ``size``: three specials, every byte, ``given`` words and invented ones."""
    if size < BYTE_TOKENS:
        raise ValueError(f"a byte vocabulary has at least {BYTE_TOKENS} tokens, not {size}")
    words = [*given, *(f"\u2581w{number}" for number in range(size - BYTE_TOKENS - len(given)))]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *words]
    kinds = np.full(size, 1, np.int32)
    kinds[:3], kinds[3:BYTE_TOKENS] = (2, 3, 3), 6
    return {
        "tokenizer.ggml.model": _value("llama"),
        "tokenizer.ggml.tokens": array_value(GGUFValueType.STRING, tokens),
        "tokenizer.ggml.scores": _array(GGUFValueType.FLOAT32, -np.arange(size, dtype=np.float32)),
        "tokenizer.ggml.token_type": _array(GGUFValueType.INT32, kinds),
        "tokenizer.ggml.bos_token_id": _value(1),
        "tokenizer.ggml.eos_token_id": _value(2),
        "tokenizer.ggml.unknown_token_id": _value(0),
        "tokenizer.ggml.add_bos_token": _value(True),
        "tokenizer.chat_template": _value(TEMPLATE),
    }


def _value(content: zoo.Content) -> Value:
    kind = {
        bool: GGUFValueType.BOOL,
        int: GGUFValueType.UINT32,
        float: GGUFValueType.FLOAT32,
        str: GGUFValueType.STRING,
    }
    if isinstance(content, list):
        return array_value(kind[type(content[0])], list(content))
    return scalar_value(kind[type(content)], content)


def _array(kind: GGUFValueType, contents: np.ndarray[Any, Any]) -> Value:
    return Value(
        GGUFValueType.ARRAY, array_value(kind, []).raw[:4] + struct.pack("<Q", len(contents)) + contents.tobytes()
    )


def _text(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


def _info(tensor: _Tensor, offset: int) -> bytes:
    dimensions = struct.pack(f"<I{len(tensor.shape)}Q", len(tensor.shape), *tensor.shape)
    return _text(tensor.name) + dimensions + struct.pack("<IQ", tensor.type, offset)


def _write_weights(file: BinaryIO, tensor: _Tensor, random: np.random.Generator) -> None:
    block, block_bytes = GGML_QUANT_SIZES[tensor.type]
    blocks, at_once = math.prod(tensor.shape) // block, max(1, CHUNK_BYTES // block_bytes)
    if tensor.row_spread:
        assert tensor.type == Type.F32
        sizes = np.exp(tensor.row_spread * random.standard_normal(tensor.shape[1])).astype(np.float32)
        rows = np.frombuffer(_blocks(tensor, blocks, random), np.float32).reshape(-1, tensor.shape[0])
        file.write((rows * sizes[:, None]).tobytes())
        blocks = 0
    for start in range(0, blocks, at_once):
        file.write(_blocks(tensor, min(at_once, blocks - start), random))
    file.write(bytes(-tensor.size_bytes % ALIGNMENT))


# Quantised types whose blocks begin with a half-precision scale (and minimum): bytes of the scales, the mean and
# the standard deviation of their quants when all bits are random.
_SIMPLE: Final[dict[Type, tuple[bool, float, float]]] = {
    Type.Q4_0: (False, 7.5, 4.61),
    Type.Q4_1: (True, 7.5, 4.61),
    Type.Q5_0: (False, 15.5, 9.23),
    Type.Q5_1: (True, 15.5, 9.23),
    Type.Q8_0: (False, 0.0, 73.9),
}
_SUB_SCALE: Final = 48.4
"""Root mean square of a sub-block scale sampled from 32..63, in the K types."""


def _blocks(tensor: _Tensor, count: int, random: np.random.Generator) -> bytes:
    """``count`` blocks with mean ``tensor.mean`` and about ``tensor.deviation``; the mean is for plain floats only."""
    block_bytes = GGML_QUANT_SIZES[tensor.type][1]
    if tensor.type in (Type.F32, Type.F16, Type.BF16):
        numbers = random.standard_normal(count, np.float32) * np.float32(tensor.deviation) + np.float32(tensor.mean)
        if tensor.type == Type.BF16:
            return bytes((numbers.view(np.uint32) >> 16).astype(np.uint16).tobytes())
        return bytes(numbers.astype(np.float16 if tensor.type == Type.F16 else np.float32).tobytes())
    data = np.frombuffer(bytearray(random.bytes(count * block_bytes)), np.uint8).reshape(count, block_bytes)
    spread = random.uniform(0.75, 1.25, count).astype(np.float32) * np.float32(tensor.deviation)
    if tensor.type in _SIMPLE:
        has_minimum, mean, deviation = _SIMPLE[tensor.type]
        _put(data, 0, spread / deviation)
        if has_minimum:
            _put(data, 2, -mean * spread / deviation)
    elif tensor.type in (Type.Q4_K, Type.Q5_K):
        mean, deviation = (7.5, 4.61) if tensor.type == Type.Q4_K else (15.5, 9.23)
        _put(data, 0, spread / (deviation * _SUB_SCALE))
        _put(data, 2, mean * spread / (deviation * _SUB_SCALE))
        data[:, 4:8] |= 0xA0
        data[:, 8:12] = data[:, 4:8]
        data[:, 12:16] = data[:, 12:16] & 0x0F | data[:, 12:16] << 4
    elif tensor.type == Type.Q6_K:
        data[:, 192:208] = data[:, 192:208] & 0x1F | 0x20
        _put(data, 208, spread / (18.5 * _SUB_SCALE))
    elif tensor.type == Type.MXFP4:
        data[:, 0] = 127 - round(math.log2(2.9 / tensor.deviation))
    else:
        raise ValueError(f"synthetic weights of type {tensor.type.name} are not made here")
    return data.tobytes()


def _put(data: np.ndarray[Any, Any], at: int, scales: np.ndarray[Any, Any]) -> None:
    data[:, at : at + 2] = scales.astype(np.float16).view(np.uint8).reshape(-1, 2)


def main() -> None:
    """Parse the command line and write one model."""
    parser = argparse.ArgumentParser(description="Write a synthetic GGUF model.")
    parser.add_argument(
        "--preset", default="tiny", choices=["tiny", *PRESETS], help="the model's shape (default: tiny)"
    )
    architectures = [*_LAYERS, *zoo.ALL]
    parser.add_argument(
        "--architecture", default="llama", choices=architectures, help="of a tiny model (default: llama)"
    )
    parser.add_argument("--layers", type=int, help="another number of layers than the preset's")
    parser.add_argument("--quantisation", help="q4_k_m or a ggml type such as q8_0")
    parser.add_argument("--vocabulary", default="bytes", help="bytes, or from:FILE.gguf for that model's tokenizer")
    parser.add_argument("--seed", type=int, default=0, help="another seed gives other weights (default: 0)")
    parser.add_argument("--out", type=Path, required=True, help="the file to write")
    options = parser.parse_args()
    start = time.perf_counter()
    write_model(
        options.out,
        architecture=options.architecture,
        preset=options.preset,
        quantisation=options.quantisation,
        seed=options.seed,
        vocabulary=options.vocabulary,
        **({"layers": options.layers} if options.layers else {}),
    )
    size = options.out.stat().st_size
    print(f"{options.out}: {size / 1e6:.1f} MB in {time.perf_counter() - start:.1f} s")


if __name__ == "__main__":
    main()
