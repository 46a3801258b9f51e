"""Built-in model shapes have the sizes of the models they stand for."""

from __future__ import annotations

import pytest

from halda import LayerProfile
from primad.errors import ConfigError
from primad.gguf.shapes import shape, shape_names

WEIGHTS = {
    "llama3-8b": 8.03e9,
    "deepseek-v3": 671e9,
    "kimi-k2": 1026e9,
    "glm4.7-flash": 29.9e9,
    "glm5": 744e9,
    "minimax-m2": 229e9,
    "qwen3-coder-30b-a3b": 30.5e9,
    "qwen3-coder-480b-a35b": 480e9,
    "qwen3.6-27b": 27e9,
    "qwen3.6-35b-a3b": 35e9,
    "llama3.1-70b": 70.6e9,
    "llama3.3-70b": 70.6e9,
    "llama2-7b": 6.74e9,
    "llama3.1-8b": 8.03e9,
    "llama3-14b": 14.1e9,
    "llama1-30b": 32.5e9,
    "llama3-45b": 44.884e9,
    "llama3-60b": 60.3e9,
    "llama1-65b": 65.2e9,
    "llama3-70b": 70.6e9,
    "qwen2.5-7b": 7.62e9,
    "qwen2.5-14b": 14.8e9,
    "qwen2.5-32b": 32.8e9,
    "qwen2.5-72b": 72.7e9,
    "llama3.1-405b": 405.9e9,
    "mixtral-8x7b": 46.7e9,
    "qwen3-30b-a3b": 30.5e9,
    "llama3.2-1b": 1.24e9,
    "llama3.2-3b": 3.21e9,
    "qwen3-1.7b": 1.72e9,
    "qwen3-4b": 4.02e9,
    "qwen3-8b": 8.19e9,
    "qwen3-14b": 14.8e9,
    "qwen3-32b": 32.8e9,
    "qwen3-235b-a22b": 235e9,
    "gemma3-4b": 3.88e9,
    "gemma3-12b": 11.8e9,
    "gemma3-27b": 27.0e9,
    "phi4-14b": 14.7e9,
    "mistral-nemo-12b": 12.2e9,
    "mistral-small-24b": 23.6e9,
    "gpt-oss-20b": 20.9e9,
    "gpt-oss-120b": 116.8e9,
    "glm4.5-air": 106.8e9,
    "glm4.5": 355e9,
    "glm4.6": 355e9,
    "qwen3-next-80b-a3b": 80e9,
    "qwen3-vl-30b-a3b": 30.5e9,
    "qwen3-vl-235b-a22b": 235e9,
    "qwen3.5-27b": 27e9,
    "qwen3.8-27b": 27e9,
    "qwen3.5-35b-a3b": 35e9,
    "qwen3.5-122b-a10b": 122e9,
    "qwen3.5-397b-a17b": 397e9,
    "gemma3n-e2b": 4.46e9,
    "gemma3n-e4b": 6.87e9,
    "gemma4-e2b": 4.65e9,
    "gemma4-e4b": 7.55e9,
    "gemma4-12b": 12e9,
    "gemma4-26b-a4b": 25.2e9,
    "gemma4-31b": 30.7e9,
    "nemotron3-nano-30b-a3b": 31.6e9,
    "nemotron3-super-120b-a12b": 120.6e9,
    "step3.5-flash": 196.81e9,
    "llama4-scout": 109e9,
    "llama4-maverick": 400e9,
}
"""As published; without vision and multi-token prediction for Gemma 3 and GLM, without vision and audio for Gemma 4
E2B and E4B (5.1 and 8 billion) and Gemma 3n (5.4 and 7.9)."""
ACTIVE = {
    "deepseek-v3": 37e9,
    "kimi-k2": 32e9,
    "minimax-m2": 10e9,
    "qwen3-coder-480b-a35b": 35e9,
    "qwen3-next-80b-a3b": 3e9,
    "qwen3.5-35b-a3b": 3e9,
    "qwen3.5-122b-a10b": 10e9,
    "qwen3.5-397b-a17b": 17e9,
    "gemma4-26b-a4b": 3.8e9,
    "glm4.5": 32e9,
    "glm4.6": 32e9,
    "nemotron3-nano-30b-a3b": 3.2e9,
    "nemotron3-super-120b-a12b": 12.7e9,
    "step3.5-flash": 11e9,
    "llama4-scout": 17e9,
    "llama4-maverick": 17e9,
}
"""Weights used per token, with the output matrix: rounded, some with the token embedding, which is looked up."""


