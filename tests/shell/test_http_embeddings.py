"""Embeddings and ranking over a fake embedding model."""

from __future__ import annotations

import base64

import numpy as np
import pytest

from primad.api.answering.backend import ModelNames
from tests.fakes.backend import FakeBackend, replies
from tests.fakes.embeddings import FakeEmbeddings
from tests.fakes.http import call

EMBED, RERANK, OLLAMA, BEFORE = "/v1/embeddings", "/v1/rerank", "/api/embed", "/api/embeddings"


def request(path, *, embeddings=None, names=ModelNames(), **body):
    request = {"json": body} if body else {}
    return call(
        FakeBackend(replies()),
        "POST" if body else "GET",
        path,
        names=names,
        embeddings=embeddings or FakeEmbeddings(),
        **request,
    )


@pytest.mark.parametrize("path", [EMBED, "/embeddings"])
@pytest.mark.parametrize(
    ("asked", "count"), [("sea", 1), (["sea", "tree"], 2), ([1, 2, 3], 1), ([[1, 2], [3]], 2)], ids=str
)
def test_every_form_of_input(path, asked, count):
    body = request(path, input=asked).json()
    assert [each["index"] for each in body["data"]] == list(range(count))
    assert body["usage"] == {"prompt_tokens": 2 * count, "total_tokens": 2 * count}
    assert (body["object"], body["model"], body["data"][0]["object"]) == ("list", "small", "embedding")


def test_base64_and_dimensions():
    answer = request(EMBED, input="sea", encoding_format="base64", dimensions=1)
    (each,) = answer.json()["data"]
    assert np.frombuffer(base64.b64decode(each["embedding"]), "<f4").tolist() == [1.0]
    cut = request(EMBED, input="sea", dimensions=2).json()["data"][0]["embedding"]
    assert cut == pytest.approx([0.6, 0.8])


@pytest.mark.parametrize(
    ("path", "body", "named"),
    [
        (EMBED, {"input": ""}, "input: is empty"),
        (EMBED, {"input": ["sea", ""]}, "input[1]: is empty"),
        (EMBED, {"input": []}, "input"),
        (EMBED, {"input": [[]]}, "input"),
        (EMBED, {"input": [1, "sea"]}, "a string, a list of token ids, or a list of 1 to 2048 of either"),
        (EMBED, {"input": [-1]}, "input"),
        (EMBED, {"input": 7}, "input"),
        (EMBED, {"input": {"text": "sea"}}, "input"),
        (EMBED, {"input": ["sea"] * 2049}, "2048"),
        (EMBED, {"input": [[1]] * 2049}, "2048"),
        (EMBED, {"input": "sea", "dimensions": 4}, "dimensions: the embedding model has 3"),
        (EMBED, {"input": "sea", "dimensions": 0}, "dimensions"),
        (EMBED, {"input": "sea", "dimensions": "2"}, "dimensions"),
        (EMBED, {"input": "sea", "encoding_format": "int8"}, "encoding_format"),
        (EMBED, {"model": "small"}, "input"),
        (RERANK, {"query": "sea", "documents": []}, "documents"),
        (RERANK, {"query": "", "documents": ["ship"]}, "query: is empty"),
        (RERANK, {"query": "sea", "documents": ["ship", ""]}, "documents[1]: is empty"),
        (RERANK, {"query": "sea", "documents": ["ship"], "top_n": 0}, "top_n"),
        (RERANK, {"query": "sea"}, "documents"),
        (OLLAMA, {"model": "small", "input": [""]}, "input[0]: is empty"),
        (OLLAMA, {"model": "small", "input": ["a"] * 2049}, "2048"),
        (OLLAMA, {"model": "small", "input": [1]}, "input"),
        (OLLAMA, {"input": "sea"}, "model"),
        (BEFORE, {"model": "small", "prompt": ["sea"]}, "prompt"),
    ],
)
def test_a_bad_request_is_refused_with_the_reason(path, body, named):
    response = request(path, **body)
    assert response.status_code == 400
    assert named in response.text


@pytest.mark.parametrize("path", [RERANK, "/rerank", "/v1/reranking", "/reranking"])
def test_documents_are_ranked_by_their_cosine(path):
    body = request(path, query="sea", documents=["tree", "ship"], top_n=1).json()
    assert [(each["index"], round(each["relevance_score"], 5)) for each in body["results"]] == [(1, 0.96)]
    assert [each["index"] for each in request(path, query="sea", documents=["tree", "ship"]).json()["results"]] == [
        1,
        0,
    ]


def test_as_ollama_has_it():
    fake = FakeEmbeddings()
    body = request(OLLAMA, embeddings=fake, model="small:latest", input=["sea", "tree"], keep_alive="5m").json()
    assert body["embeddings"] == [pytest.approx([0.6, 0.8, 0.0]), [0, 0, 1]]
    assert (body["model"], body["prompt_eval_count"]) == ("small:latest", 4)
    assert request(OLLAMA, embeddings=fake, model="small", input="sea", truncate=False).json()["embeddings"]
    assert request(BEFORE, embeddings=fake, model="small", prompt="tree").json() == {"embedding": [0, 0, 1]}
    assert fake.cuts == [True, False, True]
    assert (
        request(OLLAMA, model="small").json()["embeddings"]
        == request(OLLAMA, model="small", input=[]).json()["embeddings"]
    )
    assert request(BEFORE, model="small").json() == {"embedding": []}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (EMBED, {"input": "sea"}),
        (RERANK, {"query": "sea", "documents": ["ship"]}),
        (OLLAMA, {"model": "small", "input": "sea"}),
        (BEFORE, {"model": "small", "prompt": "sea"}),
    ],
)
def test_without_an_embedding_model_the_error_names_the_option(path, body):
    refused = call(FakeBackend(replies()), "POST", path, json=body)
    assert refused.status_code == 404
    assert "--embedding FILE.gguf" in refused.text
    wrong = request(path, **(body | {"model": "x"}))
    assert wrong.status_code == 404
    assert "the embedding model here is small, not x" in wrong.text
    assert request(path, names=ModelNames(any_model=True), **(body | {"model": "x"})).status_code == 200


def test_the_embedding_model_is_listed_next_to_the_other():
    assert [each["id"] for each in request("/v1/models").json()["data"]] == ["toy", "small"]
    assert request("/v1/models/small").json()["max_model_len"] == 512
    same = FakeEmbeddings()
    same.name = "toy"
    assert [each["id"] for each in request("/v1/models", embeddings=same).json()["data"]] == ["toy"]
    assert [each["model"] for each in request("/api/tags", embeddings=same).json()["models"]] == ["toy:latest"]
    assert [each["model"] for each in request("/api/tags").json()["models"]] == ["toy:latest", "small:latest"]


def test_status_and_metrics_count_embedding_requests():
    assert request("/status").json()["embedding"] == FakeEmbeddings().status()
    assert call(FakeBackend(replies()), "GET", "/status").json()["embedding"] is None
    printed = request("/metrics").text
    for line in ("alive 1.0", "rss_bytes 7e+07", "requests_total 9.0", "errors_total 1.0", "compute_seconds_total 1.5"):
        assert f"\nprimad_embedding_{line}\n" in printed
    assert "primad_embedding" not in call(FakeBackend(replies()), "GET", "/metrics").text
