"""llama-server's own paths over a fake backend."""

from __future__ import annotations

import asyncio
import itertools
import json
import time

import pytest

from primad.api.backend import FillInTokens, Health
from primad.api.generation import write
from primad.api.llama_server import prepared
from primad.api.openai.job import Job
from primad.errors import RingError
from tests.fakes.backend import BOS, ByteVocabulary, FakeBackend, says
from tests.fakes.http import call, events, post

TEMPLATE = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}>"


def test_tokens_and_back():
    backend = FakeBackend(says())
    assert post(backend, "/tokenize", content="Hé").json() == {"tokens": [72, 195, 169]}
    assert post(backend, "/tokenize", content="a", add_special=True).json() == {"tokens": [BOS, 97]}
    whole = post(backend, "/tokenize", content="aé", with_pieces=True).json()["tokens"]
    assert whole == [{"id": 97, "piece": "a"}, {"id": 195, "piece": [195]}, {"id": 169, "piece": [169]}]
    name = ByteVocabulary().name(BOS)
    assert post(backend, "/detokenize", tokens=[BOS, 72, 195, 169]).json() == {"content": f"{name}Hé"}
    assert post(backend, "/detokenize", tokens=[999]).json()["error"]["param"] == "tokens"


def test_the_template_is_applied_and_told():
    backend = FakeBackend(says(), vocabulary=ByteVocabulary(chat_template=TEMPLATE), context_tokens=77)
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
    ("asked", "kind", "word", "text"),
    [({}, "eos", "", "one END"), ({"n_predict": 2}, "limit", "", "on"), ({"stop": ["END"]}, "word", "END", "one ")],
)
def test_a_completion_says_why_it_stopped(asked, kind, word, text):
    whole = post(FakeBackend(says("one END")), "/completion", prompt="Hi", **asked).json()
    assert (whole["content"], whole["stop"], whole["stop_type"], whole["stopping_word"]) == (text, True, kind, word)
    assert (whole["tokens_evaluated"], whole["timings"]["prompt_n"]) == (3, 3)
    *parts, end = events(post(FakeBackend(says("one END")), "/completion", prompt="Hi", stream=True, **asked))
    assert "".join(part["content"] for part in parts) == text
    assert not any(part["stop"] for part in parts)
    assert (end["stop"], end["stop_type"], end["content"]) == (True, kind, "")
    assert end["tokens_predicted"] == whole["tokens_predicted"]


def test_a_completion_in_one_piece_says_what_its_tokens_took(monkeypatch):
    ticks = itertools.count()
    monkeypatch.setattr(time, "perf_counter", lambda: float(next(ticks)))
    told = post(FakeBackend(says("abc")), "/completion", prompt="Hi").json()["timings"]
    assert told["predicted_ms"] >= 2000
    assert told["predicted_per_second"] == told["predicted_n"] / told["predicted_ms"] * 1000


def test_every_event_says_what_it_took_if_it_is_asked_to():
    told = events(post(FakeBackend(says("abc")), "/completion", prompt="Hi", stream=True, timings_per_token=True))
    assert [event["timings"]["predicted_n"] for event in told] == [1, 2, 3, 3]
    assert {event["timings"]["prompt_n"] for event in told} == {3}
    assert all(event["timings"].keys() == told[-1]["timings"].keys() for event in told)
    silent = events(post(FakeBackend(says("abc")), "/completion", prompt="Hi", stream=True))
    assert ["timings" in event for event in silent] == [False, False, False, True]
    for path, asked in (
        ("/v1/completions", {"prompt": "Hi"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}]}),
    ):
        made = FakeBackend(says("abc"), vocabulary=ByteVocabulary(chat_template=TEMPLATE))
        *told, _ = events(post(made, path, stream=True, timings_per_token=True, **asked))
        timed = [event["timings"]["predicted_n"] for event in told if "timings" in event]
        assert timed == [1, 2, 3, 3]
        *silent, _ = events(post(made, path, stream=True, **asked))
        assert not any("timings" in event for event in silent)


