"""Requests in the shapes that real programs send: they ask, get a call, and return its result."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

from tests.fakes.backend import ByteVocabulary, FakeBackend, replies
from tests.fakes.http import call, events

CALL = '<tool_call>\n{"name": "read_file", "arguments": {"path": "a.txt"}}\n</tool_call>'
TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}[{{ m.role }}]{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ c.function | tojson }}{% endfor %}{% endfor %}>"
)
PARAMETERS = {
    "$schema": "http://json-schema.org/draft-07/schema#",
    "type": "object",
    "properties": {"path": {"type": "string", "description": "What to read"}},
    "required": ["path"],
    "additionalProperties": False,
}
FUNCTION = {"name": "read_file", "description": "Reads a file.", "parameters": PARAMETERS}
CALL_ITEM = {"id": "call_1", "type": "function", "function": {"name": "read_file", "arguments": '{"path": "a.txt"}'}}
CACHED = {"cache_control": {"type": "ephemeral"}}

# github.com/open-webui/open-webui, backend/open_webui/utils/middleware.py: native function calling
OPEN_WEBUI: dict[str, Any] = {
    "model": "toy",
    "stream": True,
    "stream_options": {"include_usage": True},
    "messages": [
        {"role": "system", "content": "Today is Monday."},
        {"role": "user", "content": "What is in a.txt?"},
        {"role": "assistant", "content": "", "tool_calls": [CALL_ITEM | {"index": 0}]},
        {"role": "tool", "tool_call_id": "call_1", "content": "seven"},
    ],
    "tools": [{"type": "function", "function": FUNCTION}],
}
# github.com/continuedev/continue, core/llm/llms/OpenAI.ts: agent mode, provider openai
CONTINUE: dict[str, Any] = {
    "model": "toy",
    "max_tokens": 4096,
    "stream": True,
    "stream_options": {"include_usage": True},
    "messages": [
        {"role": "system", "content": "<important_rules>You are in agent mode.</important_rules>"},
        {"role": "user", "content": [{"type": "text", "text": "What is in a.txt?"}]},
        {"role": "assistant", "content": " ", "tool_calls": [CALL_ITEM]},
        {"role": "tool", "tool_call_id": "call_1", "content": "seven"},
    ],
    "tools": [{"type": "function", "function": FUNCTION | {"strict": False}, "displayTitle": "Read"}],
    "parallel_tool_calls": False,
}
# the same for completion while typing: core/autocomplete, starcoder2 and Python, with the stops that it sent first
CONTINUE_TYPING: dict[str, Any] = {
    "model": "toy",
    "prompt": "<fim_prefix>def add(a, b):\n    return <fim_suffix>\n<fim_middle>",
    "max_tokens": 4096,
    "temperature": 0.01,
    "stream": True,
    "stop": [
        *("<fim_prefix>", "<fim_suffix>", "<fim_middle>", "<file_sep>", "<|endoftext|>", "</fim_middle>", "</code>"),
        *("\n\n", "\r\n\r\n", "/src/", "#- coding: utf-8", "```", "t.", "\nt", "<file_sep>"),
        *("\ndef", "\nclass", '\n"""#'),
    ],
}
# Claude Code: Anthropic's Messages, with the system of github.com/ggml-org/llama.cpp/pull/20623
CLAUDE_CODE: dict[str, Any] = {
    "model": "claude-sonnet-4-5-20250929",
    "max_tokens": 32_000,
    "stream": True,
    "temperature": 1,
    "metadata": {"user_id": "user_1_account__session_2"},
    "thinking": {"type": "enabled", "budget_tokens": 31_999},
    "output_config": {"effort": "high"},
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    "system": [
        {"type": "text", "text": "x-anthropic-billing-header: cc_version=2"},
        {"type": "text", "text": "You are an agent.", **CACHED},
    ],
    "messages": [
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "<system-reminder>Be brief.</system-reminder>"},
                {"type": "text", "text": "What is in a.txt?", **CACHED},
            ],
        },
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "I read it.", "signature": ""},
                {"type": "tool_use", "id": "call_1", "name": "read_file", "input": {"path": "a.txt"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {
                    "type": "tool_result",
                    "tool_use_id": "call_1",
                    "is_error": False,
                    "content": [{"type": "text", "text": "seven"}],
                    **CACHED,
                }
            ],
        },
    ],
    "tools": [
        {"name": "read_file", "description": "Reads a file.", "input_schema": PARAMETERS},
        {"type": "web_search_20250305", "name": "web_search", "max_uses": 8},
    ],
}
# github.com/openai/codex, codex-rs/codex-api/src/common.rs (ResponsesApiRequest)
CODEX: dict[str, Any] = {
    "model": "toy",
    "instructions": "You are a coding agent.",
    "stream": True,
    "store": False,
    "include": ["reasoning.encrypted_content"],
    "prompt_cache_key": "0197",
    "reasoning": {"effort": "medium", "summary": "auto"},
    "text": {"verbosity": "low"},
    "tool_choice": "auto",
    "parallel_tool_calls": False,
    "input": [
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Sandboxed."}]},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "What is in a.txt?"}]},
        {"type": "reasoning", "summary": [], "content": None, "encrypted_content": None},
        {"type": "function_call", "call_id": "call_1", "name": "read_file", "arguments": '{"path": "a.txt"}'},
        {"type": "function_call_output", "call_id": "call_1", "output": "seven"},
    ],
    "tools": [
        {"type": "function", "strict": False, **FUNCTION},
        {"type": "custom", "name": "apply_patch", "format": {"type": "grammar", "syntax": "lark", "definition": "x"}},
        {"type": "web_search"},
    ],
}
# github.com/home-assistant/core, homeassistant/components/ollama/entity.py
HOME_ASSISTANT: dict[str, Any] = {
    "model": "toy",
    "stream": True,
    "keep_alive": "-1s",
    "options": {"num_ctx": 8192},
    "think": False,
    "messages": [
        {"role": "system", "content": "You are a voice assistant."},
        {"role": "user", "content": "What is in a.txt?"},
        {"role": "assistant", "tool_calls": [{"function": {"name": "read_file", "arguments": {"path": "a.txt"}}}]},
        {"role": "tool", "tool_name": "read_file", "content": "seven"},
    ],
    "tools": [{"type": "function", "function": FUNCTION}],
}


