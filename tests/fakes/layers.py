"""Layers put into a cache as by the daemon, and devices that serve layers."""

from __future__ import annotations

from collections.abc import Iterable

from primad.gguf.layers import LayerCut, LayerRef
from primad.layers.cache import LayerCache
from primad.network.contacts import Contact


def put(cache: LayerCache, layer: LayerCut) -> LayerRef:
    """Put all of ``layer`` into the cache."""
    ref = layer.ref()
    for _ in cache.copying(ref, layer):
        continue
    return ref


def missing(cache: LayerCache, refs: Iterable[LayerRef]) -> list[LayerRef]:
    """The ``refs`` that are not in the cache as a whole."""
    return [ref for ref in refs if not cache.has(ref)]


def here(device: str, key: str, port: int, *addresses: str) -> Contact:
    """A device on this machine."""
    return Contact(device=device, key=key, addresses=list(addresses) or ["127.0.0.1"], port=port)
