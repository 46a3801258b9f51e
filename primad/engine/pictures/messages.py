"""What the head and its process for pictures say to each other, in frames of msgpack."""

from __future__ import annotations

from typing import Final

import msgspec

from primad.engine.pictures.grids import RowLayout

MAX_BYTES: Final = 20 << 20
"""Of the file of a picture or a sound."""
MAX_CONTENT_BYTES: Final = 56 << 20
"""Of rows that go from process to process in one frame: of a picture, and of all pictures of a prompt."""


class LoadEncoder(msgspec.Struct, frozen=True, kw_only=True, tag="load"):
    """Load the encoder file ``path`` for the ``model`` file, with so many ``threads``, on the ``gpu`` by llama.cpp's name
    for it (empty: on the processor); answered with ``EncoderReady``.

    Pictures become ``min_tokens`` to ``max_tokens`` rows, where their size is not fixed; 0: as the encoder says.
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
    """Rows have ``width`` numbers; the process holds so many ``bytes``."""

    width: int
    bytes: int


class TokenRun(msgspec.Struct, frozen=True, tag="tokens"):
    """Tokens that the model wants around and between the parts of a picture."""

    tokens: tuple[int, ...]


class EmbeddedRun(msgspec.Struct, frozen=True, tag="embedded"):
    """Rows of hidden states, as they go into the first layer: (rows, width) float32, little-endian.

    Where they ``look_ahead`` each sees them all, and they belong in one step. They are of a ``layout`` in ``columns``.
    """

    rows: int
    looks_ahead: bool
    content: bytes
    layout: RowLayout = ""
    columns: int = 0


class EncodedPicture(msgspec.Struct, frozen=True, kw_only=True, tag="encoded"):
    """A picture in a prompt: its ``runs`` in order, and what its file, and the ``encoder``, are known by."""

    digest: str
    encoder: str = ""
    runs: tuple[TokenRun | EmbeddedRun, ...]

    @property
    def positions(self) -> int:
        """So many of the context it takes."""
        return sum(run.rows if isinstance(run, EmbeddedRun) else len(run.tokens) for run in self.runs)

    @property
    def content_bytes(self) -> int:
        """Of all its rows."""
        return sum(len(run.content) for run in self.runs if isinstance(run, EmbeddedRun))


class PictureRefused(msgspec.Struct, frozen=True, tag="refused"):
    """What is wrong with the picture."""

    error: str


class EncoderFailed(msgspec.Struct, frozen=True, tag="failed"):
    """What llama.cpp cannot do."""

    error: str


PictureTask = LoadEncoder | EncodePicture
PictureReply = EncoderReady | EncodedPicture | PictureRefused | EncoderFailed
