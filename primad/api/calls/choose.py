"""Which form a model calls in, and whether it thinks, as its chat template shows. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from primad.api.calls import families
from primad.api.calls.form import Markers, ToolForm, parse_json
from primad.api.grammar import HERMES, CallForm


@dataclass(frozen=True, slots=True, kw_only=True)
class Thinking:
    """The markers around thoughts."""

    begin: str
    end: str


_JSON: Final = CallForm(before='{"name": "', middle='", "arguments": ', behind="}", between="\n")
_LLAMA: Final = CallForm(before='{"name": "', middle='", "parameters": ', behind="}", between="; ")
_MISTRAL: Final = CallForm(before='[TOOL_CALLS][{"name": "', middle='", "arguments": ', behind="}]", between="")
_PHI: Final = CallForm(
    before='<|tool_call|>[{"name": "', middle='", "arguments": ', behind="}]<|/tool_call|>", between=""
)
_GRANITE: Final = CallForm(before='<|tool_call|>[{"name": "', middle='", "arguments": ', behind="}]", between="")
_COMMAND_R: Final = CallForm(
    before='<|START_ACTION|>[{"tool_call_id": "0", "tool_name": "',
    middle='", "parameters": ',
    behind="}]<|END_ACTION|>",
    between="",
)
_BARE: Final = Markers(begin="", end="")
_TOOL_CALL: Final = Markers(begin="<tool_call>", end="</tool_call>")
_BLOCK: Final = Markers(begin="```json\n", end="```")
_ALL: Final = (
    ToolForm(name="hermes", parse=parse_json, markers=(_TOOL_CALL,), call_form=HERMES, head=families.HEAD),
    ToolForm(
        name="qwen3-coder",
        parse=families.parse_qwen_coder,
        markers=(_TOOL_CALL, Markers(begin="<function=", end="</function>")),
        noise=("</tool_call>",),
    ),
    ToolForm(
        name="llama3-json",
        parse=parse_json,
        markers=(Markers(begin="<|python_tag|>", end=""), _BARE),
        noise=(";",),
        call_form=_LLAMA,
        head=families.HEAD,
    ),
    ToolForm(
        name="llama3-pythonic",
        parse=families.parse_any,
        markers=(
            Markers(begin="<|python_start|>", end="<|python_end|>"),
            Markers(begin="<|tool_call_start|>", end="<|tool_call_end|>"),
            Markers(begin="", end="", quotes="\"'"),
        ),
    ),
    ToolForm(
        name="mistral",
        parse=families.parse_mistral,
        markers=(Markers(begin="[TOOL_CALLS]", end="", prefix=families.MISTRAL_PREFIX),),
        call_form=_MISTRAL,
        head=families.MISTRAL_HEAD,
    ),
    ToolForm(name="gpt-oss", parse=parse_json, channels=True),
    ToolForm(name="glm", parse=families.parse_glm, markers=(_TOOL_CALL,)),
    ToolForm(
        name="deepseek",
        parse=families.parse_deepseek,
        head=families.DEEPSEEK_HEAD,
        markers=(Markers(begin="<｜tool▁call▁begin｜>", end="<｜tool▁call▁end｜>"),),
        noise=("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
    ),
    ToolForm(
        name="deepseek-dsml",
        parse=families.parse_invoke,
        markers=(
            Markers(begin="<｜DSML｜invoke", end="</｜DSML｜invoke>"),
            Markers(begin="<｜DSML｜ invoke", end="</｜DSML｜ invoke>"),
        ),
        noise=tuple(
            f"<{slash}｜DSML｜{name}>" for slash in ("", "/") for name in ("function_calls", "tool_calls", " calls")
        ),
    ),
    ToolForm(
        name="gemma",
        parse=families.parse_gemma,
        markers=(
            Markers(begin="<|tool_call>", end="<tool_call|>"),
            Markers(begin="<start_function_call>", end="<end_function_call>"),
            Markers(begin="```tool_code\n", end="```"),
            _BLOCK,
        ),
    ),
    ToolForm(
        name="minimax",
        parse=families.parse_invoke,
        markers=(Markers(begin="<invoke", end="</invoke>"),),
        noise=("<minimax:tool_call>", "</minimax:tool_call>"),
    ),
    ToolForm(
        name="kimi",
        parse=families.parse_kimi,
        head=families.KIMI_HEAD,
        markers=(Markers(begin="<|tool_call_begin|>", end="<|tool_call_end|>"),),
        noise=("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
    ),
    ToolForm(
        name="kimi-k3",
        parse=families.parse_kimi_k3,
        markers=(Markers(begin="<|open|>call ", end="<|close|>call<|sep|>"),),
        noise=(
            *(f"<|{side}|>{name}<|sep|>" for side in ("open", "close") for name in ("response", "tools")),
            "<|close|>message<|sep|>",
            "<|end_of_msg|>",
        ),
        frames_text=True,
    ),
    ToolForm(
        name="phi-4-mini",
        parse=parse_json,
        markers=(Markers(begin="<|tool_call|>", end="<|/tool_call|>"),),
        call_form=_PHI,
        head=families.HEAD,
    ),
    ToolForm(
        name="granite",
        parse=parse_json,
        markers=(Markers(begin="<|tool_call|>", end=""), Markers(begin="<tool_call>", end="")),
        noise=("</tool_call>",),
        call_form=_GRANITE,
        head=families.HEAD,
    ),
    ToolForm(
        name="command-r",
        parse=parse_json,
        markers=(
            Markers(begin="<|START_ACTION|>", end="<|END_ACTION|>"),
            Markers(begin="Action: ```json\n", end="```"),
        ),
        noise=("<|START_RESPONSE|>", "<|END_RESPONSE|>"),
        call_form=_COMMAND_R,
        head=families.HEAD,
        frames_text=True,
    ),
    ToolForm(
        name="json",
        parse=parse_json,
        markers=(_BARE, _BLOCK),
        call_form=_JSON,
        head=families.HEAD,
        uses_control_tokens=False,
    ),
)
FORMS: Final[Mapping[str, ToolForm]] = {form.name: form for form in _ALL}
"""By the names that ``serve --tool-parser`` takes."""
_SIGNS: Final = (
    ("<|channel|>", "gpt-oss"),
    ("minimax:tool_call", "minimax"),
    ("｜DSML｜", "deepseek-dsml"),
    ("<｜tool▁call▁begin｜>", "deepseek"),
    ("<|tool_call_begin|>", "kimi"),
    ("<|open|>", "kimi-k3"),
    ("<|START_ACTION|>", "command-r"),
    ("Write 'Action:'", "command-r"),
    ("<|/tool|>", "phi-4-mini"),
    ("<|tool_call>", "gemma"),
    ("<start_function_call>", "gemma"),
    ("<|tool_call_start|>", "llama3-pythonic"),
    ("<|python_start|>", "llama3-pythonic"),
    ("<arg_key>", "glm"),
    ("<function=", "qwen3-coder"),
    ("<tool_call>", "hermes"),
    ("<|tool_call|>", "granite"),
    ("[TOOL_CALLS]", "mistral"),
    ("<|python_tag|>", "llama3-json"),
    ("<|eom_id|>", "llama3-json"),
    ('"parameters": dictionary of argument name', "llama3-json"),
)
_THOUGHTS: Final = (
    ("</think>", "<think>", "</think>"),
    ("[/THINK]", "[THINK]", "[/THINK]"),
    ("</seed:think>", "<seed:think>", "</seed:think>"),
    ("<channel|>", "<|channel>thought", "<channel|>"),
    ("<|END_THINKING|>", "<|START_THINKING|>", "<|END_THINKING|>"),
    ("<|open|>", "<|open|>think<|sep|>", "<|close|>think<|sep|>"),
)


def form_of(template: str) -> ToolForm:
    """The form that ``template``, the source of a chat template, shows; Hermes' where it shows none."""
    return FORMS[next((name for sign, name in _SIGNS if sign in template), "hermes")]


def thinks(template: str) -> Thinking | None:
    """The markers of thoughts in ``template``, or None where there are none."""
    return next((Thinking(begin=begin, end=end) for sign, begin, end in _THOUGHTS if sign in template), None)
