"""Vectors of texts from the model of ``serve --embedding``, for all dialects."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
from numpy.typing import NDArray
from starlette.requests import Request

from primad.api.answering.job import PreparedTexts
from primad.api.http.access import caller, charge
from primad.api.http.connection import while_connected
from primad.api.http.endpoint import Endpoint
from primad.api.http.turns import in_turns
from primad.errors import RequestError, printable


@dataclass(frozen=True, slots=True, kw_only=True)
class Vectors:
    """A vector of length 1 for each text, from the ``model`` of that name, and the number of tokens of all texts."""

    model: str
    rows: Sequence[NDArray[np.float32]]
    tokens: int

    def encoded(self) -> Iterator[bytes]:
        """Yield each vector as a JSON list."""
        return (msgspec.json.encode(row.tolist()) for row in self.rows)


async def embed(endpoint: Endpoint, request: Request, asked: PreparedTexts, *, query: str | None = None) -> Vectors:
    """Return the vectors of the texts of ``asked``, after the vector of ``query`` if there is one.

    Stops if the client leaves. Raises ``RequestError`` if there is no such model or text, ``RingError`` after a crash.
    """
    model, dimensions = asked.model, asked.dimensions
    texts = asked.texts if query is None else [query, *asked.texts]

    def called(index: int) -> str:
        place = index - (query is not None)
        return asked.called(place) if place >= 0 else "query"

    embeddings = endpoint.embeddings_for(request)
    if embeddings is None:
        raise RequestError(
            "this server has no embedding model; start 'primad serve' with --embedding FILE.gguf",
            status=404,
            code="no_embedding_model",
        )
    is_beside = embeddings is endpoint.embeddings
    if is_beside and model is not None and model != embeddings.name and not endpoint.any_model:
        raise RequestError(
            f"the embedding model here is {embeddings.name}, not {printable(model)}",
            status=404,
            code="model_not_found",
            param="model",
        )
    if dimensions is not None and 0 < embeddings.width < dimensions:
        raise RequestError(
            f"dimensions: the embedding model has {embeddings.width}; request at most as many", param="dimensions"
        )
    work = embeddings.embed(texts, called, cuts=asked.cuts, owner=caller())
    found, tokens = await while_connected(request.receive, work)
    charge(tokens)
    rows = [np.frombuffer(row, "<f4") for row in found]
    if dimensions is not None:
        rows = await in_turns(_cut(row, dimensions) for row in rows)
    return Vectors(model=embeddings.name, rows=rows, tokens=tokens)


def _cut(row: NDArray[np.float32], dimensions: int) -> NDArray[np.float32]:
    cut = row[:dimensions]
    return (cut / (np.linalg.norm(cut) or 1)).astype(np.float32)
