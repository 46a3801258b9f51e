"""Request fields for functions that the model can call, and for its thoughts."""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

from pydantic import BeforeValidator, Field, ValidationInfo, field_validator, model_validator
from pydantic_core import PydanticCustomError

from primad.api.dialects.openai.fields import Strict, expecting, only
from primad.api.dialects.openai.history import understood_call
from primad.errors import printable

MAX_TOOLS: Final = 256
MAX_TOOLS_CHARS: Final = 512 << 10
"""Limit of all tools of a request together, as JSON."""
MAX_TOOL_NAME_CHARS: Final = 128

_Name = Annotated[str, Field(min_length=1, max_length=MAX_TOOL_NAME_CHARS)]


class FunctionSpec(Strict):
    """A function that the model may call. ``parameters`` is a JSON schema; ``strict`` applies if calls are required."""

    name: _Name
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class FunctionTool(Strict):
    """A tool. Functions are the only kind."""

    type: Literal["function"]
    function: FunctionSpec

    def for_template(self) -> dict[str, Any]:
        """Return the tool for chat templates, complete."""
        function = self.function
        parameters = {"type": "object", "properties": {}} if function.parameters is None else function.parameters
        inner = {"name": function.name, "description": function.description or "", "parameters": parameters}
        return {"type": "function", "function": inner}


class NamedFunction(Strict):
    """A function by its name."""

    name: str


class NamedChoice(Strict):
    """The one function to call."""

    type: Literal["function"]
    function: NamedFunction


_WORDS: Final = ("none", "auto", "required", "any")
"""Words for a choice; Mistral and Anthropic say ``any`` for ``required``."""


class AllowedTool(Strict):
    """One of the allowed tools, by its name."""

    function: NamedFunction


class AllowedTools(Strict):
    """The allowed tools: the model may call them, or must."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[AllowedTool], Field(min_length=1, max_length=MAX_TOOLS)]


class AllowedChoice(Strict):
    """The functions that may be called this time."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


def _understood_choice(value: Any) -> Any:
    """Return a choice as the field takes it: a word may be the type of an object."""
    word = value["type"] if isinstance(value, dict) and value.keys() == {"type"} else value
    if isinstance(word, str) and word in _WORDS:
        return "required" if word == "any" else word
    return value


class ToolFields(Strict):
    """Functions that the model may call, whether it must, and the place of its thoughts."""

    tools: Annotated[list[FunctionTool], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    tool_choice: Annotated[
        Literal["none", "auto", "required"] | NamedChoice | AllowedChoice | None,
        BeforeValidator(_understood_choice),
        expecting('"none", "auto", "required" or {"type": "function", "function": {"name": NAME}}'),
    ] = None
    parallel_tool_calls: bool | None = None
    reasoning_format: Literal["none", "auto", "deepseek"] | None = None
    functions: Annotated[Any, only(None, [], why="use tools")] = None
    function_call: Annotated[Any, only(None, "none", "auto", why="use tool_choice")] = None

    @field_validator("tools")
    @classmethod
    def _tools_in_bounds(cls, value: list[FunctionTool] | None) -> list[FunctionTool] | None:
        names: set[str] = set()
        for name in (tool.function.name for tool in value or ()):
            if name in names:
                raise PydanticCustomError("tools", "two tools are named '{name}'", {"name": printable(name, 64)})
            names.add(name)
        chars = sum(len(tool.model_dump_json()) for tool in value or ())
        if chars > MAX_TOOLS_CHARS:
            message = "the tools have {chars} characters as JSON; at most {most} are accepted"
            raise PydanticCustomError("tools", message, {"chars": chars, "most": MAX_TOOLS_CHARS})
        return value

    @field_validator("tool_choice")
    @classmethod
    def _choice_of_tools(cls, value: Any, info: ValidationInfo) -> Any:
        names = {tool.function.name for tool in info.data.get("tools") or ()}
        if value == "required" and not names:
            raise PydanticCustomError("tool_choice", "a call is required, and there are no tools")
        for name in _named(value):
            if name not in names:
                context = {"name": printable(name, 64)}
                raise PydanticCustomError("tool_choice", "there is no tool '{name}' among the tools", context)
        return value

    @property
    def callable_tools(self) -> list[FunctionTool]:
        """The tools that the model sees and may call."""
        if self.tools is None or self.tool_choice == "none":
            return []
        allowed = _named(self.tool_choice) if isinstance(self.tool_choice, AllowedChoice) else None
        return [tool for tool in self.tools if allowed is None or tool.function.name in allowed]

    @property
    def demanded_tools(self) -> list[FunctionTool]:
        """The tools of which one must be called; empty if the model decides."""
        if isinstance(self.tool_choice, NamedChoice):
            name = self.tool_choice.function.name
            return [tool for tool in self.callable_tools if tool.function.name == name]
        choice = self.tool_choice
        mode = choice.allowed_tools.mode if isinstance(choice, AllowedChoice) else choice
        return self.callable_tools if mode == "required" else []

    @property
    def several_calls(self) -> bool:
        """Whether a response may have several calls."""
        return self.parallel_tool_calls is not False and not isinstance(self.tool_choice, NamedChoice)


def _named(choice: Any) -> list[str]:
    """Return the names of the functions in ``choice``."""
    if isinstance(choice, AllowedChoice):
        return [tool.function.name for tool in choice.allowed_tools.tools]
    return [choice.function.name] if isinstance(choice, NamedChoice) else []


class CalledFunction(Strict):
    """The called function: ``arguments`` is a JSON object as text, as the model wrote it."""

    name: str
    arguments: str = "{}"


class ToolCall(Strict):
    """A call in an earlier response."""

    id: str = ""
    type: Literal["function"] = "function"
    function: CalledFunction

    @model_validator(mode="before")
    @classmethod
    def _understood(cls, value: Any) -> Any:
        return understood_call(value)

    def for_template(self) -> dict[str, Any]:
        """Return the call as ``tool_prompt`` takes it."""
        function = {"name": self.function.name, "arguments": self.function.arguments}
        return {"id": self.id, "type": "function", "function": function}
