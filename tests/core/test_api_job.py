"""A valid request becomes a job for the served model, or a refusal that names the field."""

from __future__ import annotations

import dataclasses
import json
import math
from datetime import datetime

import pytest
from llguidance import LLMatcher, LLTokenizer

from primad.api.answering.backend import SamplingDefaults, TextModel
from primad.api.answering.job import Job
from primad.api.answering.text import Placed
from primad.api.dialects.openai import job
from primad.api.dialects.openai.job import chat_job, completion_job
from primad.api.dialects.openai.logprobs import IMPOSSIBLE, chat_logprobs, completion_logprobs, token_text
from primad.api.dialects.openai.schema import ChatRequest, CompletionRequest, parse
from primad.engine.protocol import packed_biases
from primad.errors import RequestError
from primad.ring.messages import Sampled, Sampling
from tests.fakes.backend import BOS, EOS, ByteVocabulary

USUAL = Sampling(
    temperature=0.8,
    top_k=40,
    top_p=0.95,
    min_p=0.05,
    seed=7,
    presence_penalty=0.0,
    frequency_penalty=0.0,
    repeat_penalty=1.0,
    penalty_tokens=64,
    logit_bias=b"",
    dry_breakers=("\n", ":", '"', "*"),
)

BYTES = LLTokenizer("byte")


def served(context_tokens: int = 100, **vocabulary) -> TextModel:
    return TextModel(id="toy", created=0, context_tokens=context_tokens, vocabulary=ByteVocabulary(**vocabulary))


def completion(on: TextModel | None = None, /, **fields) -> Job:
    request = parse(CompletionRequest, json.dumps({"prompt": "Hi"} | fields).encode())
    return completion_job(request, on or served(), seed=7)


def chat(on: TextModel | None = None, /, **fields) -> Job:
    body = {"messages": [{"role": "user", "content": "Hi"}]} | fields
    request = parse(ChatRequest, json.dumps(body).encode())
    return chat_job(request, on or served(chat_template="{{ messages[-1].content }}"), seed=7, now=datetime(2025, 1, 1))


def refusal(ask, *args, **fields) -> RequestError:
    with pytest.raises(RequestError) as caught:
        ask(*args, **fields)
    return caught.value


def test_the_defaults_are_those_of_llama_cpp():
    (choice,) = completion().choices
    assert (choice.prompt, choice.max_tokens, choice.sampling, choice.echo) == ([BOS, *b"Hi"], 16, USUAL, "")
    assert chat().choices[0].max_tokens == 100 - 3


def test_the_sampling_values_of_the_model_file_are_the_defaults():
    recommended = SamplingDefaults(temperature=0.3, top_k=0, min_p=0.1, xtc_probability=0.5)
    on = dataclasses.replace(served(), sampling=recommended)
    sampling = completion(on).choices[0].sampling
    assert (sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p) == (0.3, 0, 0.95, 0.1)
    assert sampling.xtc_probability == 0.5
    assert completion(on, temperature=1.5, top_k=7).choices[0].sampling.temperature == 1.5


SAMPLERS = [
    ("temperature", 0, "temperature", 0),
    ("top_k", 5, "top_k", 5),
    ("top_p", 0.5, "top_p", 0.5),
    ("min_p", 0.25, "min_p", 0.25),
    ("seed", 3, "seed", 3),
    ("presence_penalty", 1, "presence_penalty", 1),
    ("frequency_penalty", -1, "frequency_penalty", -1),
    ("repeat_penalty", 1.25, "repeat_penalty", 1.25),
    ("repeat_last_n", 0, "penalty_tokens", 0),
    ("repeat_last_n", -1, "penalty_tokens", 100),
    ("logit_bias", {"7": -100, "3": 5.5}, "logit_bias", packed_biases(((3, 5.5), (7, -100.0)))),
    ("logit_bias", {"ab": 2, "65": False}, "logit_bias", packed_biases(((65, -math.inf), (97, 2.0), (98, 2.0)))),
    (
        "logit_bias",
        [[7, 1], ["b", -2.5], [3, False]],
        "logit_bias",
        packed_biases(((3, -math.inf), (7, 1.0), (98, -2.5))),
    ),
    ("top_n_sigma", 1.5, "top_n_sigma", 1.5),
    ("top_n_sigma", -1, "top_n_sigma", 0),
    ("typical_p", 0.5, "typical_p", 0.5),
    ("dynatemp_range", 0.5, "temperature_range", 0.5),
    ("dynatemp_exponent", 2, "temperature_exponent", 2),
    ("mirostat", 2, "mirostat", 2),
    ("mirostat_tau", 3, "mirostat_tau", 3),
    ("mirostat_eta", 0.2, "mirostat_eta", 0.2),
    ("dry_multiplier", 0.8, "dry_tokens", 100),
    ("dry_base", 2, "dry_base", 2),
    ("dry_allowed_length", 4, "dry_allowed_length", 4),
    ("dry_penalty_last_n", 5, "dry_tokens", 0),
    ("dry_sequence_breakers", ["x"], "dry_breakers", ("x",)),
    ("xtc_probability", 0.5, "xtc_probability", 0.5),
    ("xtc_threshold", 0.2, "xtc_threshold", 0.2),
    ("min_tokens", 9, "min_tokens", 9),
    ("ignore_eos", True, "ignore_eos", True),
]


