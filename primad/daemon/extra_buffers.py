"""Decide which windows use llama.cpp's extra buffers: one layer, and on the head the tail, are tried in a child process.

A head tries layers that it cuts out of its model file, a worker one of the layers that it has fetched.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
from collections.abc import Callable, Sequence
from typing import Final

from halda import Window
from halda.assignment import in_memory
from primad.daemon.layer_files import Workspace, copy_layers, place_windows, remove_metadata
from primad.engine.probe import StopFlag, Trial, Verdict, is_worth_it, probe
from primad.engine.protocol import EngineOptions
from primad.errors import DiskError, ModelError
from primad.gguf.architectures import cuttable, layer_count
from primad.gguf.header import Header
from primad.gguf.windows import ModelCutter, WindowSpec, token_embedding, vocabulary_size
from primad.layers.cache import LayerCache
from primad.layers.fetch import hash_in_thread
from primad.settings.limits import OwnerLimits
from primad.system.memory import memory

logger = logging.getLogger(__name__)

MEMORY_SHARE: Final = 0.4
"""Extra buffers copy a window's weights: only where the copies take at most this share of the free memory."""
TRIALS: Final = 2
_TRIAL_NUMBER: Final = -1
"""The number of a trial's files; no load has it."""

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
    """For each of the head's ``windows`` whether it uses extra buffers; ``advance`` is told how many of ``TRIALS`` are done.

    What was tried of this model before is in ``tried``, by where the tail begins; what is tried now is added.

    An architecture that cannot be cut has no window to try, so it stays without. Raises ``EngineError`` when llama.cpp
    cannot compute the model at all.
    """
    total = layer_count(header)
    try:
        cuttable(header)
    except ModelError:
        return [False] * len(windows)
    held = sum(_weight_bytes(header) * len(window.layers) // total for window in windows)
    if not _fits_twice(held, limits):
        return [False] * len(windows)
    tail_first = _tail_first(windows, total, cuttable(header).cut_multiple)
    if tail_first not in tried:
        try:
            tried[tail_first] = await _try_model(place, header, tail_first, options, advance)
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


async def are_extra_buffers_worth_it(
    place: Workspace,
    specs: Sequence[WindowSpec],
    trial: WindowSpec,
    options: EngineOptions,
    advance: Callable[[int], None],
    *,
    limits: OwnerLimits,
    width: int,
) -> bool:
    """Whether a worker's windows ``specs`` use extra buffers; ``trial`` is a one-layer window of the same layers.

    All layers are in the cache. ``advance`` is told 0 when the one trial begins. Raises ``EngineError`` when llama.cpp
    cannot compute them at all.
    """
    size_bytes = sum(ref.size_bytes for spec in specs for ref in spec.layers)
    if not _fits_twice(size_bytes, limits):
        return False
    advance(0)
    return is_worth_it(await _try_window(place, trial, options, width=width), 1)


async def _try_model(
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
        refs = (ref for spec in specs for ref in spec.layers)
        await copy_layers(cutter, trial.cache, refs, lambda _: None)
        width, vocabulary = token_embedding(header).shape[0], vocabulary_size(header)
        layer = await _try_window(trial, specs[0], options, width=width)
        advance(1)
        tail = await _try_window(trial, specs[1], options, width=width, vocabulary=vocabulary)
        advance(TRIALS)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return layer, tail


async def _try_window(
    place: Workspace, spec: WindowSpec, options: EngineOptions, *, width: int, vocabulary: int = 0
) -> Verdict:
    """Probe the window ``spec``, whose layer files are in the cache. Raises ``EngineError``."""
    (files,) = place_windows(place, [spec], [in_memory(spec.first, spec.last)], _TRIAL_NUMBER)
    trial = Trial(files=files, options=options, width=width, vocabulary=vocabulary, extra_buffers=False)
    tensors = tuple(tensor for layer in spec.layers for tensor in layer.tensors)
    stop = StopFlag()
    try:
        return await asyncio.to_thread(probe, trial, tensors, place.build, place.verdicts, stop)
    finally:
        stop.set()
        remove_metadata(place, _TRIAL_NUMBER)


def _fits_twice(size_bytes: int, limits: OwnerLimits) -> bool:
    """Whether copies of ``size_bytes`` of weights leave this device enough of the memory that primad may use."""
    now = memory()
    return size_bytes <= MEMORY_SHARE * limits.ram_bytes(now.available_bytes, now.total_bytes)


def _weight_bytes(header: Header) -> int:
    """Bytes of all weights in the file."""
    return sum(tensor.bytes for tensor in header.tensors.values())


def _tail_first(windows: Sequence[Window], total: int, multiple: int) -> int:
    """Where the shortest tail begins that is no longer than the tail window and may be cut there."""
    shortest = (total - 1) // multiple * multiple
    tail = next((window.first for window in windows if window.last == total), 0)
    return max(shortest, tail)
