"""The table of known architectures, and why others are refused."""

from __future__ import annotations

from typing import Final

from primad.errors import ModelError
from primad.gguf.architecture import Architecture, Embedding, Recurrent, Sliding
from primad.gguf.header import Header

MAX_LAYERS: Final = 512
"""llama.cpp's LLAMA_MAX_LAYERS."""

ADVICE: Final = "serve it with --single-device, or choose another model"


class NotCutError(ModelError):
    """The model cannot be cut exactly; ``reason`` says why, the error also what to do."""

    def __init__(self, reason: str, advice: str) -> None:
        super().__init__(f"{reason}; {advice}")
        self.reason = reason


_SECTIONS: Final = frozenset(("rope.dimension_sections",))
"""Positions of several parts, which are equal for text."""
_DEEPSTACK: Final = frozenset(("n_deepstack_layers",))
"""Layers that take image features."""
_DENSE: Final = frozenset(("leading_dense_block_count",))
"""Which layers have no experts, for architectures where tensors show it and the key is ignored."""
HEAD_COUNTS: Final = "attention.head_count_kv"
_KV_HEADS: Final = frozenset((HEAD_COUNTS,))
RECURRENT_LAYERS: Final = "attention.recurrent_layers"
_STATES: Final = frozenset((RECURRENT_LAYERS,))
SLIDING_KEYS: Final = "attention.sliding_window"
INDEXER_TYPES: Final = "attention.indexer.types"
_ROPE: Final = "attention.rope_pattern"
_XIELU: Final = frozenset(f"xielu.{key}" for key in ("alpha_n", "alpha_p", "beta", "eps"))
"""These keys have no prefix."""

