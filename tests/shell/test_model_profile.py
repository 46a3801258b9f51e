"""A model's memory besides its weights is what llama.cpp says it allocates: KV cache, states and compute buffers."""

from __future__ import annotations

import logging
import re
from collections import Counter
from dataclasses import replace

import msgspec
import pytest

from halda import Workload
from halda.cost import compute_buffer_bytes, kv_bytes
from primad.engine.binding import hear_llama
from primad.engine.llama.windows import WholeModel
from primad.gguf.architectures.cuts import cuttable
from primad.gguf.architectures.layers import layer_count
from primad.gguf.header import read_header
from primad.gguf.profile import model_profile
from primad.gguf.windows import vocabulary_size
from tests.core.test_architectures import model
from tests.shell.test_cut_exact import HYBRIDS, OPTIONS, assigned, files_of
from tools import synth

MIB = 1 << 20
WORK = Workload(context_tokens=256, kv_type="f16", sequences=32, prompt_tokens=128, answer_tokens=128, chunk_rows=64)
_BUFFER = re.compile(r" (KV|RS) buffer size = +([0-9.]+) MiB")


@pytest.fixture
def printed(caplog):
    hear_llama()  # another test of this process may have set a callback
    caplog.set_level(logging.DEBUG, "primad.engine.binding")
    return caplog


LATENT = ["bailingmoe3", "deepseek2", "mistral4"]
INDEXED = ["deepseek32", "glm-dsa", "minimax-m3"]
DIFFERING = [
    *("deci", "gemma4", "gemma4-per-layer", "glm4moe", "gpt-oss", "llama", "mimo2", "openelm", "smallthinker"),
    *("spark2_5", "step35"),
]


@pytest.mark.slow
@pytest.mark.parametrize("architecture", sorted({*HYBRIDS, *LATENT, *INDEXED, *DIFFERING}))
def test_forecast_kv_and_state_bytes_are_what_llama_cpp_allocates(architecture, printed, tmp_path):
    """This includes layers that slide, differ in their heads, keep a state or have one latent vector for all heads."""
    path = tmp_path / "model.gguf"
    synth.write_model(path, architecture=architecture)
    header = read_header(path)
    work = replace(WORK, sequences=cuttable(header).max_sequences or WORK.sequences)
    options = msgspec.structs.replace(OPTIONS, context=work.context_tokens, sequences=work.sequences)
    files = files_of(path, (), assigned(layer_count(header), 0, is_tail=True))
    WholeModel(files, options, frozenset(), vocabulary=vocabulary_size(header)).release()
    found: Counter[str] = Counter()
    for record in printed.records:
        if match := _BUFFER.search(record.getMessage()):
            found[match[1]] += round(float(match[2]) * MIB)
    layers = model_profile(header).layers
    states = sum(layer.state_bytes for layer in layers) * work.sequences
    assert found["RS"] == pytest.approx(states, abs=0.011 * MIB)
    cells = sum(kv_bytes(each, work) - each.adapter_bytes for each in layers)
    assert found["KV"] == pytest.approx(cells - states, abs=0.021 * MIB)


@pytest.mark.slow
@pytest.mark.parametrize("architecture", INDEXED)
def test_buffers_include_the_index_of_sparse_attention(architecture, printed, tmp_path):
    path = tmp_path / "model.gguf"
    synth.write_model(path, architecture=architecture, width=256, is_empty=True)
    header = read_header(path)
    asked = replace(WORK, context_tokens=8192, sequences=1, chunk_rows=256)
    options = msgspec.structs.replace(OPTIONS, context=8192, sequences=1, rows=256)
    files = files_of(path, (), assigned(layer_count(header), 0, is_tail=True))
    WholeModel(files, options, frozenset(), vocabulary=vocabulary_size(header)).release()
    found = [float(mib) * MIB for mib in re.findall(r"CPU compute buffer size = +([0-9.]+) MiB", printed.text)]
    assert compute_buffer_bytes(model_profile(header), asked) == pytest.approx(max(found), rel=0.08)


