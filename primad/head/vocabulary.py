"""The served model's vocabulary, for the API: llama.cpp's tokenizer, and what the model file says of chat and sampling.

Loaded only after the ring process has loaded the same file: whatever crashes llama.cpp has crashed there.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from primad.api.backend import FillInTokens, SamplingDefaults
from primad.engine.llama import LlamaVocabulary
from primad.errors import ModelError
from primad.gguf.constants import GGUFValueType
from primad.gguf.header import Header

CHAT_TEMPLATE = "tokenizer.chat_template"
_RECOMMENDED: Final = {
    "general.sampling.temp": ("temperature", 0.0, 2.0),
    "general.sampling.top_k": ("top_k", 0, 2**31 - 1),
    "general.sampling.top_p": ("top_p", 0.0, 1.0),
    "general.sampling.min_p": ("min_p", 0.0, 1.0),
    "general.sampling.penalty_repeat": ("repeat_penalty", 0.01, 10.0),
    "general.sampling.penalty_last_n": ("penalty_tokens", -1, 2**31 - 1),
    "general.sampling.mirostat": ("mirostat", 0, 2),
    "general.sampling.mirostat_tau": ("mirostat_tau", 0.0, 100.0),
    "general.sampling.mirostat_eta": ("mirostat_eta", 0.0, 1.0),
    "general.sampling.xtc_probability": ("xtc_probability", 0.0, 1.0),
    "general.sampling.xtc_threshold": ("xtc_threshold", 0.0, 1.0),
}
"""Keys of a model file with the field that each is, and what that may be."""


def sampling_defaults(header: Header) -> SamplingDefaults:
    """How the model file wants its tokens sampled. A value that makes no sense is as if it were not there."""
    found: dict[str, Any] = {}
    for key, (name, least, most) in _RECOMMENDED.items():
        if key not in header.values:
            continue
        try:
            number = header.number(key)
        except ModelError:
            continue
        if least <= number <= most:
            found[name] = int(number) if isinstance(least, int) else float(number)
    return SamplingDefaults(**found)


class ModelVocabulary(LlamaVocabulary):
    """A ``LlamaVocabulary`` that also knows the chat template, and how to fill in; ``path`` where it is not in the file."""

    def __init__(self, header: Header, path: Path | None = None) -> None:
        super().__init__(path or header.path)
        value = header.values.get(CHAT_TEMPLATE)
        before, after, middle, file = self.fill_in_ids
        self.fill_in = (
            FillInTokens(before=before, after=after, middle=middle, file=file if file >= 0 else None)
            if min(before, after, middle) >= 0
            else None
        )
        self.chat_template = str(value.scalar()) if value is not None and value.type == GGUFValueType.STRING else None
