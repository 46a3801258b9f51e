"""llama-server's own paths over a fake backend."""

from __future__ import annotations

import itertools
import json
import time
from typing import Any

import pytest

from primad.api.answering.backend import FillInTokens, Health
from primad.api.answering.generation import write
from primad.api.dialects.llama_server import prepared
from primad.api.http.long_response import PIECE_BYTES, in_pieces
from primad.errors import RingError
from tests.fakes.backend import BOS, ByteVocabulary, FakeBackend, replies
from tests.fakes.http import call, events, post

TEMPLATE = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}>"


def test_tokens_and_back():
    backend = FakeBackend(replies())
    assert post(backend, "/tokenize", content="Hé").json() == {"tokens": [72, 195, 169]}
    assert post(backend, "/tokenize", content="a", add_special=True).json() == {"tokens": [BOS, 97]}
    whole = post(backend, "/tokenize", content="aé", with_pieces=True).json()["tokens"]
    assert whole == [{"id": 97, "piece": "a"}, {"id": 195, "piece": [195]}, {"id": 169, "piece": [169]}]
    name = ByteVocabulary().name(BOS)
    assert post(backend, "/detokenize", tokens=[BOS, 72, 195, 169]).json() == {"content": f"{name}Hé"}
    assert post(backend, "/detokenize", tokens=[999]).json()["error"]["param"] == "tokens"


def test_the_template_is_applied_and_its_properties_are_served():
    backend = FakeBackend(replies(), vocabulary=ByteVocabulary(chat_template=TEMPLATE), context_tokens=77)
    body = post(backend, "/apply-template", messages=[{"role": "user", "content": "Hi"}]).json()
    assert body == {"prompt": "[user]Hi>"}
    props = call(backend, "GET", "/props").json()
    assert props["chat_template"] == TEMPLATE
    assert props["chat_template_caps"]["supports_tools"] is False
    assert props["default_generation_settings"]["n_ctx"] == 77
    slots = call(backend, "GET", "/slots").json()
    assert slots == [{"id": 0, "n_ctx": 77, "speculative": False, "is_processing": False}]
    assert call(backend, "GET", "/models").json() == call(backend, "GET", "/v1/models").json()


@pytest.mark.parametrize(
    ("options", "kind", "word", "text"),
    [({}, "eos", "", "one END"), ({"n_predict": 2}, "limit", "", "on"), ({"stop": ["END"]}, "word", "END", "one ")],
)
def test_a_completion_has_its_stop_reason(options, kind, word, text):
    whole = post(FakeBackend(replies("one END")), "/completion", prompt="Hi", **options).json()
    assert (whole["content"], whole["stop"], whole["stop_type"], whole["stopping_word"]) == (text, True, kind, word)
    assert (whole["tokens_evaluated"], whole["timings"]["prompt_n"]) == (3, 3)
    *parts, end = events(post(FakeBackend(replies("one END")), "/completion", prompt="Hi", stream=True, **options))
    assert "".join(part["content"] for part in parts) == text
    assert not any(part["stop"] for part in parts)
    assert (end["stop"], end["stop_type"], end["content"]) == (True, kind, "")
    assert end["tokens_predicted"] == whole["tokens_predicted"]


def test_a_whole_completion_has_the_time_of_its_tokens(monkeypatch):
    ticks = itertools.count()
    monkeypatch.setattr(time, "perf_counter", lambda: float(next(ticks)))
    reported = post(FakeBackend(replies("abc")), "/completion", prompt="Hi").json()["timings"]
    assert reported["predicted_ms"] >= 2000
    assert reported["predicted_per_second"] == (reported["predicted_n"] - 1) / reported["predicted_ms"] * 1000
    assert reported["predicted_per_token_ms"] == reported["predicted_ms"] / (reported["predicted_n"] - 1)
    assert reported["prompt_per_second"] == reported["prompt_n"] / reported["prompt_ms"] * 1000
    one = post(FakeBackend(replies("a")), "/completion", prompt="Hi").json()["timings"]
    assert (one["predicted_n"], one["predicted_per_second"], one["predicted_per_token_ms"]) == (1, 0, 0)


