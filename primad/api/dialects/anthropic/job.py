"""Translates Anthropic's requests into the core's. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from primad.api.answering.backend import ModelSettings
from primad.api.dialects.anthropic.schema import (
    CountRequest,
    ImageBlock,
    MessagesRequest,
    TextBlock,
    ThinkingBlock,
    Tool,
    ToolResultBlock,
    ToolUseBlock,
    Turn,
)
from primad.api.dialects.openai.schema import ChatRequest, build

_BILLING: Final = "x-anthropic-"
"""The start of a system block that is the client's note to Anthropic; it changes with every request."""
NAMES: Final = {"json_schema": "output_config.format"}
"""Anthropic's names of the core's fields."""
OF_CLIENTS: Final = "claude-"
"""The start of model names that clients have built in: they mean the served model."""
_CHOICES: Final = {"auto": "auto", "none": "none", "any": "required"}


def chat_request(ask: CountRequest, served: ModelSettings) -> ChatRequest:
    """Return ``ask`` as a chat request. Raises ``RequestError`` for unsupported features."""
    fields: dict[str, Any] = {
        "model": None if ask.model.startswith(OF_CLIENTS) or ask.model == served.id else ask.model,
        "messages": [
            *_system(ask),
            *(message for number, turn in enumerate(ask.messages) for message in _messages(turn, number)),
        ],
    }
    tools = [_tool(tool) for tool in ask.tools or () if tool.input_schema is not None]
    if tools:
        fields["tools"] = tools
        if ask.tool_choice is not None:
            choice = ask.tool_choice
            fields["tool_choice"] = (
                {"type": "function", "function": {"name": choice.name}}
                if choice.type == "tool"
                else _CHOICES[choice.type]
            )
            if choice.disable_parallel_tool_use:
                fields["parallel_tool_calls"] = False
    if ask.thinking is not None and ask.thinking.type != "adaptive":
        fields["enable_thinking"] = ask.thinking.type == "enabled"
    if isinstance(ask, MessagesRequest):
        fields |= {
            "max_tokens": ask.max_tokens,
            "temperature": ask.temperature,
            "top_p": ask.top_p,
            "top_k": ask.top_k,
            "stop": ask.stop_sequences,
        }
        wanted = None if ask.output_config is None else ask.output_config.format
        wanted = wanted or ask.output_format
        if wanted is not None:
            fields["json_schema"] = wanted.schema_
    return build(ChatRequest, fields)


def _system(ask: CountRequest) -> list[dict[str, Any]]:
    blocks = [ask.system] if isinstance(ask.system, str) else [block.text for block in ask.system or ()]
    text = "\n".join(block for block in blocks if not block.startswith(_BILLING))
    return [{"role": "system", "content": text}] if text else []


def _messages(turn: Turn, number: int) -> list[dict[str, Any]]:
    """Return turn ``number`` as messages: results of tools first, as chat templates want them, then the text."""
    if turn.content is None or isinstance(turn.content, str):
        return [{"role": turn.role, "content": turn.content}]
    at = f"messages[{number}].content"
    results = [
        {
            "role": "tool",
            "tool_call_id": block.tool_use_id,
            "content": _parts(block.content or "", f"{at}[{place}].content"),
        }
        for place, block in enumerate(turn.content)
        if isinstance(block, ToolResultBlock)
    ]
    parts = _parts(turn.content, at)
    thoughts = [block.thinking for block in turn.content if isinstance(block, ThinkingBlock)]
    calls = [_call(block) for block in turn.content if isinstance(block, ToolUseBlock)]
    if results and not parts:
        return results
    message: dict[str, Any] = {"role": turn.role, "content": parts or ""}
    if thoughts:
        message["reasoning_content"] = "\n".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    return [*results, message]


def _parts(blocks: str | Sequence[object], at: str) -> str | list[dict[str, Any]]:
    """Return the texts and pictures of ``blocks``; ``at`` is their place in the request."""
    if isinstance(blocks, str):
        return blocks
    found = []
    for place, block in enumerate(blocks):
        if isinstance(block, TextBlock):
            found.append({"type": "text", "text": block.text})
        if isinstance(block, ImageBlock):
            source = block.source.data if block.source.type == "base64" else block.source.url
            found.append({"type": "picture", "source": source, "called": f"{at}[{place}]"})
    return found


def _call(block: ToolUseBlock) -> dict[str, Any]:
    return {"id": block.id, "type": "function", "function": {"name": block.name, "arguments": block.input}}


def _tool(tool: Tool) -> dict[str, Any]:
    function = {"name": tool.name, "description": tool.description or "", "parameters": tool.input_schema}
    return {"type": "function", "function": function}


def stop_reason(finish: str, stopped_by: str | None) -> str:
    """Return Anthropic's word for the reason why a response ended."""
    if finish == "tool_calls":
        return "tool_use"
    if finish == "length":
        return "max_tokens"
    return "end_turn" if stopped_by is None else "stop_sequence"
