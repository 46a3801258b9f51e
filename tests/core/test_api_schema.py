"""Requests are strict and bounded; a refusal names the fault."""

from __future__ import annotations

import json

import pytest

from primad.api.dialects.openai.schema import ChatRequest, CompletionRequest, parse
from primad.errors import RequestError

HELLO = [{"role": "user", "content": "Hi"}]


def chat(**fields) -> ChatRequest:
    return parse(ChatRequest, json.dumps({"messages": HELLO} | fields).encode())


def completion(**fields) -> CompletionRequest:
    return parse(CompletionRequest, json.dumps({"prompt": "Hi"} | fields).encode())


def refusal(parse_it, **fields) -> RequestError:
    with pytest.raises(RequestError) as caught:
        parse_it(**fields)
    assert caught.value.status == 400
    assert "\n" not in str(caught.value)
    return caught.value


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("temperature", [-0.1, 2.1, "1", True, [], {}, float("nan"), float("inf"), 10**400, -float("inf")]),
        ("top_p", [-0.1, 1.1, "1"]),
        ("top_k", [-2, 1.5, 2**31, 10**400, True]),
        ("min_p", [-0.1, 1.1]),
        ("seed", [1.5, "1", 2**63, -(2**63) - 1]),
        ("presence_penalty", [-2.1, 2.1]),
        ("frequency_penalty", [-2.1, 2.1]),
        ("repeat_penalty", [0, -1, 11]),
        ("repeat_last_n", [-2, "all"]),
        ("max_tokens", [0, -2, 1.5, "9", 2**31]),
        ("n", [0, 129, "2"]),
        ("stop", [["x"] * 65, "x" * 257, 7, [7], {}]),
        ("stream", [1, "true"]),
        ("stream_options", [{"include_usage": True}]),
        ("model", [7, []]),
        ("logit_bias", ["x", 7, {"7": "x"}, {"7": 100.5}, {"7": True}, [[7]], [7]]),
        ("top_n_sigma", [-2, "1"]),
        ("typical_p", [-0.1, 1.1]),
        ("dynatemp_range", [-0.1, 3]),
        ("mirostat", [3, -1, "2"]),
        ("mirostat_tau", [-1]),
        ("mirostat_eta", [-0.1, 1.1]),
        ("dry_multiplier", [-1, "1"]),
        ("dry_base", [-1]),
        ("dry_allowed_length", [-1, 0.5]),
        ("dry_penalty_last_n", [-2]),
        ("dry_sequence_breakers", ["x", [""], ["x" * 41], ["x"] * 17, ["x" * 40] * 4]),
        ("xtc_probability", [-0.1, 1.1]),
        ("xtc_threshold", [-0.1, 1.1]),
        ("min_tokens", [-1, 1.5]),
        ("ignore_eos", [1, "true"]),
        ("response_format", ["json", {"type": "xml"}, {}]),
        ("json_schema", ["{}", [], True]),
        ("grammar", [7, {}]),
        ("id_slot", [-2, "0"]),
        ("cache_prompt", [1]),
        ("priority", ["1", 0.5, 2**31, -(2**31)]),
    ],
)
def test_a_value_out_of_range_or_type_is_refused(field, values):
    for value in values:
        for parse_it in (chat, completion):
            assert refusal(parse_it, **{field: value}).param.partition(".")[0].partition("[")[0] == field


@pytest.mark.parametrize(
    "fields",
    [
        {"functions": [{"name": "f"}]},
        {"function_call": {"name": "f"}},
        {"guided_json": {"type": "object"}},
        {"bad_words": ["x"]},
        {"stop_token_ids": [7]},
        {"lora": [{"id": 0}]},
        {"use_beam_search": True},
        {"modalities": ["text", "audio"]},
        {"audio": {"voice": "alloy"}},
        {"web_search_options": {}},
    ],
)
def test_a_feature_that_is_not_served_is_refused_by_name(fields):
    error = refusal(chat, **fields)
    assert error.param == next(iter(fields))
    assert error.code == "unsupported_parameter"


def test_features_asked_for_in_no_way_are_fine():
    chat(
        tools=[], tool_choice="none", functions=None, response_format={"type": "text"}, modalities=["text"], audio=None
    )
    completion(suffix="", best_of=2, n=2)


def test_unknown_fields_are_ignored():
    chat(prediction={"type": "content", "content": "x"})  # a hint that speeds up the response without changing it
    chat(user="me", store=True, metadata={"a": "b"}, service_tier="auto", parallel_tool_calls=True, made_up=[[[1]]])


