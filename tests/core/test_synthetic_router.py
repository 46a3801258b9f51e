"""A synthetic mixture of experts picks its experts evenly, or unevenly on request; nothing else changes."""

from __future__ import annotations

import numpy as np

from primad.gguf.header import read_header
from tools import synth


def router(path, **shape):
    """The norms of the rows of the first router, and the rest of the file."""
    synth.write_model(path, architecture="qwen3moe", layers=1, experts=64, **shape)
    tensor = read_header(path).tensors["blk.0.ffn_gate_inp.weight"]
    content = path.read_bytes()
    rows = np.frombuffer(content, np.float32, tensor.bytes // 4, tensor.offset).reshape(64, -1)
    return np.linalg.norm(rows, axis=1), content[: tensor.offset] + content[tensor.offset + tensor.bytes :]


def test_the_rows_of_a_router_have_the_spread_that_was_asked_for(tmp_path):
    alike, rest = router(tmp_path / "alike.gguf")
    unlike, other = router(tmp_path / "unlike.gguf", router_spread=0.4)
    assert np.log(alike).std() < 0.15
    assert 0.3 < np.log(unlike).std() < 0.5
    assert rest == other
