"""Plain llama.cpp through llama-cpp-python's low-level calls, as a child of the benchmark: the whole model, one process.

Speaks JSON lines: {"prefill": rows}, {"decode": tokens, "after": rows} or, to go on with what was computed last, {"more":
tokens} in, {"seconds": s, "tokens": [...], "rss_bytes": b} out. Decode takes the most likely token each time, and nothing
else: it is the fastest loop that these calls allow.

{"answers": n, "of": tokens, "after": rows} asks for n answers at once, as llama-server computes them: one context whose KV
cache all sequences share, and one ``llama_decode`` a step over the next token of each that writes, then the prompts as far
as there is room. It says what each token was waited for, {"first_s": [...], "next_s": [...]}. So it stands for llama-server
without HTTP; llama-cpp-python's own server computes one request at a time.
"""

from __future__ import annotations

import ctypes
import json
import sys
import time
from collections.abc import Sequence
from typing import Any

import llama_cpp as llama
import numpy as np
import psutil
from llama_cpp._ggml import libggml

SEQUENCE = 0


def prompt_of(tokens: int) -> list[int]:
    """A prompt of so many tokens; a longer one begins with a shorter one."""
    return [(i * 37) % 1000 + 10 for i in range(tokens)]


PROMPT = prompt_of(512)


@llama.llama_log_callback  # type: ignore[untyped-decorator]
def _quiet(*_: object) -> None:
    pass


