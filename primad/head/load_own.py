"""The head loads its own windows: it cuts their layers out of the model file, or serves the whole file as one window."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from halda import Plan
from primad.daemon.layer_files import copy_layers
from primad.daemon.loaded_process import LoadedProcess
from primad.daemon.loading import WindowLoad
from primad.gguf.layers import LayerRef
from primad.head.ring_inputs import RingInputs
from primad.network.messages import Load
from primad.ring.messages import HeadPart

LEAST_ROWS: Final = 64
"""A processor computes so many rows of a chunk nearly as quickly as any number of them."""


async def load_own(inputs: RingInputs, load: Load) -> LoadedProcess:
    """The head's ring process, told to load the windows of ``load``.

    Raises ``PrimadError`` when a disk refuses or llama.cpp cannot compute the model.
    """
    plan = inputs.promise.plan
    chunk_rows, least_rows = rows_of_chunks(plan, load.rows, load.sequences)
    own = HeadPart(
        model=str(inputs.service.model.header.path),
        depth=len(plan.devices),
        at_once=1 if plan.streaming else load.sequences,  # every step reads what streams anew
        chunk_rows=chunk_rows,
        least_rows=least_rows,
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


def rows_of_chunks(plan: Plan, rows: int, sequences: int) -> tuple[int, int]:
    """How many rows a chunk of a prompt has: at most, and at the least where another message begins behind it.

    More chunks mean that a prompt's next turn finds more of it computed, and that other answers wait less for it; but each
    reads all that streams, and a GPU computes few rows not much quicker than many.
    """
    if plan.streaming or any(window.gpu_layers for window in plan.route):
        return rows, max(1, rows // 2)
    least = min(LEAST_ROWS, rows)
    return (rows if sequences == 1 else least), least
