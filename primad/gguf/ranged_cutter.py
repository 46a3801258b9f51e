"""Decide which bytes of a model on a hub each device fetches, and relay layers to devices that cannot reach the hub."""

from __future__ import annotations

import queue
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from itertools import combinations
from pathlib import Path
from typing import Final

from primad.errors import ModelError
from primad.gguf.architectures.cuts import cut_points
from primad.gguf.architectures.layers import block_count, layer_count, layer_inputs
from primad.gguf.hub_ranges import HubRanges
from primad.gguf.layers import (
    CHUNK_BYTES,
    DIGEST_BYTES,
    LayerRef,
    StopHashing,
    chunk_count,
    chunk_size,
    layer_digest,
    never,
)
from primad.gguf.origins import LayerOrigin, RemoteFile, origin_name, runs_of_chunk
from primad.gguf.slices import cut_of
from primad.gguf.windows import ModelCutter, WindowSpec, window_metadata

_READERS_KEPT: Final = 4


def read_chunk(
    reader: HubRanges, files: Sequence[RemoteFile], origin: LayerOrigin, ref: LayerRef, number: int
) -> bytes:
    """Chunk ``number`` of the layer ``ref`` as it is on the hub. Raises ``HubError``."""
    chunk = bytearray(chunk_size(ref.size_bytes, number))
    for run in runs_of_chunk(ref, origin, number):
        data = memoryview(reader.read(files[run.file], run.offset, run.size))
        for begin, size, at in run.pieces:
            chunk[at : at + size] = data[begin : begin + size]
    return bytes(chunk)


@dataclass(frozen=True, slots=True)
class RemoteLayer:
    """A layer that is relayed from the hub and not stored here."""

    size_bytes: int
    _ref: LayerRef
    _origin: LayerOrigin
    _cutter: RangedCutter

    def tree(self) -> bytes:
        """Raises ``ModelError``: no device has hashed it under this name."""
        raise ModelError("nobody has fetched it yet")

    def read(self, offset: int, size: int) -> bytes:
        """``size`` bytes from ``offset``, which must begin a chunk, else ``ModelError``. Raises ``HubError``."""
        if offset % CHUNK_BYTES:
            raise ModelError("it is passed on in whole chunks")
        with self._cutter.reader() as reader:
            return read_chunk(reader, self._cutter.files, self._origin, self._ref, offset // CHUNK_BYTES)[:size]


@dataclass(frozen=True)
class RangedCutter(ModelCutter):
    """Cuts a model whose weights are on a hub. A layer of unknown digest is named by its origin."""

    files: tuple[RemoteFile, ...] = ()
    parts: tuple[Path, ...] = ()
    hubs: frozenset[str] = frozenset()
    token: str | None = field(default=None, repr=False)

    @cached_property
    def _readers(self) -> queue.LifoQueue[HubRanges]:
        return queue.LifoQueue(_READERS_KEPT)

    @cached_property
    def _origins(self) -> dict[str, tuple[int, LayerRef, LayerOrigin]]:
        """Number, reference and origin of every layer, by the name of its origin."""
        found = {}
        layers = layer_count(self.header)
        projections: list[int] = []
        if layer_inputs(self.header):
            ends = combinations([0, *cut_points(self.header), layers], 2)
            projections = [self.projection_layer(*each) for each in ends]
        for layer in [*range(layers + 1), self.embedding_layer, *projections]:
            layer_cut = self.cut(layer)
            places = tuple((self.parts.index(tensor.path), tensor.offset) for tensor in layer_cut.sources)
            ref = LayerRef("", layer_cut.size_bytes, layer_cut.tensors)
            parts = tuple(cut_of(tensor) for tensor in layer_cut.sources)
            cuts = parts if any(parts) else ()
            name = origin_name(self.files, places, ref, cuts)
            ref = LayerRef(name, ref.size_bytes, ref.tensors)
            found[name] = layer, ref, LayerOrigin(layer=name, name=name, places=places, cuts=cuts)
        return found

    @cached_property
    def _names(self) -> dict[int, str]:
        return {layer: name for name, (layer, _, _) in self._origins.items()}

    def ref(self, layer: int, stop: StopHashing = never) -> LayerRef:
        """The layer file of ``layer``, named by its digest if that is known, else by its origin."""
        name = self._names[layer]
        _, ref, _ = self._origins[name]
        tree = self.digests.get(layer) if self.digests is not None else None
        if tree is None or len(tree) != chunk_count(ref.size_bytes) * DIGEST_BYTES:
            return ref
        return LayerRef(layer_digest(ref.size_bytes, tree), ref.size_bytes, ref.tensors)

    def origins_of(self, windows: Iterable[Sequence[LayerRef]]) -> list[LayerOrigin]:
        """The origins of the layers of ``windows``, under the names that the windows give them."""
        wanted = {ref.digest for refs in windows for ref in refs}
        called = {self.ref(layer).digest: origin for layer, _, origin in self._origins.values()}
        return [
            LayerOrigin(layer=digest, name=origin.name, places=origin.places, cuts=origin.cuts)
            for digest, origin in called.items()
            if digest in wanted
        ]

    def learn(self, name: str, tree: bytes) -> str | None:
        """Record the tree of a fetched layer by its origin ``name``. If another digest was known, keep and return that one.
        Raises ``ModelError`` for a name that is not a layer of this model."""
        if name not in self._origins or len(tree) != chunk_count(self._origins[name][1].size_bytes) * DIGEST_BYTES:
            raise ModelError(f"{self.header.path}: has no layer of the origin {name[:12]!r}")
        layer, ref, _ = self._origins[name]
        known = self.ref(layer).digest
        if known == name and self.digests is not None:
            self.digests.put(layer, tree)
            self.digests.save()
            return None
        return None if known == layer_digest(ref.size_bytes, tree) else known

    def whole(self) -> WindowSpec:
        """The whole model as one window that takes tokens, from layer files, for a device that serves it alone."""
        layers = layer_count(self.header)
        values = {key: value for key, value in self.header.values.items() if not key.startswith("split.")}
        if layers < block_count(self.header):  # layers for multi-token prediction are left out
            own = window_metadata(self.header, 0, layers)
            values |= {key: value for key, value in own.items() if not key.startswith(("general.", "tokenizer."))}
            values.pop(f"{self.header.text('general.architecture')}.nextn_predict_layers", None)
        return self._one_window(values)

    def source(self, digest: str) -> RemoteLayer | None:  # type: ignore[override]
        """The layer of this origin, to relay to a device that cannot fetch it."""
        if digest not in self._origins:
            return None
        _, ref, origin = self._origins[digest]
        return RemoteLayer(ref.size_bytes, ref, origin, self)

    @contextmanager
    def reader(self) -> Iterator[HubRanges]:
        """A connection to the hub, kept for reuse."""
        try:
            reader = self._readers.get_nowait()
        except queue.Empty:
            reader = HubRanges(self.hubs, self.token)
        try:
            yield reader
        finally:
            try:
                self._readers.put_nowait(reader)
            except queue.Full:
                reader.close()
