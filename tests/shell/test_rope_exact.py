"""Windows with other RoPE scaling than the model's match llama.cpp's whole model with it, bit for bit."""

import ctypes

import numpy as np
import pytest
from llama_cpp import llama_cpp as llama
from msgspec.structs import replace

from primad.engine.rope import ROPE_SCALINGS, Rope
from primad.gguf.architectures.layers import layer_count
from primad.gguf.header import read_header
from primad.gguf.profile import model_profile
from primad.planning.adapters import with_rope
from tests.shell.test_cut_exact import OPTIONS, PROMPT, Route
from tools import synth

pytestmark = pytest.mark.slow

ROPES = {
    "base": Rope(freq_base=50_000.0),
    "linear": Rope(scaling="linear", freq_scale=0.25),
    "none": Rope(scaling="none", freq_scale=0.25, freq_base=1234.0),
    "yarn": Rope(scaling="yarn", freq_scale=0.125, yarn_orig_ctx=32),
    "yarn by hand": Rope(
        scaling="yarn",
        freq_scale=0.5,
        yarn_orig_ctx=64,
        yarn_ext_factor=0.7,
        yarn_attn_factor=1.1,
        yarn_beta_fast=20.0,
        yarn_beta_slow=2.0,
    ),
    "longrope": Rope(scaling="longrope", freq_scale=0.5),
}


def llama_logits(path, rope):
    """The logits of llama.cpp alone after ``PROMPT``, with the parameters in ``rope``."""
    model = llama.llama_model_load_from_file(str(path).encode(), llama.llama_model_default_params())
    params = llama.llama_context_default_params()
    params.n_ctx, params.n_batch, params.n_ubatch, params.n_threads, params.n_threads_batch = 256, 256, 64, 1, 1
    params.swa_full = True
    if rope.scaling is not None:
        params.rope_scaling_type = ROPE_SCALINGS.index(rope.scaling)
    for name in rope.__struct_fields__[1:]:
        setattr(params, name if name.startswith("yarn") else f"rope_{name}", getattr(rope, name))
    context = llama.llama_init_from_model(model, params)
    tokens = (llama.llama_token * len(PROMPT))(*PROMPT)
    assert llama.llama_decode(context, llama.llama_batch_get_one(tokens, len(PROMPT))) == 0
    size = llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(model))
    logits = np.ctypeslib.as_array(
        ctypes.cast(llama.llama_get_logits_ith(context, -1), ctypes.POINTER(ctypes.c_float)), shape=(size,)
    ).copy()
    llama.llama_free(context)
    llama.llama_model_free(model)
    return logits


def ring_logits(header, cuts, folder, rope):
    route = Route(header, cuts, folder, replace(OPTIONS, rope=rope))
    route.logits(PROMPT[:64], 0)
    logits = route.logits(PROMPT[64:], 64)
    route.release()
    return logits


@pytest.mark.parametrize("kind", ROPES)
@pytest.mark.parametrize("architecture", ["llama", "gemma3", "gpt-oss", "cohere2"])
def test_windows_use_the_requested_rope_scaling(architecture, kind, tmp_path):
    path = tmp_path / "model.gguf"
    synth.write_model(path, architecture=architecture, layers=8)
    header = read_header(path)
    expected = llama_logits(path, ROPES[kind])
    multiple = with_rope(model_profile(header), header, ROPES[kind]).cut_multiple
    cuts = [*range(0, layer_count(header), multiple), layer_count(header)]
    assert len(cuts) > 2
    assert np.array_equal(ring_logits(header, cuts, tmp_path, ROPES[kind]), expected)


def test_other_rope_scaling_gives_other_logits(tmp_path):
    path = tmp_path / "model.gguf"
    synth.write_model(path, layers=2)
    header = read_header(path)
    logits = {kind: ring_logits(header, [0, 2], tmp_path, rope).tobytes() for kind, rope in ROPES.items()}
    logits["model"] = llama_logits(path, Rope()).tobytes()
    assert len({*logits.values()}) == len(logits)