def test_unknown_fields_are_logged_once_per_request(caplog):
    with caplog.at_level("INFO"):
        chat(user="me", **{f"made\nup{i}": i for i in range(20)}, **{"z" * 500: 1})
    (line,) = caplog.messages
    assert "made\\nup0" in line
    assert "user" not in line.split(":")[1]
    assert len(line) < 500


def test_fields_of_llama_cpps_server_are_accepted():
    chat(cache_prompt=True, timings_per_token=True, return_progress=False, id_slot=-1, samplers=[], seed=-1)


def test_null_means_the_default():
    fields = [
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "seed",
        "stop",
        "max_tokens",
        "n",
        "stream",
        "logit_bias",
        "model",
    ]
    assert chat(**dict.fromkeys(fields)) == chat()


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([], "messages"),
        ("Hi", "messages"),
        (None, "messages"),
        ([7], "messages[0]"),
        ([{}], "messages[0].role"),
        ([{"content": "x"}], "messages[0].role"),
        ([{"role": "robot", "content": "x"}], "messages[0].role"),
        ([{"role": "user"}], "messages[0].content"),
        ([*HELLO, {"role": "tool"}], "messages[1].content"),
        ([{"role": "user", "content": 7}], "messages[0].content"),
        ([{"role": "user", "content": {"text": "x"}}], "messages[0].content"),
        ([{"role": "user", "content": [{"type": "input_file", "file_id": "x"}]}], "messages[0].content"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content"),
        ([{"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]}], "messages[0].tool_calls[0].function"),
        ([{"role": "user", "content": "x", "tool_calls": [{"function": {"name": "f"}}]}], "messages[0].tool_calls"),
        ([{"role": "user", "content": "x", "name": 7}], "messages[0].name"),
    ],
)
def test_a_wrong_message_is_named(messages, param):
    assert refusal(chat, messages=messages).param == param


def test_message_content_as_templates_read_it():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = [
        {"role": "user", "content": parts, "name": "Ann"},
        {"role": "assistant", "content": None},
        {"role": "tool", "content": "7", "tool_call_id": "1"},
    ]
    assert [message.for_template() for message in chat(messages=messages).messages] == [
        {"role": "user", "content": "a\nb", "name": "Ann"},
        {"role": "assistant", "content": ""},
        {"role": "tool", "content": "7", "tool_call_id": "1"},
    ]


@pytest.mark.parametrize(
    "prompt", [None, 7, [], [[]], [1, "a"], [[1], "a"], ["a", [1]], [-1], [True], [1.5], {}, ["a"] * 129]
)
def test_a_wrong_prompt_is_refused(prompt):
    assert refusal(completion, prompt=prompt).param == "prompt"


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [("a", ["a"]), ("", [""]), (["a", "b"], ["a", "b"]), ([1, 2], [[1, 2]]), ([[1], [2, 3]], [[1], [2, 3]])],
)
def test_the_four_forms_of_a_prompt(prompt, prompts):
    assert completion(prompt=prompt).prompts == prompts


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
        ({"echo": True, "logprobs": 1}, "logprobs"),
        ({"best_of": 3, "n": 2}, "best_of"),
        ({"suffix": 5}, "suffix"),
    ],
)
def test_fields_that_only_chat_has_are_refused_in_completions(fields, param):
    assert refusal(completion, **fields).param == param


def test_log_probabilities_of_a_chat():
    assert chat().logprob_count is None
    assert chat(logprobs=True).logprob_count == 0
    assert chat(logprobs=True, top_logprobs=20).logprob_count == 20
    assert refusal(chat, top_logprobs=3).param == "top_logprobs"
    assert refusal(chat, logprobs=True, top_logprobs=21).param == "top_logprobs"
    assert refusal(chat, logprobs=5).param == "logprobs"


def test_the_other_names_of_fields():
    assert chat(repetition_penalty=1.5).repeat_penalty == 1.5
    assert chat(max_tokens=5, max_completion_tokens=7).token_limit == 7


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b" ",
        b"{",
        b"null",
        b"[]",
        b'"text"',
        b"\xff\xfe",
        b'{"messages": "\xff"}',
        b'{"messages": [{"role": "user", "content": "\\ud800" }',
        b'{"temperature": ' + b"9" * 5000 + b"}",
        b'{"made_up": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b"{}",
    ],
)
@pytest.mark.parametrize("model", [ChatRequest, CompletionRequest])
def test_a_body_that_is_no_request_is_refused(model, body):
    refusal(lambda: parse(model, body))
