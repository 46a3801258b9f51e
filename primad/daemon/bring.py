"""Brings layers of a model on a hub into this device's cache: from devices that have them, otherwise from the hub."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from primad.errors import ClusterError, DiskError
from primad.gguf.layers import LayerRef
from primad.gguf.origins import LayerOrigin
from primad.layers.cache import LayerCache
from primad.layers.download import download_layers
from primad.layers.fetch import fetch_layers, hash_in_thread, held_by_any, missing_layers
from primad.layers.source_link import Transfers
from primad.layers.sources import HubRoutes, WantedLayer
from primad.network.contacts import Contact
from primad.system.tasks import in_thread

logger = logging.getLogger(__name__)

OnArrived = Callable[[int], None]
OnNamed = Callable[[str, str, bytes], None]
"""Called with the name of a layer's origin, its digest and its tree."""


async def bring_layers(
    cache: LayerCache,
    hub_routes: HubRoutes,
    sources: Sequence[Contact],
    origins: Sequence[LayerOrigin],
    missing: Sequence[LayerRef],
    arrived: OnArrived,
    named: OnNamed,
) -> None:
    """Bring ``missing`` into ``cache``; ``named`` gets the digests of layers that had none.

    ``sources`` are asked first for layers with a digest. Raises ``ClusterError`` if no source has a layer,
    ``DiskError`` if this device's disk fails or is full.
    """
    known = {origin.layer: origin for origin in origins}
    hashed = [ref for ref in missing if ref.digest not in known or known[ref.digest].name != ref.digest]
    fresh = [WantedLayer(ref, known[ref.digest]) for ref in missing if ref not in hashed]
    fresh = [layer for layer in fresh if not await _was_downloaded(cache, layer, arrived, named)]
    if hashed:
        await _fetch(cache, hub_routes.transfers, sources, hashed, arrived)
        left = await missing_layers(cache, hashed)
        if foreign := [ref for ref in left if ref.digest not in known]:
            raise ClusterError(f"layer {foreign[0].digest[:12]} cannot be fetched: no device has it")
        fresh += [WantedLayer(ref, known[ref.digest]) for ref in left]

    def downloaded(name: str, digest: str, tree: bytes) -> None:
        cache.origins.put(name, digest)
        named(name, digest, tree)

    if fresh:
        await download_layers(hub_routes, fresh, cache, arrived, downloaded)


async def _was_downloaded(cache: LayerCache, layer: WantedLayer, arrived: OnArrived, named: OnNamed) -> bool:
    """Return whether this layer was downloaded before and is still here; if so, report its digest."""
    digest = cache.origins.get(layer.origin.name)
    if digest is None:
        return False
    ref = LayerRef(digest, layer.ref.size_bytes, layer.ref.tensors)
    if not await hash_in_thread(cache.has, ref):
        return False
    stored = cache.reader(digest)
    if stored is None:
        return False
    named(layer.origin.name, digest, await in_thread(stored.tree))
    arrived(ref.size_bytes)
    return True


async def _fetch(
    cache: LayerCache, transfers: Transfers, sources: Sequence[Contact], refs: Sequence[LayerRef], arrived: OnArrived
) -> None:
    """Fetch those of ``refs`` that other devices have; the others are left to be downloaded."""
    held = await held_by_any(transfers, sources, [ref.digest for ref in refs])
    try:
        await fetch_layers(transfers, sources, [ref for ref in refs if ref.digest in held], cache, arrived)
    except DiskError:
        raise
    except ClusterError as exc:
        logger.warning("%s; the hub is asked", exc)
