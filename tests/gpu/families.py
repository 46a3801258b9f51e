"""Models of a few layers at real widths, one for each way in which an architecture uses memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from primad.gguf.header import Header, read_header
from tests.core.test_architectures import value
from tools import synth
from tools.lab import zoo


def _attends(width: int, heads: int, kv: int | list[int], each: int) -> dict[str, Any]:
    return {
        "embedding_length": width,
        "attention.head_count": heads,
        "attention.head_count_kv": kv,
        "attention.key_length": each,
        "attention.value_length": each,
    }


def _states(inner: int, state: int, rank: int, groups: int) -> dict[str, int]:
    return {
        "ssm.inner_size": inner,
        "ssm.state_size": state,
        "ssm.time_step_rank": rank,
        "ssm.group_count": groups,
    }


def _experts(count: int, used: int, width: int) -> dict[str, int]:
    return {
        "expert_count": count,
        "expert_used_count": used,
        "expert_feed_forward_length": width,
        "expert_shared_feed_forward_length": width,
    }


_FEW = [0, 0, 4, 0]
_LATENT = {
    **_attends(2048, 32, 1, 576),
    "attention.value_length": 512,
    "attention.key_length_mla": 192,
    "attention.value_length_mla": 128,
    "attention.kv_lora_rank": 512,
    "attention.q_lora_rank": 1536,
    "rope.dimension_count": 64,
}
SHAPES: dict[str, dict[str, Any]] = {
    "llama": {"width": 2048, "heads": 32, "heads_kv": 8, "head_width": 64, "feed_forward": 8192},
    "starcoder2": {"width": 3072, "heads": 24, "heads_kv": 2, "head_width": 128, "feed_forward": 12_288},
    "gemma3": {"width": 2560, "heads": 8, "heads_kv": 4, "head_width": 256, "feed_forward": 10_240, "sliding_window": 1024},
    "gpt-oss": {
        "width": 2880, "heads": 64, "heads_kv": 8, "head_width": 64, "expert_feed_forward": 2880, "sliding_window": 128,
    },
    "qwen3moe": {
        "width": 2048, "heads": 32, "heads_kv": 4, "head_width": 128, "experts": 16, "experts_used": 8,
        "expert_feed_forward": 768,
    },
    "deepseek2": {"width": 2048, "heads": 64, "head_width": 128, "experts_used": 4, "expert_feed_forward": 1408},
}  # fmt: skip
"""Arguments for ``tools/synth.py``."""
KEYS: dict[str, dict[str, Any]] = {
    "bailingmoe3": {**_LATENT, "attention.head_count_kv": [0, 0, 0, 1], "kda.head_dim": 128, **_experts(4, 4, 512)},
    "falcon-h1": {**_attends(2048, 8, 2, 128), "feed_forward_length": 4096, **_states(4096, 256, 32, 1)},
    "gemma4": {
        **_attends(2816, 16, [8, 8, 8, 2], 512),
        "feed_forward_length": 2112,
        "attention.key_length_swa": 256,
        "attention.value_length_swa": 256,
        "rope.dimension_count": 512,
        "rope.dimension_count_swa": 256,
    },
    "glm4moe": {
        **_attends(2048, 48, 8, 128), "rope.dimension_count": 64, "feed_forward_length": 5632, **_experts(8, 8, 704),
    },
    "granitehybrid": {**_attends(2048, 16, _FEW, 128), "feed_forward_length": 4096, **_states(4096, 128, 64, 1)},
    "grok": {**_attends(3072, 24, 8, 128), **_experts(2, 2, 4096), "feed_forward_length": 4096},
    "jamba": {**_attends(2048, 16, _FEW, 128), "feed_forward_length": 4096, **_states(4096, 16, 128, 0)},
    "laguna": {
        **_attends(2048, 48, 8, 128),
        "feed_forward_length": 4096,
        "rope.dimension_count": 64,
        "rope.dimension_count_swa": 128,
        **_experts(16, 8, 512),
    },
    "lfm2": {**_attends(2048, 32, _FEW, 64), "feed_forward_length": 4096},
    "llama4": {**_attends(2560, 16, 8, 128), "feed_forward_length": 8192, **_experts(2, 1, 4096)},
    "mimo2": {**_attends(2048, 64, [4, 8, 8, 8], 192), "attention.value_length": 128, **_experts(8, 8, 1024)},
    "mistral4": {**_LATENT, **_experts(4, 4, 512)},
    "nemotron_h": {**_attends(2240, 20, _FEW, 128), "feed_forward_length": [0, 4096], **_states(5120, 128, 64, 8)},
    "openelm": {
        **_attends(2048, 16, 4, 128),
        "attention.head_count": [12, 16, 20, 24],
        "attention.head_count_kv": [3, 4, 5, 6],
        "feed_forward_length": [3072, 4096, 6144, 8192],
    },
    "qwen35": {
        **_attends(2048, 8, 2, 256),
        "feed_forward_length": 6144,
        "rope.dimension_count": 64,
        "rope.dimension_sections": [11, 11, 10, 0],
        **_states(4096, 128, 32, 16),
    },
    "qwen3next": {
        **_attends(2048, 16, 2, 256),
        "rope.dimension_count": 64,
        **_experts(16, 10, 512),
        **_states(4096, 128, 32, 16),
    },
    "step35": {
        **_attends(2048, 32, 8, 128),
        "attention.head_count": [32, 48, 48, 48],
        "rope.dimension_count": 128,
        "rope.dimension_count_swa": 128,
        **_experts(8, 8, 1280),
    },
}  # fmt: skip
"""Metadata for ``tools/lab/zoo.py``; a list has a value for each layer and repeats."""


MULTIPLES = {
    **dict.fromkeys(("bailingmoe3", "granitehybrid", "jamba", "laguna", "lfm2", "llama4", "nemotron_h"), 4),
    **dict.fromkeys(("gemma4", "mimo2", "qwen35", "qwen3next", "step35"), 4),
}
"""Layers of a window for families that need more than two."""


def write_family(path: Path, family: str) -> Header:
    """A model that can be cut into three windows; all weights are 0."""
    layers = 3 * MULTIPLES.get(family, 2)
    if family in SHAPES:
        synth.write_model(
            path, architecture=family, layers=layers, quantisation="q4_k_m", is_empty=True, **SHAPES[family]
        )
        return read_header(path)
    predicting = int(zoo.MODELS[family].get("nextn_predict_layers", 0))
    total = layers + predicting
    values = {
        f"{family}.{key}": value(
            [content[i % len(content)] for i in range(total)] if _is_by_layer(key, content) else content
        )
        for key, content in KEYS[family].items()
    }
    synth.write_model(path, architecture=family, layers=total, quantisation="q4_k_m", values=values, is_empty=True)
    return read_header(path)


def _is_by_layer(key: str, content: object) -> bool:
    return isinstance(content, list) and key != "rope.dimension_sections"
