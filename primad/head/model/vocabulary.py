"""A model file's facts about chat, sampling and the model."""

from __future__ import annotations

from math import prod
from pathlib import Path
from typing import Any, Final

from primad.api.answering.backend import ModelFacts, SamplingDefaults
from primad.api.answering.chat import check_template
from primad.errors import ConfigError, ModelError
from primad.gguf.constants import GGUFValueType, LlamaFileType
from primad.gguf.header import Header

CHAT_TEMPLATE = "tokenizer.chat_template"
MAX_TEMPLATE_BYTES: Final = 1 << 20
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
"""Keys of a model file, each with its field and the range of valid values."""


def sampling_defaults(header: Header) -> SamplingDefaults:
    """Return the model file's sampling defaults. Invalid values are ignored."""
    found: dict[str, Any] = {}
    for key, (name, minimum, maximum) in _RECOMMENDED.items():
        if key not in header.values:
            continue
        try:
            number = header.number(key)
        except ModelError:
            continue
        if minimum <= number <= maximum:
            found[name] = int(number) if isinstance(minimum, int) else float(number)
    return SamplingDefaults(**found)


def chat_template_of(header: Header) -> str | None:
    """Return the Jinja source in the model file, or None. Raises ``ModelError`` if it is too long: clients may ask for
    it."""
    value = header.values.get(CHAT_TEMPLATE)
    if value is None or value.type != GGUFValueType.STRING:
        return None
    if len(value.raw) > MAX_TEMPLATE_BYTES:
        raise ModelError(
            f"{header.path}: its chat template is larger than {MAX_TEMPLATE_BYTES >> 20} MiB; replace it with "
            "--chat-template FILE"
        )
    return str(value.scalar())


def chat_template_in(path: Path) -> str:
    """Return the Jinja source in the file of ``--chat-template``. Raises ``ConfigError`` if it is unusable."""
    at = f"--chat-template {path}"
    try:
        with path.open("rb") as file:
            source = file.read(MAX_TEMPLATE_BYTES + 1).decode()
    except (OSError, ValueError) as exc:
        reason = exc.strerror if isinstance(exc, OSError) else "not text in UTF-8"
        raise ConfigError(f"{at}: {reason or exc}; name a file with a Jinja template") from exc
    if not source.strip() or len(source) > MAX_TEMPLATE_BYTES:
        raise ConfigError(
            f"{at}: is empty, or larger than {MAX_TEMPLATE_BYTES >> 20} MiB; name a file with a Jinja template"
        )
    try:
        check_template(source)
    except ModelError as exc:
        raise ConfigError(f"{at}: {exc.__cause__}; name a file with a Jinja template") from exc
    return source


def facts_of(header: Header) -> ModelFacts:
    """Return the facts of the model of ``header``. Raises ``ModelError`` for a header that lacks its context length."""
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
    """Return the text value of ``key``; "" if it is missing or of another type: clients only display it."""
    try:
        return header.text(key, "")
    except ModelError:
        return ""


def _quantization(file_type: int) -> str:
    try:
        return LlamaFileType(file_type).name.removeprefix("MOSTLY_").removeprefix("ALL_")
    except ValueError:
        return ""
