"""Parse what people write into options, variables and files, and format what they read: sizes, rates, times, numbers.

There is one ``parse_`` function per kind. Each takes the value as it came (text of a flag or variable, a value of a
TOML file) and ``source``, which names its origin; each raises ``ConfigError`` starting with ``source`` for an invalid
value. The ``show_`` functions format quantities for people.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from primad.errors import ConfigError, printable

_DIGITS: Final = r"(\d{1,15}(?:\.\d{1,9})?)"
_SIZE: Final = re.compile(_DIGITS + r"\s*([kKMGT]?)(i?)B")
_RATE: Final = re.compile(_DIGITS + r"\s*([kKMGT]?)(i?)(B|bit)(?:/s)?")
_PERCENT: Final = re.compile(_DIGITS + r"\s*%")
_TIME: Final = re.compile(_DIGITS + r"\s*(us|µs|ms|s|min|h|d|)")
_POWERS: Final[dict[str, int]] = {"": 0, "k": 1, "K": 1, "M": 2, "G": 3, "T": 4}
_SECONDS: Final = {"us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "": 1.0, "min": 60.0, "h": 3600.0, "d": 86_400.0}
_MAX_BYTES: Final = 1 << 59
_Choice = TypeVar("_Choice", bound=str)


@dataclass(frozen=True, slots=True)
class Share:
    """A part of all that a device has, such as half of its memory: more than 0, at most 1."""

    of_total: float


Amount = int | Share
"""A number of bytes, or a share of the total."""


def bytes_of(amount: Amount, total_bytes: int) -> int:
    """Return ``amount`` in bytes, given the total."""
    return int(amount.of_total * total_bytes) if isinstance(amount, Share) else amount


def parse_bytes(value: Any, source: str) -> int:
    """Parse ``16GiB``, ``1.5GB`` or ``800MB`` to bytes; a bare number, in bytes, only where it already is one (TOML)."""
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= _MAX_BYTES:
        return value
    match = _SIZE.fullmatch(value.strip()) if isinstance(value, str) else None
    size = -1.0 if match is None else _scaled(match)
    if not 0 <= size <= _MAX_BYTES:
        raise ConfigError(f"{source}: {_shown(value)} is not a size; give one such as 16GiB or 500MB")
    return round(size)


def parse_amount(value: Any, source: str) -> Amount:
    """Parse a size as ``parse_bytes`` takes it, or a share such as ``50%``, up to 100%."""
    match = _PERCENT.fullmatch(value.strip()) if isinstance(value, str) else None
    if match is not None:
        share = float(match[1]) / 100
        if not 0 < share <= 1:
            raise ConfigError(f"{source}: {_shown(value)} is not a share; give more than 0% and at most 100%")
        return Share(share)
    try:
        return parse_bytes(value, source)
    except ConfigError as exc:
        raise ConfigError(
            f"{source}: {_shown(value)} is not a size; give one such as 16GiB, 500MB or 50% of what the device has"
        ) from exc


def parse_rate(value: Any, source: str) -> float:
    """Parse ``1Gbit/s``, ``300Mbit`` or ``20MB`` to bytes per second, more than 0."""
    match = _RATE.fullmatch(value.strip()) if isinstance(value, str) else None
    rate = 0.0 if match is None else _scaled(match) / (8 if match[4] == "bit" else 1)
    if not 0 < rate <= _MAX_BYTES:
        raise ConfigError(f"{source}: {_shown(value)} is not a rate; give one such as 100Mbit/s or 20MB/s")
    return rate


def parse_duration(value: Any, source: str, *, minimum: float = 0.0, maximum: float) -> float:
    """Parse a number, ``0.5s``, ``500ms``, ``10min`` or ``2h`` to seconds, from ``minimum`` to ``maximum``."""
    seconds = math.nan
    if isinstance(value, str):
        match = _TIME.fullmatch(value.strip())
        seconds = math.nan if match is None else float(match[1]) * _SECONDS[match[2]]
    elif isinstance(value, int | float) and not isinstance(value, bool):
        seconds = float(value) if abs(value) <= _MAX_BYTES else math.inf
    if not minimum <= seconds <= maximum:
        raise ConfigError(
            f"{source}: {_shown(value)} is not a time from {minimum:g} to {maximum:g} s; give one such as 2s, 500ms or "
            "10min"
        )
    return seconds


def parse_seconds(text: str, source: str) -> float:
    """Parse ``2ms``, ``150us`` or ``0.5s`` to seconds, at most a minute: for a link, so the unit is required."""
    if not text.strip().endswith("s"):
        raise ConfigError(f"{source}: {_shown(text)} is not a time; give one such as 2ms or 150us")
    return parse_duration(text, source, maximum=60)


def parse_gain(value: Any, source: str) -> float:
    """Parse a gain such as ``0.1`` or ``10%``, from 0 to 10."""
    match = re.fullmatch(_DIGITS + r"\s*(%?)", value.strip()) if isinstance(value, str) else None
    gain = math.nan
    if match is not None:
        gain = float(match[1]) / (100 if match[2] else 1)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        gain = float(value) if abs(value) <= _MAX_BYTES else math.inf
    if not 0 <= gain <= 10:
        raise ConfigError(f"{source}: {_shown(value)} is not a gain; give one such as 0.1 or 10%")
    return gain


def parse_whole(value: Any, source: str, *, minimum: int = 0, maximum: int) -> int:
    """Parse a whole number from ``minimum`` to ``maximum``."""
    try:
        number = int(value) if isinstance(value, int | str) and not isinstance(value, bool) else minimum - 1
    except ValueError:
        number = minimum - 1
    if not minimum <= number <= maximum:
        raise ConfigError(f"{source}: {_shown(value)} is not a whole number from {minimum} to {maximum}")
    return number


def parse_yes_no(value: Any, source: str) -> bool:
    """Parse true, yes or 1, or false, no or 0."""
    match str(value).lower():
        case "true" | "1" | "yes":
            return True
        case "false" | "0" | "no":
            return False
        case _:
            raise ConfigError(f"{source}: {_shown(value)} is neither true nor false")


def parse_choice(text: str, choices: Sequence[_Choice], source: str) -> _Choice:
    """Return the one of ``choices`` that equals ``text``."""
    for choice in choices:
        if choice == text:
            return choice
    raise ConfigError(f"{source} {text}: choose {', '.join(choices[:-1])} or {choices[-1]}")


def parse_count(text: str, maximum: int, source: str) -> int | None:
    """Parse a whole number from 1 to ``maximum``; None for ``auto``."""
    if text == "auto":
        return None
    count = int(text) if re.fullmatch(r"[0-9]{1,9}", text) else 0
    if not 1 <= count <= maximum:
        raise ConfigError(f"{source} {printable(text)}: give a whole number from 1 to {maximum}, or auto")
    return count


def did_you_mean(typed: str, known: Collection[str]) -> str:
    """Return the end of a message about ``typed``, which is unknown: the nearest of ``known``, if one is similar."""
    close = difflib.get_close_matches(typed, known, n=1)
    return f"; did you mean '{close[0]}'?" if close else ""


def parse_list(value: Any, source: str) -> list[Any]:
    """Return a list, or the comma-separated parts of a text."""
    if isinstance(value, str):
        return [part.strip() for part in value.split(",") if part.strip()]
    if not isinstance(value, list | tuple):
        raise ConfigError(f"{source}: {_shown(value)} is not a list")
    return list(value)


def show_count(number: int, noun: str) -> str:
    """``1 layer``, ``2 layers``."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


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


