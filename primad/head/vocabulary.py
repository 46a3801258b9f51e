"""The served model's vocabulary, for the API: llama.cpp's tokenizer, and the chat template of the model file.

Loaded only after the ring process has loaded the same file: whatever crashes llama.cpp has crashed there.
"""

from __future__ import annotations

from primad.engine.llama import LlamaVocabulary
from primad.gguf.constants import GGUFValueType
from primad.gguf.header import Header

CHAT_TEMPLATE = "tokenizer.chat_template"


class ModelVocabulary(LlamaVocabulary):
    """A ``LlamaVocabulary`` that also knows the chat template."""

    def __init__(self, header: Header) -> None:
        super().__init__(header.path)
        value = header.values.get(CHAT_TEMPLATE)
        self.chat_template = str(value.scalar()) if value is not None and value.type == GGUFValueType.STRING else None
