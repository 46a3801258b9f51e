"""Messages between the head and its text process, as length-prefixed frames of msgpack."""

from __future__ import annotations

from datetime import datetime

import msgspec

from primad.api.answering.backend import ModelSettings
from primad.api.answering.pictures import Picture
from primad.api.answering.pieces import PieceTable
from primad.errors import ModelError, PrimadError, PromptTooLongError, RequestError


class LoadText(msgspec.Struct, frozen=True, kw_only=True, tag="load"):
    """Load the vocabulary of the model file ``path``, with this chat template. The reply is ``TextReady``.

    An empty path means no model: only requests that need none are prepared."""

    path: str
    chat_template: str | None
    reports_pieces: bool
    memory_bytes: int
    """The process may use this much more than after loading, if the system can enforce it."""


class Prepare(msgspec.Struct, frozen=True, kw_only=True, tag="prepare"):
    """Run the preparation ``what`` (module and function). The reply is ``PreparedRequest``, ``PicturesWanted`` or
    ``RequestRefused``.

    ``seen`` are the token ids of its pictures, by digest."""

    what: str
    body: bytes
    settings: ModelSettings | None
    seed: int
    now: datetime
    seen: dict[str, list[int]] = {}


class TextReady(msgspec.Struct, frozen=True, kw_only=True, tag="ready"):
    """The process accepts requests; with ``pieces`` if requested."""

    pieces: PieceTable | None


class PreparedRequest(msgspec.Struct, frozen=True, kw_only=True, tag="prepared"):
    """A preparation's result, as msgpack, and ``lines`` for the log."""

    made: bytes
    lines: list[str]


class PicturesWanted(msgspec.Struct, frozen=True, kw_only=True, tag="pictures"):
    """The request has ``pictures`` that must be encoded before it can be prepared."""

    pictures: list[Picture]


class RequestRefused(msgspec.Struct, frozen=True, kw_only=True, tag="refused"):
    """A request that cannot be served, or with ``status`` 0 a model file that cannot be used."""

    message: str
    status: int = 0
    code: str | None = None
    param: str | None = None
    of_model: bool = False
    spent: bool = False
    """The process ran out of memory, and has to be replaced."""
    prompt_tokens: int | None = None
    context_tokens: int = 0

    @classmethod
    def of(cls, exc: PrimadError) -> RequestRefused:
        """Return ``exc`` as a message."""
        if not isinstance(exc, RequestError):
            return cls(message=str(exc))
        refused = cls(message=str(exc), status=exc.status, code=exc.code, param=exc.param, of_model=exc.of_model)
        if isinstance(exc, PromptTooLongError):
            sizes = {"prompt_tokens": exc.prompt_tokens, "context_tokens": exc.context_tokens}
            return msgspec.structs.replace(refused, **sizes)
        return refused

    def error(self) -> PrimadError:
        """Return the error in the message."""
        if self.prompt_tokens is not None:
            error = PromptTooLongError(self.prompt_tokens, self.context_tokens, self.param or "")
            error.args = (self.message,)
            return error
        if self.status:
            return RequestError(
                self.message, status=self.status, code=self.code, param=self.param, of_model=self.of_model
            )
        return ModelError(self.message)


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """llama.cpp's loading error, or (after ``Prepare``) the traceback of a bug."""

    message: str


PrepareTask = LoadText | Prepare
TextReply = TextReady | PreparedRequest | PicturesWanted | RequestRefused | Failed