def _scaled(match: re.Match[str]) -> float:
    return float(match[1]) * (1024.0 if match[3] else 1000.0) ** _POWERS[match[2]]


def _shown(value: Any) -> str:
    """Format ``value`` for a message, however long it is."""
    if isinstance(value, str):
        return repr(value if len(value) <= 70 else value[:70] + "...")
    return printable(_named(value), 70)


def _named(value: Any) -> str:
    """Return a value's text; Python refuses to format an integer of thousands of digits."""
    try:
        return repr(value)
    except ValueError:
        return "a number of thousands of digits"


def show_gpu(name: str, gpu: str) -> str:
    """Name a GPU by its name and by llama.cpp's name for it, as one of several."""
    return f"{name} ({gpu})" if gpu else name


def show_progress(share: object, left_s: object) -> list[str]:
    """Format the progress and remaining time, as far as these are known: ``40 %``, ``about 12 s left``."""
    parts = [f"{100 * share:.0f} %"] if isinstance(share, int | float) else []
    return [*parts, f"about {left_s:.0f} s left"] if isinstance(left_s, int | float) else parts


def show_expiry(left_s: float) -> str:
    """Say when an idle model is unloaded: ``unloads in 4 min if idle``."""
    left = f"{max(0, left_s):.0f} s" if left_s < 60 else f"{math.ceil(left_s / 60)} min"
    return f"unloads in {left} if idle"