def test_a_completion_has_its_sampling_settings_and_prompt():
    options = {"top_k": 7, "stop": ["END"], "logit_bias": [[5, False], ["a", 1]], "n_predict": 9, "seed": 5, "n": 2}
    backend = FakeBackend(replies("one\ntwo"))
    whole = post(backend, "/completion", prompt=["Hi", [BOS, 72]], **options).json()
    assert [each["prompt"] for each in whole] == ["<s>Hi", "<s>Hi", "<s>H", "<s>H"]
    assert [each["generation_settings"]["seed"] for each in whole] == [5, 6, 5, 6]
    assert all(each["has_new_line"] for each in whole)
    printed = whole[0]["generation_settings"]
    assert (printed["top_k"], printed["stop"], printed["n_predict"], printed["n_ctx"]) == (7, ["END"], 9, 4096)
    assert printed["logit_bias"] == [{"token": 5, "bias": None}, {"token": 97, "bias": 1.0}]
    end = events(post(backend, "/completion", prompt="Hi", stream=True, **options))[-1]
    assert end["has_new_line"] is True
    assert end["generation_settings"] == printed | {"stream": True, "seed": end["generation_settings"]["seed"]}
    only = post(backend, "/completion", prompt="Hi", response_fields=["generation_settings/n_predict", "prompt"]).json()
    assert only == {"n_predict": -1, "prompt": "<s>Hi"}
    usual = call(backend, "GET", "/props").json()["default_generation_settings"]["params"]
    assert usual.items() <= post(backend, "/completion", prompt="Hi").json()["generation_settings"].items()


async def test_a_long_list_of_tokens_is_written_in_pieces():
    sent: list[int] = []

    async def send(message: Any) -> None:
        sent.append(len(message.get("body", b"")))

    response = in_pieces(b"[" + b"1," * (1 << 20) + b"1]")
    assert response.headers["content-length"] == str((1 << 21) + 3)
    await response({"type": "http"}, lambda: None, send)
    assert (sum(sent), max(sent)) == ((1 << 21) + 3, PIECE_BYTES)


def test_settings_that_are_too_long_are_not_repeated_for_each_choice():
    options = {"prompt": "Hi", "n_predict": 1, "stop": [f"{n:x<255}" for n in range(64)], "logit_bias": [[5, 1]]}
    few, many = (post(FakeBackend(replies("a")), "/completion", n=n, **options) for n in (2, 128))
    assert all(len(each["generation_settings"]["stop"]) == 64 for each in few.json())
    for each in many.json():
        settings = each["generation_settings"]
        assert (settings["stop"], settings["logit_bias"], settings["n_predict"]) == ([], [], 1)


def test_every_event_has_its_timings_on_request():
    reported = events(
        post(FakeBackend(replies("abc")), "/completion", prompt="Hi", stream=True, timings_per_token=True)
    )
    assert [event["timings"]["predicted_n"] for event in reported] == [1, 2, 3, 3]
    assert {event["timings"]["prompt_n"] for event in reported} == {3}
    assert all(event["timings"].keys() == reported[-1]["timings"].keys() for event in reported)
    silent = events(post(FakeBackend(replies("abc")), "/completion", prompt="Hi", stream=True))
    assert ["timings" in event for event in silent] == [False, False, False, True]
    for path, options in (
        ("/v1/completions", {"prompt": "Hi"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}]}),
    ):
        made = FakeBackend(replies("abc"), vocabulary=ByteVocabulary(chat_template=TEMPLATE))
        *reported, _ = events(post(made, path, stream=True, timings_per_token=True, **options))
        timed = [event["timings"]["predicted_n"] for event in reported if "timings" in event]
        assert timed == [1, 2, 3, 3]
        *silent, last, _ = events(post(made, path, stream=True, **options))
        assert not any("timings" in event for event in silent)
        whole = post(made, path, **options).json()
        assert last["timings"]["predicted_n"] == whole["timings"]["predicted_n"] == 3
        assert whole["timings"].keys() == last["timings"].keys()
        counted = {"include_usage": True}
        *_, counts, _ = events(post(made, path, stream=True, stream_options=counted, **options))
        assert (counts["choices"], counts["timings"]["predicted_n"]) == ([], 3)


