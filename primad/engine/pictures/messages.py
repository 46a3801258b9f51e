"""Messages between the head and its picture process, in frames of msgpack."""

from __future__ import annotations

from typing import Final

import msgspec

from primad.engine.pictures.grids import RowLayout

MAX_BYTES: Final = 20 << 20
"""Largest file of a picture or a sound."""
MAX_CONTENT_BYTES: Final = 56 << 20
"""Limit for the rows that processes exchange in one frame: of a picture, and of all pictures of a prompt."""


class LoadEncoder(msgspec.Struct, frozen=True, kw_only=True, tag="load"):
    """Load the encoder file ``path`` for the ``model`` file, with this number of ``threads``, on the ``gpu`` by
    llama.cpp's name (empty: on the CPU); answered with ``EncoderReady``.

    Pictures become ``min_tokens`` to ``max_tokens`` tokens, where their size is not fixed; 0: the encoder's default.
    """

    path: str
    model: str
    threads: int
    min_tokens: int = 0
    max_tokens: int = 0
    gpu: str = ""


class EncodePicture(msgspec.Struct, frozen=True, tag="encode"):
    """Encode the file ``data``; answered with ``EncodedPicture`` or ``PictureRefused``."""

    data: bytes


class EncoderReady(msgspec.Struct, frozen=True, kw_only=True, tag="ready"):
    """Rows have ``width`` numbers; the process uses ``bytes`` of memory."""

    width: int
    bytes: int


class TokenRun(msgspec.Struct, frozen=True, tag="tokens"):
    """Tokens that the model expects around and between the parts of a picture."""

    tokens: tuple[int, ...]


class EmbeddedRun(msgspec.Struct, frozen=True, tag="embedded"):
    """Rows of hidden states, the input of the first layer: (rows, width) float32, little-endian.

    With ``looks_ahead`` each row attends to all, and they must be in one step. They have a ``layout`` with ``columns``.
    """

    rows: int
    looks_ahead: bool
    content: bytes
    layout: RowLayout = ""
    columns: int = 0


class EncodedPicture(msgspec.Struct, frozen=True, kw_only=True, tag="encoded"):
    """An encoded picture: its ``runs`` in order, the ``digest`` of its file, and the identifier of the ``encoder``."""

    digest: str
    encoder: str = ""
    runs: tuple[TokenRun | EmbeddedRun, ...]

    @property
    def positions(self) -> int:
        """Number of context positions that it takes."""
        return sum(run.rows if isinstance(run, EmbeddedRun) else len(run.tokens) for run in self.runs)

    @property
    def content_bytes(self) -> int:
        """Bytes of all its rows."""
        return sum(len(run.content) for run in self.runs if isinstance(run, EmbeddedRun))


class PictureRefused(msgspec.Struct, frozen=True, tag="refused"):
    """Why the picture is refused."""

    error: str


class EncoderFailed(msgspec.Struct, frozen=True, tag="failed"):
    """What llama.cpp failed at."""

    error: str


PictureTask = LoadEncoder | EncodePicture
PictureReply = EncoderReady | EncodedPicture | PictureRefused | EncoderFailed
