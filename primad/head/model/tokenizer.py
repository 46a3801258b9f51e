"""The served model's tokenizer, loaded only by the text process, since it needs llama.cpp."""

from __future__ import annotations

from pathlib import Path

from primad.api.answering.backend import FillInTokens
from primad.engine.vocabulary import LlamaVocabulary


class ModelVocabulary(LlamaVocabulary):
    """A ``LlamaVocabulary`` that also has its model's chat template and fill-in-the-middle tokens."""

    def __init__(self, path: str, chat_template: str | None) -> None:
        super().__init__(Path(path))
        before, after, middle, file = self.fill_in_ids
        self.fill_in = (
            FillInTokens(before=before, after=after, middle=middle, file=file if file >= 0 else None)
            if min(before, after, middle) >= 0
            else None
        )
        self.chat_template = chat_template
