"""Standard output for the answers of a child process alone, whatever a library in it prints."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import BinaryIO, Final

from primad.system.terminal import escape_uncaught

STACK_BYTES: Final = 256 << 20
"""Of the thread that makes tokens of texts: a pre-tokenizer of llama.cpp takes up to some kB of stack for each character of
a run of equal ones."""


@contextmanager
def answer_stream() -> Iterator[BinaryIO]:
    """Where answers go: what was standard output. What is printed from now on goes to standard error, where nothing that
    a request or a file brought with it steers the terminal."""
    escape_uncaught()
    with os.fdopen(os.dup(sys.stdout.fileno()), "wb") as answers:
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
        yield answers
