"""Remember the hash trees of a model file's layers, so that a restarted head need not read the whole model again.

An entry is valid for a file of the same path, size and modification time; any other file is hashed again. The key
includes the version of the entries, so that digests made in another way are never used.
"""

from __future__ import annotations

import contextlib
from hashlib import blake2b
from pathlib import Path
from typing import Final

import msgspec
from msgspec.structs import astuple

from primad.gguf.header import Header
from primad.gguf.slices import TensorSlice
from primad.system.files import write_whole

MODELS_KEPT: Final = 16
VERSION: Final = 2
"""Version 1 stored one digest per layer, over all of its weights."""


class LayerDigests:
    """The known trees (see ``gguf/layers.py``) of one model's layers, kept in the JSON file ``memory``."""

    def __init__(self, header: Header, memory: Path) -> None:
        self._memory = memory
        self._key = _key(header)
        self._known = _read(memory).get(self._key, {})

    def get(self, layer: int) -> bytes | None:
        """The tree of ``layer``, if it is known."""
        return self._known.get(layer)

    def put(self, layer: int, tree: bytes) -> None:
        """Remember the tree of ``layer``; ``save`` keeps it."""
        self._known[layer] = tree

    def save(self) -> None:
        """Write the known trees. If the disk fails, the layers are hashed again next time."""
        models = _read(self._memory)
        models.pop(self._key, None)
        kept = dict(list(models.items())[-(MODELS_KEPT - 1) :]) | {self._key: self._known}
        with contextlib.suppress(OSError):
            write_whole(self._memory, msgspec.json.encode(kept))


def _key(header: Header) -> str:
    files = sorted({tensor.path for tensor in header.tensors.values()} | {header.path})
    facts = [(str(path.absolute()), path.stat().st_size, path.stat().st_mtime_ns) for path in files]
    slices = [
        (each.name, each.shape, astuple(each.cut)) for each in header.tensors.values() if isinstance(each, TensorSlice)
    ]
    content = repr((facts, slices)) if slices else repr(facts)  # of a share, or of the whole model
    return f"{VERSION}:" + blake2b(content.encode(), digest_size=16).hexdigest()


def _read(memory: Path) -> dict[str, dict[int, bytes]]:
    known = {}
    try:
        for key, trees in msgspec.json.decode(memory.read_bytes(), type=dict[str, msgspec.Raw]).items():
            if key.startswith(f"{VERSION}:"):
                known[key] = msgspec.json.decode(trees, type=dict[int, bytes])
    except (OSError, msgspec.DecodeError):
        return {}
    return known