@pytest.mark.parametrize(
    ("path", "body", "turns"),
    [
        ("/v1/chat/completions", OPEN_WEBUI, "messages"),
        ("/v1/chat/completions", CONTINUE, "messages"),
        ("/v1/messages?beta=true", CLAUDE_CODE, "messages"),
        ("/v1/responses", CODEX, "input"),
        ("/api/chat", HOME_ASSISTANT, "messages"),
    ],
    ids=["Open WebUI", "Continue", "Claude Code", "Codex", "Home Assistant"],
)
def test_agents_get_responses(path, body, turns):
    made = FakeBackend(replies(CALL), vocabulary=ByteVocabulary(chat_template=TEMPLATE))
    assert made.served is not None
    made.served = dataclasses.replace(made.served, tool_parser="hermes")
    headers = {
        "authorization": "Bearer none",
        "anthropic-version": "2023-06-01",
        "anthropic-beta": "claude-code-20250219",
    }
    turn_of_the_user = next(number for number, turn in enumerate(body[turns]) if turn.get("role") == "user")
    for printed in (body[turns][: turn_of_the_user + 1], body[turns]):
        response = call(made, "POST", path, json=body | {turns: printed}, headers=headers)
        assert response.status_code == 200, response.text
        assert "read_file" in response.text
        assert "<tool_call>" not in response.text
    first, second = (bytes(each.prompt[1:]).decode() for each in made.calls)
    assert json.dumps(FUNCTION) in first
    assert "x-anthropic" not in first
    assert '{"name": "read_file", "arguments": {"path": "a.txt"}}[tool]seven>' in second


def test_an_editor_completion_stops_at_its_stop_string():
    made = FakeBackend(replies("a + b\ndef more"))
    reported = events(call(made, "POST", "/v1/completions", json=CONTINUE_TYPING))
    assert "".join(event["choices"][0]["text"] for event in reported[:-1]) == "a + b"


