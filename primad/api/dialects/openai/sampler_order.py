"""Applies a request's list of ``samplers``: omitted ones are off. The order must be llama.cpp's, or one that gives the
same tokens. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from typing import Any, Final

import msgspec

from primad.errors import RequestError
from primad.ring.messages import Sampling

_OFF: Final[dict[str, dict[str, Any]]] = {
    "penalties": {"repeat_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0},
    "dry": {"dry_multiplier": 0.0, "dry_tokens": 0},
    "top_n_sigma": {"top_n_sigma": 0.0},
    "top_k": {"top_k": 0},
    "typ_p": {"typical_p": 1.0},
    "top_p": {"top_p": 1.0},
    "min_p": {"min_p": 0.0},
    "xtc": {"xtc_probability": 0.0},
    "temperature": {"temperature": 1.0, "temperature_range": 0.0},
}
"""The neutral value of each sampler, in llama.cpp's order."""
SAMPLERS: Final = tuple(_OFF)
_LETTERS: Final = dict(zip("edskypmxt", SAMPLERS, strict=True))
_ALIASES: Final = {"typical_p": "typ_p", "typical": "typ_p", "typ": "typ_p", "temp": "temperature", "nucleus": "top_p"}
_KEEP_THE_LIKELIEST: Final = frozenset({"top_n_sigma", "top_k", "top_p", "min_p"})
_EITHER_WAY: Final = frozenset({("top_k", "min_p"), ("top_k", "temperature"), ("top_n_sigma", "temperature")})
"""Pairs that commute."""


def in_order(sampling: Sampling, samplers: str | Sequence[str]) -> Sampling:
    """Return ``sampling`` with only the ``samplers`` of the list. Names that only llama.cpp has, such as ``infill``,
    are ignored, as llama.cpp ignores unknown ones.

    Raises ``RequestError`` (400) for an order that would change the result.
    """
    if sampling.mirostat:
        return sampling  # mirostat replaces all samplers
    given = [_LETTERS.get(letter, "") for letter in samplers] if isinstance(samplers, str) else map(_known, samplers)
    named = [name for name in dict.fromkeys(given) if name]
    chosen = msgspec.structs.replace(
        sampling, **{field: off for name in SAMPLERS if name not in named for field, off in _OFF[name].items()}
    )
    active = [name for name in named if _is_active(name, chosen)]
    for first, second in combinations(active, 2):
        if SAMPLERS.index(first) > SAMPLERS.index(second) and not _is_the_same(first, second, chosen):
            raise RequestError(
                f"'samplers': not supported: {second} comes before {first}, as in llama.cpp's order: "
                f"{', '.join(SAMPLERS)}",
                param="samplers",
                code="unsupported_parameter",
                of_model=True,  # some are off by the model's defaults
            )
    return chosen


def _known(name: str) -> str:
    plain = name.replace("-", "_")
    plain = _ALIASES.get(plain, plain)
    return plain if plain in _OFF else ""


def _is_active(name: str, sampling: Sampling) -> bool:
    if not sampling.temperature and name in _KEEP_THE_LIKELIEST:
        return False
    return any(getattr(sampling, field) != off for field, off in _OFF[name].items())


def _is_the_same(first: str, second: str, sampling: Sampling) -> bool:
    by_entropy = "temperature" in (first, second) and sampling.temperature_range != 0
    return not by_entropy and not _EITHER_WAY.isdisjoint({(first, second), (second, first)})
