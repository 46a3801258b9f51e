"""A conversation as a request has it: its messages, what goes to the chat template beside them, and its tools."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError

from primad.api.openai.fields import Strict, expecting, only
from primad.api.openai.template_fields import TemplateFields
from primad.api.openai.tool_fields import ToolCall, ToolFields

NO_AUDIO = only(None, why="this server answers with text only")


class TextPart(Strict):
    """A part of a message's content."""

    type: Literal["text"]
    text: str


class Message(Strict):
    """One message of a conversation. Only an assistant's content may be null, and only an assistant calls."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[
        str | list[TextPart] | None,
        expecting("a string or a list of text parts (images, audio and files are not supported)"),
    ] = Field(default=None, validate_default=True)
    name: str | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    tool_calls: Annotated[list[ToolCall], Field(fail_fast=True)] | None = None
    function_call: Annotated[Any, only(None, why="say it as tool_calls")] = None
    audio: Annotated[Any, NO_AUDIO] = None

    @field_validator("content")
    @classmethod
    def _content_is_there(cls, value: str | list[TextPart] | None, info: ValidationInfo) -> str | list[TextPart] | None:
        if value is None and info.data.get("role", "assistant") != "assistant":
            raise PydanticCustomError("missing", "a message needs content; only an assistant's may be null")
        return value

    @field_validator("tool_calls")
    @classmethod
    def _calls_of_the_assistant(cls, value: list[ToolCall] | None, info: ValidationInfo) -> list[ToolCall] | None:
        if value and info.data.get("role", "assistant") != "assistant":
            raise PydanticCustomError("tool_calls", "only an assistant's message has calls")
        return value

    def for_template(self) -> dict[str, Any]:
        """The message as chat templates read it: text parts joined by newlines, null content as ""."""
        match self.content:
            case None:
                text = ""
            case str():
                text = self.content
            case parts:
                text = "\n".join(part.text for part in parts)
        optional = {
            "name": self.name,
            "tool_call_id": self.tool_call_id,
            "reasoning_content": self.reasoning_content,
            "tool_calls": [call.for_template() for call in self.tool_calls or ()],
        }
        return {"role": self.role, "content": text} | {key: value for key, value in optional.items() if value}


class ChatFields(TemplateFields, ToolFields):
    """What makes a chat's prompt."""

    messages: Annotated[list[Message], Field(min_length=1, fail_fast=True)]
