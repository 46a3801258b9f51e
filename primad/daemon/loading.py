"""Turn window specs into loaded windows: prepare the layer files, decide on extra buffers, start the ring process.

The same for head and worker; only the head has the model file as well.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from halda import Plan
from primad.engine.probe import StopFlag, Trial, Verdict, probe
from primad.engine.protocol import EngineOptions, WindowFiles
from primad.errors import ClusterError, WeightsError
from primad.gguf.layers import LayerRef
from primad.gguf.windows import ModelCutter, WindowSpec
from primad.layers.cache import LayerCache
from primad.layers.fetch import hash_in_thread, in_thread
from primad.ring.messages import OpenWindow
from primad.settings.config import usage_folder
from primad.settings.limits import OwnerLimits
from primad.system.memory import memory

EXTRA_MEMORY_SHARE = 0.4
"""Extra buffers copy a window's weights: only where the copies take at most this share of the free memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workspace:
    """Where this daemon keeps layer files, files of this run and what probes found; which llama.cpp it has."""

    cache: LayerCache
    run: Path
    verdicts: Path
    build: str

    @property
    def usage(self) -> Path:
        """Where it is kept how often the experts of layers are used."""
        return usage_folder(self.verdicts.parent)


async def missing_layers(cache: LayerCache, refs: Iterable[LayerRef]) -> list[LayerRef]:
    """Those of ``refs`` that are not in ``cache`` whole, each once; stopping waits for one chunk to be hashed."""
    return [ref for ref in dict.fromkeys(refs) if not await hash_in_thread(cache.has, ref)]


async def check_layers(cache: LayerCache, refs: Iterable[LayerRef]) -> None:
    """Raises ``ClusterError`` when one of ``refs``, all of which were whole, is not any more; it is removed.

    Reads only what changed since it was looked at last, so that this costs nothing where nothing did.
    """
    if damaged := await missing_layers(cache, refs):
        names = ", ".join(ref.digest[:12] for ref in damaged[:3])
        more = f" and {len(damaged) - 3} more" if len(damaged) > 3 else ""
        raise ClusterError(f"layer {names}{more} changed on the disk while it was loaded; it will be fetched again")


def distrust(cache: LayerCache, error: WeightsError, refs: Iterable[LayerRef]) -> WeightsError:
    """``error``, with the file if that can be told; what it may be about of ``refs`` is looked at anew before it is used."""
    digests = {ref.digest for ref in refs}
    touched = cache.touched(digests) if error.file is None else []
    if touched:
        return WeightsError(f"{error}: {touched[0]}", str(touched[0]))
    cache.doubt(error.file, digests)
    return error


async def copy_layers(
    cutter: ModelCutter, cache: LayerCache, refs: Iterable[LayerRef], copied: Callable[[int], None]
) -> None:
    """Cut ``refs`` out of the model file into ``cache``; ``copied`` is told bytes, together the size of ``refs``.

    Makes room first. Stopping waits for one chunk. Raises ``ModelError`` when the model file cannot be read or changed,
    ``DiskError`` when the cache's disk refuses or has no room.
    """
    async with cache.turn:
        wanted = []
        for ref in dict.fromkeys(refs):
            if await hash_in_thread(cache.has, ref):
                copied(ref.size_bytes)
            else:
                wanted.append(ref)
        await asyncio.to_thread(cache.make_room, sum(ref.file_bytes for ref in wanted))
        for ref in wanted:
            await _copy_layer(cutter, cache, ref, copied)


async def _copy_layer(cutter: ModelCutter, cache: LayerCache, ref: LayerRef, copied: Callable[[int], None]) -> None:
    source = cutter.source(ref.digest)
    assert source is not None
    with cache.writing(ref) as writer:
        chunks = source.chunks()
        while (chunk := await in_thread(next, chunks, None)) is not None:
            await in_thread(writer.write, chunk)
            copied(len(chunk))
        await in_thread(writer.finish)


