"""Tiny models of architectures for which ``tools/synth.py`` has no layout: llama.cpp itself lists their tensors.

Their metadata is here, with the minimum that exercises each rule of ``primad/gguf/architectures``: layers with a
sliding window or experts, values that differ by layer, layers for multi-token prediction.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from primad.engine.wanted import wanted_tensors
from primad.gguf.header import Value

Content = float | int | bool | str | list[int] | list[float] | list[bool]

LAYERS: Final = 8
DEEPER: Final = {"smallthinker": 16, "gemma4-per-layer": 16}
"""Models that need more than 8 layers to be cut."""
WIDTH: Final = 64
_SLIDES: Final = [True, True, True, False] * 2
_BASE: Final[dict[str, Content]] = {
    "context_length": 4096,
    "embedding_length": WIDTH,
    "feed_forward_length": 96,
    "attention.head_count": 4,
    "attention.head_count_kv": 2,
    "attention.key_length": 16,
    "attention.value_length": 16,
    "attention.layer_norm_rms_epsilon": 1e-5,
    "attention.layer_norm_epsilon": 1e-5,
}
_HALF: Final[dict[str, Content]] = {"rope.dimension_count": 8}
_SECTIONS: Final[dict[str, Content]] = {"rope.dimension_count": 16, "rope.dimension_sections": [4, 2, 2, 0]}
_MOE: Final[dict[str, Content]] = {
    "expert_count": 4,
    "expert_used_count": 2,
    "expert_feed_forward_length": 32,
    "expert_shared_feed_forward_length": 32,
    "expert_shared_count": 1,
    "expert_gating_func": 2,
    "expert_weights_norm": True,
    "expert_weights_scale": 1.5,
}
_LEAD: Final[dict[str, Content]] = {"leading_dense_block_count": 1}
_SSM: Final[dict[str, Content]] = {
    "ssm.conv_kernel": 4,
    "ssm.inner_size": 64,
    "ssm.state_size": 16,
    "ssm.time_step_rank": 4,
    "ssm.group_count": 2,
}
_WKV: Final[dict[str, Content]] = {"wkv.head_size": 16, "time_mix_extra_dim": 8, "time_decay_extra_dim": 8}
_FEW: Final = [0, 0, 2, 0, 0, 0, 2, 0]
"""Attention heads of a hybrid's layers."""
_MLA: Final[dict[str, Content]] = {
    "attention.key_length": 40,
    "attention.value_length": 32,
    "attention.key_length_mla": 24,
    "attention.value_length_mla": 16,
    "attention.kv_lora_rank": 32,
    "attention.q_lora_rank": 48,
    "attention.head_count_kv": 1,
    "rope.dimension_count": 8,
}
_INDEXER: Final[dict[str, Content]] = {
    "attention.indexer.head_count": 2,
    "attention.indexer.key_length": 64,
    "attention.indexer.top_k": 24,
}
_GEMMA4: Final[dict[str, Content]] = {
    "attention.sliding_window": 24,
    "attention.sliding_window_pattern": _SLIDES,
    "attention.head_count_kv": [4, 4, 4, 1] * 2,
    "attention.key_length": 32,
    "attention.value_length": 32,
    "attention.key_length_swa": 16,
    "attention.value_length_swa": 16,
    "rope.dimension_count": 32,
    "rope.dimension_count_swa": 16,
    "rope.freq_base_swa": 5000.0,
    "embedding_length_per_layer_input": 0,
    "attention.shared_kv_layers": 0,
    "final_logit_softcapping": 30.0,
}

