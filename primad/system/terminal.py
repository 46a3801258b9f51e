"""Escape all text for terminals and logs, so that text from any file, device or response cannot control them.

A terminal obeys control characters (C0, C1, DEL); other characters change the reading order (bidirectional embeddings,
overrides and isolates) or end a line invisibly. They are replaced by their Python escapes. Marks that right-to-left
text needs, and joiners of letters and emoji, stay.
"""

from __future__ import annotations

import logging
import re
import sys
import threading
import traceback
from types import TracebackType
from typing import Any, Final

_OBEYED: Final = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def safe(text: str) -> str:
    """``text`` with its line breaks and tabs, and all other control characters escaped."""
    return _OBEYED.sub(lambda found: ascii(found[0])[1:-1], text)


def safe_json(text: str) -> str:
    """JSON ``text``, escaped without changing its meaning."""
    return _OBEYED.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


class LineFormatter(logging.Formatter):
    """Format each record as one line, except for a traceback."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802
        return safe(super().formatMessage(record)).replace("\n", "\\n")

    def formatException(self, ei: Any) -> str:  # noqa: N802
        return safe(super().formatException(ei))


def _log_uncaught(kind: type[BaseException], error: BaseException | None, trace: TracebackType | None) -> None:
    if sys.stderr is not None:
        sys.stderr.write(safe("".join(traceback.format_exception(kind, error, trace))))


def escape_uncaught() -> None:
    """Escape uncaught errors, too."""
    sys.excepthook = _log_uncaught
    threading.excepthook = lambda found: _log_uncaught(found.exc_type, found.exc_value, found.exc_traceback)
    sys.unraisablehook = lambda found: _log_uncaught(found.exc_type, found.exc_value, found.exc_traceback)


def start_logging(level: str, form: str) -> None:
    """Log records of ``level`` and above to standard error, each as ``form`` says."""
    escape_uncaught()
    handler = logging.StreamHandler()
    handler.setFormatter(LineFormatter(form))
    logging.basicConfig(level=level, handlers=[handler])
