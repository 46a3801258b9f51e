"""A valid request becomes work for the served model, or a refusal that names the field."""

from __future__ import annotations

import json
from datetime import datetime

import pytest

from primad.api.backend import ServedModel
from primad.api.openai.job import Job, chat_job, completion_job
from primad.api.openai.logprobs import IMPOSSIBLE, chat_logprobs, completion_logprobs, token_text
from primad.api.openai.schema import ChatRequest, CompletionRequest, parse
from primad.api.text import Placed
from primad.errors import RequestError
from primad.ring.messages import Sampled, Sampling
from tests.fakes.backend import BOS, EOS, ByteVocabulary

NEUTRAL = Sampling(
    temperature=1.0,
    top_k=0,
    top_p=1.0,
    min_p=0.0,
    seed=7,
    presence_penalty=0.0,
    frequency_penalty=0.0,
    repeat_penalty=1.0,
    penalty_tokens=64,
    logit_bias=(),
)


def served(context_tokens: int = 100, **vocabulary) -> ServedModel:
    return ServedModel(id="toy", created=0, context_tokens=context_tokens, vocabulary=ByteVocabulary(**vocabulary))


def completion(on: ServedModel | None = None, /, **fields) -> Job:
    request = parse(CompletionRequest, json.dumps({"prompt": "Hi"} | fields).encode())
    return completion_job(request, on or served(), seed=7)


def chat(on: ServedModel | None = None, /, **fields) -> Job:
    body = {"messages": [{"role": "user", "content": "Hi"}]} | fields
    request = parse(ChatRequest, json.dumps(body).encode())
    return chat_job(request, on or served(chat_template="{{ messages[-1].content }}"), seed=7, now=datetime(2025, 1, 1))


def refusal(ask, *args, **fields) -> RequestError:
    with pytest.raises(RequestError) as caught:
        ask(*args, **fields)
    return caught.value


def test_the_defaults_are_openais():
    (choice,) = completion().choices
    assert (choice.prompt, choice.max_tokens, choice.sampling, choice.echo) == ([BOS, *b"Hi"], 16, NEUTRAL, "")
    assert chat().choices[0].max_tokens == 100 - 3


def test_every_sampler_is_passed_on():
    fields = {
        "temperature": 0,
        "top_k": 5,
        "top_p": 0.5,
        "min_p": 0.25,
        "seed": 3,
        "presence_penalty": 1,
        "frequency_penalty": -1,
        "repeat_penalty": 1.25,
        "repeat_last_n": 0,
        "logit_bias": {"7": -100, "3": 5.5},
    }
    sampling = completion(**fields).choices[0].sampling
    assert sampling == Sampling(
        temperature=0,
        top_k=5,
        top_p=0.5,
        min_p=0.25,
        seed=3,
        presence_penalty=1,
        frequency_penalty=-1,
        repeat_penalty=1.25,
        penalty_tokens=0,
        logit_bias=((3, 5.5), (7, -100.0)),
    )


@pytest.mark.parametrize(
    ("seed", "expected"), [(0, 0), (2**32 - 1, 0), (-1, 2**32 - 2), (2**63 - 1, (2**63 - 1) % (2**32 - 1))]
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


@pytest.mark.parametrize("key", ["260", "-1", "x", "", "1.0", " 1", "１", "9" * 5000, "1e2"])
def test_a_bias_for_no_token_is_refused(key):
    assert refusal(completion, logit_bias={key: 1}).param == "logit_bias"


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
