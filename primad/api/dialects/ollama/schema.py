"""Requests of Ollama's paths, as in its API documentation. Pure."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from primad.api.dialects.openai.fields import Strict, expecting, only
from primad.api.dialects.openai.free_samplers import FreeSamplers, Whole
from primad.api.dialects.openai.schema import MAX_TOP_LOGPROBS, ChatRequest, CompletionRequest, TokenLimit

_Images = Annotated[list[str], expecting("a list of images as base64")] | None
_NoSound = Annotated[Any, only(None, [], "", why="send audio among images, or to /v1/chat/completions as input_audio")]


class OllamaFunction(Strict):
    """The called function, with its arguments as an object, or as text."""

    name: str
    arguments: dict[str, Any] | str | None = None


class OllamaCall(Strict):
    """A call of a tool."""

    function: OllamaFunction


class OllamaMessage(Strict):
    """One message of a conversation."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str | None = None
    thinking: str | None = None
    images: _Images = None
    audio: _NoSound = None
    tool_calls: list[OllamaCall] | None = None
    tool_name: str | None = None


class ModelRequest(Strict):
    """``POST /api/show``. ``name`` is the older name of ``model``."""

    model: Annotated[str, Field(max_length=512)] | None = None
    name: Annotated[str, Field(max_length=512)] | None = None


class OllamaRequest(Strict):
    """Fields common to chat and generate. ``keep_alive`` is accepted and ignored: the model stays loaded. A
    conversation that is too long loses its oldest turns, unless ``truncate`` is false."""

    model: Annotated[str, Field(max_length=512)]
    stream: bool | None = None
    format: Annotated[Literal["", "json"] | dict[str, Any] | None, expecting('"json" or a JSON schema')] = None
    options: dict[str, Any] | None = None
    think: Annotated[
        bool | Literal["low", "medium", "high"] | None, expecting('true, false, "low", "medium" or "high"')
    ] = None
    keep_alive: Any = None
    truncate: bool | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None


class OllamaChatRequest(OllamaRequest):
    """``POST /api/chat``. Without messages it only loads the model."""

    messages: Annotated[list[OllamaMessage], Field(fail_fast=True)] | None = None
    tools: list[dict[str, Any]] | None = None


class OllamaGenerateRequest(OllamaRequest):
    """``POST /api/generate``. ``raw`` skips the chat template."""

    prompt: str | None = None
    system: str | None = None
    raw: bool | None = None
    images: _Images = None
    audio: _NoSound = None
    suffix: str | None = None
    template: Annotated[Any, only(None, "", why="the model's own template is used; or send raw")] = None
    context: Annotated[Any, only(None, [], why="send the conversation to /api/chat")] = None


class FreeChatRequest(FreeSamplers, ChatRequest):
    """The core's fields of a chat, with the value ranges of Ollama."""

    max_tokens: Annotated[TokenLimit | None, Whole] = None


class FreeCompletionRequest(FreeSamplers, CompletionRequest):
    """The core's fields of a raw prompt, or of one with a suffix."""

    max_tokens: Annotated[TokenLimit | None, Whole] = None