def test_zero_tokens_to_predict_computes_only_the_prompt():
    for path, options in (("/completion", {"prompt": "Hi"}), ("/infill", {"input_prefix": "a", "input_suffix": ""})):
        backend = FakeBackend(
            replies("one END"), vocabulary=ByteVocabulary(fill_in=FillInTokens(before=1, after=2, middle=3))
        )
        whole = post(backend, path, n_predict=0, t_max_prompt_ms=1, t_max_predict_ms=1, samplers=[], **options).json()
        assert (whole["content"], whole["tokens_predicted"], whole["stop_type"]) == ("", 0, "limit")
        assert whole["tokens_evaluated"] == whole["timings"]["prompt_n"] == len(backend.calls[0].prompt)
        (end,) = events(post(backend, path, n_predict=0, stream=True, **options))
        assert (end["stop"], end["tokens_predicted"]) == (True, 0)
        assert [each.max_tokens for each in backend.calls] == [1, 1]


async def test_a_completion_over_its_time_limit_ends_after_the_next_line():
    backend = FakeBackend(replies("a\nbcd\ne\nf"))
    assert backend.served is not None
    for limit_ms, text in ((1500, "a\nbcd\n"), (2500, "a\nbcd\ne\n"), (9000, "a\nbcd\ne\nf"), (0, "a\nbcd\ne\nf")):
        body = json.dumps({"prompt": "Hi", "t_max_predict_ms": limit_ms}).encode()
        job = (await backend.prepare(prepared.completion, body, backend.served.settings)).job
        ticks = map(float, itertools.count())
        written = write(backend, backend.vocabulary, job, job.choices[0], clock=ticks.__next__)
        parts = [(part.text, part.finish) async for part in written]
        assert "".join(text for text, _ in parts) == text
        assert parts[-1][1] == ("stop" if text.endswith("f") else "length")
        assert backend.calls[-1].closed.is_set()


def test_a_prompt_of_ids_and_texts_is_one_prompt():
    backend = FakeBackend(replies("x"))
    assert post(backend, "/completion", prompt=[72, "i", 33], n_predict=-1).json()["content"] == "x"
    assert backend.calls[0].prompt == [72, 105, 33]
    assert backend.calls[0].max_tokens == 4096 - 3


def test_several_prompts_and_choices_have_an_index():
    for options, prompts in (
        ({"prompt": ["a", "b"]}, [[BOS, 97], [BOS, 98]]),
        ({"prompt": ["a"]}, [[BOS, 97]]),
        ({"prompt": [[97, 98], "c", [97, "b"]]}, [[97, 98], [BOS, 99], [97, 98]]),
        ({"prompt": "a", "n": 2}, [[BOS, 97]] * 2),
        ({"prompt": [97, 98]}, [[97, 98]]),
    ):
        backend = FakeBackend(replies("xy"))
        reported = post(backend, "/completion", **options).json()
        reported = reported if isinstance(reported, list) else [reported]
        assert [each.prompt for each in backend.calls] == prompts
        assert [(each["index"], each["content"]) for each in reported] == [(i, "xy") for i in range(len(prompts))]
        assert [each["tokens_evaluated"] for each in reported] == [len(prompt) for prompt in prompts]
        assert all(each["timings"]["predicted_n"] == each["tokens_predicted"] == 2 for each in reported)
        streamed = events(post(FakeBackend(replies("xy")), "/completion", stream=True, **options))
        for index in range(len(prompts)):
            assert "".join(each["content"] for each in streamed if each["index"] == index) == "xy"
            assert [each["stop"] for each in streamed if each["index"] == index] == [False, False, True]
    for wrong in ([], [[]], ["a"] * 129, [["a", []]], [1.5]):
        assert post(FakeBackend(replies()), "/completion", prompt=wrong).status_code == 400


def test_probabilities_have_llama_servers_shape():
    whole = post(FakeBackend(replies("aé")), "/completion", prompt="Hi", n_probs=2).json()
    first, middle, _ = whole["completion_probabilities"]
    assert (first["id"], first["token"], first["bytes"], first["logprob"]) == (97, "a", [97], -0.5)
    assert first["top_logprobs"] == [
        {"id": 97, "token": "a", "bytes": [97], "logprob": -0.5},
        {"id": 98, "token": "b", "bytes": [98], "logprob": -1.0},
    ]
    assert (middle["token"], middle["bytes"]) == ("", [195])
    *parts, end = events(post(FakeBackend(replies("aé")), "/completion", prompt="Hi", n_probs=2, stream=True))
    assert [each for part in parts for each in part["completion_probabilities"]] == whole["completion_probabilities"]
    assert "completion_probabilities" not in end
    assert (
        "completion_probabilities" not in post(FakeBackend(replies("a")), "/completion", prompt="Hi", n_probs=0).json()
    )


