"""Ollama's paths for embeddings: ``/api/embed``, and the older ``/api/embeddings``."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any, Final

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from primad.api.answering.backend import Embeddings
from primad.api.dialects.ollama import prepared
from primad.api.dialects.ollama.job import LATEST
from primad.api.dialects.ollama.keep_alive import ollama_wanted
from primad.api.dialects.ollama.responses import model_details, model_entry, nanoseconds
from primad.api.http.dialect import Route
from primad.api.http.endpoint import Endpoint, json_response
from primad.api.http.long_response import LongResponse
from primad.api.http.vectors import embed
from primad.api.http.wanted import Choosing


class OllamaEmbedded(msgspec.Struct, frozen=True, kw_only=True):
    """The response of ``/api/embed``; durations are nanoseconds."""

    model: str
    embeddings: list[list[float]]
    total_duration: int
    load_duration: int
    prompt_eval_count: int


class OllamaEmbedding(msgspec.Struct, frozen=True, kw_only=True):
    """The response of ``/api/embeddings``."""

    embedding: list[float]


class _Handlers:
    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint

    async def embed(self, request: Request) -> Response:
        """Return the embeddings of texts; without texts only load the model."""
        begun_s = time.perf_counter()
        asked = await self._endpoint.prepare(request, prepared.embed)
        vectors: Any = []
        tokens, long = 0, LongResponse()
        if asked.texts is not None:
            found = await embed(self._endpoint, request, asked.texts)
            vectors, tokens = await long.list_of(found.encoded()), found.tokens
        response = OllamaEmbedded(
            model=asked.model,
            embeddings=vectors,
            total_duration=nanoseconds(time.perf_counter() - begun_s),
            load_duration=0,
            prompt_eval_count=tokens,
        )
        return long.response(response)

    async def embed_one(self, request: Request) -> Response:
        """Return the embedding of a prompt; empty without a prompt."""
        asked = await self._endpoint.prepare(request, prepared.embed_one)
        vector = list[float]()
        if asked.texts is not None:
            found = await embed(self._endpoint, request, asked.texts)
            vector = found.rows[0].tolist()
        return json_response(OllamaEmbedding(embedding=vector))


def _choosing(text: str) -> Choosing:
    return Choosing(
        read=lambda fields: replace(ollama_wanted(fields, getattr(fields, text)), streams=False), embeds=True
    )


def routes(endpoint: Endpoint) -> tuple[Route, ...]:
    """Return both routes."""
    here = _Handlers(endpoint)
    return (
        Route(
            path="/api/embed",
            handler=here.embed,
            asks="OllamaEmbedRequest",
            responses="OllamaEmbedded",
            chooses=_choosing("input"),
        ),
        Route(
            path="/api/embeddings",
            handler=here.embed_one,
            asks="OllamaEmbeddingsRequest",
            responses="OllamaEmbedding",
            chooses=_choosing("prompt"),
        ),
    )


def listed(embeddings: Embeddings) -> dict[str, Any]:
    """Return the embedding model as an entry of ``GET /api/tags``."""
    name = embeddings.name + LATEST
    return model_entry(name, embeddings.created, 0, name, model_details("", "", "") | {"families": []})


REQUESTS: Final = (prepared.OllamaEmbedRequest, prepared.OllamaEmbeddingsRequest)
RESPONSES: Final = (OllamaEmbedded, OllamaEmbedding)