FILES = {
    "gpt-oss-20b": 11.27,
    "gpt-oss-120b": 59.02,
    "llama3-8b-q4_k_m": 4.58,
    "llama3-8b-q4_0": 4.33,
    "llama3-8b-q8": 7.95,
    "llama3-70b-q4_k_m": 39.59,
    "llama3.1-405b-q4_k_m": 226.37,
    "llama3.2-3b-q4_k_m": 1.87,
    "qwen2.5-14b-q4_k_m": 8.37,
    "qwen3-30b-a3b-q4_k_m": 17.28,
    "gemma3-27b-q4_k_m": 15.40,
}
"""GiB of all tensors, as llama-bench prints for the commonly downloaded files."""


@pytest.mark.parametrize("name", FILES)
def test_shapes_are_as_large_as_the_files_that_people_download(name: str) -> None:
    assert shape(name).size_bytes / 2**30 == pytest.approx(FILES[name], rel=0.002)


def test_a_model_of_one_file_has_its_types_whatever_the_suffix() -> None:
    assert shape("gpt-oss-20b-q4k") == shape("gpt-oss-20b")
    assert {"MXFP4", "F32"} == set(shape("gpt-oss-20b").layers[0].expert_bytes_by_type)


def test_the_table_is_whole() -> None:
    assert set(shape_names()) == set(WEIGHTS)


@pytest.mark.parametrize("name", WEIGHTS)
def test_weights_are_as_many_as_stated(name: str) -> None:
    assert shape(f"{name}-f16").size_bytes == pytest.approx(2 * WEIGHTS[name], rel=0.02)


@pytest.mark.parametrize("name", ["llama3-45b", "llama3-70b", "llama1-65b", "llama3.1-405b", "mixtral-8x7b"])
def test_q4k_takes_four_and_a_half_bits(name: str) -> None:
    assert shape(f"{name}-q4k").size_bytes == pytest.approx(WEIGHTS[name] * 4.5 / 8, rel=0.02)


def test_q8_takes_eight_and_a_half_bits() -> None:
    assert shape("llama3-70b-q8").size_bytes == pytest.approx(70.6e9 * 8.5 / 8, rel=0.02)