MODELS: Final[dict[str, dict[str, Content]]] = {
    "arctic": _MOE,
    "bailingmoe": {**_LEAD, **_MOE},
    "bailingmoe3": {
        **_LEAD,
        **_MLA,
        **_MOE,
        "attention.head_count_kv": [0, 0, 0, 1] * 2,
        "kda.head_dim": 16,
        "kda.gate_lower_bound": -5.0,
        "ssm.conv_kernel": 4,
    },
    "kimi-linear": {
        **_LEAD,
        **_MLA,
        **_MOE,
        "attention.q_lora_rank": 0,
        "attention.head_count_kv": [0, 0, 0, 1] * 2,
        "kda.head_dim": 16,
        "ssm.conv_kernel": 4,
    },
    "bitnet": {},
    "codeshell": {},
    "cohere2moe": {**_LEAD, **_MOE, "attention.sliding_window": 24, "logit_scale": 2.0},
    "deci": {
        "attention.head_count": [4, 4, 0, 4] * 2,
        "attention.head_count_kv": [2, 4, 0, 0] * 2,
        "feed_forward_length": [64, 96, 128, 160] * 2,
    },
    "dbrx": {**_MOE, "attention.clamp_kqv": 8.0},
    "gptneox": {"attention.head_count_kv": 4, "use_parallel_residual": True},
    "grok": {**_MOE, "attn_logit_softcapping": 30.0},
    "jais2": {"attention.head_count_kv": 4},
    "maincoder": {},
    "openelm": {
        "attention.head_count": [4, 4, 8, 8] * 2,
        "attention.head_count_kv": [2, 2, 4, 4] * 2,
        "feed_forward_length": [64, 96, 128, 160] * 2,
    },
    "orion": {},
    "pangu-embedded": {},
    "plamo": {"attention.head_count": 4, "attention.head_count_kv": 4},
    "qwen": {"attention.head_count_kv": 4, "feed_forward_length": 192},
    "refact": {"attention.head_count_kv": 1},
    "xverse": {},
    "apertus": {
        f"xielu.{key}": [start + 0.1 * layer for layer in range(LAYERS)]
        for key, start in (("alpha_n", 0.5), ("alpha_p", 1.5), ("beta", 0.4), ("eps", -0.1))
    },
    "bailingmoe2": {**_LEAD, **_MOE},
    "chatglm": _HALF,
    "ernie4_5": {},
    "ernie4_5-moe": {**_LEAD, **_MOE, "interleave_moe_layer_step": 1},
    "exaone-moe": {**_LEAD, **_MOE, "attention.sliding_window": 24, "attention.sliding_window_pattern": _SLIDES},
    "falcon": {},
    "gemma4": _GEMMA4,
    "gemma4-moe": {**_GEMMA4, **_MOE},
    "gemma4-per-layer": {
        **_GEMMA4,
        "attention.sliding_window_pattern": [True, False] * 4,
        "attention.head_count_kv": 1,
        "embedding_length_per_layer_input": 32,
        "attention.shared_kv_layers": 8,
        "feed_forward_length": [96, 96, 96, 96, 128, 128, 128, 128],
    },
    "glm4": _HALF,
    "glm4moe": {**_HALF, **_LEAD, **_MOE, "nextn_predict_layers": 1},
    "grovemoe": {
        **_MOE,
        "expert_chunk_feed_forward_length": 16,
        "expert_group_scale": 0.05,
        "experts_per_group": 2,
    },
    "hunyuan-dense": {},
    "hy_v3": {**_LEAD, **_MOE},
    "laguna": {**_LEAD, **_MOE, **_HALF, "attention.sliding_window": 24, "rope.dimension_count_swa": 16},
    "laguna-full": {**_LEAD, **_MOE, **_HALF},
    "llama4": {**_MOE, "interleave_moe_layer_step": 2},
    "mimo2": {
        **_MOE,
        "attention.sliding_window": 24,
        "attention.sliding_window_pattern": [False, True, True, True, False, True, True, True],
        "attention.head_count_kv": [1, 2, 2, 2, 1, 2, 2, 2],
        "attention.value_length": 8,
        "rope.freq_base_swa": 5000.0,
    },
    "mistral4": {**_LEAD, **_MLA, **_MOE},
    "nemotron": _HALF,
    "phi2": {**_HALF, "attention.head_count_kv": 4},
    "phimoe": _MOE,
    "afmoe": {**_LEAD, **_MOE, "attention.sliding_window": 24},
    "gemma2": {"attention.sliding_window": 24, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
    "gemma": {},
    "falcon-h1": _SSM,
    "mamba": {**_SSM, "ssm.inner_size": 128, "ssm.group_count": 0, "attention.head_count": 0, "feed_forward_length": 0},
    "mamba2": {
        **_SSM,
        "ssm.inner_size": 128,
        "ssm.time_step_rank": 8,
        "attention.head_count": 0,
        "feed_forward_length": 0,
    },
    "plamo2": {
        **_SSM,
        "ssm.inner_size": 128,
        "ssm.time_step_rank": 8,
        "ssm.group_count": 0,
        "attention.head_count_kv": _FEW,
    },
    "rwkv6": {
        **_WKV,
        "attention.head_count": 0,
        "attention.head_count_kv": 0,
        "token_shift_count": 2,
        "rescale_every_n_layers": 2,
    },
    "rwkv6qwen2": {**_WKV, "token_shift_count": 1},
    "jais": {"attention.head_count_kv": 4, "attention.max_alibi_bias": 8.0},
    "olmo": {"attention.clamp_kqv": 8.0},
    "mellum": {
        **_MOE,
        "attention.sliding_window": 24,
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": 4.0,
        "rope.scaling.original_context_length": 64,
    },
    "plamo3": {"attention.sliding_window": 24, "attention.sliding_window_pattern": 4, "rope.freq_base_swa": 5000.0},
    "maple": {
        **_MOE,
        "attention.sliding_window": 24,
        "attention.sliding_window_pattern": _SLIDES,
        "swiglu_clamp_exp": [0.1 * layer for layer in range(LAYERS)],
    },
    "spark2_5": {
        "attention.sliding_window": 24,
        "attention.sliding_window_pattern": _SLIDES,
        "rope.freq_base_swa": 5000.0,
        "attention.head_count": [4, 4, 4, 8] * 2,
        "attention.head_count_kv": [2, 2, 2, 4] * 2,
        "rope.dimension_count_swa": 8,
        "rope.dimension_count": 16,
    },
    "granite_swa": {
        "attention.sliding_window": 24,
        "attention.sliding_window_pattern": _SLIDES,
        "attention.rope_pattern": [True, False, True, True] * 2,
        "embedding_scale": 3.0,
        "residual_scale": 0.5,
        "logit_scale": 2.0,
    },
    "smallthinker": {**_MOE, "attention.sliding_window": 24},
    "smallthinker-full": _MOE,
    "hunyuan_vl": {**_SECTIONS, "rope.scaling.alpha": 1000.0},
    "paddleocr": _SECTIONS,
    "deepseek2-ocr": {**_LEAD, **_MOE, "attention.head_count_kv": 4},
    "deepseek32": {**_LEAD, **_MLA, **_MOE, **_INDEXER, "nextn_predict_layers": 1},
    "glm-dsa": {
        **_LEAD,
        **_MLA,
        **_MOE,
        **_INDEXER,
        "attention.indexer.types": [1, 1, 0, 0, 1, 0, 0, 0],
    },
    "glm-dsa-full": {**_LEAD, **_MLA, **_MOE, **_INDEXER},
    "minimax-m3": {
        **_HALF,
        **_LEAD,
        **_MOE,
        "attention.indexer.head_count": 2,
        "attention.indexer.key_length": 16,
        "attention.indexer.top_k": 2,
        "attention.indexer.block_size": 16,
        "attention.indexer.local_blocks": 1,
    },
    "muse-glimmer": {"attention.sliding_window": 24, "logit_scale": 0.5, "final_logit_softcapping": 30.0},
    "gpt2": {"attention.head_count_kv": 4},
    "starcoder": {"attention.head_count_kv": 1},
    "mpt": {"attention.head_count_kv": 4, "attention.max_alibi_bias": 8.0, "attention.clamp_kqv": 8.0},
    "granitehybrid": {
        **_SSM,
        "ssm.inner_size": 128,
        "attention.head_count_kv": _FEW,
        "embedding_scale": 3.0,
        "residual_scale": 0.5,
        "logit_scale": 2.0,
    },
    "jamba": {**_SSM, "ssm.inner_size": 128, "ssm.group_count": 0, "attention.head_count_kv": _FEW},
    "lfm2": {"attention.head_count_kv": _FEW, "shortconv.l_cache": 3},
    "lfm2moe": {**_MOE, "leading_dense_block_count": 2, "attention.head_count_kv": _FEW, "shortconv.l_cache": 3},
    "nemotron_h": {**_SSM, "attention.head_count_kv": _FEW, "feed_forward_length": [0, 96, 0, 96, 0, 96, 0, 96]},
    "nemotron_h_moe": {
        **_SSM,
        **_MOE,
        "attention.head_count_kv": _FEW,
        "feed_forward_length": [0, 32, 0, 32, 0, 32, 0, 32],
    },
    "qwen35": {**_SECTIONS, **_SSM, "full_attention_interval": 4},
    "qwen35-array": {**_SECTIONS, **_SSM, "attention.recurrent_layers": _SLIDES},
    "qwen35moe": {**_SECTIONS, **_SSM, **_MOE, "full_attention_interval": 4},
    "qwen3next": {**_HALF, **_SSM, **_MOE, "full_attention_interval": 4},
    "step35": {
        **_MOE,
        "attention.sliding_window": 24,
        "attention.sliding_window_pattern": [False, True, True, True] * 2,
        "attention.head_count": [4, 6, 6, 6] * 2,
        "attention.head_count_kv": [2] * LAYERS,
        "rope.dimension_count": 16,
        "rope.dimension_count_swa": 16,
        "rope.freq_base_swa": 5000.0,
        "swiglu_clamp_exp": [0.0, 0.0, 0.0, 0.0, 0.3, 0.2, 0.3, 0.2],
        "swiglu_clamp_shexp": [0.0, 0.0, 0.0, 0.0, 0.0, 0.1, 0.0, 0.1],
    },
    "qwen2vl": _SECTIONS,
    "qwen3vl": {**_SECTIONS, "n_deepstack_layers": 3},
    "qwen3vlmoe": {**_SECTIONS, **_MOE, "n_deepstack_layers": 3},
}
"""For each name, the differences to ``_BASE``; ``gemma4-moe`` is the layout of Gemma 4 26B."""
_WIDER: Final = frozenset(
    (
        *("embedding_length", "feed_forward_length", "attention.head_count", "attention.head_count_kv"),
        *("expert_feed_forward_length", "expert_shared_feed_forward_length", "expert_chunk_feed_forward_length"),
        *("ssm.inner_size", "ssm.time_step_rank", "ssm.group_count", "attention.indexer.head_count"),
    )
)
OUTSIDE: Final[dict[str, dict[str, Content]]] = {
    "baichuan": {"attention.head_count_kv": 4},
    "bloom": {"attention.head_count_kv": 4},
    "dream": {},
}
"""Models of architectures that are not in the table: some can be cut, some cannot."""
ALL: Final = {**MODELS, **OUTSIDE}
VARIANTS: Final = {
    "gemma4-moe": "gemma4",
    "gemma4-per-layer": "gemma4",
    "glm-dsa-full": "glm-dsa",
    "laguna-full": "laguna",
    "qwen35-array": "qwen35",
    "smallthinker-full": "smallthinker",
}
HAS_BOTH: Final = frozenset(("arctic", "gemma4-moe"))
"""Models with a dense feed-forward next to the experts of a layer."""


def layers_of(model: str) -> int:
    """Return the number of layers needed to cut the model."""
    return DEEPER.get(model, LAYERS)


def keys_of(model: str, layers: int = LAYERS, widen: int = 1) -> dict[str, Content]:
    """Return the keys of ``model`` with their prefixes, without those of every GGUF, with ``layers`` layers and
    ``widen`` times the width. Per-layer values repeat from the first."""
    name = VARIANTS.get(model, model)
    keys: dict[str, Any] = {"block_count": layers, **_BASE, **ALL[model]}
    for key, content in keys.items():
        if isinstance(content, list) and len(content) == LAYERS:
            content = [content[layer % LAYERS] for layer in range(layers)]
        if key in _WIDER:
            content = [_wider(each, widen) for each in content] if isinstance(content, list) else _wider(content, widen)
        keys[key] = content
    return {key if key.startswith("xielu.") else f"{name}.{key}": content for key, content in keys.items()}


def _wider(count: int, widen: int) -> int:
    """Return ``widen`` times ``count``; a count of one, shared by all, stays one."""
    return count if count == 1 else widen * count


def is_hybrid(model: str) -> bool:
    """Whether some layers of ``model`` keep a state."""
    return any(key.startswith(("ssm.", "shortconv.", "wkv.")) for key in ALL.get(model, {}))


def tensors_of(values: Mapping[str, Value], *, has_both: bool = False) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield names and shapes of the tensors of a model with this metadata, without scales of weights.

    A layer with experts has no dense feed-forward unless it ``has_both``.
    """
    found = wanted_tensors(values)
    experts = {name.split(".ffn_")[0] for name in found if name.endswith("_exps.weight")}
    for name, shape in found.items():
        layer, _, rest = name.partition(".ffn_")
        is_dense = layer in experts and rest in ("gate.weight", "up.weight", "down.weight") and not has_both
        is_scale = name.endswith((".scale", ".input_scale")) and not name.endswith("ffn_gate_inp.scale")
        is_needless = (
            name.startswith(("cls.", "dense_2.")) or ".nextn.embed_tokens" in name or ".shared_head_head" in name
        )
        is_of_rwkv = "rwkv6qwen2.block_count" in values and name.endswith("time_mix_first.weight")
        if not (is_dense or is_scale or is_needless or is_of_rwkv):
            yield name, shape