@pytest.mark.parametrize(("field", "value", "name", "expected"), SAMPLERS)
def test_every_sampler_is_passed_on(field, value, name, expected):
    sampling = completion(**{field: value}).choices[0].sampling
    assert getattr(sampling, name) == expected
    changed = {name, "dry_multiplier"} if field.startswith("dry") else {name}
    assert {field for field in USUAL.__struct_fields__ if getattr(sampling, field) != getattr(USUAL, field)} <= changed


def test_dry_looks_back_as_many_tokens_as_requested():
    assert completion(dry_multiplier=1, dry_penalty_last_n=5).choices[0].sampling.dry_tokens == 5


def test_minus_one_is_no_bound_and_no_seed():
    assert completion(max_tokens=-1).choices[0].max_tokens == 97
    assert chat(max_completion_tokens=-1).choices[0].max_tokens == 97
    assert completion(seed=-1).choices[0].sampling.seed == 7


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "null"}}}},
        {"response_format": {"type": "json_object", "schema": {"type": "null"}}},
        {"json_schema": {"type": "null"}},
        {"grammar": 'root ::= "null"'},
        {"grammar": 'start: "null"'},
    ],
)
def test_every_field_that_constrains_the_completion_is_enforced(fields):
    for ask in (chat, completion):
        grammar = ask(**fields).choices[0].sampling.grammar
        matcher = LLMatcher(BYTES, grammar, log_level=0)
        assert not matcher.is_error()
        assert matcher.consume_tokens(BYTES.tokenize_str("null"))
        assert matcher.is_accepting()
    assert chat(response_format={"type": "text"}).choices[0].sampling.grammar is None


def test_a_completion_has_at_most_one_constraint():
    error = refusal(chat, response_format={"type": "json_object"}, grammar='root ::= "x"')
    assert error.param == "grammar"
    assert refusal(chat, response_format={"type": "json_schema"}).param == "response_format"


@pytest.mark.parametrize(
    ("seed", "expected"), [(0, 0), (2**32 - 1, 0), (-2, 2**32 - 3), (2**63 - 1, (2**63 - 1) % (2**32 - 1))]
)
def test_a_seed_fits_llama_cpp(seed, expected):
    assert completion(seed=seed).choices[0].sampling.seed == expected


def test_choices_of_a_prompt_have_seeds_of_their_own():
    job = completion(prompt=["a", "b"], n=2, seed=5)
    assert [(choice.index, choice.prompt[-1:], choice.sampling.seed) for choice in job.choices] == [
        (0, [*b"a"], 5),
        (1, [*b"a"], 6),
        (2, [*b"b"], 5),
        (3, [*b"b"], 6),
    ]
    assert job.prompt_tokens == 4


def test_token_ids_are_the_prompt_as_they_are():
    (choice,) = completion(prompt=[BOS, 65, 66], echo=True).choices
    assert (choice.prompt, choice.echo) == ([BOS, 65, 66], "AB")


def test_echo_is_the_prompt_as_it_was_sent():
    assert completion(prompt="<s>Hi", echo=True).choices[0].echo == "<s>Hi"


@pytest.mark.parametrize("length", [99, 98])
def test_an_answer_is_cut_to_what_the_context_leaves(length):
    (choice,) = completion(prompt=[65] * length, max_tokens=1000).choices
    assert choice.max_tokens == 100 - length


@pytest.mark.parametrize("length", [100, 5000])
def test_a_prompt_that_does_not_fit_is_refused(length):
    error = refusal(completion, prompt=[65] * length)
    assert (error.status, error.code, error.param) == (400, "context_length_exceeded", "prompt")
    error = refusal(chat, messages=[{"role": "user", "content": "x" * length}])
    assert (error.code, error.param) == ("context_length_exceeded", "messages")


def test_a_prompt_without_tokens_is_refused():
    assert completion(prompt="").choices[0].prompt == [BOS]
    assert refusal(completion, served(adds_bos=False), prompt="").param == "prompt"


def test_a_token_outside_the_vocabulary_is_refused():
    assert refusal(completion, prompt=[65, 260]).param == "prompt"


@pytest.mark.parametrize("key", ["260", "-1", "", "1.0", " 1", "１", "9" * 5000, "1e2"])
def test_a_bias_for_no_token_is_refused(key):
    assert refusal(completion, logit_bias={key: 1}).param == "logit_bias"
    assert refusal(completion, logit_bias=[[key, 1]]).param == "logit_bias"


@pytest.mark.parametrize(
    "texts", [["x"] * 1025, ["x" * 9000, "y" * 9000], ["漢" * 20_000]], ids=["many", "long", "one"]
)
def test_texts_with_a_bias_are_few_and_short_and_ids_as_many_as_there_are(texts):
    assert refusal(completion, logit_bias=[[text, 1] for text in texts]).param == "logit_bias"
    assert (
        len(completion(logit_bias=[[number % 256, 1] for number in range(5000)]).choices[0].sampling.logit_bias)
        == 8 * 256
    )


