"""Requests of ``/v1/messages``, as in Anthropic's API reference. Pure."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator
from pydantic_core import PydanticCustomError

from primad.api.dialects.openai.fields import Strict, expecting
from primad.api.dialects.openai.samplers import MAX_TOKENS
from primad.api.dialects.openai.schema import MAX_STOP_CHARS, MAX_STOPS
from primad.errors import printable

_NOT_SERVED = {
    "document": "only text and images are read; send the document's text",
    "server_tool_use": "this server runs no tools itself",
    "container_upload": "this server has no containers",
    **dict.fromkeys(
        ("audio", "input_audio"), "this API takes no audio; send it to /v1/chat/completions as input_audio"
    ),
}

_SOURCES = ("base64", "url")


class TextBlock(Strict):
    """A text part of a message."""

    type: Literal["text"]
    text: str


class ImageSource(Strict):
    """An image as base64; a URL in its place is refused later, by name."""

    type: Literal["base64", "url"]
    data: str = ""
    url: str = ""


class ImageBlock(Strict):
    """An image in a message, or in the result of a tool."""

    type: Literal["image"]
    source: Annotated[ImageSource, expecting("an image as base64, with its data")]


class ThinkingBlock(Strict):
    """The model's reasoning in an earlier turn."""

    type: Literal["thinking"]
    thinking: str


class RedactedBlock(Strict):
    """Reasoning that only another server can read."""

    type: Literal["redacted_thinking"]


class ToolUseBlock(Strict):
    """The model called a tool."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any] | str | None = None


class ToolResultBlock(Strict):
    """The result of a tool."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: str | list[Annotated[TextBlock | ImageBlock, Field(discriminator="type")]] | None = None
    is_error: bool | None = None


Block = Annotated[
    TextBlock | ImageBlock | ThinkingBlock | RedactedBlock | ToolUseBlock | ToolResultBlock,
    Field(discriminator="type"),
]


class Turn(Strict):
    """One message of a conversation."""

    role: Literal["user", "assistant", "system"]
    content: Annotated[
        str | Annotated[list[Block], Field(fail_fast=True)] | None,
        expecting("a string or a list of text, image, thinking, tool_use and tool_result blocks"),
    ]

    @field_validator("content", mode="before")
    @classmethod
    def _served(cls, value: Any) -> Any:
        return _check_blocks(_as_texts(value))


class Tool(Strict):
    """A tool that the model may call; tools that Anthropic runs itself have a ``type`` and are skipped."""

    name: str
    type: str | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None


class ToolChoice(Strict):
    """Tool choice: ``any`` tool, or the one named ``name``."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class ThinkingChoice(Strict):
    """Whether the model thinks first, if its template leaves it open."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = None


class OutputFormat(Strict):
    """The required form of the response."""

    type: Literal["json_schema"]
    schema_: Annotated[dict[str, Any], Field(alias="schema")]


class OutputConfig(Strict):
    """Options of the response."""

    format: OutputFormat | None = None


class CountRequest(Strict):
    """``POST /v1/messages/count_tokens``."""

    model: Annotated[str, Field(max_length=512)]
    messages: Annotated[list[Turn], Field(min_length=1, fail_fast=True)]
    system: str | list[TextBlock] | None = None
    tools: list[Tool] | None = None
    tool_choice: ToolChoice | None = None
    thinking: ThinkingChoice | None = None


class MessagesRequest(CountRequest):
    """``POST /v1/messages``."""

    max_tokens: Annotated[int, Field(ge=1, le=MAX_TOKENS)]
    temperature: Annotated[float, Field(ge=0, le=1)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=0, le=MAX_TOKENS)] | None = None
    stop_sequences: (
        Annotated[
            list[Annotated[str, Field(max_length=MAX_STOP_CHARS)]],
            Field(max_length=MAX_STOPS),
        ]
        | None
    ) = None
    stream: bool | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None
    """The earlier name of ``output_config.format``."""


def _as_texts(value: Any) -> Any:
    """Convert blocks that contain text into text blocks: documents, search results, found tools."""
    if not isinstance(value, list):
        return value
    found = []
    for block in value:
        if isinstance(block, dict) and block.get("type") == "tool_result":
            block = block | {"content": _as_texts(block.get("content"))}
        text = _text_in(block)
        found.append(block if text is None else {"type": "text", "text": text})
    return found


def _text_in(block: Any) -> str | None:
    """Return the text of ``block`` if it is not a text block."""
    kind = block.get("type") if isinstance(block, dict) else None
    if kind == "tool_reference" and isinstance(block.get("tool_name"), str):
        return str(block["tool_name"])
    source = block.get("source") if kind == "document" else block if kind == "search_result" else None
    if not isinstance(source, dict):
        return None
    inner = source.get("data") if source.get("type") == "text" else source.get("content")
    parts = inner if isinstance(inner, list) else [{"text": inner}]
    texts = [part.get("text") if isinstance(part, dict) else None for part in parts]
    texts = [block.get("title"), *texts] if isinstance(block.get("title"), str) else texts
    return "\n".join(map(str, texts)) if texts and all(isinstance(text, str) for text in texts) else None


def _check_blocks(value: Any) -> Any:
    """Raise an error that names a known but unsupported block."""
    for block in value if isinstance(value, list) else ():
        kind = block.get("type") if isinstance(block, dict) else None
        if isinstance(kind, str) and kind in _NOT_SERVED:
            raise PydanticCustomError(
                "unsupported", "{kind} blocks are not supported: {why}", {"kind": kind, "why": _NOT_SERVED[kind]}
            )
        source = block.get("source") if kind == "image" else None
        if isinstance(source, dict) and isinstance(source.get("type"), str) and source["type"] not in _SOURCES:
            why = "images with a source of type '{kind}' are not supported: send base64"
            raise PydanticCustomError("unsupported", why, {"kind": printable(source["type"], 64)})
        if kind == "tool_result":
            _check_blocks(block.get("content"))
    return value