def test_q4k_is_the_default_and_its_output_matrix_is_q6k() -> None:
    assert shape("Llama3-8B") == shape("llama3-8b-q4k")
    assert shape("llama3-8b").output_bytes_by_type == {"Q6_K": 128256 * 4096 * 210 // 256, "F32": 4 * 4096}


def test_kv_cache_is_f16_of_the_key_and_value_heads() -> None:
    assert shape("llama3-70b").layers[0].kv_bytes_per_token == 2 * 8 * 128 * 2
    assert shape("llama1-65b").layers[0].kv_bytes_per_token == 2 * 8192 * 2


def test_expert_weights_are_separate_from_those_that_every_row_uses() -> None:
    model = shape("qwen3-30b-a3b")
    assert (model.experts, model.experts_used) == (128, 8)
    used = sum(
        sum(layer.bytes_by_type.values()) + sum(layer.expert_bytes_by_type.values()) * 8 / 128
        for layer in shape("qwen3-30b-a3b-f16").layers
    )
    assert used / 2 == pytest.approx(2.7e9, rel=0.05)


def test_rows_without_whole_blocks_fall_back_as_in_llama_cpp() -> None:
    assert "Q5_0" in shape("qwen2.5-72b").layers[0].bytes_by_type
    assert set(shape("qwen2.5-32b").layers[0].bytes_by_type) == {"Q4_K", "F32"}


@pytest.mark.parametrize("name", ["llama3-71b", "llama3-70b-q3", "", "../devices/paper-d1", "q4k"])
def test_an_unknown_name_is_one_clear_error(name: str) -> None:
    with pytest.raises(ConfigError, match="no built-in model shape") as caught:
        shape(name)
    assert "llama3-70b" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 240, "nobody finds an error in a list of all names"


def test_a_slip_in_a_name_is_answered_with_the_names_that_are_near() -> None:
    with pytest.raises(ConfigError, match="no built-in model shape 'qwen3-9b', but qwen3-"):
        shape("qwen3-9b")


@pytest.mark.parametrize("name", ACTIVE)
def test_a_token_uses_as_many_weights_as_stated(name: str) -> None:
    model = shape(f"{name}-f16")
    used = sum(
        sum(layer.bytes_by_type.values()) + layer.expert_bytes * model.experts_used / model.experts
        for layer in model.layers
    )
    with_output = (used + model.output_bytes) / 2
    assert ACTIVE[name] == pytest.approx(with_output, rel=0.2) or ACTIVE[name] == pytest.approx(
        with_output + model.embedding_bytes / 2, rel=0.2
    )


@pytest.mark.parametrize(
    ("name", "attending", "states"),
    [
        ("qwen3.5-27b", 16, 48),
        ("qwen3-next-80b-a3b", 12, 36),
        ("nemotron3-nano-30b-a3b", 6, 23),
        ("nemotron3-super-120b-a12b", 8, 40),
        ("glm4.5", 92, 0),
    ],
)
def test_layers_attend_or_keep_a_state_or_neither(name: str, attending: int, states: int) -> None:
    layers = shape(name).layers
    assert sum(layer.kv_bytes_per_token > 0 for layer in layers) == attending
    assert sum(layer.state_bytes > 0 for layer in layers) == states
    assert not any(layer.kv_bytes_per_token and layer.state_bytes for layer in layers)


def test_layers_that_slide_have_heads_of_their_own() -> None:
    layers = shape("gemma4-31b").layers
    assert {layer.kv_bytes_per_token for layer in layers} == {2 * 16 * 256 * 2, 2 * 4 * 512 * 2}
    assert [layer.kv_bytes_per_token for layer in layers].count(2 * 4 * 512 * 2) == 10


@pytest.mark.parametrize(("name", "tail", "hop"), [("gemma4-e2b", 22, 6145), ("gemma4-e4b", 20, 10753)])
def test_layers_without_cells_of_their_own_are_in_the_tail_with_those_that_have_them(
    name: str, tail: int, hop: int
) -> None:
    model = shape(name)
    assert (model.tail_layers, model.hop_values) == (tail, hop)
    assert [layer.kv_bytes_per_token > 0 for layer in model.layers[2 - tail :]] == [False] * (tail - 2)
    assert all(layer.kv_bytes_per_token for layer in model.layers[: 2 - tail])


def cells_of(layer: LayerProfile) -> int:
    return layer.kv_bytes_per_token


def states_of(layer: LayerProfile) -> int:
    return layer.state_bytes


@pytest.mark.parametrize("name", ["qwen3.5-27b", "qwen3.5-35b-a3b", "qwen3-next-80b-a3b", "nemotron3-nano-30b-a3b"])
def test_the_tail_of_a_hybrid_attends_and_keeps_a_state_and_other_windows_begin_anywhere(name: str) -> None:
    model = shape(name)
    kinds = [[i for i, layer in enumerate(model.layers) if is_one(layer)] for is_one in (cells_of, states_of)]
    assert (model.cut_multiple, model.last_cut) == (1, min(kind[-1] for kind in kinds))
    stand_in, widest = model.stand_in, max(map(cells_of, model.layers))
    assert stand_in is not None
    assert (stand_in.state_bytes, widest % stand_in.kv_bytes_per_token) == (max(map(states_of, model.layers)), 0)
    assert 0 < stand_in.kv_bytes_per_token < widest