@pytest.mark.parametrize("pair", [[260, 1], [-1, 1], [1.5, 1], [True, 1], [7, "x"], [7, True], [7, 101]])
def test_a_pair_that_is_no_bias_is_refused(pair):
    assert refusal(completion, logit_bias=[pair]).param == "logit_bias"


def test_too_many_choices_are_refused():
    assert refusal(completion, prompt=["a"] * 65, n=2).param == "n"


def test_another_model_is_not_found():
    error = refusal(chat, model="gpt-4")
    assert (error.status, error.code, error.param) == (404, "model_not_found", "model")
    chat(model="toy")


def test_tokens_as_text():
    vocabulary = ByteVocabulary()
    assert [token_text(token, vocabulary) for token in (65, 0xF0, EOS)] == ["A", "bytes:\\xf0", "</s>"]


def test_a_token_that_cannot_come_is_still_json():
    sampled = Sampled(request=1, token=65, logprob=-0.5, top=((65, -0.5), (66, -float("inf"))))
    tokens, vocabulary = [Placed(sampled, 3)], ByteVocabulary()
    assert [top.logprob for top in chat_logprobs(tokens, vocabulary).content[0].top_logprobs] == [-0.5, IMPOSSIBLE]
    completion = completion_logprobs(tokens, vocabulary)
    assert completion.top_logprobs == [{"A": -0.5, "B": IMPOSSIBLE}]
    assert completion.text_offset == [3]


def test_the_sampled_token_is_always_among_the_alternatives_of_a_completion():
    sampled = Sampled(request=1, token=67, logprob=-4.0, top=((65, -0.5),))
    assert completion_logprobs([Placed(sampled, 0)], ByteVocabulary()).top_logprobs == [{"A": -0.5, "C": -4.0}]


@pytest.mark.parametrize(
    ("fields", "prompt"),
    [
        ({}, "||"),
        ({"enable_thinking": False, "reasoning_effort": "low"}, "False|low|"),
        ({"enable_thinking": True, "chat_template_kwargs": {"enable_thinking": False}}, "False||"),
        ({"documents": [{"title": "Log"}], "chat_template_kwargs": {"unheard": {"of": 1}}}, "||Log"),
        ({"chat_template_kwargs": {"self": 1, "range": 2, "namespace": None}}, "||"),
    ],
)
def test_a_request_sets_variables_of_the_template(fields, prompt):
    on = served(chat_template="{{ enable_thinking }}|{{ reasoning_effort }}|{{ documents[0].title if documents }}")
    assert chat(on, **fields).choices[0].prompt == [BOS, *prompt.encode()]


@pytest.mark.parametrize("name", ["messages", "tools", "bos_token", "raise_exception"])
def test_a_request_replaces_nothing_that_the_server_gives_the_template(name):
    error = refusal(chat, chat_template_kwargs={name: "x"})
    assert (error.param, error.status) == ("chat_template_kwargs", 400)
    assert f"'{name}'" in str(error)


def test_a_variable_that_breaks_the_template_is_the_requests_mistake():
    on = served(chat_template="{{ range(3) | length }}{{ enable_thinking + 1 }}")
    assert refusal(chat, on, chat_template_kwargs={"enable_thinking": "x"}).status == 400
    assert refusal(chat, on, chat_template_kwargs={"enable_thinking": 1, "range": 2}).status == 400


def test_earlier_thoughts_reach_the_template_which_decides():
    on = served(chat_template="{% for m in messages %}{{ m.reasoning_content }}/{{ m.content }};{% endfor %}")
    messages = [{"role": "assistant", "content": "Hi", "reasoning_content": "hm"}, {"role": "user", "content": "So?"}]
    assert chat(on, messages=messages).choices[0].prompt == [BOS, *b"hm/Hi;/So?;"]


def test_a_text_that_no_tokens_could_make_short_enough_is_refused_before_it_is_read(monkeypatch):
    def read(*_, **__):
        raise AssertionError("it was read")

    monkeypatch.setattr(ByteVocabulary, "tokenize", read)
    long = "x" * 12 * 100
    for exc in (
        refusal(completion, prompt=long),
        refusal(chat, messages=[{"role": "user", "content": long}]),
    ):
        assert str(exc).startswith(
            "the prompt has at least 100 tokens, which with one more exceeds the available context size of 100"
        )
        assert (exc.code, exc.prompt_tokens) == ("context_length_exceeded", 100)


def test_echoed_text_is_bounded_including_its_repetitions(monkeypatch):
    monkeypatch.setattr(job, "MAX_ECHO_CHARS", 256)
    for prompt, n, fits in (
        ("aa", 128, True),
        ("aaa", 128, False),
        (["aa", "aa"], 64, True),
        (["aa", "aaa"], 64, False),
    ):
        if not fits:
            printed = refusal(completion, prompt=prompt, n=n, echo=True)
            assert (printed.param, "more than 256; lower n" in str(printed)) == ("echo", True)
        assert len(completion(prompt=prompt, n=n, echo=fits).choices) == 128
