"""Checks a picture that another device encoded, before anything is computed with it.

The attack: rows of another size than stated, which would be read beyond their end, and rows with NaN or infinite
values, which would spoil everything computed after them.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from primad.engine.pictures.messages import EmbeddedRun, EncodedPicture
from primad.errors import ProtocolError, printable

MAX_PARTS: Final = 4
"""A row may be this multiple of the model's width: it may include what deeper layers add to their outputs."""
MAX_RUNS: Final = 4096
_NAME_CHARS: Final = 200


def check_encoded(picture: EncodedPicture, digest: str, *, width: int, vocabulary: int) -> None:
    """Check that ``picture`` fits the file of this ``digest``, and a model of this ``width`` and ``vocabulary`` size.

    Raises ``ProtocolError``.
    """
    if picture.digest != digest or len(picture.encoder) > _NAME_CHARS or not 0 < len(picture.runs) <= MAX_RUNS:
        raise ProtocolError(f"not the requested image: {printable(picture.digest[:12])}")
    sizes = {_row_bytes(run) for run in picture.runs if isinstance(run, EmbeddedRun)}
    if not sizes <= {4 * width * parts for parts in range(1, MAX_PARTS + 1)} or len(sizes) != 1:
        raise ProtocolError("an image's rows have another size than the model's")
    for run in picture.runs:
        if not isinstance(run, EmbeddedRun):
            if not all(0 <= token < vocabulary for token in run.tokens):
                raise ProtocolError("an image with tokens that the model does not have")
        elif not np.isfinite(np.frombuffer(run.content, "<f4")).all():
            raise ProtocolError("an image's rows have NaN or infinite values")


def _row_bytes(run: EmbeddedRun) -> int:
    """Return the bytes of one row; 0 if there are none, or they do not match their number or layout."""
    if run.rows < 1 or len(run.content) % run.rows or not 0 <= run.columns <= run.rows:
        return 0
    lines = {"": 0, "line": 0, "grid": run.columns, "framed": run.columns}[run.layout]
    inner = run.rows - 2 if run.layout == "framed" else run.rows
    fits = run.columns == 0 if not lines else inner % lines == 0
    return len(run.content) // run.rows if fits and bool(lines) == (run.layout in ("grid", "framed")) else 0
