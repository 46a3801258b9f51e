"""Decide, for windows cut out of a model file that is here, which of them use extra buffers: try one layer and the tail."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable, Sequence

from halda import Window
from primad.daemon.shard import Place, fits_twice, try_extra_buffers
from primad.engine.probe import is_worth_it
from primad.engine.protocol import EngineOptions
from primad.errors import ModelError
from primad.gguf.architectures import cuttable, layer_count
from primad.gguf.cache import LayerCache
from primad.gguf.header import Header
from primad.gguf.windows import ModelCutter, WindowSpec, token_embedding, vocabulary_size

TRIALS = 2


async def choose_extra_buffers(
    place: Place,
    header: Header,
    windows: Sequence[Window],
    options: EngineOptions,
    advance: Callable[[int], None],
) -> list[bool]:
    """For each of ``windows`` whether it uses extra buffers; ``advance`` is told how many of ``TRIALS`` are done.

    An architecture that cannot be cut has no window to try, so it stays without. Raises ``EngineError`` when llama.cpp
    cannot compute the model at all.
    """
    total = layer_count(header)
    try:
        cuttable(header)
    except ModelError:
        return [False] * len(windows)
    held = sum(header_bytes(header) * len(window.layers) // total for window in windows)
    if not fits_twice(held):
        return [False] * len(windows)
    tail_first = _tail_first(windows, total, cuttable(header).cut_multiple)
    folder = place.run / "probe"
    advance(0)
    try:
        trial = Place(cache=LayerCache(folder), run=place.run, verdicts=place.verdicts, build=place.build)
        specs = await asyncio.to_thread(_cut, ModelCutter(header), trial.cache, [(0, 1), (tail_first, total)])
        width, vocabulary = token_embedding(header).shape[0], vocabulary_size(header)
        layer = await try_extra_buffers(trial, specs[0], options, width=width)
        advance(1)
        tail = await try_extra_buffers(trial, specs[1], options, width=width, vocabulary=vocabulary)
        advance(TRIALS)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return [
        is_worth_it(layer, len(window.layers) - (total - tail_first), tail)
        if window.last == total
        else is_worth_it(layer, len(window.layers))
        for window in windows
    ]


def header_bytes(header: Header) -> int:
    """Bytes of all weights in the file."""
    return sum(tensor.bytes for tensor in header.tensors.values())


def _tail_first(windows: Sequence[Window], total: int, multiple: int) -> int:
    """Where the shortest tail begins that is no longer than the tail window and may be cut there."""
    shortest = (total - 1) // multiple * multiple
    tail = next((window.first for window in windows if window.last == total), 0)
    return max(shortest, tail)


def _cut(cutter: ModelCutter, cache: LayerCache, windows: Sequence[tuple[int, int]]) -> list[WindowSpec]:
    specs = [cutter.spec(0, first, last) for first, last in windows]
    for ref in cache.missing(ref for spec in specs for ref in spec.layers):
        source = cutter.source(ref.digest)
        assert source is not None
        with cache.writing(ref) as writer:
            for chunk in source.chunks():
                writer.write(chunk)
    return specs
