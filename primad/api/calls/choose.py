"""Which form a model calls in, and whether it thinks, as its chat template shows. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from primad.api.calls import families
from primad.api.calls.form import ToolForm, parse_json
from primad.api.grammar import HERMES, CallForm


@dataclass(frozen=True, slots=True, kw_only=True)
class Thinking:
    """The markers around thoughts."""

    begin: str
    end: str


_JSON: Final = CallForm(before='{"name": "', middle='", "arguments": ', behind="}", between="\n")
_LLAMA: Final = CallForm(before='{"name": "', middle='", "parameters": ', behind="}", between="; ")
_MISTRAL: Final = CallForm(before='[TOOL_CALLS][{"name": "', middle='", "arguments": ', behind="}]", between="")
_ALL: Final = (
    ToolForm(name="hermes", begin="<tool_call>", end="</tool_call>", parse=parse_json, call_form=HERMES),
    ToolForm(name="qwen3-coder", begin="<tool_call>", end="</tool_call>", parse=families.parse_qwen_coder),
    ToolForm(name="glm", begin="<tool_call>", end="</tool_call>", parse=families.parse_glm),
    ToolForm(name="llama3-json", begin="", end="", parse=parse_json, call_form=_LLAMA, noise=("<|python_tag|>", ";")),
    ToolForm(
        name="mistral",
        begin="[TOOL_CALLS]",
        end="",
        parse=families.parse_mistral,
        call_form=_MISTRAL,
        prefix=families.MISTRAL_PREFIX,
    ),
    ToolForm(
        name="deepseek",
        begin="<｜tool▁call▁begin｜>",
        end="<｜tool▁call▁end｜>",
        parse=families.parse_deepseek,
        noise=("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
    ),
    ToolForm(name="minimax", begin="<minimax:tool_call>", end="</minimax:tool_call>", parse=families.parse_minimax),
    ToolForm(name="json", begin="", end="", parse=parse_json, call_form=_JSON, uses_control_tokens=False),
)
FORMS: Final[Mapping[str, ToolForm]] = {form.name: form for form in _ALL}
"""By the names that ``serve --tool-parser`` takes."""
_SIGNS: Final = (
    ("minimax:tool_call", "minimax"),
    ("<｜tool▁call▁begin｜>", "deepseek"),
    ("<arg_key>", "glm"),
    ("<function=", "qwen3-coder"),
    ("<tool_call>", "hermes"),
    ("[TOOL_CALLS]", "mistral"),
    ("<|python_tag|>", "llama3-json"),
    ("<|eom_id|>", "llama3-json"),
    ('"parameters": dictionary of argument name', "llama3-json"),
)


def form_of(template: str) -> ToolForm:
    """The form that ``template``, the source of a chat template, shows; Hermes' where it shows none."""
    return FORMS[next((name for sign, name in _SIGNS if sign in template), "hermes")]


def thinks(template: str) -> Thinking | None:
    """The markers of thoughts in ``template``, or None where there are none."""
    for begin, end in (("<think>", "</think>"), ("[THINK]", "[/THINK]"), ("<seed:think>", "</seed:think>")):
        if end in template:
            return Thinking(begin=begin, end=end)
    return None
