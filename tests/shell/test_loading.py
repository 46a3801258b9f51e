"""The head's own layers: copied from the model file into the cache, after room is made for them."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from primad.daemon.layer_files import copy_layers
from primad.errors import DiskError, ModelError
from primad.gguf.header import read_header
from primad.gguf.layers import HEADER_BYTES, LayerCut, cut_layer
from primad.layers.cache import LayerCache
from primad.layers.fetch import missing_layers
from tests.fakes.gguf import toy_arrays, write_gguf


class Cutter:
    """The part of ``ModelCutter`` that ``copy_layers`` needs."""

    def __init__(self, layers: Sequence[LayerCut]) -> None:
        self.source = {layer.ref().digest: layer for layer in layers}.get


@pytest.fixture
def layers(tmp_path) -> list[LayerCut]:
    model = read_header(write_gguf(tmp_path / "toy.gguf", toy_arrays()))
    return [cut_layer(model, layer).hashed() for layer in range(3)]


async def copy(layers: Sequence[LayerCut], cache: LayerCache) -> list[int]:
    """Copy ``layers``; returns the reported progress."""
    reported: list[int] = []
    refs = [layer.ref() for layer in layers]
    await copy_layers(Cutter(layers).source, cache, [*refs, *refs], reported.append)
    return reported


async def test_layers_are_copied_once_and_counted(layers, tmp_path):
    cache = LayerCache(tmp_path / "cache")
    refs = [layer.ref() for layer in layers]
    assert await missing_layers(cache, [*refs, *refs]) == refs
    assert sum(await copy(layers[:1], cache)) == layers[0].size_bytes
    assert sum(await copy(layers, cache)) == sum(layer.size_bytes for layer in layers)
    assert await missing_layers(cache, refs) == []


async def test_room_is_made_before_anything_is_written(layers, tmp_path):
    cache = LayerCache(tmp_path / "cache", 3 * HEADER_BYTES)
    await copy(layers[:2], cache)
    await copy(layers[2:], cache)
    assert len(cache.layers()) == 2
    cache.lease("ring", [layer.ref().digest for layer in layers])
    with pytest.raises(DiskError, match="do not fit"):
        await copy(layers, cache)
    assert len(cache.layers()) == 2


async def test_a_model_file_that_went_away_is_one_clear_error(layers, tmp_path):
    cache = LayerCache(tmp_path / "cache")
    layers[0].sources[0].path.unlink()
    with pytest.raises(ModelError, match="cannot be read"):
        await copy(layers[:1], cache)
    assert cache.layers() == []
