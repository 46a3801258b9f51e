"""Write a layer file in order, from a source that is at hand: hashed as it is written."""

from __future__ import annotations

import os
from typing import BinaryIO

from primad.errors import ClusterError
from primad.gguf.layers import CHUNK_BYTES, LayerRef, chunk_digest, layer_digest


class LayerWriter:
    """Takes the weights of one layer in order; ``LayerCache.writing`` hands it out."""

    def __init__(self, file: BinaryIO, ref: LayerRef) -> None:
        self._file = file
        self._chunk = bytearray()
        self.ref = ref
        self.written = 0
        self.tree = b""

    def write(self, data: bytes | memoryview) -> None:
        """Append ``data``, a piece of any size. Raises ``ClusterError`` when more arrives than the layer has."""
        if self.written + len(data) > self.ref.size_bytes:
            raise ClusterError(f"layer {self.ref.digest[:12]}: more than its {self.ref.size_bytes} bytes arrived")
        self.written += len(data)
        rest = memoryview(data)
        while rest:
            room = CHUNK_BYTES - len(self._chunk)
            self._chunk += rest[:room]
            rest = rest[room:]
            if len(self._chunk) == CHUNK_BYTES:
                self._write_chunk()

    def _write_chunk(self) -> None:
        self._file.write(self._chunk)
        self.tree += chunk_digest(self._chunk)
        self._chunk = bytearray()

    def finish(self) -> None:
        """Check the digest and flush. Raises ``ClusterError`` when the bytes are not those of the layer."""
        if self._chunk:
            self._write_chunk()
        if self.written != self.ref.size_bytes or layer_digest(self.written, self.tree) != self.ref.digest:
            raise ClusterError(
                f"layer {self.ref.digest[:12]}: the {self.written} bytes that arrived are not the layer's"
            )
        self._file.flush()
        os.fsync(self._file.fileno())
