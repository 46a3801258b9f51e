"""Lists all dialects, and finds the one that a path belongs to, which shapes errors there."""

from __future__ import annotations

from typing import Final

from starlette.responses import Response

from primad.api.dialects.anthropic import routes as anthropic
from primad.api.dialects.llama_server import routes as llama_server
from primad.api.dialects.ollama import routes as ollama
from primad.api.dialects.openai import routes as openai
from primad.api.dialects.responses import routes as responses
from primad.api.http.dialect import Dialect
from primad.api.http.errors import error_response
from primad.errors import PrimadError

DIALECTS: Final = (
    openai.DIALECT,
    llama_server.DIALECT,
    anthropic.DIALECT,
    ollama.DIALECT,
    responses.DIALECT,
)


def dialect_of(path: str) -> Dialect:
    """Return the dialect with the longest prefix of ``path``."""
    found = [
        (len(prefix), number)
        for number, one in enumerate(DIALECTS)
        for prefix in one.prefixes
        if path.startswith(prefix)
    ]
    return DIALECTS[max(found)[1]] if found else openai.DIALECT


def refuse(path: str, exc: PrimadError, headers: dict[str, str] | None = None) -> Response:
    """Return the response that refuses a request to ``path``, in the form of its dialect."""
    return error_response(exc, headers, shape=dialect_of(path).error_body)
