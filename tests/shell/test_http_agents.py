"""Programs that people use are answered, in the shapes of their requests: they ask, get a call, and give its result."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

from tests.fakes.backend import ByteVocabulary, FakeBackend, says
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
GIVEN = {"id": "call_1", "type": "function", "function": {"name": "read_file", "arguments": '{"path": "a.txt"}'}}
CACHED = {"cache_control": {"type": "ephemeral"}}

# github.com/open-webui/open-webui, backend/open_webui/utils/middleware.py: native function calling
OPEN_WEBUI: dict[str, Any] = {
    "model": "toy",
    "stream": True,
    "stream_options": {"include_usage": True},
    "messages": [
        {"role": "system", "content": "Today is Monday."},
        {"role": "user", "content": "What is in a.txt?"},
        {"role": "assistant", "content": "", "tool_calls": [GIVEN | {"index": 0}]},
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
        {"role": "assistant", "content": " ", "tool_calls": [GIVEN]},
        {"role": "tool", "tool_call_id": "call_1", "content": "seven"},
    ],
    "tools": [{"type": "function", "function": FUNCTION | {"strict": False}, "displayTitle": "Read"}],
    "parallel_tool_calls": False,
}
# the same while somebody types: core/autocomplete, starcoder2 and Python, with the stops that it sent first
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
def test_agents_are_answered(path, body, turns):
    made = FakeBackend(says(CALL), vocabulary=ByteVocabulary(chat_template=TEMPLATE))
    assert made.served is not None
    made.served = dataclasses.replace(made.served, tool_parser="hermes")
    headers = {
        "authorization": "Bearer none",
        "anthropic-version": "2023-06-01",
        "anthropic-beta": "claude-code-20250219",
    }
    turn_of_the_user = next(number for number, turn in enumerate(body[turns]) if turn.get("role") == "user")
    for said in (body[turns][: turn_of_the_user + 1], body[turns]):
        response = call(made, "POST", path, json=body | {turns: said}, headers=headers)
        assert response.status_code == 200, response.text
        assert "read_file" in response.text
        assert "<tool_call>" not in response.text
    first, second = (bytes(each.prompt[1:]).decode() for each in made.calls)
    assert json.dumps(FUNCTION) in first
    assert "x-anthropic" not in first
    assert '{"name": "read_file", "arguments": {"path": "a.txt"}}[tool]seven>' in second


def test_what_an_editor_completes_while_somebody_types_stops_where_it_says():
    made = FakeBackend(says("a + b\ndef more"))
    told = events(call(made, "POST", "/v1/completions", json=CONTINUE_TYPING))
    assert "".join(event["choices"][0]["text"] for event in told[:-1]) == "a + b"
