"""Embeddings as OpenAI has them, and documents in order as Jina and llama-server have it."""

from __future__ import annotations

import base64
from collections.abc import Callable
from typing import Annotated, Any, Final, Literal

import msgspec
import numpy as np
from numpy.typing import NDArray
from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from primad.api.backend import Embeddings
from primad.api.dialect import Route
from primad.api.endpoint import Endpoint, json_response
from primad.api.openai.fields import Strict, expecting
from primad.api.openai.samplers import MAX_TOKENS
from primad.api.openai.schema import parse
from primad.api.openai.shapes import Model, ModelMeta
from primad.api.vectors import MAX_TEXTS, Dimensions, Texts, embed, numbered

_Ids = Annotated[list[Annotated[int, Field(ge=0, le=MAX_TOKENS)]], Field(min_length=1, fail_fast=True)]
_Lists = Annotated[list[_Ids], Field(min_length=1, max_length=MAX_TEXTS, fail_fast=True)]


class EmbeddingRequest(Strict):
    """``POST /v1/embeddings``."""

    model: Annotated[str, Field(max_length=512)] | None = None
    input: Annotated[
        str | Texts | _Ids | _Lists,
        expecting(f"a string, a list of token ids, or a list of 1 to {MAX_TEXTS} of either"),
    ]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Dimensions | None = None

    @property
    def texts(self) -> list[str | list[int]]:
        """The texts one by one."""
        asked: Any = self.input
        return list(asked) if self._is_list else [asked]

    @property
    def called(self) -> Callable[[int], str]:
        """What errors call them."""
        return numbered("input") if self._is_list else lambda _: "input"

    @property
    def _is_list(self) -> bool:
        return isinstance(self.input, list) and not isinstance(self.input[0], int)


class RerankRequest(Strict):
    """``POST /v1/rerank``."""

    model: Annotated[str, Field(max_length=512)] | None = None
    query: str
    documents: Texts
    top_n: Annotated[int, Field(ge=1)] | None = None


class EmbeddingUsage(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens of all texts."""

    prompt_tokens: int
    total_tokens: int


class TextEmbedding(msgspec.Struct, frozen=True, kw_only=True, tag_field="object", tag="embedding"):
    """The vector of the text ``index``: numbers, or the base64 of its float32, little-endian."""

    index: int
    embedding: list[float] | str


class EmbeddingList(msgspec.Struct, frozen=True, kw_only=True, tag_field="object", tag="list"):
    """The answer of ``POST /v1/embeddings``."""

    model: str
    data: list[TextEmbedding]
    usage: EmbeddingUsage


class RankedDocument(msgspec.Struct, frozen=True, kw_only=True):
    """The document ``index``; the score is the cosine of its embedding and the query's."""

    index: int
    relevance_score: float


class Ranking(msgspec.Struct, frozen=True, kw_only=True, tag_field="object", tag="list"):
    """The answer of ``POST /v1/rerank``, the best document first."""

    model: str
    results: list[RankedDocument]
    usage: EmbeddingUsage


class _Handlers:
    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint

    async def embed(self, request: Request) -> Response:
        """Vectors of texts."""
        ask = parse(EmbeddingRequest, await self._endpoint.read(request))
        found = await embed(self._endpoint, request, ask.texts, ask.called, model=ask.model, dimensions=ask.dimensions)
        is_base64 = ask.encoding_format == "base64"
        data = [
            TextEmbedding(index=index, embedding=_base64(row) if is_base64 else row.tolist())
            for index, row in enumerate(found.rows)
        ]
        return json_response(EmbeddingList(model=found.model, data=data, usage=_usage(found.tokens)))

    async def rerank(self, request: Request) -> Response:
        """Documents in order of their likeness to a query."""
        ask = parse(RerankRequest, await self._endpoint.read(request))
        found = await embed(
            self._endpoint,
            request,
            [ask.query, *ask.documents],
            lambda index: f"documents[{index - 1}]" if index else "query",
            model=ask.model,
        )
        scores = (found.rows[1:] @ found.rows[0]).tolist()
        best = sorted(range(len(scores)), key=lambda index: -scores[index])[: ask.top_n]
        results = [RankedDocument(index=index, relevance_score=scores[index]) for index in best]
        return json_response(Ranking(model=found.model, results=results, usage=_usage(found.tokens)))


def _base64(vector: NDArray[np.float32]) -> str:
    return base64.b64encode(vector.astype("<f4").tobytes()).decode()


def _usage(tokens: int) -> EmbeddingUsage:
    return EmbeddingUsage(prompt_tokens=tokens, total_tokens=tokens)


def routes(endpoint: Endpoint) -> tuple[Route, ...]:
    """The paths of both, with and without ``/v1``."""
    here = _Handlers(endpoint)
    return (
        *(
            Route(path=path, handler=here.embed, asks="EmbeddingRequest", answers="EmbeddingList")
            for path in ("/v1/embeddings", "/embeddings")
        ),
        *(
            Route(path=path, handler=here.rerank, asks="RerankRequest", answers="Ranking")
            for path in ("/v1/rerank", "/rerank", "/v1/reranking", "/reranking")
        ),
    )


def listed(embeddings: Embeddings) -> Model:
    """The embedding model as one of the models."""
    most = embeddings.most_tokens
    return Model(
        id=embeddings.name,
        created=embeddings.created,
        owned_by="primad",
        max_model_len=most,
        meta=ModelMeta(n_ctx=most, n_ctx_train=most),
    )


REQUESTS: Final = (EmbeddingRequest, RerankRequest)
ANSWERS: Final = (EmbeddingList, Ranking)
