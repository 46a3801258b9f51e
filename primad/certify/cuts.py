"""Choose the windows to try, and find the cut at fault when they fail."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import Final

from primad.errors import ConfigError, ModelError
from primad.gguf.architectures.cuts import cut_points
from primad.gguf.architectures.layers import layer_count
from primad.gguf.header import Header
from primad.gguf.windows import window_metadata

CutRoute = tuple[int, ...]
"""The layers at which windows begin, starting with 0, and the number of layers."""
SAMPLED: Final = 8
"""Number of places at which the model is cut in two."""


def route(header: Header, cuts: Iterable[int]) -> CutRoute:
    """Return the windows between ``cuts``."""
    return (0, *cuts, layer_count(header))


def asked_route(header: Header, cuts: Sequence[int]) -> CutRoute:
    """Return the windows that begin at the requested ``cuts``.

    Raises ``ConfigError`` for impossible layers, ``ModelError`` if the architecture's rules refuse them.
    """
    layers = layer_count(header)
    if [*cuts] != sorted({*cuts}) or not all(0 < cut < layers for cut in cuts):
        raise ConfigError(
            f"--cuts {','.join(map(str, cuts))}: give the layers at which windows begin, each once and in order, from 1 to "
            f"{layers - 1}"
        )
    found = route(header, cuts)
    for first, last in pairwise(found):
        window_metadata(header, first, last)
    return found


def is_allowed(header: Header, windows: CutRoute) -> bool:
    """Whether the architecture's rules allow these windows."""
    try:
        for first, last in pairwise(windows):
            window_metadata(header, first, last)
    except ModelError:
        return False
    return True


def in_two(header: Header, maximum: int | None = SAMPLED) -> list[CutRoute]:
    """Return two windows for every possible cut, or for ``maximum`` cuts that are spread evenly."""
    places = [cut for cut in cut_points(header) if is_allowed(header, route(header, (cut,)))]
    if maximum is not None and len(places) > maximum:
        places = [places[i * (len(places) - 1) // max(maximum - 1, 1)] for i in range(maximum)]
    return [route(header, (cut,)) for cut in places]


def failing_cuts(cuts: Sequence[int], fails: Callable[[Sequence[int]], str]) -> list[tuple[tuple[int, ...], str]]:
    """Return which of ``cuts`` fail, and why; together they do. ``fails`` returns why windows between some fail, or
    nothing.

    Halves are tried until a cut fails by itself. If neither half fails, a window between two of the cuts is at fault,
    or all together.
    """
    if len(cuts) == 1:
        return [(tuple(cuts), fails(cuts))]
    found: list[tuple[tuple[int, ...], str]] = []
    for half in (cuts[: len(cuts) // 2], cuts[len(cuts) // 2 :]):
        if fails(half):
            found += failing_cuts(half, fails)
    if not found:
        found += [(pair, why) for pair in pairwise(cuts) if (why := fails(pair))][:1]
    return found or [(tuple(cuts), fails(cuts))]
