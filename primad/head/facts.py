"""What the header of a model file says that clients show: architecture, size, quantization, the trained context."""

from __future__ import annotations

from math import prod

from primad.api.answering.backend import ModelFacts
from primad.errors import ModelError
from primad.gguf.constants import LlamaFileType
from primad.gguf.header import Header


def facts_of(header: Header) -> ModelFacts:
    """The facts of the model of ``header``. Raises ``ModelError`` for a header that lacks its context."""
    architecture = header.text("general.architecture")
    tensors = header.tensors.values()
    return ModelFacts(
        architecture=architecture,
        basename=_text(header, "general.basename"),
        quantization=_quantization(int(header.number("general.file_type", -1))),
        parameters=sum(prod(tensor.shape) for tensor in tensors),
        size_bytes=sum(tensor.bytes for tensor in tensors),
        trained_context_tokens=header.count(f"{architecture}.context_length"),
        width=header.count(f"{architecture}.embedding_length"),
    )


def _text(header: Header, key: str) -> str:
    """What is there as text; "" for nothing, and for what is none: clients only show it."""
    try:
        return header.text(key, "")
    except ModelError:
        return ""


def _quantization(file_type: int) -> str:
    try:
        return LlamaFileType(file_type).name.removeprefix("MOSTLY_").removeprefix("ALL_")
    except ValueError:
        return ""
