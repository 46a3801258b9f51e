"""The constants of GGUF files, from the package that llama.cpp's makers keep."""

from __future__ import annotations

from primad.system.allocator import without_top

with without_top("gguf"):
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType, LlamaFileType, TokenType

__all__ = ["GGML_QUANT_SIZES", "GGMLQuantizationType", "GGUFValueType", "LlamaFileType", "TokenType"]
