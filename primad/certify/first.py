"""What a head knows about a model's windows when it loads the model: from the table, a kept verdict, or a check now.

An architecture in the table needs no check; its tests cover it. An unknown one is certified when it is loaded for the
first time, before anything is planned. If that fails, one device serves the model.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Final

from primad.certify.check import Wanted, check
from primad.certify.derive import provisional
from primad.certify.verdict import CheckVerdict, load_verdict, save_verdict, verdict_line
from primad.errors import DiskError, EngineError, printable
from primad.gguf.architectures.table import NotCutError, is_unknown
from primad.gguf.header import Header

FIRST_LOAD_S: Final = 600.0
_BETWEEN_LINES_S: Final = 5.0


def certified(header: Header, home: Path, report_line: Callable[[str], None]) -> tuple[Header, str]:
    """Return ``header`` with all that its windows need, and why it is not certified if it needs to be.

    Raises ``ModelError`` for an incomplete model file.
    """
    if not is_unknown(header):
        return header, ""
    name = printable(header.text("general.architecture"))
    try:
        verdict = load_verdict(home, header)
        if verdict is None:
            provisional(header)
            report_line(
                f"architecture '{name}' is not known: whether its windows are exact is tried on a tiny model like it, once, "
                f"for {FIRST_LOAD_S:.0f} s at most"
            )
            verdict = check(header, Wanted(time_limit_s=FIRST_LOAD_S), _Progress(report_line))
            try:
                save_verdict(home, header, verdict)
            except OSError as exc:
                report_line(f"{home}: the verdict cannot be kept: {exc.strerror or exc}")
            report_line(f"architecture '{name}': {verdict.result}, after {verdict.seconds:.0f} s")
    except NotCutError as exc:
        return header, exc.reason
    except (DiskError, EngineError) as exc:
        return header, f"architecture '{name}' could not be checked: {exc}"
    if verdict.result == "certified":
        return replace(header, derived=verdict.entry), ""
    return header, f"architecture '{name}' is {verdict_line(verdict, header.path)}"


def warning(header: Header, verdict: CheckVerdict | None) -> str:
    """Return a warning for a model in the table whose ``verdict`` is 'not certified'; empty otherwise."""
    if is_unknown(header) or verdict is None or verdict.result != "not certified":
        return ""
    line = verdict_line(verdict, header.path)
    return f"windows of this model: {line}; output of several devices may differ from one device's"


class _Progress:
    """Reports what is tried, now and then."""

    def __init__(self, report_line: Callable[[str], None]) -> None:
        self._report_line = report_line
        self._reported = time.monotonic()

    def __call__(self, what: str) -> None:
        now = time.monotonic()
        if now - self._reported >= _BETWEEN_LINES_S:
            self._reported = now
            self._report_line(f"still trying: {printable(what)}")
