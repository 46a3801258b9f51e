"""Reads which model Ollama's clients want, and how long it should stay loaded: ``keep_alive``, with Go's durations
(https://pkg.go.dev/time). Pure."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any, Final

from msgspec import Raw

from primad.api.dialects.ollama.job import plain
from primad.api.http.wanted import Fields, WantedModel, small, wanted
from primad.errors import RequestError

_EMPTY: Final[tuple[Any, ...]] = (None, "", [])
FOR_EVER: Final = -1.0
MAX_S: Final = 1e9
_UNITS_S: Final = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_PART: Final = re.compile(r"(\d+\.?\d*|\.\d+)(ns|us|µs|ms|s|m|h)")
_DURATION: Final = re.compile(rf"([-+]?)((?:{_PART.pattern})+)")
_NUMBER: Final = re.compile(r"[-+]?\d+(\.\d+)?")


def ollama_wanted(fields: Fields, text: Raw) -> WantedModel:
    """Return what a request for ``text`` wants. Streaming is the default; without a text it only loads the model."""
    found, is_empty = wanted(fields), small(text) in _EMPTY
    return replace(
        found,
        name=plain(found.model) or None,
        streams=not is_empty and bytes(fields.stream) != b"false",
        keep_alive_s=keep_alive_s(small(fields.keep_alive)),
        is_empty=is_empty,
        is_readable=found.is_readable and bool(found.model),
    )


def keep_alive_s(given: Any) -> float | None:
    """Return the seconds of ``given``, a number or a text like ``5m`` or ``1h30m``; negative: for ever; None: the
    server's default. Raises ``RequestError``."""
    match given:
        case None:
            return None
        case int() | float() if not isinstance(given, bool):
            seconds = float(given)
        case str() if _NUMBER.fullmatch(given):
            seconds = float(given)
        case str() if found := _DURATION.fullmatch(given):
            seconds = sum(float(number) * _UNITS_S[unit] for number, unit in _PART.findall(found[2]))
            seconds *= -1 if found[1] == "-" else 1
        case _:
            raise RequestError(
                "keep_alive: send seconds, or a duration such as '5m' or '1h30m'; 0 unloads the model, -1 keeps it",
                param="keep_alive",
            )
    return FOR_EVER if seconds < 0 else min(seconds, MAX_S)
