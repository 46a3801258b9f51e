"""Translates Ollama's requests into the core's. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from primad.api.dialects.ollama.schema import (
    FreeChatRequest,
    FreeCompletionRequest,
    OllamaChatRequest,
    OllamaGenerateRequest,
    OllamaMessage,
    OllamaRequest,
)
from primad.api.dialects.openai.free_samplers import is_count
from primad.api.dialects.openai.schema import ChatRequest, CompletionRequest, build
from primad.errors import RequestError

LATEST: Final = ":latest"
"""The tag that Ollama's clients add to a name without one."""
_OPTIONS: Final = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "typical_p",
    "seed",
    "presence_penalty",
    "frequency_penalty",
    "repeat_penalty",
    "repeat_last_n",
    "mirostat",
    "mirostat_tau",
    "mirostat_eta",
    "stop",
)
"""Options that are fields of the core. Others concern loading a model (``num_ctx``, ``num_gpu``) and are ignored."""

NAMES: Final = {name: f"options.{name}" for name in _OPTIONS} | {
    "max_tokens": "options.num_predict",
    "response_format": "format",
    "json_schema": "format",
    "reasoning_effort": "think",
}
"""Ollama's names of the core's fields."""


def plain(name: str) -> str:
    """Return a model's name without the default tag."""
    return name.removesuffix(LATEST)


def chat_request(ask: OllamaChatRequest) -> ChatRequest:
    """Return ``ask`` as a chat request. Raises ``RequestError`` for unsupported features."""
    fields: dict[str, Any] = {
        "messages": [_message(message, number) for number, message in enumerate(ask.messages or ())]
    }
    if ask.tools:
        fields["tools"] = ask.tools
    return build(FreeChatRequest, _shared(ask) | fields)


def generate_request(ask: OllamaGenerateRequest) -> ChatRequest | CompletionRequest:
    """Return ``ask`` as a chat request of one message, with ``raw`` or ``suffix`` as a completion request; raises like
    ``chat_request``."""
    if ask.images and (ask.raw or ask.suffix):
        raise RequestError("images: only supported with the model's template; leave out raw and suffix", param="images")
    if ask.raw or ask.suffix:
        fields: dict[str, Any] = {"max_tokens": -1} | _shared(ask) | {"prompt": ask.prompt or "", "suffix": ask.suffix}
        fields["logprobs"] = fields.pop("top_logprobs", 0) if fields.get("logprobs") else None
        return build(FreeCompletionRequest, fields)
    system = [{"role": "system", "content": ask.system}] if ask.system else []
    content = _content(ask.prompt or "", ask.images, "images")
    return build(FreeChatRequest, _shared(ask) | {"messages": [*system, {"role": "user", "content": content}]})


def _shared(ask: OllamaRequest) -> dict[str, Any]:
    options: Mapping[str, Any] = ask.options or {}
    fields: dict[str, Any] = {"model": plain(ask.model), "logprobs": ask.logprobs}
    if ask.top_logprobs is not None:
        fields["top_logprobs"] = ask.top_logprobs
    fields |= {name: options[name] for name in _OPTIONS if options.get(name) is not None}
    limit = options.get("num_predict")
    if limit is not None:
        fields["max_tokens"] = -1 if is_count(limit) and limit < 1 else limit
    if ask.format == "json":
        fields["response_format"] = {"type": "json_object"}
    elif isinstance(ask.format, dict):
        fields["json_schema"] = ask.format
    if ask.think is not None:
        fields["enable_thinking"] = bool(ask.think)
        if isinstance(ask.think, str):
            fields["reasoning_effort"] = ask.think
    return fields


def _content(text: str, images: Sequence[str] | None, at: str) -> str | list[dict[str, Any]]:
    """Put pictures before the text, as Ollama does, and sounds too, which Ollama's clients send among the pictures."""
    if not images:
        return text
    pictures = [{"type": "media", "source": each, "called": f"{at}[{number}]"} for number, each in enumerate(images)]
    return [*pictures, {"type": "text", "text": text}]


def _message(message: OllamaMessage, number: int) -> dict[str, Any]:
    content = _content(message.content or "", message.images, f"messages[{number}].images")
    fields: dict[str, Any] = {"role": message.role, "content": content}
    if message.thinking:
        fields["reasoning_content"] = message.thinking
    if message.tool_name:
        fields["name"] = message.tool_name
    if message.tool_calls:
        fields["tool_calls"] = [
            {
                "id": f"call_{number}",
                "type": "function",
                "function": {"name": call.function.name, "arguments": call.function.arguments},
            }
            for number, call in enumerate(message.tool_calls)
        ]
    return fields
