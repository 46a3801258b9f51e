"""Thinking is controlled by the variables of the model's own template."""

from __future__ import annotations

from datetime import datetime

import pytest

from primad.api.answering.chat import render
from primad.api.dialects.openai.thinking_fields import thinking_variables, with_word
from tests.fakes.backend import ByteVocabulary

HELLO = [{"role": "user", "content": "Hi"}]
FAMILIES = {
    "Qwen3, GLM, Gemma 4": "{% if enable_thinking is defined and enable_thinking is false %}off{% else %}on{% endif %}",
    "Granite 3.3": "{% if thinking %}on{% else %}off{% endif %}",
    "DeepSeek V3.1": "{% if not thinking is defined %}{% set thinking = false %}{% endif %}"
    "{{ 'on' if thinking else 'off' }}",
    "another": "{{ 'on' if think else 'off' }}",
    "Command A": "{% set reasoning = reasoning if reasoning is not undefined else (false if reasoning_effort is defined and "
    'reasoning_effort | lower == "none" else true) %}{{ "on" if reasoning else "off" }}',
    "MiniMax-M3": "{% if thinking_mode is defined and thinking_mode == 'disabled' %}off{% else %}on{% endif %}",
    "Ling": "{% if thinking_option is not defined %}{% set thinking_option = 'on' %}{% endif %}{{ thinking_option }}",
    "Seed-OSS": "{% if thinking_budget is defined and thinking_budget == 0 %}off{% else %}on{% endif %}",
    "Hunyuan": "{% if not reasoning_effort is defined %}{% set reasoning_effort = 'no_think' %}"
    "{% elif reasoning_effort not in ['high', 'low', 'no_think'] %}{{ raise_exception('no') }}{% endif %}"
    "{{ 'off' if reasoning_effort == 'no_think' else 'on' }}",
}


def shown(template: str, thinks: bool | None, effort: str | None = None) -> str:
    variables = thinking_variables(template, thinks, effort)
    return render(ByteVocabulary(chat_template=template), HELLO, now=datetime(2026, 1, 1), variables=variables)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_thinks_or_not_as_it_is_asked(family):
    template = FAMILIES[family]
    assert [shown(template, thinks) for thinks in (True, False)] == ["on", "off"]
    assert shown(template, None, "none") == "off"
    assert shown(template, None) == render(ByteVocabulary(chat_template=template), HELLO, now=datetime(2026, 1, 1))


def test_an_effort_is_one_that_the_template_knows():
    harmony = (
        '{% if reasoning_effort is not defined %}{% set reasoning_effort = "medium" %}{% endif %}{{ reasoning_effort }}'
    )
    assert [shown(harmony, *asked) for asked in ((None,), (True,), (False,), (True, "high"), (None, "low"))] == [
        *("medium", "medium", "low", "high", "low")
    ]
    kimi = "{% if thinking_effort not in ['low', 'high', 'max'] %}{{ raise_exception('x') }}{% endif %}{{ thinking_effort }}"
    efforts = ("minimal", "low", "medium", "high", "xhigh", "max")
    assert [shown(kimi, None, each) for each in efforts] == ["low", "low", "high", "high", "max", "max"]
    assert [shown(FAMILIES["Hunyuan"], True, each) for each in ("low", "medium", "high")] == ["on"] * 3
    assert shown("{{ enable_thinking is defined }}{{ reasoning_effort is defined }}", None) == "FalseFalse"


def test_a_template_that_reads_a_word_of_the_user_gets_that_word():
    template = (
        "{% set ns = namespace(enable_thinking=true) %}{% for m in messages %}{% if '/no_think' in m.content %}"
        "{% set ns.enable_thinking = false %}{% endif %}[{{ m.content.replace('/no_think', '').strip() }}]{% endfor %}"
        "{{ 'on' if ns.enable_thinking else 'off' }}"
    )
    for thinks, effort, reported in (
        (True, None, "on"),
        (False, None, "off"),
        (None, "none", "off"),
        (None, None, "on"),
    ):
        printed = with_word([{"role": "system", "content": "s"}, *HELLO], template, thinks, effort)
        got = render(ByteVocabulary(chat_template=template), printed, now=datetime(2026, 1, 1))
        assert got.endswith(reported)
        assert got.startswith("[s][Hi")
    for other in (FAMILIES["Qwen3, GLM, Gemma 4"], template + "{% if enable_thinking %}{% endif %}"):
        assert with_word(HELLO, other, False, None) == HELLO
