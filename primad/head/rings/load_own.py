"""Loads the head's own windows: cuts their layers out of the model file, or loads the whole file as one window.

For a model on a hub the head downloads its own layers, like every device, and the token embedding.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial

from primad.daemon.bring import bring_layers
from primad.daemon.layer_files import copy_layers
from primad.daemon.loaded_process import LoadedProcess
from primad.daemon.loading import WindowLoad
from primad.engine.protocol import AdapterFile
from primad.gguf.hub_ranges import HubError
from primad.gguf.layers import LayerRef
from primad.gguf.ranged_cutter import RangedCutter
from primad.head.rings.ring_inputs import RingInputs
from primad.layers.sources import HubRoutes
from primad.layers.whole import compare, is_compared
from primad.network.contacts import Contact
from primad.network.messages import Load
from primad.planning.batching import min_rows
from primad.ring.messages import HeadPart
from primad.system.tasks import in_thread

OwnProgress = Callable[[str, int, int], None]
"""Called with the phase, the bytes done and the total bytes."""


async def load_own(inputs: RingInputs, load: Load, sources: Sequence[Contact], progress: OwnProgress) -> LoadedProcess:
    """Start the head's ring process, which loads the windows of ``load``; ``sources`` may have layers of them.

    Raises ``PrimadError`` if a disk fails or llama.cpp cannot compute the model.
    """
    plan, batching, model = inputs.forecast.plan, inputs.forecast.batching, inputs.service.model
    vocabulary, chunk_tokens = await inputs.pieces(), inputs.service.chunk_tokens(inputs.forecast)
    own = HeadPart(
        model=str(model.file),
        vocabulary=vocabulary.size,
        ends=vocabulary.ends,
        depth=len(plan.places),
        chunks=inputs.forecast.chunks_at_once,
        at_once=load.sequences
        if batching.rows > 1 or not plan.streaming
        else 1,  # every step reads streamed layers again
        chunk_rows=chunk_tokens,
        min_rows=min_rows(plan, chunk_tokens),
        batching=batching,
        pieces=inputs.forecast.pieces,
        keep_rows=inputs.block_tokens,
        states=load.states,
        state_rows=inputs.state_tokens,
        drafting=inputs.drafting,
        draft=inputs.draft,
        drafts_elsewhere=inputs.devices.draft_device is not None,
        predicts=model.predicts and inputs.drafting is not None and not plan.groups,
        adapters=tuple(AdapterFile(str(each.header.path), each.scale) for each in model.adapters),
    )
    ranged = model.ranged
    windows = WindowLoad(
        load,
        load.epoch,
        inputs.node,
        inputs.profile,
        own,
        None if ranged is None else ranged.ref(ranged.embedding_layer),
    )

    async def cut(missing: Sequence[LayerRef], copied: Callable[[int], None]) -> None:
        await copy_layers(model.source, inputs.node.workspace.cache, missing, copied)

    if ranged is not None:
        await _download(inputs, ranged, windows, sources, progress)
    elif windows.layers:  # unless the window is the whole model
        await windows.prepare(cut, partial(progress, "copy"))
    return await windows.start(windows.key())


async def _download(
    inputs: RingInputs, cutter: RangedCutter, windows: WindowLoad, sources: Sequence[Contact], progress: OwnProgress
) -> None:
    """Download the head's own layers; afterwards their digests are known."""
    node = inputs.node
    hub_routes = HubRoutes(files=cutter.files, token=cutter.token, head=None, transfers=node.transfers(inputs.context))
    origins = cutter.origins_of([windows.layers])

    async def bring(missing: Sequence[LayerRef], arrived: Callable[[int], None]) -> None:
        await bring_layers(node.workspace.cache, hub_routes, sources, origins, missing, arrived, named)

    def named(name: str, digest: str, tree: bytes) -> None:
        windows.named(name, digest, tree)
        cutter.learn(name, tree)

    await windows.prepare(bring, partial(progress, "fetch"))
    if {cutter.ref(layer).digest for layer in cutter.layers_of_all} <= {ref.digest for ref in windows.layers}:
        await _compare(inputs, cutter)


async def _compare(inputs: RingInputs, cutter: RangedCutter) -> None:
    """All of the model is here: compare it with the hub's hash, once."""
    head, cache, reporter = inputs.forecast.plan.head, inputs.node.workspace.cache, inputs.reporter
    if await in_thread(is_compared, cutter):
        return
    loop = asyncio.get_running_loop()

    def advance(done: int, total: int) -> None:
        loop.call_soon_threadsafe(reporter.progress, head, "compare", done, total)

    try:
        await in_thread(compare, cutter, cache, advance)
    except HubError as exc:
        reporter.report_line(f"the download of {cutter.header.path.name} is not compared with the hub yet: {exc}")
