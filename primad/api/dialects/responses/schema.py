"""Requests of ``/v1/responses``, as in OpenAI's API reference. Pure."""

from __future__ import annotations

from typing import Annotated, Any, Literal, get_args

from pydantic import BeforeValidator, Field, field_validator
from pydantic_core import PydanticCustomError

from primad.api.dialects.openai.fields import Strict, expecting, only
from primad.api.dialects.openai.history import result_of
from primad.api.dialects.openai.samplers import MAX_TOKENS
from primad.errors import printable

_STATELESS = "nothing is stored between requests; send the whole conversation as 'input'"


_PartKind = Literal[
    "input_text",
    "output_text",
    "text",
    "summary_text",
    "reasoning_text",
    "refusal",
    "input_image",
    "image_url",
    "input_audio",
]
_ItemKind = Literal[
    "message", "function_call", "function_call_output", "custom_tool_call", "custom_tool_call_output", "reasoning"
]
_RECORDS = frozenset({"web_search_call", "file_search_call", "code_interpreter_call", "image_generation_call"})
"""Items about another server's own actions. They are ignored; their results are in that server's response."""


class InputAudio(Strict):
    """Audio as base64; its ``format`` is detected from the file."""

    data: str
    format: str | None = None


class ContentPart(Strict):
    """A part of an item: input or output text, a refusal, an image or audio."""

    type: _PartKind
    text: str | None = None
    refusal: str | None = None
    image_url: str | dict[str, Any] | None = None
    input_audio: InputAudio | None = None
    file_id: Annotated[Any, only(None, why="no files are stored here; send the image as image_url")] = None


_Parts = Annotated[
    str | list[ContentPart] | None,
    expecting(
        "a string or a list of parts: texts, input_image with a data URL, and input_audio (files are not supported)"
    ),
]


class InputItem(Strict):
    """One item of a conversation: a message, a function call, its result, or reasoning."""

    type: _ItemKind = "message"
    role: Literal["user", "assistant", "system", "developer"] = "user"
    content: _Parts = None
    call_id: str | None = None
    name: str | None = None
    arguments: dict[str, Any] | str | None = None
    input: str | None = None
    output: Annotated[_Parts, BeforeValidator(result_of)] = None
    summary: _Parts = None


class TextFormat(Strict):
    """The required form of the response."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None


class TextOptions(Strict):
    """Options of the response's text."""

    format: TextFormat | None = None


class ReasoningOptions(Strict):
    """How much the model thinks, if its template leaves it open."""

    effort: str | None = None


class ResponsesRequest(Strict):
    """``POST /v1/responses``."""

    model: Annotated[str, Field(max_length=512)] | None = None
    input: Annotated[
        str | Annotated[list[InputItem], Field(min_length=1, fail_fast=True)],
        expecting(
            "a string, or items: messages of text, input_image and input_audio, function_call, function_call_output and "
            "reasoning"
        ),
    ]
    instructions: str | None = None
    max_output_tokens: Annotated[int, Field(ge=1, le=MAX_TOKENS)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    stream: bool | None = None
    metadata: (
        Annotated[
            dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]], Field(max_length=16)
        ]
        | None
    ) = None
    previous_response_id: Annotated[Any, only(None, why=_STATELESS)] = None
    conversation: Annotated[Any, only(None, why=_STATELESS)] = None
    prompt: Annotated[Any, only(None, why="no prompts are stored here")] = None
    background: Annotated[Any, only(None, False, why=_STATELESS)] = None
    top_logprobs: Annotated[Any, only(None, 0, why="use /v1/chat/completions")] = None

    @field_validator("input", mode="before")
    @classmethod
    def _served(cls, value: Any) -> Any:
        return _check_items(_understood(value))


def _understood(value: Any) -> Any:
    """Convert items of earlier turns to the common form: Codex' shell calls are calls."""
    if not isinstance(value, list):
        return value
    found = []
    for item in value:
        kind = item.get("type") if isinstance(item, dict) else None
        if not isinstance(kind, str) or kind not in _RECORDS:
            is_shell = isinstance(kind, str) and kind.startswith(("local_shell_call", "shell_call"))
            found.append(_as_function(item, str(kind)) if is_shell else item)
    return found


def _as_function(item: dict[str, Any], kind: str) -> dict[str, Any]:
    if kind.endswith("_output"):
        return {
            "type": "function_call_output",
            "call_id": item.get("call_id") or item.get("id"),
            "output": item.get("output"),
        }
    name, call_id = kind.removesuffix("_call"), item.get("call_id") or item.get("id")
    return {"type": "function_call", "call_id": call_id, "name": name, "arguments": item.get("action")}


def _check_items(value: Any) -> Any:
    """Raise an error that names an item of an unsupported type, or with an unsupported part."""
    for number, item in enumerate(value if isinstance(value, list) else ()):
        if not isinstance(item, dict):
            continue
        _check_kind(item, _ItemKind, f"input[{number}] is")
        for field in ("content", "output", "summary"):
            parts = item.get(field)
            for part in parts if isinstance(parts, list) else ():
                _check_kind(part, _PartKind, f"input[{number}] has a part")
    return value


def _check_kind(given: Any, known: Any, what: str) -> None:
    kind = given.get("type") if isinstance(given, dict) else None
    if isinstance(kind, str) and kind not in get_args(known):
        raise PydanticCustomError(
            "unsupported",
            "{what} of type '{kind}', which is not supported: this server reads text, images and function calls",
            {"what": what, "kind": printable(kind, 64)},
        )