class Plain:
    """``gpu_layers``, the last ones, are the GPU's, or those of llama.cpp's RPC ``servers``, which need its ``library``."""

    def __init__(
        self,
        *,
        path: str,
        threads: int,
        extra_buffers: bool,
        context: int,
        rows: int,
        sequences: int,
        library: str,
        servers: Sequence[str],
        gpu_layers: int,
    ) -> None:
        llama.llama_log_set(_quiet, ctypes.c_void_p(0))
        llama.llama_backend_init()
        model_params = llama.llama_model_default_params()
        model_params.use_extra_bufts = extra_buffers
        model_params.n_gpu_layers = gpu_layers
        if servers:
            devices = _devices_of(library, servers)
            model_params.devices = ctypes.cast(devices, ctypes.c_void_p)
            model_params.tensor_split = (ctypes.c_float * llama.llama_max_devices())(*[1.0] * len(servers))
        self.model = llama.llama_model_load_from_file(path.encode(), model_params)
        params = llama.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_ubatch = context, rows, rows
        params.n_threads = params.n_threads_batch = threads
        params.n_seq_max, params.kv_unified = sequences, True
        params.no_perf = True
        self.context = llama.llama_init_from_model(self.model, params)
        self.memory = llama.llama_get_memory(self.context)
        self.vocabulary = llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(self.model))
        self.batch = llama.llama_batch_init(rows, 0, 1)
        self.rows = rows
        self.tokens: list[int] = []
        """Drawn since the last prompt."""
        self.position = 0

    def _step(self, tokens: list[int], position: int) -> int:
        batch = self.batch
        for i, token in enumerate(tokens):
            batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.seq_id[i][0] = token, position + i, 1, SEQUENCE
            batch.logits[i] = i == len(tokens) - 1
        batch.n_tokens = len(tokens)
        if llama.llama_decode(self.context, batch):
            raise SystemExit("llama_decode failed")
        logits = np.ctypeslib.as_array(llama.llama_get_logits_ith(self.context, -1), shape=(self.vocabulary,))
        return int(logits.argmax())

    def prefill(self, rows: int) -> float:
        """Seconds for a prompt of ``rows`` tokens."""
        llama.llama_memory_clear(self.memory, True)
        prompt = prompt_of(rows)
        start = time.perf_counter()
        for first in range(0, rows, self.rows):
            token = self._step(prompt[first : first + self.rows], first)
        self.tokens, self.position = [token], rows
        return time.perf_counter() - start

    def decode(self, tokens: int, after: int) -> float:
        """Seconds for ``tokens`` tokens after a prompt of ``after``."""
        self.prefill(after)
        return self.more(tokens)

    def more(self, tokens: int) -> float:
        """Seconds for ``tokens`` tokens more."""
        start = time.perf_counter()
        for _ in range(tokens):
            self.tokens.append(self._step(self.tokens[-1:], self.position))
            self.position += 1
        return time.perf_counter() - start

    def together(self, answers: int, tokens: int, after: int) -> dict[str, Any]:
        """So many ``answers`` of ``tokens`` tokens, all ``after`` the same prompt, which each computes."""
        llama.llama_memory_clear(self.memory, True)
        known = [prompt_of(after) for _ in range(answers)]
        cells = [0] * answers
        begin = time.perf_counter()
        latest, first_s, next_s = [begin] * answers, list[float](), list[float]()
        while writing := [i for i in range(answers) if len(known[i]) < after + tokens]:
            for i in self._shared_step(sorted(writing, key=lambda i: cells[i] < after), known, cells):
                now = time.perf_counter()
                (next_s if len(known[i]) > after + 1 else first_s).append(now - latest[i])
                latest[i] = now
        self.tokens = known[0][after:]
        return {"seconds": time.perf_counter() - begin, "first_s": first_s, "next_s": next_s}

    def _shared_step(self, writing: Sequence[int], known: Sequence[list[int]], cells: list[int]) -> list[int]:
        """One step over what the sequences ``writing`` know and have no cells of; those of which it drew a token."""
        batch, row, drawn = self.batch, 0, dict[int, int]()
        for i in writing:
            for position in range(cells[i], min(len(known[i]), cells[i] + self.rows - row)):
                batch.token[row], batch.pos[row] = known[i][position], position
                batch.n_seq_id[row], batch.seq_id[row][0] = 1, i
                batch.logits[row] = position == len(known[i]) - 1
                if batch.logits[row]:
                    drawn[i] = row
                row, cells[i] = row + 1, position + 1
        batch.n_tokens = row
        if llama.llama_decode(self.context, batch):
            raise SystemExit("llama_decode failed")
        for i, at in drawn.items():
            logits = np.ctypeslib.as_array(llama.llama_get_logits_ith(self.context, at), shape=(self.vocabulary,))
            known[i].append(int(logits.argmax()))
        return list(drawn)

    def answer(self, ask: dict[str, int]) -> dict[str, Any]:
        """Seconds that it took to do what was asked, and what else is told of it."""
        match ask:
            case {"prefill": rows}:
                return {"seconds": self.prefill(rows)}
            case {"more": tokens}:
                return {"seconds": self.more(tokens)}
            case {"answers": answers, "of": tokens, "after": rows}:
                return self.together(answers, tokens, rows)
        return {"seconds": self.decode(ask["decode"], ask["after"])}


def _devices_of(library: str, servers: Sequence[str]) -> ctypes.Array[Any]:
    """The first device of each of ``servers``, as llama.cpp takes them: a list that ends with a null."""
    rpc, ggml = ctypes.CDLL(library), libggml
    rpc.ggml_backend_rpc_add_server.restype = ctypes.c_void_p
    ggml.ggml_backend_reg_dev_get.restype = ctypes.c_void_p
    found = []
    for server in servers:
        registered = ctypes.c_void_p(rpc.ggml_backend_rpc_add_server(server.encode()))
        if not registered:
            raise SystemExit(f"llama.cpp's RPC server {server} does not answer")
        ggml.ggml_backend_register(registered)
        found.append(ggml.ggml_backend_reg_dev_get(registered, ctypes.c_size_t(0)))
    return (ctypes.c_void_p * (len(found) + 1))(*found, None)


def main() -> None:
    plain = Plain(**json.loads(sys.argv[1]))
    for line in sys.stdin:
        answer = plain.answer(json.loads(line))
        held = psutil.Process().memory_info().rss
        print(json.dumps(answer | {"tokens": plain.tokens, "rss_bytes": held}), flush=True)


if __name__ == "__main__":
    main()
