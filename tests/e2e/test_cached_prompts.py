"""A prompt prefix is found in the folder of --kv-cache after the worker and the head were restarted."""

from __future__ import annotations

import secrets
from contextlib import ExitStack

import httpx
import pytest

from primad.gguf.header import read_header
from tests.e2e.cluster import PATIENCE_S, Head, heading, joined, wait_until
from tests.fakes.gguf import write_adapter
from tools import synth

pytestmark = pytest.mark.slow

PROMPT = "A tale of the sea and of those who sail on it. " * 60
"""Longer than a chunk."""
CACHED = 512
"""Tokens of its whole chunks."""
MAX_STARTS = 4
"""Several, because blocks that would arrive later than they can be computed are not used, as on a stalled machine."""


def answer(head: Head, prompt: str = PROMPT) -> tuple[str, int]:
    """Return the completion, and the number of cached prompt tokens."""
    body = {"prompt": prompt, "max_tokens": 12, "temperature": 0}
    reply = httpx.post(f"{head.url}/v1/completions", json=body, timeout=PATIENCE_S).json()
    return reply["choices"][0]["text"], reply["usage"]["prompt_tokens_details"]["cached_tokens"]


def is_found(head: Head, expected: str) -> bool:
    """Whether all blocks of the prompt are found, which only the cache has by then; its completion is as ``expected``.

    Blocks that would arrive too late are not used, so on a stalled machine this is repeated.
    """
    assert answer(head, f"{secrets.token_hex(4)} takes the only sequence. {PROMPT}")[1] == 0
    wait_until(lambda: head.status()["kv"]["lag_tokens"] == 0, "all is kept")
    before = head.status()["kv"]["found_tokens"]
    text, cached = answer(head)
    assert (text, head.status()["kv"]["found_tokens"] - before) == (expected, cached)
    return cached == CACHED


def test_a_prompt_is_found_again_after_every_device_restarted(quick_model, module_home, tmp_path):
    cluster = f"prompts-{secrets.token_hex(6)}"
    worker_home, head_home = module_home("worker"), module_home("head")
    caches = {"worker": ("--kv-cache", tmp_path / "w"), "head": ("--kv-cache", tmp_path / "h")}
    arguments = ("--wait", 1, "--use-all", "--context", 2048, "--sequences", 1, *caches["head"])
    with ExitStack() as heads:
        head = heads.enter_context(heading(quick_model, head_home, cluster, *arguments, config=""))
        with joined(worker_home, cluster, *caches["worker"]) as worker:
            head.wait_serving()
            reported, before = answer(head)
            assert before == 0
            wait_until(lambda: is_found(head, reported), "the prompt is found")
            worker.stop()
        heads.close()
    for _ in range(MAX_STARTS):
        with (
            joined(worker_home, cluster, *caches["worker"]),
            heading(quick_model, head_home, cluster, *arguments, config="") as again,
        ):
            again.wait_serving()
            text, found = answer(again)
            assert text == reported
            if found == CACHED:
                break
    assert found == CACHED


def test_a_prompt_cached_with_other_rope_scaling_or_adapters_is_not_reused(smollm2, new_home, tmp_path):
    model, home = tmp_path / "model.gguf", new_home("head")
    synth.write_model(model, vocabulary=f"from:{smollm2}")
    changed = {name: tensor.shape for name, tensor in read_header(model).tensors.items() if "attn_q" in name}
    lora = write_adapter(tmp_path / "lora.gguf", changed)

    def reported(*options: object) -> str:
        arguments = ("--alone", "--context", 2048, "--sequences", 1, "--kv-cache", tmp_path / "cells", *options)
        with heading(model, home, secrets.token_hex(6), *arguments, config="") as head:
            head.wait_serving()
            first, cached = answer(head)
            assert cached == 0, options
            wait_until(lambda: is_found(head, first), "the prompt is found")
            return first

    plain = reported()
    for options in (("--rope-freq-base", 20_000), ("--lora", lora)):
        assert reported(*options) != plain
