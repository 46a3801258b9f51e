"""Turns an exception into the client's view: a status, headers and OpenAI's error object."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Final

import msgspec
from starlette.responses import Response

from primad.api.http.error_body import ErrorBody, ErrorDetail
from primad.errors import PrimadError, PromptTooLongError, RequestError, RingError

RETRY_AFTER_S: Final = 5
"""Retry-After while the ring is loading, broken or full: about the time of a short recovery."""


def status_of(exc: PrimadError) -> int:
    """Return the HTTP status: the request's own for ``RequestError``, 503 for ``RingError``, else 500."""
    match exc:
        case RequestError():
            return exc.status
        case RingError():
            return 503
        case _:
            return 500


def error_body(exc: PrimadError) -> ErrorBody:
    """Return OpenAI's error object for ``exc``. ``type`` follows from the status, except that a prompt that is too long
    has llama-server's type."""
    status = status_of(exc)
    if isinstance(exc, PromptTooLongError):
        detail = ErrorDetail(
            message=str(exc),
            type="exceed_context_size_error",
            param=exc.param,
            code=exc.code,
            n_prompt_tokens=exc.prompt_tokens,
            n_ctx=exc.context_tokens,
        )
        return ErrorBody(error=detail)
    code, param = (exc.code, exc.param) if isinstance(exc, RequestError) else (None, None)
    if status == 503 and code is None:
        code = "service_unavailable"
    match status:
        case 429:
            kind = "rate_limit_error"
        case _ if status >= 500:
            kind = "server_error"
        case _:
            kind = "invalid_request_error"
    return ErrorBody(error=ErrorDetail(message=str(exc), type=kind, param=param, code=code))


def error_response(
    exc: PrimadError,
    headers: dict[str, str] | None = None,
    *,
    shape: Callable[[PrimadError], msgspec.Struct] = error_body,
) -> Response:
    """Return the response to a request that failed before its first byte, in a dialect's ``shape``; 429 and 503 have
    Retry-After."""
    status = status_of(exc)
    retry_s = exc.retry_s if isinstance(exc, RequestError) and exc.retry_s else RETRY_AFTER_S
    retry = {"retry-after": f"{math.ceil(retry_s)}"} if status in (429, 503) else {}
    return Response(
        msgspec.json.encode(shape(exc)),
        status_code=status,
        headers=retry | (headers or {}),
        media_type="application/json",
    )