def latent(width: int, heads: int) -> dict[str, int]:
    return {
        "embedding_length": width,
        "attention__head_count": heads,
        "attention__head_count_kv": 1,
        "attention__key_length": 576,
        "attention__value_length": 512,
        "attention__key_length_mla": 192,
        "attention__value_length_mla": 128,
    }


def state_space(width: int, inner: int, state: int, groups: int) -> dict[str, int]:
    sizes = {"conv_kernel": 4, "inner_size": inner, "state_size": state, "group_count": groups}
    return {"embedding_length": width, **{f"ssm__{key}": size for key, size in sizes.items()}}


@pytest.mark.parametrize(
    ("name", "keys", "measured_mib"),
    [
        ("deepseek2", latent(7168, 128), 412.0),
        ("mistral4", latent(7168, 64), 220.0),
        ("nemotron_h", state_space(4480, 10240, 128, 8), 147.8),
        ("falcon-h1", state_space(5120, 10240, 256, 2), 156.2),
        ("granitehybrid", state_space(4096, 8192, 128, 1), 115.9),
        ("jamba", state_space(4096, 8192, 16, 0), 108.7),
        ("grok", {"embedding_length": 6144, "attention__head_count": 48, "attention__head_count_kv": 8}, 456.0),
    ],
    ids=["latent-128", "latent-64", "mamba-2", "mamba-2-beside", "mamba-2-one-group", "mamba-1", "without-flash"],
)
def test_compute_buffers_exceed_what_the_weights_suggest(name, keys, measured_mib):
    """``measured_mib`` is what llama.cpp allocates for 512-token chunks, 4,096 tokens and a small feed-forward."""
    profile = replace(model_profile(model(name, context_length=4096, **keys)), width=keys["embedding_length"])
    asked = replace(WORK, context_tokens=4096, sequences=1, chunk_rows=512)
    assert compute_buffer_bytes(profile, asked) == pytest.approx(measured_mib * MIB, rel=0.08)


_COMPUTE = re.compile(r" compute buffer size = +([0-9.]+) MiB")
WIDE = {"width": 1024, "heads": 16, "heads_kv": 4, "head_width": 64, "layers": 2, "is_empty": True}


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("arcee", {"feed_forward": 8192}),
        ("starcoder2", {"feed_forward": 4096}),
        ("llama", {"feed_forward": 4096}),
        ("phi3", {"feed_forward": 4096, "heads_kv": 16}),
        ("command-r", {"feed_forward": 4096}),
        ("qwen3", {"feed_forward": 1024, "heads": 32}),
        ("qwen3moe", {"experts": 8, "experts_used": 8, "expert_feed_forward": 384}),
        ("qwen3moe", {"experts": 8, "experts_used": 8, "expert_feed_forward": 1024}),
    ],
    ids=["squared", "no-gate", "gate", "fused", "beside", "wide-attention", "small-experts", "large-experts"],
)
def test_a_compute_buffer_follows_from_the_shapes_of_a_layer(name, shape, printed, tmp_path):
    """For 512 tokens and one window: at most 15 % above llama.cpp's allocation, and never below."""
    path = tmp_path / "model.gguf"
    synth.write_model(path, architecture=name, **{**WIDE, **shape})
    header = read_header(path)
    asked = replace(WORK, context_tokens=1024, sequences=1, chunk_rows=512)
    options = msgspec.structs.replace(OPTIONS, context=asked.context_tokens, sequences=1, rows=asked.chunk_rows)
    files = files_of(path, (), assigned(layer_count(header), 0, is_tail=True))
    WholeModel(files, options, frozenset(), vocabulary=vocabulary_size(header)).release()
    (taken,) = (match for each in printed.records if (match := _COMPUTE.search(each.getMessage())))
    counted = compute_buffer_bytes(model_profile(header), asked) / MIB
    assert 0.99 <= counted / float(taken[1]) <= 1.15
