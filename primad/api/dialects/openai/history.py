"""Normalises what clients send back of earlier turns. Pure.

Each server, gateway and client stores responses in its own way, and a client sends all of them with each turn, so an
error would end the chat for good. So everything that can be understood is accepted; the rest is kept, and refused by
name.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any, Final

_TEXTS: Final = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
"""Types of parts with text, and the field with the text."""
PICTURES: Final = ("image_url", "input_image")
_THOUGHTS: Final = {"thinking": "thinking", "reasoning": "reasoning", "redacted_thinking": ""}
_WORDED_AS: Final = ("reasoning", "thinking")
"""Other names of ``reasoning_content``: that of vLLM and OpenRouter, and that of Ollama."""


def understood(message: Any) -> Any:
    """Return ``message`` of a chat in the form of ``Message``."""
    if not isinstance(message, dict):
        return message
    message = dict(message)
    if message.get("role") == "function":  # OpenAI's API before tools
        message |= {"role": "tool", "tool_call_id": message.get("tool_call_id") or _call_id(message.get("name"))}
    if message.get("role") == "tool" and "content" in message:
        message["content"] = result_of(message.get("content"))
    thoughts = [message.get(name) for name in ("reasoning_content", *_WORDED_AS)]
    thoughts += _thoughts(message.get("thinking_blocks"))
    content = message.get("content")
    if isinstance(content, list):
        thoughts += _thoughts(content)
        message["content"] = [_part(part) for part in content if not _is_thought(part)]
    elif content is None and "content" in message:
        message["content"] = ""
    thought = next((each for each in thoughts if isinstance(each, str) and each), None)
    if thought is not None and not message.get("reasoning_content"):
        message["reasoning_content"] = thought
    if not message.get("content") and isinstance(message.get("refusal"), str):
        message["content"] = message["refusal"]
    called = message.get("function_call")
    if isinstance(called, dict) and not message.get("tool_calls"):
        message |= {"function_call": None, "tool_calls": [{"id": _call_id(called.get("name")), "function": called}]}
    return message


def understood_call(call: Any) -> Any:
    """Return a call of an earlier response in the form of ``ToolCall``."""
    if not isinstance(call, dict):
        return call
    custom = call.get("custom")
    if call.get("type") == "custom" and isinstance(custom, dict):
        call = call | {
            "type": None,
            "function": {"name": custom.get("name"), "arguments": {"input": custom.get("input")}},
        }
    function = call.get("function")
    if isinstance(function, dict):
        call = call | {"function": function | {"arguments": arguments_of(function.get("arguments"))}}
    return {name: value for name, value in call.items() if value is not None}


def arguments_of(value: Any) -> str:
    """Return a call's arguments as text, in whatever form they come."""
    return "{}" if value is None else as_text(value)


def result_of(value: Any) -> Any:
    """Return a tool's result as text or parts, in whatever form it comes."""
    is_read = value is None or (
        isinstance(value, list) and all(isinstance(part, str) or _has_type(part) for part in value)
    )
    return value if is_read else as_text(value)


def as_text(value: Any) -> str:
    """Return ``value`` as text; other types as JSON."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _call_id(name: Any) -> str:
    """Return an id for a call without one: its result only names the function."""
    return f"call_{name}"


def _has_type(part: Any) -> bool:
    return isinstance(part, dict) and isinstance(part.get("type"), str)


def _is_thought(part: Any) -> bool:
    return _has_type(part) and part["type"] in _THOUGHTS


def _thoughts(parts: Any) -> list[str]:
    """Return the thoughts in ``parts`` as one text, if there are any."""
    found = []
    for part in parts if isinstance(parts, list) else ():
        thought = part.get(_THOUGHTS[part["type"]]) if _is_thought(part) else None
        inner: Iterable[Any] = thought if isinstance(thought, list) else (thought,)
        found += [_text(each) for each in inner if each]
    return ["\n".join(found)] if found else []


def _text(part: Any) -> str:
    return str(part.get("text") or "") if isinstance(part, dict) else str(part)


def _part(part: Any) -> Any:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    kind = part["type"] if _has_type(part) else None
    if kind in _TEXTS and _TEXTS[kind] in part:
        return {"type": "text", "text": part[_TEXTS[kind]] or ""}
    sound = part.get("input_audio") if kind == "input_audio" else None
    if isinstance(sound, dict) and isinstance(sound.get("data"), str):
        return {"type": "sound", "source": sound["data"]}
    source = picture_in(part) if kind in PICTURES else None
    return part if source is None else {"type": "picture", "source": source}


def picture_in(part: Any) -> Any:
    """Return the URL or base64 of a part that is a picture, in any of the forms that clients send."""
    image = part.get("image_url")
    return image.get("url") if isinstance(image, dict) else image