USER = {"role": "user", "content": "What is in a.txt?"}
USER_IN_PARTS = {"role": "user", "content": [{"type": "text", "text": "What is in a.txt?"}]}
TYPED = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "What is in a.txt?"}]}
SHIP = {
    "type": "object",
    "properties": {"masts": {"type": "integer"}},
    "required": ["masts"],
    "additionalProperties": False,
}
RECORDED: dict[str, tuple[str, dict[str, Any]]] = {
    # 2.1.197; a system message after the user's
    "Claude Code": (
        "/v1/messages?beta=true",
        {
            "model": "claude-opus-4-8",
            "max_tokens": 64_000,
            "stream": True,
            "metadata": {"user_id": '{"device_id":"1","account_uuid":"","session_id":"2"}'},
            "thinking": {"type": "adaptive"},
            "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
            "output_config": {"effort": "high"},
            "system": [{"type": "text", "text": "You are an agent.", **CACHED}],
            "messages": [USER_IN_PARTS, {"role": "system", "content": "Available agent types: Explore"}],
            "tools": CLAUDE_CODE["tools"],
        },
    ),
    # 0.171; ids of items, tools in a namespace, a result after a text and its call
    "Codex": (
        "/v1/responses",
        {
            "model": "toy",
            "stream": True,
            "store": False,
            "tool_choice": "auto",
            "parallel_tool_calls": True,
            "reasoning": {"summary": "auto"},
            "include": ["reasoning.encrypted_content"],
            "prompt_cache_key": "01a2",
            "client_metadata": {"session_id": "01a2"},
            "input": [
                {"id": "msg_1", **CODEX["input"][0]},
                {"id": "msg_2", **CODEX["input"][0]},
                {"id": "msg_3", **TYPED},
                {
                    "type": "message",
                    "status": "completed",
                    "id": "msg_4",
                    "role": "assistant",
                    "content": [{"type": "output_text", "text": "I look.", "annotations": [], "logprobs": []}],
                },
                {"id": "fc_5", "status": "completed", **CODEX["input"][3]},
                {"id": "fco_6", **CODEX["input"][4]},
            ],
            "tools": [
                {"type": "function", "strict": False, **FUNCTION},
                {"type": "namespace", "name": "agents", "tools": [{"type": "function", **FUNCTION}]},
                {"type": "web_search"},
            ],
        },
    ),
    # 1.18; its request for a title, with two user messages
    "opencode": (
        "/v1/chat/completions",
        {
            "model": "toy",
            "max_tokens": 512,
            "stream": True,
            "stream_options": {"include_usage": True},
            "messages": [
                {"role": "system", "content": "You are a title generator."},
                {"role": "user", "content": "Generate a title for this conversation:"},
                USER,
            ],
        },
    ),
    # 1.26, ToolCallingAgent
    "smolagents": (
        "/v1/chat/completions",
        {
            "model": "toy",
            "max_tokens": 80,
            "stop": ["Observation:", "Calling tools:"],
            "tool_choice": "required",
            "messages": [{"role": "system", "content": [{"type": "text", "text": "You are an agent."}]}, USER_IN_PARTS],
            "tools": [{"type": "function", "function": FUNCTION}],
        },
    ),
    # 1.110, without Content-Type
    "LiteLLM's Ollama": (
        "/api/chat",
        {
            "model": "toy",
            "messages": [
                {"role": "system", "content": "a", "images": []},
                {"role": "system", "content": "b", "images": []},
                {**USER, "images": []},
            ],
            "options": {"num_predict": 5},
            "stream": False,
            "think": True,
        },
    ),
    "LiteLLM's Anthropic": (
        "/v1/messages",
        {
            "model": "claude-x",
            "max_tokens": 60,
            "messages": [USER_IN_PARTS],
            "tools": [{"name": "read_file", "input_schema": PARAMETERS, "type": "custom", "description": "Reads."}],
            "output_format": {"type": "json_schema", "schema": SHIP},
        },
    ),
    # 2.14 of its client; its tool runner
    "Anthropic": (
        "/v1/messages",
        {
            "model": "claude-x",
            "max_tokens": 60,
            "messages": [USER],
            "thread": {"type": "create"},
            "tools": [{"name": "read_file", "description": "Reads.", "input_schema": PARAMETERS}],
        },
    ),
    # 2.31, a model of OpenAI's Responses with an output type
    "pydantic-ai": (
        "/v1/responses",
        {
            "model": "toy",
            "stream": False,
            "temperature": 0,
            "instructions": "Be brief.",
            "input": [USER],
            "tool_choice": "required",
            "tools": [
                {"name": "final_result", "type": "function", "parameters": SHIP, "description": "It.", "strict": True}
            ],
        },
    ),
    # 6.0 of ai, generateObject
    "AI SDK": (
        "/v1/responses",
        {
            "model": "toy",
            "input": [{"role": "user", "content": [{"type": "input_text", "text": "What is in a.txt?"}]}],
            "max_output_tokens": 100,
            "text": {
                "format": {
                    "type": "json_schema",
                    "strict": True,
                    "name": "response",
                    "schema": {"$schema": "http://json-schema.org/draft-07/schema#", **SHIP},
                }
            },
        },
    ),
    # 2.54 of its client, with all its optional fields
    "OpenAI": (
        "/v1/chat/completions",
        {
            "model": "toy",
            "messages": [USER],
            "max_completion_tokens": 20,
            "prediction": {"type": "content", "content": "red"},
            "prompt_cache_key": "k",
            "reasoning_effort": "low",
            "safety_identifier": "x",
            "service_tier": "auto",
            "store": False,
            "verbosity": "low",
        },
    ),
}
"""What clients sent in November 2026, shortened."""


@pytest.mark.parametrize("client", RECORDED)
def test_recorded_client_requests_succeed(client):
    path, body = RECORDED[client]
    made = FakeBackend(replies("Seven."), vocabulary=ByteVocabulary(chat_template=TEMPLATE))
    response = call(made, "POST", path, content=json.dumps(body).encode())
    assert response.status_code == 200, response.text
    prompt = bytes(made.calls[0].prompt[1:]).decode()
    assert USER["content"] in prompt
    texts = [
        each["content"] for each in body.get("messages") or body["input"] if each.get("role") in ("system", "developer")
    ]
    assert [each for each in texts if isinstance(each, str) and each not in prompt] == []
