"""Embeddings as in OpenAI's API, and reranking as in Jina's and llama-server's."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from typing import Any, Final

import msgspec
import numpy as np
from numpy.typing import NDArray
from starlette.requests import Request
from starlette.responses import Response

from primad.api.answering.backend import Embeddings
from primad.api.answering.job import PreparedTexts
from primad.api.dialects.openai import prepared
from primad.api.dialects.openai.prepared import EmbeddingRequest, RerankRequest
from primad.api.dialects.openai.shapes import Model, ModelMeta
from primad.api.http.dialect import Route
from primad.api.http.endpoint import Endpoint, json_response
from primad.api.http.long_response import LongResponse
from primad.api.http.vectors import embed
from primad.api.http.wanted import Choosing


class EmbeddingUsage(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens of all texts."""

    prompt_tokens: int
    total_tokens: int


class TextEmbedding(msgspec.Struct, frozen=True, kw_only=True, tag_field="object", tag="embedding"):
    """The vector of the text ``index``: numbers, or the base64 of its float32, little-endian."""

    index: int
    embedding: list[float] | str


class EmbeddingList(msgspec.Struct, frozen=True, kw_only=True, tag_field="object", tag="list"):
    """The response of ``POST /v1/embeddings``."""

    model: str
    data: list[TextEmbedding]
    usage: EmbeddingUsage


class RankedDocument(msgspec.Struct, frozen=True, kw_only=True):
    """The document ``index``; the score is the cosine similarity of its embedding and the query's."""

    index: int
    relevance_score: float


class Ranking(msgspec.Struct, frozen=True, kw_only=True, tag_field="object", tag="list"):
    """The response of ``POST /v1/rerank``, the best document first."""

    model: str
    results: list[RankedDocument]
    usage: EmbeddingUsage


class _Handlers:
    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint

    async def embed(self, request: Request) -> Response:
        """Return the embeddings of texts."""
        asked = await self._endpoint.prepare(request, prepared.embedding)
        found = await embed(self._endpoint, request, asked)
        vectors: Iterator[Any] = map(_base64, found.rows) if asked.as_base64 else map(msgspec.Raw, found.encoded())
        data = (TextEmbedding(index=index, embedding=vector) for index, vector in enumerate(vectors))
        long = LongResponse()
        listed = await long.list_of(map(msgspec.json.encode, data))
        return long.response(EmbeddingList(model=found.model, data=listed, usage=_usage(found.tokens)))

    async def rerank(self, request: Request) -> Response:
        """Return documents ranked by similarity to a query."""
        asked = await self._endpoint.prepare(request, prepared.ranking)
        documents = PreparedTexts(model=asked.model, texts=list(asked.documents), param="documents", numbered=True)
        found = await embed(self._endpoint, request, documents, query=asked.query)
        scores = [float(row @ found.rows[0]) for row in found.rows[1:]]
        best = sorted(range(len(scores)), key=lambda index: -scores[index])[: asked.top_n]
        results = [RankedDocument(index=index, relevance_score=scores[index]) for index in best]
        return json_response(Ranking(model=found.model, results=results, usage=_usage(found.tokens)))


_CHOOSES: Final = Choosing(embeds=True)


def _base64(vector: NDArray[np.float32]) -> str:
    return base64.b64encode(vector.astype("<f4").tobytes()).decode()


def _usage(tokens: int) -> EmbeddingUsage:
    return EmbeddingUsage(prompt_tokens=tokens, total_tokens=tokens)


def routes(endpoint: Endpoint) -> tuple[Route, ...]:
    """Return the routes of both, with and without ``/v1``."""
    here = _Handlers(endpoint)
    return (
        *(
            Route(path=path, handler=here.embed, asks="EmbeddingRequest", responses="EmbeddingList", chooses=_CHOOSES)
            for path in ("/v1/embeddings", "/embeddings")
        ),
        *(
            Route(path=path, handler=here.rerank, asks="RerankRequest", responses="Ranking", chooses=_CHOOSES)
            for path in ("/v1/rerank", "/rerank", "/v1/reranking", "/reranking")
        ),
    )


def listed(embeddings: Embeddings) -> Model:
    """Return the embedding model as an entry of the models."""
    maximum = embeddings.max_text_tokens
    return Model(
        id=embeddings.name,
        created=embeddings.created,
        owned_by="primad",
        max_model_len=maximum,
        meta=ModelMeta(n_ctx=maximum, n_ctx_train=maximum),
    )


REQUESTS: Final = (EmbeddingRequest, RerankRequest)
RESPONSES: Final = (EmbeddingList, Ranking)
