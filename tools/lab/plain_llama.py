"""Plain llama.cpp through llama-cpp-python's low-level calls, as a child of the benchmark: the whole model in one
process.

Speaks JSON lines: {"prefill": rows}, {"decode": tokens, "after": rows} or, to continue from the last computation,
{"more": tokens} in, {"seconds": s, "tokens": [...], "rss_bytes": b} out. Decode only takes the most likely token each
time: it is the fastest loop that these calls allow.
"""

from __future__ import annotations

import ctypes
import json
import sys
import time

import llama_cpp as llama
import numpy as np
import psutil

SEQUENCE = 0


def prompt_of(tokens: int) -> list[int]:
    """Return a prompt of ``tokens`` tokens; a longer one begins with a shorter one."""
    return [(i * 37) % 1000 + 10 for i in range(tokens)]


PROMPT = prompt_of(512)


@llama.llama_log_callback  # type: ignore[untyped-decorator]
def _quiet(*_: object) -> None:
    pass


class Plain:
    """A model of which the GPU computes the last ``gpu_layers`` layers."""

    def __init__(
        self,
        *,
        path: str,
        threads: int,
        extra_buffers: bool,
        context: int,
        rows: int,
        gpu_layers: int,
    ) -> None:
        llama.llama_log_set(_quiet, ctypes.c_void_p(0))
        llama.llama_backend_init()
        model_params = llama.llama_model_default_params()
        model_params.use_extra_bufts = extra_buffers
        model_params.n_gpu_layers = gpu_layers
        self.model = llama.llama_model_load_from_file(path.encode(), model_params)
        params = llama.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_ubatch = context, rows, rows
        params.n_threads = params.n_threads_batch = threads
        params.no_perf = True
        self.context = llama.llama_init_from_model(self.model, params)
        self.memory = llama.llama_get_memory(self.context)
        self.vocabulary = llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(self.model))
        self.batch = llama.llama_batch_init(rows, 0, 1)
        self.rows = rows
        self.tokens: list[int] = []
        """Tokens sampled since the last prompt."""
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
        """Return the seconds for a prompt of ``rows`` tokens."""
        llama.llama_memory_clear(self.memory, True)
        prompt = prompt_of(rows)
        start = time.perf_counter()
        for first in range(0, rows, self.rows):
            token = self._step(prompt[first : first + self.rows], first)
        self.tokens, self.position = [token], rows
        return time.perf_counter() - start

    def decode(self, tokens: int, after: int) -> float:
        """Return the seconds for ``tokens`` tokens after a prompt of ``after``."""
        self.prefill(after)
        return self.more(tokens)

    def more(self, tokens: int) -> float:
        """Return the seconds for ``tokens`` further tokens."""
        start = time.perf_counter()
        for _ in range(tokens):
            self.tokens.append(self._step(self.tokens[-1:], self.position))
            self.position += 1
        return time.perf_counter() - start

    def answer(self, ask: dict[str, int]) -> float:
        """Return the seconds that the request took."""
        match ask:
            case {"prefill": rows}:
                return self.prefill(rows)
            case {"more": tokens}:
                return self.more(tokens)
        return self.decode(ask["decode"], ask["after"])


def main() -> None:
    plain = Plain(**json.loads(sys.argv[1]))
    for line in sys.stdin:
        seconds = plain.answer(json.loads(line))
        held = psutil.Process().memory_info().rss
        print(json.dumps({"seconds": seconds, "tokens": plain.tokens, "rss_bytes": held}), flush=True)


if __name__ == "__main__":
    main()
