"""The call formats of models, as a table. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

from primad.api.answering.calls import families
from primad.api.answering.calls.form import ARGUMENTS, Markers, Parse, ToolForm, parse_json, parse_named
from primad.api.answering.calls.harmony import HarmonyReader
from primad.api.answering.calls.recipients import RecipientReader
from primad.api.answering.grammar import HERMES, CallForm


def _json(
    name: str,
    *markers: tuple[str, str],
    call: tuple[str, str, str] | None = None,
    between: str = "",
    head: re.Pattern[str] = families.HEAD,
    parse: Parse = parse_json,
    noise: tuple[str, ...] = (),
    frames: tuple[str, ...] = (),
    uses_control_tokens: bool = True,
) -> ToolForm:
    """Return a format with JSON arguments between ``markers`` (pairs of begin and end). ``call`` is a grammar's text
    before the name, after it and after the arguments; by default a list of objects between the first markers."""
    begin, end = markers[0]
    before, middle, behind = call or (f'{begin}[{{"name": "', '", "arguments": ', f"}}]{end}")
    return ToolForm(
        name=name,
        parse=parse,
        markers=tuple(Markers(begin=begin, end=end) for begin, end in markers),
        noise=noise,
        frames=frames,
        call_form=CallForm(before=before, middle=middle, behind=behind, between=between),
        head=head,
        uses_control_tokens=uses_control_tokens,
    )


def _marks(*texts: str) -> tuple[Markers, ...]:
    """Pairs of markers from every two of ``texts``."""
    return tuple(Markers(begin=begin, end=end) for begin, end in zip(texts[::2], texts[1::2], strict=True))


_SOLAR_HEAD: Final = re.compile(rf"[^<]*<\|tool_call:name\|>([^<]+)<\|tool_call:args\|>{ARGUMENTS}")
_FUNCTIONARY_HEAD: Final = re.compile(rf"([^>\n<]+)>{ARGUMENTS}")
_APERTUS_HEAD: Final = re.compile(rf'\s*(?:\[\s*)?\{{\s*"([^"\\]+)"\s*:{ARGUMENTS}')
_GIGACHAT: Final = (("<|function_call|>", ""), ("function call<|role_sep|>\n", ""))
_BLOCK: Final = ("```json\n", "```")
_ALL: Final = (
    ToolForm(
        name="hermes",
        parse=parse_json,
        markers=_marks("<tool_call>", "</tool_call>"),
        call_form=HERMES,
        head=families.HEAD,
    ),
    ToolForm(
        name="qwen3-coder",
        parse=families.parse_qwen_coder,
        markers=_marks(
            *("<tool_call>", "</tool_call>", "<seed:tool_call>", "</seed:tool_call>", "<function=", "</function>")
        ),
        noise=("</tool_call>", "</seed:tool_call>"),
    ),
    _json(
        "llama3-json",
        ("<|python_tag|>", ""),
        ("", ""),
        call=('{"name": "', '", "parameters": ', "}"),
        between="; ",
        noise=(";",),
    ),
    ToolForm(
        name="llama3-pythonic",
        parse=families.parse_any,
        markers=(
            *_marks("<|python_start|>", "<|python_end|>", "<|tool_call_start|>", "<|tool_call_end|>"),
            *_marks("<function_calls>", "</function_calls>"),
            Markers(begin="", end="", quotes="\"'"),
        ),
    ),
    ToolForm(
        name="mistral",
        parse=families.parse_mistral,
        markers=(Markers(begin="[TOOL_CALLS]", end="", prefix=families.MISTRAL_PREFIX),),
        call_form=CallForm(before='[TOOL_CALLS][{"name": "', middle='", "arguments": ', behind="}]", between=""),
        head=families.MISTRAL_HEAD,
    ),
    ToolForm(name="gpt-oss", parse=parse_json, reader=HarmonyReader, has_thoughts=True),
    ToolForm(
        name="glm",
        parse=families.parse_glm,
        markers=_marks("<tool_call>", "</tool_call>", "<tool_call:opensource>", "</tool_call:opensource>"),
        noise=("<tool_calls:opensource>", "</tool_calls:opensource>"),
    ),
    ToolForm(
        name="deepseek",
        parse=families.parse_deepseek,
        head=families.DEEPSEEK_HEAD,
        markers=_marks("<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"),
        noise=("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
    ),
    ToolForm(
        name="deepseek-dsml",
        parse=families.parse_invoke,
        markers=_marks("<｜DSML｜invoke", "</｜DSML｜invoke>", "<｜DSML｜ invoke", "</｜DSML｜ invoke>"),
        noise=tuple(
            f"<{slash}｜DSML｜{name}>" for slash in ("", "/") for name in ("function_calls", "tool_calls", " calls")
        ),
    ),
    ToolForm(
        name="gemma",
        parse=families.parse_gemma,
        markers=_marks(
            *("<|tool_call>", "<tool_call|>", "<start_function_call>", "<end_function_call>"),
            *("```tool_code\n", "```", *_BLOCK),
        ),
    ),
    ToolForm(
        name="minimax",
        parse=families.parse_invoke,
        markers=_marks("<invoke", "</invoke>"),
        noise=("<minimax:tool_call>", "</minimax:tool_call>"),
    ),
    ToolForm(
        name="minimax-m3",
        parse=families.parse_minimax_m3,
        markers=_marks("]<]minimax[>[<invoke", "]<]minimax[>[</invoke>"),
        noise=("]<]minimax[>[<tool_call>", "]<]minimax[>[</tool_call>"),
    ),
    ToolForm(name="minicpm5", parse=families.parse_invoke, markers=_marks("<function name=", "</function>")),
    ToolForm(name="muse", parse=parse_json, reader=HarmonyReader, has_thoughts=True),
    ToolForm(
        name="kimi",
        parse=families.parse_kimi,
        head=families.KIMI_HEAD,
        markers=_marks("<|tool_call_begin|>", "<|tool_call_end|>"),
        call_form=CallForm(
            before="<|tool_call_begin|>functions.",
            middle=":0<|tool_call_argument_begin|>",
            behind="<|tool_call_end|>",
            between="",
        ),
        noise=("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
    ),
    ToolForm(
        name="kimi-k3",
        parse=families.parse_kimi_k3,
        markers=_marks("<|open|>call ", "<|close|>call<|sep|>"),
        frames=(
            *(f"<|{side}|>{name}<|sep|>" for side in ("open", "close") for name in ("response", "tools")),
            "<|close|>message<|sep|>",
            "<|end_of_msg|>",
        ),
    ),
    _json("phi-4-mini", ("<|tool_call|>", "<|/tool_call|>")),
    _json("granite", ("<|tool_call|>", ""), ("<tool_call>", ""), noise=("</tool_call>",)),
    _json(
        "command-r",
        ("<|START_ACTION|>", "<|END_ACTION|>"),
        *((f"Action:{space}```json\n", "```") for space in (" ", "\n", "")),
        call=('<|START_ACTION|>[{"tool_call_id": "0", "tool_name": "', '", "parameters": ', "}]<|END_ACTION|>"),
        frames=tuple(f"<|{side}_{name}|>" for side in ("START", "END") for name in ("RESPONSE", "TEXT")),
    ),
    _json("nemotron-v2", ("<TOOLCALL>", "</TOOLCALL>")),
    _json(
        "tool-calls",
        ("<tool_calls>", "</tool_calls>"),
        ("<tool_call>", "</tool_call>"),
        frames=("[END FINAL RESPONSE]",),
    ),
    _json(
        "apertus",
        ("<|tools_prefix|>", "<|tools_suffix|>"),
        call=('<|tools_prefix|>[{"', '": ', "}]<|tools_suffix|>"),
        head=_APERTUS_HEAD,
        parse=parse_named,
    ),
    _json(
        "solar",
        ("<|tool_call:begin|>", "<|tool_call:end|>"),
        call=(
            "<|tool_calls|><|tool_call:begin|>0<|tool_call:name|>",
            "<|tool_call:args|>",
            "<|tool_call:end|>",
        ),
        head=_SOLAR_HEAD,
        parse=families.parse_solar,
        frames=("<|begin|>assistant", "<|content|>", "<|end|>", "<|tool_calls|>", "<|calls|>"),
    ),
    _json("firefunction", ("functools", ""), uses_control_tokens=False),
    _json(
        "gigachat",
        *_GIGACHAT,
        call=('<|function_call|>{"name": "', '", "arguments": ', "}"),
        frames=("<|message_sep|>",),
    ),
    _json(
        "gigachat3",
        *_GIGACHAT,
        call=('<|message_sep|>\n\nfunction call<|role_sep|>\n{"name": "', '", "arguments": ', "}"),
        frames=("<|message_sep|>",),
    ),
    _json(
        "functionary",
        ("<function=", "</function>"),
        call=("<function=", ">", "</function>"),
        head=_FUNCTIONARY_HEAD,
        parse=families.parse_qwen_coder,
        uses_control_tokens=False,
    ),
    ToolForm(
        name="functionary-v3-2",
        parse=parse_json,
        reader=RecipientReader,
        call_form=CallForm(before="", middle="\n", behind="", between="\n>>>"),
        uses_control_tokens=False,
    ),
    _json(
        "json",
        ("", ""),
        _BLOCK,
        call=('{"name": "', '", "arguments": ', "}"),
        between="\n",
        uses_control_tokens=False,
    ),
)
FORMS: Final[Mapping[str, ToolForm]] = {form.name: form for form in _ALL}
"""The formats by the names that ``serve --tool-parser`` takes."""
