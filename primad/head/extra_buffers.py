"""Decide, for windows cut out of a model file that is here, which of them use extra buffers: try one layer and the tail."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Sequence

from halda import Window
from primad.daemon.loading import Workspace, copy_layers, fits_twice, missing_layers, try_extra_buffers
from primad.engine.probe import Verdict, is_worth_it
from primad.engine.protocol import EngineOptions
from primad.errors import DiskError, ModelError
from primad.gguf.architectures import cuttable, layer_count
from primad.gguf.header import Header
from primad.gguf.windows import ModelCutter, token_embedding, vocabulary_size
from primad.layers.cache import LayerCache
from primad.layers.fetch import hash_in_thread
from primad.settings.limits import OwnerLimits

logger = logging.getLogger(__name__)

TRIALS = 2

Tried = dict[int, tuple[Verdict, Verdict]]
"""Verdicts on a layer and on the tail of one model, by the layer where that tail begins."""


async def choose_extra_buffers(
    place: Workspace,
    header: Header,
    windows: Sequence[Window],
    options: EngineOptions,
    advance: Callable[[int], None],
    *,
    limits: OwnerLimits,
    tried: Tried,
) -> list[bool]:
    """For each of ``windows`` whether it uses extra buffers; ``advance`` is told how many of ``TRIALS`` are done.

    What was tried of this model before is in ``tried``, by where the tail begins; what is tried now is added.

    An architecture that cannot be cut has no window to try, so it stays without. Raises ``EngineError`` when llama.cpp
    cannot compute the model at all.
    """
    total = layer_count(header)
    try:
        cuttable(header)
    except ModelError:
        return [False] * len(windows)
    held = sum(header_bytes(header) * len(window.layers) // total for window in windows)
    if not fits_twice(held, limits):
        return [False] * len(windows)
    tail_first = _tail_first(windows, total, cuttable(header).cut_multiple)
    if tail_first not in tried:
        try:
            tried[tail_first] = await _try(place, header, tail_first, options, advance)
        except DiskError as exc:
            logger.warning("extra buffers are not tried: %s", exc)
            return [False] * len(windows)
    layer, tail = tried[tail_first]
    return [
        is_worth_it(layer, len(window.layers) - (total - tail_first), tail)
        if window.last == total
        else is_worth_it(layer, len(window.layers))
        for window in windows
    ]


async def _try(
    place: Workspace, header: Header, tail_first: int, options: EngineOptions, advance: Callable[[int], None]
) -> tuple[Verdict, Verdict]:
    """The verdicts on one layer, and on the tail from layer ``tail_first``."""
    total = layer_count(header)
    folder = place.run / "probe"
    advance(0)
    try:
        trial = Workspace(cache=LayerCache(folder), run=place.run, verdicts=place.verdicts, build=place.build)
        cutter = ModelCutter(header)
        specs = []
        for first, last in ((0, 1), (tail_first, total)):
            for number in cutter.layers_of(first, last):
                await hash_in_thread(cutter.ref, number)
            specs.append(cutter.spec(0, first, last))
        refs = await missing_layers(trial.cache, (ref for spec in specs for ref in spec.layers))
        await copy_layers(cutter, trial.cache, refs, lambda _: None)
        width, vocabulary = token_embedding(header).shape[0], vocabulary_size(header)
        layer = await try_extra_buffers(trial, specs[0], options, width=width)
        advance(1)
        tail = await try_extra_buffers(trial, specs[1], options, width=width, vocabulary=vocabulary)
        advance(TRIALS)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return layer, tail


def header_bytes(header: Header) -> int:
    """Bytes of all weights in the file."""
    return sum(tensor.bytes for tensor in header.tensors.values())


def _tail_first(windows: Sequence[Window], total: int, multiple: int) -> int:
    """Where the shortest tail begins that is no longer than the tail window and may be cut there."""
    shortest = (total - 1) // multiple * multiple
    tail = next((window.first for window in windows if window.last == total), 0)
    return max(shortest, tail)
