"""Lists the nodes of a model's graph, in the order in which llama.cpp computes them.

Use it in child processes, like ``wanted.py``: llama.cpp may abort on a file.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from primad.engine.binding import why
from primad.engine.llama.tap import EVAL_CALLBACK, ggml_base, node_name
from primad.errors import EngineError
from primad.system.allocator import without_top

with without_top("llama_cpp"):
    from llama_cpp import llama_cpp as llama

_ROWS: Final = 5
_CONTEXT: Final = 256


def graph_nodes(path: Path) -> Iterator[tuple[str, bool]]:
    """Yield each node's name, and whether it has the shape of its tokens' hidden states. Raises ``EngineError``."""
    params = llama.llama_model_default_params()
    params.n_gpu_layers = 0
    params.use_extra_bufts = False
    model = llama.llama_model_load_from_file(str(path).encode(), params)
    if not model:
        raise EngineError(f"llama.cpp cannot load {path}: {why('it does not say why')}")
    width = int(llama.llama_model_n_embd(model))
    nodes: list[tuple[str, bool]] = []

    def note(node: int) -> bool:
        shape = (ggml_base.ggml_nelements(node), ggml_base.ggml_nrows(node), ggml_base.ggml_nbytes(node))
        nodes.append((node_name(node).decode(errors="replace"), shape == (_ROWS * width, _ROWS, 4 * _ROWS * width)))
        return False

    callback = EVAL_CALLBACK(note)
    options = llama.llama_context_default_params()
    options.n_ctx, options.n_batch, options.n_ubatch = _CONTEXT, _ROWS, _ROWS
    options.n_threads = options.n_threads_batch = 1
    options.cb_eval = ctypes.cast(callback, type(options.cb_eval))
    context = llama.llama_init_from_model(model, options)
    batch = llama.llama_batch_init(_ROWS, 0, 1)
    try:
        if not context:
            raise EngineError(f"llama.cpp cannot open {path}: {why('out of memory?')}")
        nodes.clear()
        batch.n_tokens = _ROWS
        for i in range(_ROWS):
            batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.logits[i] = i + 1, i, 1, 1
            batch.seq_id[i][0] = 0
        if llama.llama_decode(context, batch) != 0:
            raise EngineError(f"llama.cpp cannot compute {path}: {why('it does not say why')}")
    finally:
        llama.llama_batch_free(batch)
        if context:
            llama.llama_free(context)
        llama.llama_model_free(model)
    yield from nodes
