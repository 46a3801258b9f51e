"""What Ollama's paths are asked, as its API documentation has them. Pure."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from primad.api.dialects.openai.fields import Strict, expecting, only
from primad.api.dialects.openai.free_samplers import FreeSamplers, Whole
from primad.api.dialects.openai.schema import MAX_TOP_LOGPROBS, ChatRequest, CompletionRequest, TokenLimit

_NoImages = Annotated[Any, only(None, [], why="this model reads text only")]


class OllamaFunction(Strict):
    """The function that a model called, with its arguments as an object, or as the text of one."""

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
    images: _NoImages = None
    tool_calls: list[OllamaCall] | None = None
    tool_name: str | None = None


class ModelRequest(Strict):
    """``POST /api/show``. ``name`` is what ``model`` was called before."""

    model: Annotated[str, Field(max_length=512)] | None = None
    name: Annotated[str, Field(max_length=512)] | None = None


class OllamaRequest(Strict):
    """What chat and generate share. ``keep_alive`` is taken and means nothing: the model stays."""

    model: Annotated[str, Field(max_length=512)]
    stream: bool | None = None
    format: Annotated[Literal["", "json"] | dict[str, Any] | None, expecting('"json" or a JSON schema')] = None
    options: dict[str, Any] | None = None
    think: Annotated[
        bool | Literal["low", "medium", "high"] | None, expecting('true, false, "low", "medium" or "high"')
    ] = None
    keep_alive: Any = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None


class OllamaChatRequest(OllamaRequest):
    """``POST /api/chat``. Without messages it only asks for the model to be there."""

    messages: Annotated[list[OllamaMessage], Field(fail_fast=True)] | None = None
    tools: list[dict[str, Any]] | None = None


class OllamaGenerateRequest(OllamaRequest):
    """``POST /api/generate``. ``raw`` leaves out the chat template."""

    prompt: str | None = None
    system: str | None = None
    raw: bool | None = None
    images: _NoImages = None
    suffix: str | None = None
    template: Annotated[Any, only(None, "", why="the model's own template is used; or send raw")] = None
    context: Annotated[Any, only(None, [], why="send the conversation to /api/chat")] = None


class FreeChatRequest(FreeSamplers, ChatRequest):
    """What the core makes of a chat; numbers are Ollama's."""

    max_tokens: Annotated[TokenLimit | None, Whole] = None


class FreeCompletionRequest(FreeSamplers, CompletionRequest):
    """What the core makes of a raw prompt, or one with a suffix."""

    max_tokens: Annotated[TokenLimit | None, Whole] = None
