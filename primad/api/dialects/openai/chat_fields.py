"""Request fields of a conversation: its messages, the chat template's variables, and its tools. Pure.

Also drops the oldest messages of a conversation that became too long for the context.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Final, Literal

from pydantic import Field, ValidationInfo, field_validator, model_validator
from pydantic_core import PydanticCustomError

from primad.api.answering.pictures import SentPicture, marker_of
from primad.api.dialects.openai.fields import Strict, expecting, only
from primad.api.dialects.openai.history import PICTURES, understood
from primad.api.dialects.openai.thinking_fields import thinking_variables
from primad.api.dialects.openai.tool_fields import ToolCall, ToolFields
from primad.errors import printable

NO_AUDIO = only(None, why="this server returns text only")
_REPORTED: Final = ("system", "developer")
_MIN_SHARE: Final = 4
"""A response without a limit keeps at least one in this many tokens of the context."""
MAX_DOCUMENTS: Final = 128
MAX_TEMPLATE_VARIABLES: Final = 32
_OURS: Final = frozenset(
    {
        "messages",
        "tools",
        "documents",
        "add_generation_prompt",
        "bos_token",
        "eos_token",
        "strftime_now",
        "raise_exception",
    }
)
"""Template variables that the server sets, which a request cannot replace."""


class TemplateFields(Strict):
    """Variables of the chat template. Unused ones have no effect."""

    chat_template_kwargs: Annotated[dict[str, Any], Field(max_length=MAX_TEMPLATE_VARIABLES)] | None = None
    enable_thinking: bool | None = None
    reasoning_effort: Annotated[str, Field(min_length=1, max_length=32)] | None = None
    documents: Annotated[list[dict[str, Any]], Field(max_length=MAX_DOCUMENTS)] | None = None

    @field_validator("chat_template_kwargs")
    @classmethod
    def _none_of_ours(cls, value: dict[str, Any] | None) -> dict[str, Any] | None:
        for name in sorted(_OURS.intersection(value or ())):
            raise PydanticCustomError("reserved", "'{name}' is set by the server; leave it out", {"name": name})
        return value

    def variables_for(self, template: str) -> dict[str, Any]:
        """Return the variables of ``template``, by its own names. ``chat_template_kwargs`` overrides the others."""
        rendered = thinking_variables(template, self.enable_thinking, self.reasoning_effort)
        documents = {} if self.documents is None else {"documents": self.documents}
        return rendered | documents | (self.chat_template_kwargs or {})


class TextPart(Strict):
    """A part of a message's content."""

    type: Literal["text"]
    text: str


_KINDS: Final[dict[str, Literal["picture", "sound", ""]]] = {"picture": "picture", "sound": "sound", "media": ""}


class PicturePart(Strict):
    """An image or audio in a message's content: a data URL or base64, which its client ``called`` so. The type of
    ``media`` is detected from the file."""

    type: Literal["picture", "sound", "media"]
    source: str
    called: str = ""


