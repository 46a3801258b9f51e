"""Compute a prompt with pictures with llama.cpp and its libmtmd alone: a ring must equal the result bit for bit."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
from llama_cpp import llama_cpp as llama
from llama_cpp import mtmd_cpp as mtmd
from numpy.typing import NDArray

from primad.system.allocator import zeroed
from tools.lab import LabError

Part = str | bytes
"""Text, or the file of a picture."""


@llama.llama_log_callback  # type: ignore[untyped-decorator]
def _quiet(*_: object) -> None:
    pass


def plain_answer(
    model: Path,
    encoder: Path,
    parts: Sequence[Part],
    tokens: int,
    *,
    rows: int,
    context: int = 512,
    never: int | None = None,
) -> tuple[list[int], list[NDArray[np.float32]]]:
    """Return the ``tokens`` most likely tokens after ``parts``, with the logits (vocabulary,) from which each was
    sampled.

    ``never`` is not sampled.

    Prompts are computed in batches of ``rows`` tokens, with one thread and without repacked weights; memory is zeroed,
    since some encoders' graphs read uninitialised memory. Raises ``LabError``.
    """
    with zeroed(), ExitStack() as stack:
        loaded, running = _open(stack, model, rows, context)
        eye = _open_encoder(stack, encoder, loaded)
        chunks = _chunks(stack, eye, parts)
        position = ctypes.c_int32(0)
        code = mtmd.mtmd_helper_eval_chunks(eye, running, chunks, 0, 0, rows, True, ctypes.byref(position))
        if code:
            raise LabError(f"llama.cpp cannot compute the prompt (code {code})")
        vocabulary = llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(loaded))
        drawn, found = list[int](), list[NDArray[np.float32]]()
        for number in range(tokens):
            pointer = llama.llama_get_logits_ith(running, -1)
            found.append(np.ctypeslib.as_array(pointer, shape=(vocabulary,)).copy())
            likely = [int(each) for each in found[-1].argsort()[-2:][::-1] if each != never]
            drawn.append(likely[0])
            token = (llama.llama_token * 1)(drawn[-1])
            if number + 1 < tokens and llama.llama_decode(running, llama.llama_batch_get_one(token, 1)):
                raise LabError("llama_decode failed")
        return drawn, found


def _open(stack: ExitStack, model: Path, rows: int, context: int) -> tuple[Any, Any]:
    params = llama.llama_model_default_params()
    params.n_gpu_layers, params.use_extra_bufts = 0, False
    loaded = llama.llama_model_load_from_file(str(model).encode(), params)
    if not loaded:
        raise LabError(f"llama.cpp cannot load {model}")
    stack.callback(llama.llama_model_free, loaded)
    params = llama.llama_context_default_params()
    params.n_ctx, params.n_batch, params.n_ubatch = context, rows, rows
    params.n_threads = params.n_threads_batch = 1
    params.n_seq_max, params.swa_full = 1, True
    running = llama.llama_init_from_model(loaded, params)
    if not running:
        raise LabError("llama.cpp cannot open a context")
    stack.callback(llama.llama_free, running)
    return loaded, running


def _open_encoder(stack: ExitStack, encoder: Path, loaded: Any) -> Any:
    mtmd.mtmd_log_set(_quiet, ctypes.c_void_p(0))
    mtmd.mtmd_helper_log_set(_quiet, ctypes.c_void_p(0))
    params = mtmd.mtmd_context_params_default()
    params.use_gpu, params.print_timings, params.warmup, params.n_threads = False, False, False, 1
    eye = mtmd.mtmd_init_from_file(str(encoder).encode(), loaded, params)
    if not eye:
        raise LabError(f"llama.cpp cannot load {encoder}")
    stack.callback(mtmd.mtmd_free, eye)
    return eye


def _chunks(stack: ExitStack, eye: Any, parts: Sequence[Part]) -> Any:
    marker = mtmd.mtmd_default_marker()
    text = b"".join(part.encode() if isinstance(part, str) else marker for part in parts)
    bitmaps = []
    for part in parts:
        if isinstance(part, bytes):
            buffer = (ctypes.c_uint8 * len(part)).from_buffer_copy(part)
            bitmap = mtmd.mtmd_helper_bitmap_init_from_buf(eye, buffer, len(part), False)
            if not bitmap:
                raise LabError("llama.cpp cannot read a picture")
            stack.callback(mtmd.mtmd_bitmap_free, bitmap)
            bitmaps.append(bitmap)
    chunks = mtmd.mtmd_input_chunks_init()
    stack.callback(mtmd.mtmd_input_chunks_free, chunks)
    prompt = mtmd.mtmd_input_text(text=text, text_len=len(text), add_special=True, parse_special=True)
    array = (mtmd.mtmd_bitmap_p_ctypes * max(len(bitmaps), 1))(*bitmaps)
    code = mtmd.mtmd_tokenize(eye, chunks, ctypes.byref(prompt), array, len(bitmaps))
    if code:
        raise LabError(f"llama.cpp cannot cut the prompt into tokens (code {code})")
    return chunks
