"""The files that windows are loaded from: layers in the cache, whole and leased, and a metadata split for each
window."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from primad.engine.protocol import AdapterFile, WindowSource
from primad.errors import ClusterError, WeightsError
from primad.gguf.adapter import AdapterSpec, adapter_header
from primad.gguf.layers import CHUNK_BYTES, HEADER_BYTES, LayerCut, LayerRef
from primad.gguf.windows import WindowPlan
from primad.kv.store import KvStore
from primad.layers.cache import LayerCache
from primad.layers.fetch import missing_layers
from primad.system.tasks import in_thread


@dataclass(frozen=True, slots=True, kw_only=True)
class Workspace:
    """Where this daemon keeps layer files, KV cache, files of this run and counts of expert use; and the build of its
    llama.cpp.

    Unneeded KV blocks stay only if the store has a limit, which is the case for the owner's cache.
    """

    cache: LayerCache
    kv: KvStore
    run: Path
    usage: Path
    build: str


async def check_layers(cache: LayerCache, refs: Iterable[LayerRef]) -> None:
    """Raise ``ClusterError`` if one of ``refs``, all of which were whole, is damaged; it is removed.

    Reads only what changed since the last check, so this costs nothing if nothing changed.
    """
    if damaged := await missing_layers(cache, refs):
        names = ", ".join(ref.digest[:12] for ref in damaged[:3])
        more = f" and {len(damaged) - 3} more" if len(damaged) > 3 else ""
        raise ClusterError(f"layer {names}{more} changed on the disk while it was loaded; it will be fetched again")


def distrust(cache: LayerCache, error: WeightsError, refs: Iterable[LayerRef]) -> WeightsError:
    """Return ``error``, with the damaged file if known. Layers of ``refs`` that may be damaged are verified again
    before use."""
    digests = {ref.digest for ref in refs}
    touched = cache.touched(digests) if error.file is None else []
    if touched:
        return WeightsError(f"{error}: {touched[0]}", str(touched[0]))
    cache.doubt(error.file, digests)
    return error


async def copy_layers(
    find: Callable[[str], LayerCut | None],
    cache: LayerCache,
    refs: Iterable[LayerRef],
    copied: Callable[[int], None],
) -> None:
    """Cut ``refs``, which ``find`` finds in local files, into ``cache``; ``copied`` gets bytes, in total their size.

    Makes room first. Stopping waits for one chunk. Raises ``ModelError`` if the model file cannot be read or has
    changed, ``DiskError`` if the cache's disk fails or has no room.
    """
    async with cache.turn:
        wanted = await missing_layers(cache, refs, copied)
        await asyncio.to_thread(cache.make_room, sum(ref.file_bytes for ref in wanted))
        for ref in wanted:
            source = find(ref.digest)
            assert source is not None
            with contextlib.closing(cache.copying(ref, source)) as steps:
                while (size := await in_thread(next, steps, None)) is not None:
                    copied(size)


def place_windows(place: Workspace, plans: Iterable[WindowPlan], number: int) -> list[WindowSource]:
    """Write metadata splits and layer headers of load ``number`` for ``plans``; every layer must be in the cache.

    Raises ``ClusterError`` if the disk fails.
    """
    seen: Counter[str] = Counter()
    placed = []
    for plan in plans:
        spec, paths = plan.spec, []
        for layer, ref in enumerate(spec.layers):
            paths.append(str(place.cache.place(ref, number=layer, split=layer + 1, copy=seen[ref.digest])))
            seen[ref.digest] += 1
        metadata = place.run / f"window-{number}-{spec.window}.gguf"
        try:
            spec.write_metadata(metadata)
            adapters = tuple(_put_together(place, metadata, at, each) for at, each in enumerate(spec.adapters))
        except OSError as exc:
            raise ClusterError(f"{metadata}: cannot be written: {exc.strerror or exc}; make room there") from exc
        placed.append(
            WindowSource(
                window=spec.window,
                metadata=str(metadata),
                layers=tuple(paths),
                assignment=plan.assignment,
                extra_buffers=plan.extra_buffers,
                adapters=adapters,
            )
        )
    return placed


def _put_together(place: Workspace, metadata: Path, at: int, spec: AdapterSpec) -> AdapterFile:
    """Write the file of an adapter for a window, next to the window's ``metadata``, with which it is removed. Raises
    ``OSError``."""
    path = metadata.with_name(f"{metadata.stem}-lora-{at}.gguf")
    with path.open("wb") as file:
        file.write(adapter_header(spec))
        for ref in spec.layers:
            with place.cache.path(ref.digest).open("rb") as layer:
                layer.seek(HEADER_BYTES)
                shutil.copyfileobj(layer, file, CHUNK_BYTES)
    return AdapterFile(str(path), spec.scale)


def lease_layers(place: Workspace, number: int, refs: Iterable[LayerRef]) -> None:
    """Keep ``refs`` in the cache for load ``number``, until ``release_files``."""
    place.cache.lease(_owner(number), (ref.digest for ref in refs))


def release_files(place: Workspace, number: int) -> None:
    """Release what load ``number`` holds: its layers may be evicted, and its metadata is removed."""
    remove_metadata(place, number)
    place.cache.end_lease(_owner(number))


def remove_metadata(place: Workspace, number: int) -> None:
    """Remove the metadata splits of load ``number``."""
    for path in place.run.glob(f"window-{number}-*.gguf"):
        path.unlink(missing_ok=True)


def _owner(number: int) -> str:
    """Return the name under which load ``number`` leases layers in the cache."""
    return f"load-{number}"
