"""OpenAI's error object. It stands apart from ``errors``, which makes responses: the text process brings no server."""

from __future__ import annotations

import msgspec


class ErrorDetail(msgspec.Struct, frozen=True, kw_only=True):
    """What is wrong, in one line; ``param`` names the request's field. A prompt that does not fit tells both sizes."""

    message: str
    type: str
    param: str | None
    code: str | None
    n_prompt_tokens: int | msgspec.UnsetType = msgspec.UNSET
    n_ctx: int | msgspec.UnsetType = msgspec.UNSET


class ErrorBody(msgspec.Struct, frozen=True, kw_only=True):
    """OpenAI's error object."""

    error: ErrorDetail