def test_a_completion_at_the_context_limit_is_truncated_and_fields_can_be_selected():
    for options, is_cut in (({}, True), ({"n_predict": 2}, False)):
        reported = post(
            FakeBackend(replies("abcdefgh"), context_tokens=8), "/completion", prompt="Hi", **options
        ).json()
        assert (reported["stop_type"], reported["truncated"]) == ("limit", is_cut)
    fields = ["content", "timings/prompt_n", "no/such", ""]
    assert post(FakeBackend(replies("a")), "/completion", prompt="Hi", response_fields=fields).json() == {
        "content": "a",
        "prompt_n": 3,
    }
    *_, end = events(post(FakeBackend(replies("a")), "/completion", prompt="Hi", response_fields=["stop"], stream=True))
    assert end == {"stop": True}
    assert post(FakeBackend(replies("a")), "/completion", prompt="Hi", response_fields=[""]).json()["content"] == "a"


def test_errors_name_the_wrong_field():
    refused = post(FakeBackend(replies()), "/completion", prompt="Hi", n_probs=101).json()["error"]
    assert (refused["param"], "n_probs" in refused["message"]) == ("n_probs", True)
    assert post(FakeBackend(replies()), "/tokenize").json()["error"]["param"] == "content"
    got = events(post(FakeBackend(replies("a", RingError("gone"))), "/completion", prompt="Hi", stream=True))
    assert got[-1]["error"]["message"] == "gone"
    backend = FakeBackend(replies())
    backend.state = Health(serving=False, taken=False, detail="loading")
    assert call(backend, "GET", "/props").status_code == 503


def test_variables_of_the_template_are_accepted():
    backend = FakeBackend(
        replies(), vocabulary=ByteVocabulary(chat_template="{{ reasoning_effort }}"), context_tokens=77
    )
    messages = [{"role": "user", "content": "Hi"}]
    assert post(backend, "/apply-template", messages=messages, reasoning_effort="high").json() == {"prompt": "high"}


def test_a_gap_is_filled():
    fills = ByteVocabulary(fill_in=FillInTokens(before=1, after=2, middle=3))
    backend = FakeBackend(replies("mid"), vocabulary=fills)
    whole = post(backend, "/infill", input_prefix="a", prompt="b", input_suffix="c", n_predict=9).json()
    assert whole["content"] == "mid"
    files = [{"filename": "x", "text": "y"}]
    *_, end = events(post(backend, "/infill", input_prefix="a", input_suffix="", input_extra=files, stream=True))
    assert end["stop"] is True
    completion = post(backend, "/v1/completions", prompt="ab", suffix="c").json()
    assert completion["choices"][0]["text"] == "mid"
    assert (
        post(backend, "/api/generate", model="toy", prompt="ab", suffix="c", stream=False).json()["response"] == "mid"
    )
    assert [each.prompt for each in backend.calls] == [
        [BOS, 1, *b"ab", 2, *b"c", 3],
        [BOS, *b"x\ny\n", 1, *b"a", 2, 3],
        [BOS, 1, *b"ab", 2, *b"c", 3],
        [BOS, 1, *b"ab", 2, *b"c", 3],
    ]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/infill", {"input_prefix": "a", "input_suffix": "b"}, "input_suffix"),
        ("/infill", {"input_prefix": "a"}, "input_suffix"),
        ("/infill", {"input_prefix": "a", "input_suffix": "b", "input_extra": [{"text": 1}]}, "input_extra[0].text"),
        ("/v1/completions", {"prompt": "a", "suffix": "b"}, "suffix"),
    ],
)
def test_an_infill_that_cannot_be_done_is_refused_by_its_field(path, body, param):
    answer = post(FakeBackend(replies("x")), path, **body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