def test_no_tokens_to_predict_has_the_prompt_computed_and_nothing_written():
    for path, asked in (("/completion", {"prompt": "Hi"}), ("/infill", {"input_prefix": "a", "input_suffix": ""})):
        backend = FakeBackend(says("one END"), vocabulary=ByteVocabulary(fill_in=FillInTokens(before=1, after=2, middle=3)))
        whole = post(backend, path, n_predict=0, t_max_prompt_ms=1, t_max_predict_ms=1, samplers=[], **asked).json()
        assert (whole["content"], whole["tokens_predicted"], whole["stop_type"]) == ("", 0, "limit")
        assert whole["tokens_evaluated"] == whole["timings"]["prompt_n"] == len(backend.calls[0].prompt)
        (end,) = events(post(backend, path, n_predict=0, stream=True, **asked))
        assert (end["stop"], end["tokens_predicted"]) == (True, 0)
        assert [each.max_tokens for each in backend.calls] == [1, 1]


def test_an_answer_that_takes_too_long_ends_behind_the_next_line():
    backend = FakeBackend(says("a\nbcd\ne\nf"))
    assert backend.served is not None
    for limit_ms, text in ((1500, "a\nbcd\n"), (2500, "a\nbcd\ne\n"), (9000, "a\nbcd\ne\nf"), (0, "a\nbcd\ne\nf")):
        body = json.dumps({"prompt": "Hi", "t_max_predict_ms": limit_ms}).encode()
        job = asyncio.run(backend.prepare(prepared.completion, body, backend.served.settings)).job
        ticks = itertools.count()

        async def texts(job: Job = job, ticks: itertools.count[int] = ticks) -> list[tuple[str, str | None]]:
            written = write(backend, backend.vocabulary, job, job.choices[0], clock=lambda: float(next(ticks)))
            return [(part.text, part.finish) async for part in written]

        parts = asyncio.run(texts())
        assert "".join(text for text, _ in parts) == text
        assert parts[-1][1] == ("stop" if text.endswith("f") else "length")
        assert backend.calls[-1].closed.is_set()


def test_a_prompt_of_ids_and_texts_is_one_prompt():
    backend = FakeBackend(says("x"))
    assert post(backend, "/completion", prompt=[72, "i", 33], n_predict=-1).json()["content"] == "x"
    assert backend.calls[0].prompt == [72, 105, 33]
    assert backend.calls[0].max_tokens == 4096 - 3


def test_what_is_wrong_is_told():
    assert "n_probs" in post(FakeBackend(says()), "/completion", prompt="Hi", n_probs=3).json()["error"]["message"]
    assert post(FakeBackend(says()), "/tokenize").json()["error"]["param"] == "content"
    got = events(post(FakeBackend(says("a", RingError("gone"))), "/completion", prompt="Hi", stream=True))
    assert got[-1]["error"]["message"] == "gone"
    backend = FakeBackend(says())
    backend.state = Health(serving=False, taken=False, detail="loading")
    assert call(backend, "GET", "/props").status_code == 503


def test_variables_of_the_template_are_taken():
    backend = FakeBackend(says(), vocabulary=ByteVocabulary(chat_template="{{ reasoning_effort }}"), context_tokens=77)
    messages = [{"role": "user", "content": "Hi"}]
    assert post(backend, "/apply-template", messages=messages, reasoning_effort="high").json() == {"prompt": "high"}


def test_a_gap_is_filled():
    fills = ByteVocabulary(fill_in=FillInTokens(before=1, after=2, middle=3))
    backend = FakeBackend(says("mid"), vocabulary=fills)
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
def test_what_cannot_be_filled_is_refused_by_its_field(path, body, param):
    answer = post(FakeBackend(says("x")), path, **body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
