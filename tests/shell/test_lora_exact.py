"""Windows with the layers of a LoRA adapter give what llama.cpp gives with the whole adapter, bit for bit."""

import ctypes

import numpy as np
import pytest
from llama_cpp import llama_cpp as llama

from primad.engine.llama.model import load_adapters
from primad.engine.protocol import AdapterFile
from primad.gguf.adapter import open_adapter
from primad.gguf.architectures.tensors import layer_of
from primad.gguf.header import read_header
from tests.fakes.gguf import write_adapter
from tests.shell.test_cut_exact import PROMPT, Route, cuts_of
from tools import synth

pytestmark = pytest.mark.slow


def matrices(header, *, layers=None):
    """The shapes of layers' matrices, by name; only of ``layers``, if given."""
    return {
        name: tensor.shape
        for name, tensor in header.tensors.items()
        if (layer := layer_of(name)) is not None
        and (layers is None or layer in layers)
        and len(tensor.shape) > 1
        and name.split(".")[2]
        in ("attn_q", "attn_v", "attn_output", "ffn_down", "ffn_up", "ffn_down_exps", "ffn_up_exps")
    }


def llama_logits(path, adapters):
    """The logits of llama.cpp alone after ``PROMPT``, with ``adapters`` (files and scales)."""
    model = llama.llama_model_load_from_file(str(path).encode(), llama.llama_model_default_params())
    loaded = load_adapters(model, [AdapterFile(str(file), scale) for file, scale in adapters])
    params = llama.llama_context_default_params()
    params.n_ctx, params.n_batch, params.n_ubatch, params.n_threads, params.n_threads_batch = 256, 256, 64, 1, 1
    params.swa_full = True
    context = llama.llama_init_from_model(model, params)
    handles = (ctypes.POINTER(ctypes.c_void_p) * len(loaded))(*loaded)
    scales = (ctypes.c_float * len(loaded))(*(scale for _, scale in adapters))
    llama.llama_set_adapters_lora(context, handles, len(loaded), scales)
    tokens = (llama.llama_token * len(PROMPT))(*PROMPT)
    assert llama.llama_decode(context, llama.llama_batch_get_one(tokens, len(PROMPT))) == 0
    size = llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(model))
    pointer = ctypes.cast(llama.llama_get_logits_ith(context, -1), ctypes.POINTER(ctypes.c_float))
    logits = np.ctypeslib.as_array(pointer, shape=(size,)).copy()
    llama.llama_free(context)
    llama.llama_model_free(model)
    return logits


def ring_logits(header, cuts, folder, adapters):
    opened = [open_adapter(file, scale, header) for file, scale in adapters]
    route = Route(header, cuts, folder, adapters=opened)
    route.logits(PROMPT[:64], 0)
    logits = route.logits(PROMPT[64:], 64)
    route.release()
    return logits


@pytest.mark.parametrize("architecture", ["llama", "qwen3moe", "gemma3", "lfm2"])
def test_windows_with_an_adapter_are_the_whole_model_with_it(architecture, tmp_path):
    path = tmp_path / "model.gguf"
    synth.write_model(path, architecture=architecture)
    header = read_header(path)
    file = write_adapter(tmp_path / "lora.gguf", matrices(header), architecture=architecture)
    plain, expected = llama_logits(path, []), llama_logits(path, [(file, 0.7)])
    assert not np.array_equal(plain, expected)
    for number, cuts in enumerate(cuts_of(header)):
        folder = tmp_path / str(number)
        folder.mkdir()
        assert np.array_equal(ring_logits(header, cuts, folder, [(file, 0.7)]), expected)


def test_two_adapters_one_with_only_some_layers_are_exact(tmp_path):
    path = tmp_path / "model.gguf"
    synth.write_model(path)
    header = read_header(path)
    adapters = [
        (write_adapter(tmp_path / "a.gguf", matrices(header)), 1.0),
        (write_adapter(tmp_path / "b.gguf", matrices(header, layers=(1, 3)), rank=2, alpha=0.0, seed=5), -0.5),
    ]
    expected = llama_logits(path, adapters)
    assert np.array_equal(ring_logits(header, [0, 1, 2, 6], tmp_path, adapters), expected)


@pytest.mark.parametrize("architecture", ["llama", "gpt-oss", "lfm2", "llama4"])
def test_adapters_of_the_token_embedding_and_the_output(architecture, tmp_path):
    path = tmp_path / "model.gguf"
    synth.write_model(path, architecture=architecture)
    header = read_header(path)
    outside = {name: header.tensors[name].shape for name in ("token_embd.weight", "output.weight")}
    adapters = [
        (write_adapter(tmp_path / "a.gguf", outside | matrices(header), architecture=architecture), 0.7),
        (write_adapter(tmp_path / "b.gguf", outside, architecture=architecture, rank=3, alpha=0.0, seed=5), -0.5),
    ]
    expected = llama_logits(path, adapters)
    for single in adapters:
        assert not np.array_equal(llama_logits(path, [single]), expected)
    assert np.array_equal(ring_logits(header, cuts_of(header)[0], tmp_path, adapters), expected)


def test_many_adapters_are_added_up_in_the_same_order_each_time(tmp_path):
    path = tmp_path / "model.gguf"
    synth.write_model(path)
    header = read_header(path)
    adapters = [
        (write_adapter(tmp_path / f"{number}.gguf", matrices(header), seed=100 * number), 0.3) for number in range(7)
    ]
    expected = llama_logits(path, adapters)
    assert not np.array_equal(llama_logits(path, adapters[::-1]), expected)
    for number in range(4):
        folder = tmp_path / f"ring-{number}"
        folder.mkdir()
        assert np.array_equal(ring_logits(header, [0, 2, 6], folder, adapters), expected)
