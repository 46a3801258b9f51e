"""OpenAI's error object, separate from ``errors`` because the text process, which has no server, uses it too."""

from __future__ import annotations

import msgspec


class ErrorDetail(msgspec.Struct, frozen=True, kw_only=True):
    """The error in one line; ``param`` names the request's field. For a prompt that does not fit it has both sizes."""

    message: str
    type: str
    param: str | None
    code: str | None
    n_prompt_tokens: int | msgspec.UnsetType = msgspec.UNSET
    n_ctx: int | msgspec.UnsetType = msgspec.UNSET


class ErrorBody(msgspec.Struct, frozen=True, kw_only=True):
    """OpenAI's error object."""

    error: ErrorDetail
