"""What the head and its text process say to each other, as length-prefixed frames of msgpack."""

from __future__ import annotations

from datetime import datetime

import msgspec

from primad.api.answering.backend import ModelSettings
from primad.api.answering.pieces import PieceTable
from primad.errors import ModelError, PrimadError, PromptTooLongError, RequestError


class LoadText(msgspec.Struct, frozen=True, kw_only=True, tag="load"):
    """Load the vocabulary of the model file ``path``, whose chat template is this; answered with ``TextReady``."""

    path: str
    chat_template: str | None
    reports_pieces: bool
    memory_bytes: int
    """The process may take so much more than it has when it is loaded, where the system can see to that."""


class Prepare(msgspec.Struct, frozen=True, kw_only=True, tag="prepare"):
    """Do the preparation ``what`` (module and function); answered with ``PreparedRequest`` or ``RequestRefused``."""

    what: str
    body: bytes
    settings: ModelSettings | None
    seed: int
    now: datetime


class TextReady(msgspec.Struct, frozen=True, kw_only=True, tag="ready"):
    """The process takes requests; ``pieces`` if they were asked for."""

    pieces: PieceTable | None


class PreparedRequest(msgspec.Struct, frozen=True, kw_only=True, tag="prepared"):
    """What a preparation made, as msgpack, and ``lines`` for the log."""

    made: bytes
    lines: list[str]


class RequestRefused(msgspec.Struct, frozen=True, kw_only=True, tag="refused"):
    """A request that cannot be served, or with ``status`` 0 a model file that cannot be used."""

    message: str
    status: int = 0
    code: str | None = None
    param: str | None = None
    spent: bool = False
    """The process had no memory for it, and is to be replaced."""
    prompt_tokens: int | None = None
    context_tokens: int = 0

    @classmethod
    def of(cls, exc: PrimadError) -> RequestRefused:
        """``exc`` as a message."""
        if not isinstance(exc, RequestError):
            return cls(message=str(exc))
        refused = cls(message=str(exc), status=exc.status, code=exc.code, param=exc.param)
        if isinstance(exc, PromptTooLongError):
            sizes = {"prompt_tokens": exc.prompt_tokens, "context_tokens": exc.context_tokens}
            return msgspec.structs.replace(refused, **sizes)
        return refused

    def error(self) -> PrimadError:
        """The error that it was."""
        if self.prompt_tokens is not None:
            error = PromptTooLongError(self.prompt_tokens, self.context_tokens, self.param or "")
            error.args = (self.message,)
            return error
        if self.status:
            return RequestError(self.message, status=self.status, code=self.code, param=self.param)
        return ModelError(self.message)


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """What llama.cpp cannot load, or (behind ``Prepare``) the traceback of a mistake of ours."""

    message: str


PrepareTask = LoadText | Prepare
TextReply = TextReady | PreparedRequest | RequestRefused | Failed
