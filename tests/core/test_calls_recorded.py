"""Recorded outputs of real models and templates are parsed as their collector (the package canitoolcall) expects."""

from __future__ import annotations

from functools import cache
from typing import Any

import pydantic_core
import pytest
from canitoolcall.fixtures import Fixture, load_fixtures
from hypothesis import given
from hypothesis import strategies as st

from primad.api.answering.calls.choose import Thinking, thinks
from primad.api.answering.reading import CompletionReading
from tests.fakes.reported import calls_in

NAMES = {
    "deepseek": "deepseek",
    "gemma4": "gemma",
    "glm": "glm",
    "gpt-oss": "gpt-oss",
    "kimi": "kimi",
    "llama": "llama3-json",
    "mistral": "mistral",
    "qwen3-hermes": "hermes",
    "qwen3-xml": "qwen3-coder",
}
OTHERWISE = {
    "deepseek/sglang-v4-self-closing-invoke": "an element without content is not read",
    "glm/glm47-missing-last-close-arg-value": "half a call is text",
    "gpt-oss/harmony-marker-in-reasoning": "a marker ends thoughts",
    "gpt-oss/llamacpp-builtin-python-recipient": "code for a tool that nobody gave is text",
    "kimi/k2i-vllm-noise-between-markers": "noise is text",
    "qwen3-hermes/vllm-invalid-json-missing-brace": "whole arguments are a call, even if the closing brace is missing",
    "mistral/vllm-v11-think-text": "its template thinks in [THINK]",
}
"""Where our parse differs, and why."""


def is_ours(fixture: Fixture) -> bool:
    """Skips incomplete calls, which are text for us and dropped by them."""
    is_half = "truncated" in fixture.tags and fixture.expected is not None
    return not is_half and fixture.id not in OTHERWISE


FIXTURES = load_fixtures()
OURS = [fixture for fixture in FIXTURES if is_ours(fixture)]
Found = tuple[str, str, list[tuple[str, Any]]]


@cache
def reading(number: int) -> CompletionReading:
    fixture = OURS[number]
    name = NAMES[fixture.family]
    if "DSML" in fixture.raw_output:
        name = "deepseek-dsml"
    if "x-kimi-k3" in fixture.tags:
        name = "kimi-k3"
    if fixture.family == "llama" and fixture.raw_output.lstrip().startswith(("[", "<|python_start|>")):
        name = "llama3-pythonic"
    thinking = {
        "mistral": thinks("[/THINK]"),
        "gemma4": thinks("<channel|>"),
        "kimi": thinks("<|open|>") if name == "kimi-k3" else None,
    }.get(fixture.family) or Thinking(begin="<think>", end="</think>")
    assert thinking is not None
    prompt = (fixture.generation_prompt or "").rstrip()
    is_open = not prompt and (
        thinking.end in fixture.raw_output and thinking.begin not in fixture.raw_output
    )  # not every fixture has its prompt
    return CompletionReading(
        form=name,
        thinking=thinking,
        opened=prompt.endswith(thinking.begin) or is_open,
        functions={tool["function"]["name"]: tool["function"].get("parameters") for tool in fixture.tools},
        several=True,
        shows_control=True,
    )


def read(number: int, pieces: list[str]) -> Found:
    reader = reading(number).reader()
    reported = [*map(reader.feed, pieces), reader.finish()]
    return (
        "".join(each.thought for each in reported).strip(),
        "".join(each.text for each in reported).strip(),
        calls_in(reported),
    )


def test_there_are_many_of_many_families():
    assert len(OURS) > 400
    assert {fixture.family for fixture in OURS} == NAMES.keys()
    assert {fixture.id for fixture in FIXTURES} >= OTHERWISE.keys()


@pytest.mark.parametrize("number", range(len(OURS)), ids=[fixture.id for fixture in OURS])
def test_an_output_is_read_as_expected(number):
    fixture = OURS[number]
    found = read(number, [fixture.raw_output])
    assert read(number, list(fixture.raw_output)) == found
    expected = fixture.expected
    if expected is None:
        assert all(isinstance(arguments, str) for _, arguments in found[2]), "whole"
    else:
        calls = [(call.name, call.arguments) for call in expected.tool_calls]
        assert found == ((expected.reasoning_content or "").strip(), (expected.content or "").strip(), calls)


@given(number=st.integers(0, len(OURS) - 1), data=st.data())
def test_every_splitting_is_read_alike(number, data):
    text = OURS[number].raw_output
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=20)))
    pieces = [text[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert read(number, pieces) == read(number, [text])


@pytest.mark.parametrize("name", ["deepseek", "gpt-oss", "hermes", "kimi", "llama3-json", "mistral"])
def test_arguments_are_streamed_as_they_form(name):
    reported = 0
    for number in range(len(OURS)):
        if reading(number).form != name:
            continue
        reader, printed = reading(number).reader(), ""
        for part in (part for char in OURS[number].raw_output for part in reader.feed(char).calls):
            printed = part.arguments if part.name is not None else printed + part.arguments
            reported += not part.is_whole
            assert not printed or isinstance(pydantic_core.from_json(printed, allow_partial=not part.is_whole), dict)
    assert reported > 200
