"""Switches llama.cpp's evaluation callback off for single-token steps: it costs 0.07 to 0.3 us a node, 4 % of a small
model's token.

Each call takes the interpreter's lock, and waits where another thread has it. llama.cpp sets the callback in its
scheduler whenever it builds a graph, and reuses the graph of one token for the next. So between two graphs the callback
is removed from the scheduler, and set again when something has to be seen. There is no API for a context's scheduler,
but on Linux and macOS the library exports the method that returns it; where it is missing, the callback stays.

A window that ends in hidden states normally stops in the callback. Without it, the nodes after its output are removed
from the graph, by the flag with which ggml itself skips nodes: then nothing overwrites the output, and it is read in
place.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from typing import Any, Final

from primad.engine.tensor import Tensor
from primad.system.allocator import without_top

with without_top("llama_cpp"):
    from llama_cpp import llama_cpp as llama

_GET_SCHEDULER: Final = "_ZNK13llama_context9get_schedEv"
"""``llama_context::get_sched() const``, as all compilers except Microsoft's mangle it."""
_COMPUTE: Final = 16
"""``GGML_TENSOR_FLAG_COMPUTE``."""


class Quiet:
    """Removes the evaluation ``callback`` of ``context`` from its scheduler, and sets it again. ``ggml`` is
    libggml-base."""

    def __init__(self, ggml: ctypes.CDLL, context: Any, callback: Any) -> None:
        self._ggml, self._context, self._callback = ggml, context, callback
        self._reused = 0
        self.is_on = False
        """Whether the callback is off, until llama.cpp builds another graph."""

    def _scheduler(self) -> int | None:
        """Get the scheduler again each time: after a change of adapters or settings, llama.cpp replaces it in the next
        step."""
        return scheduler_of(self._context)

    @property
    def has_one_part(self) -> bool:
        """Whether the last graph ran on one backend, so that nothing was copied to another."""
        scheduler = self._scheduler()
        return scheduler is not None and self._ggml.ggml_backend_sched_get_n_splits(scheduler) == 1

    def begin(self) -> None:
        """Remove the callback for the last computed graph."""
        if (scheduler := self._scheduler()) is not None:
            self._ggml.ggml_backend_sched_set_eval_callback(scheduler, None, None)
            self.is_on = True

    def end(self) -> None:
        """Set the callback again for every node."""
        if self.is_on:
            self._ggml.ggml_backend_sched_set_eval_callback(self._scheduler(), self._callback, None)
            self.is_on = False

    def kept_graph(self) -> bool:
        """Return whether the last step reused the graph of the step before. If not, llama.cpp has set the callback
        again."""
        before, self._reused = self._reused, self._reused_until_now()
        kept = self._reused == before + 1
        self.is_on = self.is_on and kept
        return kept

    def _reused_until_now(self) -> int:
        return int(llama.llama_perf_context(self._context).n_reused)


def leave_out(node: int, name: bytes) -> bool:
    """Have ggml skip ``node``, called ``name``. Returns False in a build with another struct."""
    tensor = Tensor.from_address(node)
    if tensor.name != name:
        return False
    tensor.flags &= ~_COMPUTE
    return True


def bind(ggml: ctypes.CDLL) -> None:
    """Declare the calls of libggml-base that ``Quiet`` needs."""
    ggml.ggml_backend_sched_set_eval_callback.restype = None
    ggml.ggml_backend_sched_set_eval_callback.argtypes = [ctypes.c_void_p] * 3
    ggml.ggml_backend_sched_get_n_splits.restype = ctypes.c_int
    ggml.ggml_backend_sched_get_n_splits.argtypes = [ctypes.c_void_p]


def scheduler_of(context: Any) -> int | None:
    """Return the scheduler of ``context``; None where this build does not export it."""
    get = _exported(_GET_SCHEDULER)
    return None if get is None else get(context)


@cache
def _exported(name: str) -> Callable[[Any], int | None] | None:
    get = getattr(llama._lib, name, None)
    if get is not None:
        get.restype, get.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
    return get
