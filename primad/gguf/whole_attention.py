"""Models whose attention is whole on every rank of a tensor-parallel group, while their networks are cut.

A share of attention is a model of fewer heads. Some graphs derive other values from the number of heads, or compute over
all heads; others keep states that cannot be cut. For these models each rank has all of the attention and its KV cache.
The first rank's result is sent to all others, as the sum with their zeros: two processors' results of the same values
differ in the last bits, and because of these ranks would pick different experts.
"""

from __future__ import annotations

from typing import Final

from halda import ModelProfile
from primad.gguf.architectures.layers import count_at, layer_count
from primad.gguf.architectures.tensors import turns_by_context
from primad.gguf.header import Header
from primad.gguf.splits import MAX_RANKS, ShareUnits
from primad.gguf.state_shares import STATES_BY_HEADS

SAME_GRAPH: Final = {
    **dict.fromkeys(("phi3", "qwen", "qwen2"), "exaone"),
    **dict.fromkeys(("internlm2", "xverse"), "llama"),
    "qwen2vl": "paddleocr",
}
"""Architectures whose heads llama.cpp takes to be as wide as the hidden state together, with another one that has the same
graph for any number of them."""
_STATES: Final = "its layers keep states"
_BY_NUMBER: Final = "the bias of its attention goes by the number of a head"
_SQUARE: Final = "llama.cpp takes its heads to be as wide as the hidden state together"
_REASONS: Final[dict[str, tuple[str, ...]]] = {
    _BY_NUMBER: ("refact", "jais", "mpt", "bloom", "baichuan"),
    "each of its groups of heads needs an indexer": ("minimax-m3",),
    "it has norms over all heads": ("minimax-m2",),
    "some of its layers have no attention, or one without heads": ("deci",),
    _SQUARE: (
        *("arctic", "bailingmoe2", "bitnet", "chatglm", "codeshell", "cohere2", "command-r", "dbrx", "deepseek"),
        *("deepseek2-ocr", "exaone4", "falcon", "gpt2", "gptneox", "grok", "nemotron", "olmo", "olmo2", "olmoe"),
        *("orion", "phi2", "phimoe", "plamo", "qwen2moe", "stablelm", "starcoder", "starcoder2"),
    ),
}
_WHOLE: Final = {name: reason for reason, names in _REASONS.items() for name in names}
_SCALED_BY_HEADS: Final = frozenset((("gemma2", 46), ("gemma3", 62)))
"""Architectures, with the number of layers."""
_NOT_KNOWN: Final = 1 << 10
"""A number of values that makes no difference to a plan."""
WITHOUT_NETWORKS: Final = frozenset(("bitnet", "mamba", "mamba2", "rwkv6"))
"""Architectures whose layers have no network that could be cut."""


def of_shape(model: ModelProfile) -> tuple[int, ShareUnits | None]:
    """How many devices can share layers of a model known by its profile only, and the units of the cuts if known."""
    if model.architecture in WITHOUT_NETWORKS:
        return 1, None
    if why_not_by_heads(model.architecture, len(model.layers), keeps_states=model.is_recurrent):
        return MAX_RANKS, ShareUnits(heads=0, keys=(), head_unit=1, values=_NOT_KNOWN, value_unit=1)
    return min(MAX_RANKS, model.heads or MAX_RANKS), None


def why_not_by_heads(architecture: str, layers: int = 0, *, keeps_states: bool = False) -> str:
    """Why attention is whole in a model of which no more is known; empty if its heads are cut."""
    if keeps_states and architecture not in STATES_BY_HEADS:
        return _STATES
    if (architecture, layers) in _SCALED_BY_HEADS:
        return "llama.cpp takes its attention scale from the number of heads"
    return _WHOLE.get(architecture, "")


def why_attention_whole(header: Header, *, keeps_states: bool) -> str:
    """Why attention is whole as far as the metadata says; empty where nothing speaks against cutting its heads. A model that
    ``keeps_states`` has some that cannot be cut."""
    name = header.text("general.architecture")
    if keeps_states:
        return _STATES
    if header.number(f"{name}.attention.max_alibi_bias", 0.0):
        return _BY_NUMBER
    return why_not_by_heads(name, layer_count(header)) or (
        _differs(header, SAME_GRAPH[name]) if name in SAME_GRAPH else ""
    )


def _differs(header: Header, other: str) -> str:
    """Why the graph of ``other`` does not fit this model."""
    name = header.text("general.architecture")
    each = header.count(f"{name}.embedding_length") // max(count_at(header, f"{name}.attention.head_count", 0), 1)
    if header.count(f"{name}.rope.dimension_count", each) != each:
        return f"{_SQUARE}, and only a part of them rotates"
    if turns_by_context(header):
        return "angles of positions follow from how large the context is"
    ends = ("output.bias", ".ffn_down.bias", ".ffn_up.bias", ".ffn_gate.bias")
    biases = [tensor for tensor in header.tensors if tensor.endswith(ends)]
    return f"the graph of '{other}', as which it could be, has no {biases[0]}" if biases else ""
