"""Translates Responses requests into the core's. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final, TypeVar

from primad.api.dialects.openai.history import PICTURES
from primad.api.dialects.openai.schema import ChatRequest, build
from primad.api.dialects.responses.schema import ContentPart, InputItem, ResponsesRequest, TextFormat
from primad.errors import RequestError

T = TypeVar("T")
NAMES: Final = {"response_format": "text.format", "messages": "input", "reasoning_effort": "reasoning.effort"}
"""The Responses API's names of the core's fields."""


def chat_request(ask: ResponsesRequest) -> ChatRequest:
    """Return ``ask`` as a chat request. Raises ``RequestError`` for unsupported features."""
    fields: dict[str, Any] = {
        "model": ask.model,
        "messages": [*_instructions(ask), *_messages(ask.input)],
        "max_tokens": ask.max_output_tokens,
        "temperature": ask.temperature,
        "top_p": ask.top_p,
    }
    tools = [_tool(tool) for tool in ask.tools or () if tool.get("type") == "function"]
    if tools:
        fields["tools"] = tools
        fields["tool_choice"] = _choice(ask.tool_choice)
        fields["parallel_tool_calls"] = ask.parallel_tool_calls
    if ask.text is not None and ask.text.format is not None:
        fields["response_format"] = _format(ask.text.format)
    if ask.reasoning is not None and ask.reasoning.effort is not None:
        fields["reasoning_effort"] = ask.reasoning.effort
    return build(ChatRequest, fields)


def _instructions(ask: ResponsesRequest) -> list[dict[str, Any]]:
    return [{"role": "system", "content": ask.instructions}] if ask.instructions else []


def _messages(given: str | list[InputItem]) -> Iterator[dict[str, Any]]:
    """Return items as messages: thoughts and calls belong to one assistant message, with the text next to them."""
    if isinstance(given, str):
        yield {"role": "user", "content": given}
        return
    turn: dict[str, Any] = {}
    for number, item in enumerate(given):
        if item.type == "message" and item.role == "assistant" and "content" not in turn and "tool_calls" not in turn:
            turn["content"] = _content(item.content, f"input[{number}].content")
        elif item.type == "reasoning":
            turn["reasoning_content"] = _text(item.content) or _text(item.summary)
        elif item.type in ("function_call", "custom_tool_call"):
            turn.setdefault("tool_calls", []).append(_call(item, number))
        else:
            if turn:
                yield {"role": "assistant", "content": ""} | turn
                turn = {}
            yield _message(item, number)
    if turn:
        yield {"role": "assistant", "content": ""} | turn


def _message(item: InputItem, number: int) -> dict[str, Any]:
    if item.type in ("function_call_output", "custom_tool_call_output"):
        call = _needed(item.call_id, f"input[{number}].call_id")
        return {"role": "tool", "tool_call_id": call, "content": _content(item.output, f"input[{number}].output")}
    return {"role": item.role, "content": _content(item.content, f"input[{number}].content")}


def _call(item: InputItem, number: int) -> dict[str, Any]:
    arguments = item.arguments if item.type == "function_call" else {"input": item.input}
    function = {"name": _needed(item.name, f"input[{number}].name"), "arguments": arguments}
    return {"id": _needed(item.call_id, f"input[{number}].call_id"), "type": "function", "function": function}


def _needed(value: T | None, at: str) -> T:
    if value is None:
        raise RequestError(f"'{at}' is required", param=at, code="missing_required_parameter")
    return value


def _text(content: str | Sequence[ContentPart] | None) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    return "\n".join(part.text or part.refusal or "" for part in content)


def _content(content: str | Sequence[ContentPart] | None, at: str) -> str | list[dict[str, Any]]:
    """Return texts, pictures and sounds of ``content``; ``at`` is their place in the request."""
    if content is None or isinstance(content, str):
        return content or ""
    found = []
    for number, part in enumerate(content):
        if part.type == "input_audio":
            sound = _needed(part.input_audio, f"{at}[{number}].input_audio")
            found.append({"type": "sound", "source": sound.data, "called": f"{at}[{number}]"})
        elif part.type in PICTURES:
            url = part.image_url.get("url") if isinstance(part.image_url, dict) else part.image_url
            source = _needed(url, f"{at}[{number}].image_url")
            found.append({"type": "picture", "source": source, "called": f"{at}[{number}]"})
        else:
            found.append({"type": "text", "text": part.text or part.refusal or ""})
    return found


def _tool(tool: dict[str, Any]) -> dict[str, Any]:
    names = ("name", "description", "parameters", "strict")
    function = {name: tool[name] for name in names if tool.get(name) is not None}
    return {"type": "function", "function": function}


def _choice(choice: str | dict[str, Any] | None) -> Any:
    if isinstance(choice, dict) and choice.get("type") == "allowed_tools":
        tools = [_choice(tool) for tool in choice.get("tools") or () if isinstance(tool, dict)]
        return {"type": "allowed_tools", "allowed_tools": {"mode": choice.get("mode"), "tools": tools}}
    if isinstance(choice, dict) and "name" in choice:
        return {"type": "function", "function": {"name": choice["name"]}}
    return choice


def _format(wanted: TextFormat) -> dict[str, Any]:
    if wanted.type != "json_schema":
        return {"type": wanted.type}
    schema = _needed(wanted.schema_, "text.format.schema")
    return {"type": "json_schema", "json_schema": {"name": wanted.name, "schema": schema}}
