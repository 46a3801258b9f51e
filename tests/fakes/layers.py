"""Layers put into a cache as the daemon copies them, and devices that give layers."""

from __future__ import annotations

from collections.abc import Iterable

from primad.gguf.layers import LayerCut, LayerRef
from primad.layers.cache import LayerCache
from primad.network.contacts import Contact


def put(cache: LayerCache, layer: LayerCut) -> LayerRef:
    """``layer`` in the cache, whole."""
    ref = layer.ref()
    for _ in cache.copying(ref, layer):
        continue
    return ref


def missing(cache: LayerCache, refs: Iterable[LayerRef]) -> list[LayerRef]:
    """Those of ``refs`` that are not there whole."""
    return [ref for ref in refs if not cache.has(ref)]


def here(device: str, key: str, port: int, *addresses: str) -> Contact:
    """A device on this machine."""
    return Contact(device=device, key=key, addresses=list(addresses) or ["127.0.0.1"], port=port)
