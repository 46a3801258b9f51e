"""llama.cpp's functions as ``llama_cpp`` binds them, its backends begun, and what it complains of."""

from __future__ import annotations

import ctypes
import logging
from collections import deque
from typing import Any

from primad.system.allocator import without_top

with without_top("llama_cpp"):
    from llama_cpp import llama_cpp as llama


def _nextn() -> Any:
    """What is bound of layers for multi-token prediction; None where the installed build has another binding, or none."""
    try:
        with without_top("llama_cpp"):
            from llama_cpp import llama_cpp_ext
    except (ImportError, AttributeError):
        return None
    return llama_cpp_ext if hasattr(llama, "LLAMA_CONTEXT_TYPE_MTP") else None


nextn = _nextn()

__all__ = ("forget", "hear_llama", "llama", "nextn", "why")

logger = logging.getLogger(__name__)
_recent_log: deque[str] = deque(maxlen=8)


@llama.llama_log_callback  # type: ignore[untyped-decorator]
def _log(level: int, text: bytes, _: ctypes.c_void_p) -> None:
    line = text.decode("utf-8", errors="replace").strip()
    if line and level in (3, 4):
        _recent_log.append(line)
    if line:
        logger.debug("llama.cpp: %s", line)


def hear_llama() -> None:
    """Have what llama.cpp logs go to this module's logger: a process has one callback, and the last one set has it."""
    llama.llama_log_set(_log, ctypes.c_void_p(0))


def why(fallback: str) -> str:
    """What llama.cpp complained of last, once."""
    reason = _recent_log[-1] if _recent_log else fallback
    forget()
    return reason


def forget() -> None:
    """Whatever it complained of is over."""
    _recent_log.clear()


hear_llama()
llama.llama_backend_init()