SUPPORTED: Final[dict[str, Architecture]] = {
    entry.name: entry
    for entry in (
        Architecture(name="llama"),
        Architecture(name="mistral3"),
        Architecture(name="qwen2"),
        Architecture(name="qwen2moe", tied_output_fallback=False),
        Architecture(name="qwen3"),
        Architecture(name="qwen3moe"),
        Architecture(
            name="gemma3",
            embedding=Embedding.SQRT_WIDTH,
            scales_tokens_alone=True,
            sliding=Sliding.OPTIONAL,
            sliding_period=6,
        ),
        Architecture(name="phi3"),
        Architecture(name="olmo2", tied_output_fallback=False, sliding=Sliding.OPTIONAL, sliding_period=4),
        Architecture(name="olmoe", tied_output_fallback=False),
        Architecture(name="granite", embedding=Embedding.KEY),
        Architecture(name="granitemoe", embedding=Embedding.KEY),
        Architecture(name="minicpm", embedding=Embedding.KEY, default_embedding_scale=12.0),
        Architecture(name="smollm3", cut_multiple=4),
        Architecture(name="starcoder2"),
        Architecture(name="stablelm", tied_output_fallback=False),
        Architecture(name="internlm2", tied_output_fallback=False),
        Architecture(name="arcee"),
        Architecture(name="seed_oss"),
        Architecture(name="exaone"),
        Architecture(name="exaone4"),
        Architecture(name="command-r"),
        Architecture(name="cohere2", sliding=Sliding.ALWAYS, sliding_period=4),
        Architecture(name="gpt-oss", tied_output_fallback=False, sliding=Sliding.ALWAYS, sliding_period=2),
        Architecture(name="deepseek"),
        Architecture(name="deepseek2", predicts=True, drafts=True),
        Architecture(name="dots1", tied_output_fallback=False),
        Architecture(name="hunyuan-moe"),
        Architecture(name="minimax-m2", tied_output_fallback=False),
        Architecture(
            name="afmoe",
            embedding=Embedding.SQRT_WIDTH,
            sliding=Sliding.OPTIONAL,
            sliding_period=4,
            cut_multiple=4,
            is_fed=True,
        ),
        Architecture(name="apertus", tied_output_fallback=False, by_layer=_XIELU),
        Architecture(name="bailingmoe2", tied_output_fallback=False, predicts=True),
        Architecture(name="chatglm"),
        Architecture(name="ernie4_5", knows=_SECTIONS, is_fed=True),
        Architecture(name="ernie4_5-moe", step="interleave_moe_layer_step", knows=_SECTIONS, is_fed=True),
        Architecture(
            name="exaone-moe", tied_output_fallback=False, sliding=Sliding.NEEDED, sliding_period=4, predicts=True
        ),
        Architecture(name="falcon"),
        Architecture(name="gemma", embedding=Embedding.SQRT_WIDTH, is_fed=True),
        Architecture(
            name="gemma2", embedding=Embedding.SQRT_WIDTH, sliding=Sliding.ALWAYS, sliding_period=2, is_fed=True
        ),
        Architecture(
            name="gemma4",
            embedding=Embedding.SQRT_WIDTH,
            scales_tokens_alone=True,
            sliding=Sliding.NEEDED,
            is_fed=True,
            knows=frozenset(("attention.key_length_swa", "attention.value_length_swa", "rope.dimension_count_swa")),
            by_layer=_KV_HEADS | {"feed_forward_length"},
            layer_inputs="embedding_length_per_layer_input",
            shares_cells="attention.shared_kv_layers",
            shares_where_full=True,
        ),
        Architecture(name="glm4", knows=_SECTIONS, is_fed=True, predicts=True),
        Architecture(name="glm4moe", knows=_SECTIONS, is_fed=True, predicts=True, drafts=True),
        Architecture(name="grovemoe"),
        Architecture(name="hunyuan-dense"),
        Architecture(name="hy_v3", predicts=True, drafts=True, drops=_DENSE),
        Architecture(
            name="llama4", sliding=Sliding.FIXED, cut_multiple=4, step="interleave_moe_layer_step", is_fed=True
        ),
        Architecture(
            name="mimo2",
            tied_output_fallback=False,
            predicts=True,
            sliding=Sliding.NEEDED,
            by_layer=_KV_HEADS,
        ),
        Architecture(
            name="laguna",
            sliding=Sliding.OPTIONAL,
            sliding_period=4,
            slides_last=True,
            cut_multiple=4,
            knows=frozenset(("rope.dimension_count_swa",)),
        ),
        Architecture(name="mistral4", predicts=True),
        Architecture(name="nemotron", tied_output_fallback=False),
        Architecture(name="phi2", tied_output_fallback=False),
        Architecture(name="phimoe", tied_output_fallback=False),
        Architecture(
            name="step35",
            tied_output_fallback=False,
            sliding=Sliding.NEEDED,
            knows=frozenset(("rope.dimension_count_swa",)),
            by_layer=frozenset((*_KV_HEADS, "attention.head_count", "swiglu_clamp_exp", "swiglu_clamp_shexp")),
            exit="attn_norm_in-{after}",
            last_exit="h_nextn",
            predicts=True,
        ),
        Architecture(name="qwen2vl", knows=_SECTIONS, is_fed=True),
        Architecture(name="qwen3vl", knows=_SECTIONS, is_fed=True, drops=_DEEPSTACK),
        Architecture(name="qwen3vlmoe", knows=_SECTIONS, is_fed=True, drops=_DEEPSTACK),
        Architecture(name="arctic"),
        Architecture(name="bailingmoe", tied_output_fallback=False, drops=_DENSE),
        Architecture(
            name="bailingmoe3",
            knows=_SECTIONS,
            recurrent=Recurrent.HEADS,
            takes_back=True,
            by_layer=_KV_HEADS,
            is_fed=True,
            predicts=True,
        ),
        Architecture(name="bitnet"),
        Architecture(name="codeshell", tied_output_fallback=False),
        Architecture(name="cohere2moe", sliding=Sliding.FIXED, cut_multiple=4, predicts=True, drafts=True),
        Architecture(name="dbrx", tied_output_fallback=False),
        Architecture(name="gptneox", tied_output_fallback=False),
        Architecture(name="grok", embedding=Embedding.KEY, default_embedding_scale=78.38367176906169),
        Architecture(name="jais2"),
        Architecture(name="maincoder"),
        Architecture(
            name="openelm",
            by_layer=_KV_HEADS | {"attention.head_count", "feed_forward_length"},
        ),
        Architecture(name="orion", tied_output_fallback=False),
        Architecture(name="pangu-embedded"),
        Architecture(name="plamo", tied_output_fallback=False),
        Architecture(name="qwen", tied_output_fallback=False),
        Architecture(name="refact"),
        Architecture(name="xverse", tied_output_fallback=False),
        Architecture(name="falcon-h1", recurrent=Recurrent.ALL, state="scan", is_fed=True),
        Architecture(name="mamba", recurrent=Recurrent.ONLY, is_fed=True),
        Architecture(name="mamba2", recurrent=Recurrent.ONLY, state="scan", is_fed=True),
        Architecture(
            name="plamo2",
            recurrent=Recurrent.HEADS,
            by_layer=_KV_HEADS | {"attention.head_count"},
            entries=("embedding_output",),
            exit="ffn_residual-{layer}",
            is_fed=True,
        ),
        Architecture(
            name="rwkv6",
            tied_output_fallback=False,
            recurrent=Recurrent.ONLY,
            step="rescale_every_n_layers",
            entries=("embd", "node_22"),
            is_fed=True,
        ),
        Architecture(name="rwkv6qwen2", tied_output_fallback=False, recurrent=Recurrent.ONLY, is_fed=True),
        Architecture(name="jais", tied_output_fallback=False),
        Architecture(name="olmo", output_norm=""),
        Architecture(name="mellum", tied_output_fallback=False, sliding=Sliding.OPTIONAL, sliding_period=4),
        Architecture(name="plamo3", sliding=Sliding.OPTIONAL, sliding_period=8),
        Architecture(
            name="maple", tied_output_fallback=False, sliding=Sliding.NEEDED, by_layer=frozenset(("swiglu_clamp_exp",))
        ),
        Architecture(
            name="spark2_5",
            sliding=Sliding.NEEDED,
            knows=frozenset(("rope.dimension_count_swa",)),
            by_layer=_KV_HEADS | {"attention.head_count"},
        ),
        Architecture(
            name="granite_swa",
            embedding=Embedding.KEY,
            sliding=Sliding.ALWAYS,
            by_layer=_KV_HEADS | {"attention.head_count", _ROPE},
            needs=_ROPE,
        ),
        Architecture(
            name="smallthinker", sliding=Sliding.NEEDED_IF_ANY, sliding_period=4, slides_last=True, cut_multiple=4
        ),
        Architecture(name="hunyuan_vl", knows=_SECTIONS, is_fed=True),
        Architecture(name="paddleocr", knows=_SECTIONS, is_fed=True),
        Architecture(
            name="deci",
            by_layer=_KV_HEADS | {"attention.head_count", "feed_forward_length"},
            skips_attention=True,
        ),
        Architecture(name="deepseek2-ocr"),
        Architecture(name="deepseek32", knows=_SECTIONS, predicts=True, drafts=True),
        Architecture(
            name="glm-dsa",
            knows=_SECTIONS,
            by_layer=frozenset((INDEXER_TYPES,)),
            takes_over=True,
            predicts=True,
            drafts=True,
        ),
        Architecture(name="minimax-m3", tied_output_fallback=False, needs_indexer=True, max_sequences=8),
        Architecture(
            name="muse-glimmer",
            tied_output_fallback=False,
            sliding=Sliding.NEEDED,
            sliding_period=4,
            entries=("embd", "embd_norm"),
            is_fed=True,
        ),
        Architecture(name="gpt2", adds_positions=True, is_fed=True),
        Architecture(name="starcoder", adds_positions=True, is_fed=True),
        Architecture(name="mpt", adds_positions=True, is_fed=True),
        Architecture(
            name="granitehybrid",
            embedding=Embedding.KEY,
            recurrent=Recurrent.HEADS,
            state="scan",
            by_layer=_KV_HEADS,
            is_fed=True,
        ),
        Architecture(
            name="kimi-linear", tied_output_fallback=False, recurrent=Recurrent.HEADS, by_layer=_KV_HEADS, is_fed=True
        ),
        Architecture(name="jamba", recurrent=Recurrent.HEADS, by_layer=_KV_HEADS, is_fed=True),
        *(
            Architecture(
                name=name,
                output_norm="token_embd_norm",
                recurrent=Recurrent.HEADS,
                state="convolution",
                takes_back=True,
                by_layer=_KV_HEADS,
                is_fed=True,
                refuses=((SLIDING_KEYS, "layers that slide"),),
            )
            for name in ("lfm2", "lfm2moe")
        ),
        *(
            Architecture(
                name=name,
                tied_output_fallback=False,
                recurrent=Recurrent.HEADS,
                state="scan",
                takes_back=True,
                exit="nemotron_h_block_out-{layer}",
                by_layer=_KV_HEADS | {"feed_forward_length"},
                is_fed=True,
                predicts=True,
            )
            for name in ("nemotron_h", "nemotron_h_moe")
        ),
        *(
            Architecture(
                name=name,
                knows=_SECTIONS,
                recurrent=Recurrent.INTERVAL,
                state="delta",
                takes_back=True,
                by_layer=_STATES,
                is_fed=True,
                predicts=True,
                drafts=True,
            )
            for name in ("qwen35", "qwen35moe")
        ),
        Architecture(
            name="qwen3next",
            recurrent=Recurrent.INTERVAL,
            state="delta",
            by_layer=_STATES,
            is_fed=True,
            predicts=True,
            drafts=True,
        ),
    )
}

