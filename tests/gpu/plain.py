"""``python -m tests.gpu.plain MODEL...``: logits of whole models and their windows by this interpreter's llama.cpp,
without layers on a GPU; a line with a digest for each model.
"""

from __future__ import annotations

import hashlib
import sys
import tempfile
from pathlib import Path

import numpy as np

from primad.gguf.header import read_header
from tests.shell.test_cut_exact import Route, cuts_of, whole_logits


def digest(model: Path) -> str:
    """A digest of all logits' bits."""
    header = read_header(model)
    chunks, logits = whole_logits(header)
    with tempfile.TemporaryDirectory() as folder:
        route = Route(header, cuts_of(header)[0], Path(folder))
        position = 0
        for tokens in chunks:
            logits.append(route.logits(tokens, position))
            position += len(tokens)
        route.release()
    return hashlib.blake2b(np.concatenate(logits).tobytes()).hexdigest()


if __name__ == "__main__":
    for each in sys.argv[1:]:
        sys.stdout.write(digest(Path(each)) + "\n")
