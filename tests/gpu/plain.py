"""``python -m tests.gpu.plain MODEL``: the logits of a whole model by this interpreter's llama.cpp, as bytes."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

from primad.gguf.header import read_header
from tests.shell.test_cut_exact import whole_logits

if __name__ == "__main__":
    _, logits = whole_logits(read_header(Path(sys.argv[1])))
    sys.stdout.buffer.write(np.concatenate(logits).tobytes())