_REASONS: Final[dict[str, tuple[str, ...]]] = {
    "its layers mix in values of the first one": ("rwkv7", "arwkv7"),
    "its layers hand on several hidden states at once, and the first pick experts by token": ("deepseek4",),
    "llama.cpp tells its layers apart by number: the first 10, and those from 20 on": ("gemma3n",),
    "its layers take inputs in addition to the hidden state": ("talkie",),
    "its layers are scaled by the number of layers": ("minicpm3", "minimax-01"),
    "its layers are computed more than once": ("hrm_text", "nanbeige"),
    "llama.cpp aborts in its attention": ("plm",),
    "it is not a causal text decoder": (
        *(
            "bert",
            "nomic-bert",
            "nomic-bert-moe",
            "modern-bert",
            "neo-bert",
            "jina-bert-v2",
            "jina-bert-v3",
            "eurobert",
        ),
        *("gemma-embedding", "llama-embed", "t5", "t5encoder", "llada", "llada-moe", "rnd1"),
    ),
}
REFUSED: Final = {name: reason for reason, names in _REASONS.items() for name in names}

ATTENTION_INTERVAL: Final = "full_attention_interval"
DEEPSEEK2: Final = frozenset(("deepseek2", "mistral4"))
"""Architectures whose variants llama.cpp distinguishes by the number of layers, among other things."""

PER_LAYER: Final = (
    "feed_forward_length",
    "expert_feed_forward_length",
    "expert_used_count",
    "attention.head_count",
    "attention.head_count_kv",
)
"""Keys that may be an array over the layers. The graphs above read layer 0 for all, so only equal values are exact."""

ENTRY_KEY: Final = "primad.entry"
EXIT_KEY: Final = "primad.exit"
LAST_EXIT_KEY: Final = "primad.last_exit"
"""Keys of a window with a derived entry: where its graph takes input, and the names of its layers' outputs."""


def known(header: Header) -> Architecture | None:
    """The model's entry: the one that was derived for it, or the table's; None if there is neither."""
    return header.derived or SUPPORTED.get(header.text("general.architecture"))


def is_unknown(header: Header) -> bool:
    """Whether nothing is known of the architecture, not even that it cannot be cut."""
    name = header.text("general.architecture")
    return name not in SUPPORTED and name not in REFUSED


def refusal(header: Header, subject: str, reason: str) -> ModelError:
    return NotCutError(f"{header.path}: {subject} cannot be cut into windows exactly: {reason}", ADVICE)