class Message(Strict):
    """One message of a conversation. Only an assistant makes calls."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[
        str | list[Annotated[TextPart | PicturePart, Field(discriminator="type")]] | None,
        expecting("a string or a list of parts: text, and image_url with a data URL"),
    ] = Field(default=None, validate_default=True)
    name: str | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    tool_calls: Annotated[list[ToolCall], Field(fail_fast=True)] | None = None
    function_call: Annotated[Any, only(None, why="say it as tool_calls")] = None
    audio: Annotated[Any, NO_AUDIO] = None

    @model_validator(mode="before")
    @classmethod
    def _understood(cls, value: Any) -> Any:
        return understood(value)

    @field_validator("content", mode="before")
    @classmethod
    def _known_parts(cls, value: Any) -> Any:
        for part in value if isinstance(value, list) else ():
            kind = part.get("type") if isinstance(part, dict) else None
            if isinstance(kind, str) and kind not in ("text", "picture", "sound", "media"):
                why = "parts of type '{kind}' are not supported: send text, image_url with a data URL, or input_audio"
                if kind in (*PICTURES, "input_audio"):
                    why = "a part of type '{kind}' lacks its data URL, or base64, as a text"
                raise PydanticCustomError("unsupported", why, {"kind": printable(kind, 64)})
        return value

    @field_validator("content")
    @classmethod
    def _content_is_there(cls, value: Any, info: ValidationInfo) -> Any:
        if value is None and info.data.get("role", "assistant") != "assistant":
            raise PydanticCustomError("missing", "a message needs content; only an assistant's may be left out")
        return value

    @field_validator("tool_calls")
    @classmethod
    def _calls_of_the_assistant(cls, value: list[ToolCall] | None, info: ValidationInfo) -> list[ToolCall] | None:
        if value and info.data.get("role", "assistant") != "assistant":
            raise PydanticCustomError("tool_calls", "only an assistant's message has calls")
        return value

    @property
    def is_begun(self) -> bool:
        """Whether it is text of the assistant, which a response can continue."""
        return self.role == "assistant" and not self.tool_calls and not self.is_empty

    @property
    def is_empty(self) -> bool:
        """Whether it is an empty message of the assistant."""
        rendered = self.for_template()
        return self.role == "assistant" and not (
            rendered["content"].strip() or rendered.get("tool_calls") or rendered.get("reasoning_content", "").strip()
        )

    def for_template(self) -> dict[str, Any]:
        """Return the message for chat templates: text parts joined by newlines, pictures as markers, null content as
        ""."""
        match self.content:
            case None:
                text = ""
            case str():
                text = self.content
            case parts:
                text = _joined(parts)
        optional = {
            "name": self.name,
            "tool_call_id": self.tool_call_id,
            "reasoning_content": self.reasoning_content,
            "tool_calls": [call.for_template() for call in self.tool_calls or ()],
        }
        return {"role": self.role, "content": text} | {key: value for key, value in optional.items() if value}


def _joined(parts: Sequence[TextPart | PicturePart]) -> str:
    """Join ``parts`` as llama-server does: each text on its own line, except next to a picture."""
    text = ""
    for before, part in zip([None, *parts], parts, strict=False):
        is_beside = before is None or isinstance(before, PicturePart) or isinstance(part, PicturePart)
        text += ("" if is_beside else "\n") + (part.text if isinstance(part, TextPart) else marker_of(part.source))
    return text


class ChatFields(TemplateFields, ToolFields):
    """The parts of a chat's prompt. The response continues the last message if that is the assistant's, unless a new
    turn is requested."""

    messages: Annotated[list[Message], Field(min_length=1, fail_fast=True)]
    continue_final_message: bool | None = None
    add_generation_prompt: bool | None = None

    @field_validator("continue_final_message")
    @classmethod
    def _final_message(cls, value: bool | None, info: ValidationInfo) -> bool | None:
        messages: list[Message] = info.data.get("messages") or []
        if value and messages and not messages[-1].is_begun:
            raise PydanticCustomError("messages", "the last message is not text of the assistant that can be continued")
        return value

    @field_validator("add_generation_prompt")
    @classmethod
    def _one_of_both(cls, value: bool | None, info: ValidationInfo) -> bool | None:
        if value and info.data.get("continue_final_message"):
            raise PydanticCustomError("messages", "contradicts continue_final_message; set one of them to false")
        return value

    @property
    def continues(self) -> bool:
        """Whether the response continues the last message."""
        if self.continue_final_message is not None:
            return self.continue_final_message
        return self.messages[-1].is_begun and not self.add_generation_prompt

    @property
    def opens_turn(self) -> bool:
        """Whether an assistant's turn starts after the messages."""
        return self.add_generation_prompt is not False

    @property
    def begun(self) -> str:
        """The text that the response continues, "" for a new turn."""
        last = self.messages[-1].for_template()
        return str(last["content"] or last.get("reasoning_content", "")) if self.continues else ""

    @property
    def pictures(self) -> list[SentPicture]:
        """The pictures of the messages, in order."""
        return [
            SentPicture(part.called or f"messages[{number}].content[{place}]", part.source, _KINDS[part.type])
            for number, message in enumerate(self.messages)
            for place, part in enumerate(message.content if isinstance(message.content, list) else ())
            if isinstance(part, PicturePart)
        ]

    @property
    def conversation(self) -> list[dict[str, Any]]:
        """Return the messages for chat templates, without an empty last message of the assistant, which some clients
        send."""
        found = [message.for_template() for message in self.messages]
        return found[:-1] if len(found) > 1 and self.messages[-1].is_empty else found


def completion_room(context_tokens: int, limit: int | None) -> int:
    """Return the number of tokens to leave for a response of at most ``limit``: never more than half of the context."""
    return min(context_tokens // _MIN_SHARE if limit is None else limit, context_tokens // 2)


def shifted(messages: Sequence[Message], fits: Callable[[list[Message]], bool]) -> list[Message]:
    """Return ``messages`` with as few of the oldest exchanges dropped as needed for ``fits``.

    An exchange starts with a user's message, so that calls keep their results. System messages and the last exchange
    always stay.
    """
    starts = [i for i, message in enumerate(messages) if message.role == "user"]

    def without(count: int) -> list[Message]:
        first = starts[count] if count else 0
        return [message for i, message in enumerate(messages) if i >= first or message.role in _REPORTED]

    count = bisect.bisect_left(range(max(len(starts) - 1, 0)), True, key=lambda count: fits(without(count)))
    return without(count) if starts else list(messages)
