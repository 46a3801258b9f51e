"""Detects a model's call format, and whether it thinks, from its chat template. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from primad.api.answering.calls.form import ToolForm
from primad.api.answering.calls.forms import FORMS


@dataclass(frozen=True, slots=True, kw_only=True)
class Thinking:
    """The markers around thoughts."""

    begin: str
    end: str


_SIGNS: Final = (
    ("<|channel|>", "gpt-oss"),
    ("<atem:invoke", "muse"),
    ("]<]minimax[>[", "minimax-m3"),
    ("minimax:tool_call", "minimax"),
    ("｜DSML｜", "deepseek-dsml"),
    ("<｜tool▁call▁begin｜>", "deepseek"),
    ("<|tool_call_begin|>", "kimi"),
    ("<|open|>", "kimi-k3"),
    ("<|START_ACTION|>", "command-r"),
    ("Write 'Action:'", "command-r"),
    ("Write \\'Action:\\'", "command-r"),
    ("<|tools_prefix|>", "apertus"),
    ("<|tool_call:begin|>", "solar"),
    ("<|function_call|>", "gigachat"),
    ("'role': 'function call'", "gigachat3"),
    ("<|/tool|>", "phi-4-mini"),
    ("<|tool_call>", "gemma"),
    ("<start_function_call>", "gemma"),
    ("<|tool_call_start|>", "llama3-pythonic"),
    ("<|python_start|>", "llama3-pythonic"),
    ("<|tool_list_start|>", "llama3-pythonic"),  # LFM2
    ("List of tools: [", "llama3-pythonic"),  # LFM2.5, which shows no marker
    ("<function_calls>", "llama3-pythonic"),  # OLMo 3
    ("<arg_key", "glm"),
    ("<function=example_function_name>{", "functionary"),
    (">>>all", "functionary-v3-2"),
    ("<function=", "qwen3-coder"),
    ("<function name=", "minicpm5"),
    ("<TOOLCALL>", "nemotron-v2"),
    ("<tool_calls>", "tool-calls"),
    ("<tool_call>", "hermes"),
    ("<|tool_call|>", "granite"),
    ("[TOOL_CALLS]", "mistral"),
    ("functools[", "firefunction"),
    ("<|python_tag|>", "llama3-json"),
    ("<|eom_id|>", "llama3-json"),
    ('"parameters": dictionary of argument name', "llama3-json"),
)
_THOUGHTS: Final = (
    ("</think>", "<think>", "</think>"),
    ("[/THINK]", "[THINK]", "[/THINK]"),
    ("</seed:think>", "<seed:think>", "</seed:think>"),
    ("</mm:think>", "<mm:think>", "</mm:think>"),
    ("</think{}>", "<think:opensource>", "</think:opensource>"),
    ("<channel|>", "<|channel>thought", "<channel|>"),
    ("<|END_THINKING|>", "<|START_THINKING|>", "<|END_THINKING|>"),
    ("<|open|>", "<|open|>think<|sep|>", "<|close|>think<|sep|>"),
    ("<|inner_suffix|>", "<|inner_prefix|>", "<|inner_suffix|>"),
    ("<|tool_call:begin|>", "<|think|>", "<|end|>"),
    ("[BEGIN FINAL RESPONSE]", "Here are my reasoning steps:", "[BEGIN FINAL RESPONSE]"),
)


def form_of(template: str) -> ToolForm:
    """Return the format that ``template``, the source of a chat template, shows; Hermes' by default."""
    return FORMS[next((name for sign, name in _SIGNS if sign in template), "hermes")]


def thinks(template: str) -> Thinking | None:
    """Return the markers of thoughts in ``template``, or None."""
    return next((Thinking(begin=begin, end=end) for sign, begin, end in _THOUGHTS if sign in template), None)
