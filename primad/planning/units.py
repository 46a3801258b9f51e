"""Quantities as people write and read them; SI inside. Sizes and rates are read as in ``settings/quantities.py``."""

from __future__ import annotations

import re
from typing import Final

from primad.errors import ConfigError
from primad.settings.quantities import parse_bytes as parse_bytes
from primad.settings.quantities import parse_rate as parse_rate

_TIME: Final = re.compile(r"(\d{1,15}(?:\.\d{1,9})?)\s*(us|µs|ms|s)")
_SECONDS: Final = {"us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0}


def parse_seconds(text: str, source: str) -> float:
    """Seconds of ``2ms``, ``150us`` or ``0.5s``, at most a minute. Raises ``ConfigError`` naming ``source``."""
    match = _TIME.fullmatch(text.strip())
    seconds = None if match is None else float(match[1]) * _SECONDS[match[2]]
    if seconds is None or seconds > 60:
        raise ConfigError(f"{source}: {text!r} is no time; give one such as 2ms or 150us")
    return seconds


def show_bytes(count: float) -> str:
    """``1.2 GB``, ``340 MB`` (decimal); ``-`` for nothing."""
    if count == 0:
        return "-"
    for size, unit in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if abs(count) >= size * 0.9995:
            return f"{_three(count / size)} {unit}"
    return f"{count:.0f} B"


def show_rate(bytes_per_s: float) -> str:
    """``1.2 GB/s``."""
    return f"{show_bytes(bytes_per_s)}/s"


def show_ms(milliseconds: float) -> str:
    """``12.3 ms``, ``1.25 s``, ``11.3 h``; ``-`` for nothing."""
    if milliseconds == 0:
        return "-"
    for size, unit in ((3.6e6, "h"), (6e4, "min")):
        if abs(milliseconds) >= 3 * size:
            return f"{_three(milliseconds / size)} {unit}"
    if abs(milliseconds) >= 999.5:
        return f"{_three(milliseconds / 1e3)} s"
    return f"{milliseconds:.2f} ms" if abs(milliseconds) < 0.995 else f"{_three(milliseconds)} ms"


def show_speed(tokens_per_s: float) -> str:
    """``12.3 tokens/s``."""
    return f"{_three(tokens_per_s)} tokens/s" if tokens_per_s >= 0.0995 else f"{tokens_per_s:.2g} tokens/s"


def _three(number: float) -> str:
    """Three significant digits, never an exponent."""
    size = abs(number)
    return f"{number:.0f}" if size >= 99.95 else f"{number:.1f}" if size >= 9.995 else f"{number:.2f}"