def place_windows(
    place: Workspace, specs: Sequence[WindowSpec], gpu_layers: Sequence[int], epoch: int, *, output_on_gpu: bool = False
) -> list[WindowFiles]:
    """Write metadata splits and layer headers for ``specs``; every layer must be in the cache.

    The last ``gpu_layers[i]`` layers of ``specs[i]`` go to the GPU; ``output_on_gpu``: the last spec is the tail, and its
    output matrix goes there too. Raises ``ClusterError`` when the disk refuses.
    """
    seen: Counter[str] = Counter()
    placed = []
    for spec, on_gpu in zip(specs, gpu_layers, strict=True):
        paths = []
        for number, ref in enumerate(spec.layers):
            paths.append(str(place.cache.place(ref, number=number, split=number + 1, copy=seen[ref.digest])))
            seen[ref.digest] += 1
        metadata = place.run / f"window-{epoch}-{spec.window}.gguf"
        try:
            metadata.write_bytes(spec.metadata)
        except OSError as exc:
            raise ClusterError(f"{metadata}: cannot be written: {exc.strerror or exc}; make room there") from exc
        placed.append(
            WindowFiles(
                metadata=str(metadata),
                layers=tuple(paths),
                layer_count=spec.last - spec.first,
                gpu_layers=on_gpu,
                output_on_gpu=output_on_gpu and spec is specs[-1],
            )
        )
    return placed


def whole_model(path: Path, plan: Plan) -> WindowFiles:
    """The files of a ``plan`` of one window: the model file ``path`` as it is."""
    (window,) = plan.route
    return WindowFiles(
        metadata=str(path),
        layers=(),
        layer_count=len(window.layers),
        gpu_layers=window.gpu_layers,
        output_on_gpu=plan.output_on_gpu,
    )


def remove_metadata(place: Workspace, epoch: int) -> None:
    """Remove the metadata splits of ``epoch``."""
    for path in place.run.glob(f"window-{epoch}-*.gguf"):
        path.unlink(missing_ok=True)


async def try_extra_buffers(
    place: Workspace, spec: WindowSpec, options: EngineOptions, *, width: int, vocabulary: int = 0
) -> Verdict:
    """Probe the one-layer window ``spec``, whose layer files are in the cache. Raises ``EngineError``."""
    (files,) = place_windows(place, [spec], [0], epoch=-1)
    trial = Trial(files=files, options=options, width=width, vocabulary=vocabulary, extra_buffers=False)
    tensors = tuple(tensor for layer in spec.layers for tensor in layer.tensors)
    stop = StopFlag()
    try:
        return await asyncio.to_thread(probe, trial, tensors, place.build, place.verdicts, stop)
    finally:
        stop.set()
        remove_metadata(place, -1)


def fits_twice(size_bytes: int, limits: OwnerLimits) -> bool:
    """Whether copies of ``size_bytes`` of weights leave this device enough of the memory that primad may use."""
    now = memory()
    return size_bytes <= EXTRA_MEMORY_SHARE * limits.ram_bytes(now.available_bytes, now.total_bytes)


def open_window(index: int, files: WindowFiles, extra_buffers: bool, streamed: tuple[int, ...]) -> OpenWindow:
    """Window ``index`` of the route as its ring process is told to load it; one that streams needs no extra buffers."""
    return OpenWindow(window=index, files=files, extra_buffers=extra_buffers and not streamed, streamed=streamed)


def open_windows(
    specs: Sequence[WindowSpec],
    files: Sequence[WindowFiles],
    extra_buffers: Sequence[bool],
    streamed: Sequence[tuple[int, ...]],
) -> list[OpenWindow]:
    """The windows as the ring process is told to load them."""
    return [
        open_window(spec.window, placed, extra, streams)
        for spec, placed, extra, streams in zip(specs, files, extra_buffers, streamed, strict=True)
    ]


def streamed_of(plan: Plan, device: str) -> list[tuple[int, ...]]:
    """For each window of ``device`` the layers that it streams, counted from the window's first.

    Behind the last layer of the tail window comes the output matrix.
    """
    streamed = plan.streaming_of(device).layers
    return [
        tuple(
            layer - window.first
            for layer in (*window.layers, plan.layer_count)
            if layer in streamed and (layer < plan.layer_count or window is plan.route[-1])
        )
        for _, window in plan.windows_of(device)
    ]
