"""A conversation as a request has it: its messages, what goes to the chat template beside them, and its tools."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, ValidationInfo, field_validator, model_validator
from pydantic_core import PydanticCustomError

from primad.api.dialects.openai.fields import Strict, expecting, only
from primad.api.dialects.openai.history import understood
from primad.api.dialects.openai.template_fields import TemplateFields
from primad.api.dialects.openai.tool_fields import ToolCall, ToolFields

NO_AUDIO = only(None, why="this server answers with text only")


class TextPart(Strict):
    """A part of a message's content."""

    type: Literal["text"]
    text: str


class Message(Strict):
    """One message of a conversation. Only an assistant calls."""

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

    @model_validator(mode="before")
    @classmethod
    def _understood(cls, value: Any) -> Any:
        return understood(value)

    @field_validator("content")
    @classmethod
    def _content_is_there(cls, value: str | list[TextPart] | None, info: ValidationInfo) -> str | list[TextPart] | None:
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
        """Whether it is a text of the assistant's, with which an answer may go on."""
        return self.role == "assistant" and not self.tool_calls and not self.is_empty

    @property
    def is_empty(self) -> bool:
        """Whether it is the assistant's and says nothing."""
        said = self.for_template()
        return self.role == "assistant" and not (
            said["content"].strip() or said.get("tool_calls") or said.get("reasoning_content", "").strip()
        )

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
    """What makes a chat's prompt. The answer goes on where the last message ends if that is the assistant's, unless a new
    turn is asked for."""

    messages: Annotated[list[Message], Field(min_length=1, fail_fast=True)]
    continue_final_message: bool | None = None
    add_generation_prompt: bool | None = None

    @field_validator("continue_final_message")
    @classmethod
    def _final_message(cls, value: bool | None, info: ValidationInfo) -> bool | None:
        messages: list[Message] = info.data.get("messages") or []
        if value and messages and not messages[-1].is_begun:
            raise PydanticCustomError("messages", "the last message is no text of the assistant's, to go on with")
        return value

    @field_validator("add_generation_prompt")
    @classmethod
    def _one_of_both(cls, value: bool | None, info: ValidationInfo) -> bool | None:
        if value and info.data.get("continue_final_message"):
            raise PydanticCustomError("messages", "does not go with continue_final_message; set one of them to false")
        return value

    @property
    def continues(self) -> bool:
        """Whether the answer goes on where the last message ends."""
        if self.continue_final_message is not None:
            return self.continue_final_message
        return self.messages[-1].is_begun and not self.add_generation_prompt

    @property
    def opens_turn(self) -> bool:
        """Whether a turn of the assistant is to begin behind the messages."""
        return self.add_generation_prompt is not False

    @property
    def begun(self) -> str:
        """What the answer goes on from, "" for a new turn."""
        last = self.messages[-1].for_template()
        return str(last["content"] or last.get("reasoning_content", "")) if self.continues else ""

    @property
    def conversation(self) -> list[dict[str, Any]]:
        """The messages as chat templates read them, without an empty one of the assistant's that clients end with."""
        found = [message.for_template() for message in self.messages]
        return found[:-1] if len(found) > 1 and self.messages[-1].is_empty else found
