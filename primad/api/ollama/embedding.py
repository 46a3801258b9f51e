"""Ollama's paths for embeddings: ``/api/embed``, and ``/api/embeddings`` as it was before."""

from __future__ import annotations

import hashlib
import time
from typing import Annotated, Any, Final

import msgspec
from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from primad.api.backend import Embeddings
from primad.api.dialect import Route
from primad.api.endpoint import Endpoint, json_response
from primad.api.ollama.answers import iso, nanoseconds
from primad.api.ollama.job import LATEST, plain
from primad.api.openai.fields import Strict, expecting
from primad.api.openai.schema import parse
from primad.api.vectors import MAX_TEXTS, Dimensions, Texts, embed, numbered


class _OfModel(Strict):
    model: Annotated[str, Field(max_length=512)]
    options: dict[str, Any] | None = None
    keep_alive: Any = None


class OllamaEmbedRequest(_OfModel):
    """``POST /api/embed``. Texts that are too long are cut, unless ``truncate`` is false."""

    input: Annotated[
        str | Texts | Annotated[list[str], Field(max_length=0)],
        expecting(f"a string, or a list of at most {MAX_TEXTS}"),
    ] = ""
    truncate: bool | None = None
    dimensions: Dimensions | None = None


class OllamaEmbeddingsRequest(_OfModel):
    """``POST /api/embeddings``."""

    prompt: str = ""


class OllamaEmbedded(msgspec.Struct, frozen=True, kw_only=True):
    """The answer of ``/api/embed``; durations are nanoseconds."""

    model: str
    embeddings: list[list[float]]
    total_duration: int
    load_duration: int
    prompt_eval_count: int


class OllamaEmbedding(msgspec.Struct, frozen=True, kw_only=True):
    """The answer of ``/api/embeddings``."""

    embedding: list[float]


class _Handlers:
    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint

    async def embed(self, request: Request) -> Response:
        """Vectors of texts; none for no text, which only asks for the model to be there."""
        begun_s = time.perf_counter()
        ask = parse(OllamaEmbedRequest, await self._endpoint.read(request))
        vectors, tokens = list[list[float]](), 0
        if ask.input:
            is_one = isinstance(ask.input, str)
            found = await embed(
                self._endpoint,
                request,
                [ask.input] if isinstance(ask.input, str) else ask.input,
                (lambda _: "input") if is_one else numbered("input"),
                model=plain(ask.model),
                dimensions=ask.dimensions,
                cuts=ask.truncate is not False,
            )
            vectors, tokens = found.rows.tolist(), found.tokens
        answer = OllamaEmbedded(
            model=ask.model,
            embeddings=vectors,
            total_duration=nanoseconds(time.perf_counter() - begun_s),
            load_duration=0,
            prompt_eval_count=tokens,
        )
        return json_response(answer)

    async def embed_one(self, request: Request) -> Response:
        """The vector of a prompt; none for no prompt."""
        ask = parse(OllamaEmbeddingsRequest, await self._endpoint.read(request))
        vector = list[float]()
        if ask.prompt:
            found = await embed(
                self._endpoint, request, [ask.prompt], lambda _: "prompt", model=plain(ask.model), cuts=True
            )
            vector = found.rows[0].tolist()
        return json_response(OllamaEmbedding(embedding=vector))


def routes(endpoint: Endpoint) -> tuple[Route, ...]:
    """Both paths."""
    here = _Handlers(endpoint)
    return (
        Route(path="/api/embed", handler=here.embed, asks="OllamaEmbedRequest", answers="OllamaEmbedded"),
        Route(
            path="/api/embeddings", handler=here.embed_one, asks="OllamaEmbeddingsRequest", answers="OllamaEmbedding"
        ),
    )


def listed(embeddings: Embeddings) -> dict[str, Any]:
    """The embedding model as one of ``GET /api/tags``."""
    name = embeddings.name + LATEST
    return {
        "name": name,
        "model": name,
        "modified_at": iso(embeddings.created),
        "size": 0,
        "digest": hashlib.sha256(name.encode()).hexdigest(),
        "details": {"parent_model": "", "format": "gguf", "family": "", "families": [], "parameter_size": ""}
        | {"quantization_level": ""},
    }


REQUESTS: Final = (OllamaEmbedRequest, OllamaEmbeddingsRequest)
ANSWERS: Final = (OllamaEmbedded, OllamaEmbedding)
