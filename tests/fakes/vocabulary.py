"""Model files with just a vocabulary of one token per byte: enough for a tokenizer and a chat template."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import gguf

MARKERS = ("<|im_start|>", "<|im_end|>")


def _byte_texts() -> list[str]:
    """The characters with which GPT-2 writes the 256 bytes."""
    shown = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = iter(range(256, 512))
    return [chr(byte) if byte in shown else chr(next(others)) for byte in range(256)]


def write_vocabulary(path: Path, *, pre: str = "gpt-2", merges: Sequence[str] = ()) -> Path:
    """Write a model file to ``path`` whose text is split by llama.cpp's pre-tokenizer ``pre``."""
    tokens = [*_byte_texts(), *(merge.replace(" ", "") for merge in merges), *MARKERS]
    kinds = [int(gguf.TokenType.NORMAL)] * (len(tokens) - len(MARKERS)) + [int(gguf.TokenType.CONTROL)] * len(MARKERS)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(1 << 16)
    writer.add_embedding_length(64)
    writer.add_block_count(1)
    writer.add_feed_forward_length(64)
    writer.add_head_count(1)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("whitespace" if pre == "whitespace" else "gpt2")  # the first asserts no blanks left
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges(list(merges) or ["a b"])
    writer.add_bos_token_id(len(tokens) - 2)
    writer.add_eos_token_id(len(tokens) - 1)
    writer.add_unk_token_id(0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path
