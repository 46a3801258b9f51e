"""What a chat request may say of functions that the model can call, and of its thoughts."""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

from pydantic import Field, ValidationInfo, field_validator, model_validator
from pydantic_core import PydanticCustomError

from primad.api.openai.fields import Strict, expecting, only
from primad.api.openai.history import understood_call
from primad.errors import printable

MAX_TOOLS: Final = 256
MAX_TOOLS_CHARS: Final = 512 << 10
"""All tools of a request together, as JSON."""
MAX_TOOL_NAME_CHARS: Final = 128

_Name = Annotated[str, Field(min_length=1, max_length=MAX_TOOL_NAME_CHARS)]


class FunctionSpec(Strict):
    """A function that the model may call. ``parameters`` is a JSON schema; ``strict`` is kept where calls are demanded."""

    name: _Name
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class FunctionTool(Strict):
    """A tool. There are no others than functions."""

    type: Literal["function"]
    function: FunctionSpec

    def for_template(self) -> dict[str, Any]:
        """The tool as chat templates read it, with nothing missing."""
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


class ToolFields(Strict):
    """Functions that the model may call, whether it must, and where its thoughts go."""

    tools: Annotated[list[FunctionTool], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    tool_choice: Annotated[
        Literal["none", "auto", "required"] | NamedChoice | None,
        expecting('"none", "auto", "required" or {"type": "function", "function": {"name": NAME}}'),
    ] = None
    parallel_tool_calls: bool | None = None
    reasoning_format: Literal["none", "auto", "deepseek"] | None = None
    functions: Annotated[Any, only(None, [], why="say it as tools")] = None
    function_call: Annotated[Any, only(None, "none", "auto", why="say it as tool_choice")] = None

    @field_validator("tools")
    @classmethod
    def _tools_in_bounds(cls, value: list[FunctionTool] | None) -> list[FunctionTool] | None:
        names: set[str] = set()
        for name in (tool.function.name for tool in value or ()):
            if name in names:
                raise PydanticCustomError("tools", "two tools are called '{name}'", {"name": printable(name, 64)})
            names.add(name)
        chars = sum(len(tool.model_dump_json()) for tool in value or ())
        if chars > MAX_TOOLS_CHARS:
            message = "the tools have {chars} characters as JSON; at most {most} are taken"
            raise PydanticCustomError("tools", message, {"chars": chars, "most": MAX_TOOLS_CHARS})
        return value

    @field_validator("tool_choice")
    @classmethod
    def _choice_of_tools(cls, value: str | NamedChoice | None, info: ValidationInfo) -> str | NamedChoice | None:
        names = {tool.function.name for tool in info.data.get("tools") or ()}
        if value == "required" and not names:
            raise PydanticCustomError("tool_choice", "a call is required, and there are no tools")
        if isinstance(value, NamedChoice) and value.function.name not in names:
            name = printable(value.function.name, 64)
            raise PydanticCustomError("tool_choice", "there is no tool '{name}' among the tools", {"name": name})
        return value

    @property
    def callable_tools(self) -> list[FunctionTool]:
        """The tools that the model is told of and may call."""
        return [] if self.tools is None or self.tool_choice == "none" else self.tools

    @property
    def demanded_tools(self) -> list[FunctionTool]:
        """The tools one of which must be called; none where the model decides."""
        if isinstance(self.tool_choice, NamedChoice):
            name = self.tool_choice.function.name
            return [tool for tool in self.callable_tools if tool.function.name == name]
        return self.callable_tools if self.tool_choice == "required" else []

    @property
    def several_calls(self) -> bool:
        """Whether an answer may call more than once."""
        return self.parallel_tool_calls is not False and not isinstance(self.tool_choice, NamedChoice)


class CalledFunction(Strict):
    """What was called: ``arguments`` is a JSON object as text, as the model wrote it."""

    name: str
    arguments: str = "{}"


class ToolCall(Strict):
    """A call in an earlier answer."""

    id: str = ""
    type: Literal["function"] = "function"
    function: CalledFunction

    @model_validator(mode="before")
    @classmethod
    def _understood(cls, value: Any) -> Any:
        return understood_call(value)

    def for_template(self) -> dict[str, Any]:
        """The call as ``tool_prompt`` takes it."""
        function = {"name": self.function.name, "arguments": self.function.arguments}
        return {"id": self.id, "type": "function", "function": function}
