"""The head loads its own windows: it cuts their layers out of the model file, or serves the whole file as one window."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from primad.daemon.layer_files import copy_layers
from primad.daemon.loaded_process import LoadedProcess
from primad.daemon.loading import WindowLoad
from primad.gguf.layers import LayerRef
from primad.head.ring_inputs import RingInputs
from primad.network.messages import Load
from primad.planning.batching import least_rows
from primad.planning.draft_model import draft_model
from primad.ring.drafting.messages import DraftModel
from primad.ring.messages import HeadPart


async def load_own(inputs: RingInputs, load: Load) -> LoadedProcess:
    """The head's ring process, told to load the windows of ``load``.

    Raises ``PrimadError`` when a disk refuses or llama.cpp cannot compute the model.
    """
    plan, batching = inputs.promise.plan, inputs.promise.batching
    own = HeadPart(
        model=str(inputs.service.model.header.path),
        depth=len(plan.devices),
        at_once=load.sequences if batching.rows > 1 or not plan.streaming else 1,  # every step reads what streams anew
        chunk_rows=load.rows,
        least_rows=least_rows(plan, load.rows),
        batching=batching,
        pieces=inputs.promise.pieces,
        keep_rows=inputs.keep_rows,
        drafting=inputs.promise.drafting,
        draft=await _draft(inputs, load),
    )
    windows = WindowLoad(
        load,
        load.epoch,
        inputs.station,
        inputs.profile,
        own,
    )
    head, reporter = plan.head, inputs.reporter

    async def cut(missing: Sequence[LayerRef], copied: Callable[[int], None]) -> None:
        await copy_layers(inputs.service.model.cutter, inputs.station.workspace.cache, missing, copied)

    if windows.layers:  # not of the whole model
        await windows.prepare(cut, lambda done, total: reporter.progress(head, "copy", done, total))
    return await windows.start(windows.key())


async def _draft(inputs: RingInputs, load: Load) -> DraftModel | None:
    """The model that guesses; none where nothing is computed ahead."""
    path = inputs.service.options.draft
    if path is None or inputs.promise.drafting is None:
        return None
    header = inputs.service.model.header
    threads = inputs.station.config.threads
    return await asyncio.to_thread(draft_model, path, header, context=load.context, threads=threads)
