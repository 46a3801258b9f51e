"""llama.cpp's functions as bound by ``llama_cpp``, with its backends initialised and its last warnings kept."""

from __future__ import annotations

import ctypes
import logging
from collections import deque
from typing import Any

from primad.system.allocator import without_top

with without_top("llama_cpp"):
    from llama_cpp import llama_cpp as llama


def _nextn() -> Any:
    """Return the binding of multi-token prediction layers; None where the installed build has another, or none."""
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
    matters = level in (3, 4)
    if not matters and not logger.isEnabledFor(logging.DEBUG):
        return  # a model that is loaded writes hundreds of lines
    line = text.decode("utf-8", errors="replace").strip()
    if line and matters:
        _recent_log.append(line)
    if line:
        logger.debug("llama.cpp: %s", line)


def hear_llama() -> None:
    """Send llama.cpp's log to this module's logger. A process has one callback; the last one set wins."""
    llama.llama_log_set(_log, ctypes.c_void_p(0))


def why(fallback: str) -> str:
    """Return llama.cpp's last warning or error, and forget it; ``fallback`` if there is none."""
    reason = _recent_log[-1] if _recent_log else fallback
    forget()
    return reason


def forget() -> None:
    """Forget earlier warnings and errors."""
    _recent_log.clear()


hear_llama()
llama.llama_backend_init()
