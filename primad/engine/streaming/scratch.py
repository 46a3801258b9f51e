"""The scratch memory of a window: llama.cpp's compute buffer, whose pages are freed between large steps.

A buffer is sized for the largest step, a chunk of a prompt; a step of one token touches about 2 % of it. Its contents
are never read by a later step: llama.cpp sets the inputs of every step again, and copies its outputs. (Measured on a 3B
model with chunks of 512 tokens: 70 of 76 MB, freed in 5 ms, without a measurable effect on the next chunk of 15 s.)

There is no API for the buffer's address, but each node of a graph names its buffer, and a buffer its purpose.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
from collections.abc import Callable
from typing import Final

LARGE_ROWS: Final = 32
"""A step of more tokens fills a share of the buffer that is worth freeing."""
_BUFFER_OFFSET: Final = 8
"""Offset of ``buffer`` in ``struct ggml_tensor``, after its type (ggml.h)."""
_OURS: Final = b"CPU"
"""The type of a buffer in ordinary memory; a GPU backend's may be pinned, and is not touched."""
_COMPUTE: Final = 2
"""``GGML_BACKEND_BUFFER_USAGE_COMPUTE`` (ggml-backend.h)."""
_MADV_DONTNEED: Final = 4
_MADV_FREE: Final = 5
"""macOS: the system takes the pages when it needs them, unless they were written to again."""


class Scratch:
    """The compute buffer, in RAM, of one window. ``ggml`` is libggml-base."""

    def __init__(self, ggml: ctypes.CDLL) -> None:
        self._ggml = ggml
        self._place: tuple[int, int] | None = None
        self.size = 0
        """Bytes of the buffer, as of the last large step; 0 before the first."""
        self.is_full = False
        """Whether a large step left its values there."""

    def begin(self, rows: int) -> bool:
        """Prepare for a step of ``rows`` tokens; return whether to report its nodes (``note``)."""
        self._place = None  # llama.cpp may make another buffer in any step
        self.is_full = self.is_full or rows > LARGE_ROWS
        return self.is_full

    def note(self, node: int) -> None:
        """Find the buffer from ``node``, a tensor of the step's graph."""
        if not self.is_full or self._place is not None:
            return
        buffer = ctypes.c_void_p.from_address(node + _BUFFER_OFFSET).value
        if buffer is None or self._ggml.ggml_backend_buffer_get_usage(buffer) != _COMPUTE:
            return
        if self._ggml.ggml_backend_buffer_name(buffer) == _OURS:
            self.size = self._ggml.ggml_backend_buffer_get_size(buffer)
            self._place = self._ggml.ggml_backend_buffer_get_base(buffer), self.size

    def give_back(self) -> bool:
        """Free what the last steps left; return whether there was anything."""
        place, self._place, self.is_full = self._place, None, False
        if place is None:  # a GPU's buffer: nodes need not be reported again for it
            return False
        discard(*place)
        return True


def bind(ggml: ctypes.CDLL) -> None:
    """Declare the calls of libggml-base that ``Scratch`` needs."""
    for name, result in (
        ("ggml_backend_buffer_get_usage", ctypes.c_int),
        ("ggml_backend_buffer_name", ctypes.c_char_p),
        ("ggml_backend_buffer_get_base", ctypes.c_void_p),
        ("ggml_backend_buffer_get_size", ctypes.c_size_t),
    ):
        call = getattr(ggml, name)
        call.restype, call.argtypes = result, [ctypes.c_void_p]


def _system() -> Callable[[int, int], object]:
    if sys.platform == "win32":
        discard = ctypes.windll.kernel32.DiscardVirtualMemory
        discard.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
        return discard
    library = ctypes.CDLL(None)
    library.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    advice = _MADV_DONTNEED if sys.platform == "linux" else _MADV_FREE
    return lambda start, size: library.madvise(start, size, advice)


_discard: Final = _system()


def discard(start: int, size: int) -> None:
    """Free the whole pages of private memory at ``start``; their contents are lost.

    If the system refuses, they stay: nothing depends on it.
    """
    first = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE
    last = (start + size) // mmap.PAGESIZE * mmap.PAGESIZE
    if first < last:
        _discard(first, last - first)
