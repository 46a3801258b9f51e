"""Vectors of texts from the model of ``serve --embedding``, whatever dialect they are asked in."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Final

import numpy as np
from numpy.typing import NDArray
from pydantic import Field
from starlette.requests import Request

from primad.api.access import caller, charge
from primad.api.connection import while_connected
from primad.api.endpoint import Endpoint
from primad.errors import RequestError, printable

MAX_TEXTS: Final = 2048
"""Texts of one request."""

Texts = Annotated[list[str], Field(min_length=1, max_length=MAX_TEXTS, fail_fast=True)]
Dimensions = Annotated[int, Field(ge=1, le=1 << 20)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Vectors:
    """A row of length 1 for each text, from the ``model`` of that name, and the tokens of all texts."""

    model: str
    rows: NDArray[np.float32]
    tokens: int


def numbered(field: str) -> Callable[[int], str]:
    """What the texts of the list ``field`` are called."""
    return lambda index: f"{field}[{index}]"


async def embed(
    endpoint: Endpoint,
    request: Request,
    texts: Sequence[str | list[int]],
    called: Callable[[int], str],
    *,
    model: str | None,
    dimensions: int | None = None,
    cuts: bool = False,
) -> Vectors:
    """The vectors of ``texts``, which errors name as they are ``called``, cut to ``dimensions``.

    It stops when the client leaves. Raises ``RequestError`` where there is no such model or text, ``RingError`` after a
    crash.
    """
    embeddings = endpoint.embeddings
    if embeddings is None:
        raise RequestError(
            "this server has no embedding model; start 'primad serve' with --embedding FILE.gguf",
            status=404,
            code="no_embedding_model",
        )
    if model is not None and model != embeddings.name and not endpoint.any_model:
        raise RequestError(
            f"the embedding model here is {embeddings.name}, not {printable(model)}",
            status=404,
            code="model_not_found",
            param="model",
        )
    if dimensions is not None and 0 < embeddings.width < dimensions:
        raise RequestError(
            f"dimensions: the embedding model has {embeddings.width}; ask for at most as many", param="dimensions"
        )
    work = embeddings.embed(texts, called, cuts=cuts, owner=caller())
    found, tokens = await while_connected(request.receive, work)
    charge(tokens)
    rows = np.stack([np.frombuffer(vector, "<f4") for vector in found])
    return Vectors(model=embeddings.name, rows=rows if dimensions is None else _cut(rows, dimensions), tokens=tokens)


def _cut(rows: NDArray[np.float32], dimensions: int) -> NDArray[np.float32]:
    cut = rows[:, :dimensions]
    lengths = np.linalg.norm(cut, axis=1, keepdims=True)
    return (cut / np.where(lengths > 0, lengths, 1)).astype(np.float32)
