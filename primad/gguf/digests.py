"""Remember the digests of a model file's layers: a head that starts again need not read the whole model to name them.

An entry holds for a file of the same path, size and modification time; anything else is hashed anew.
"""

from __future__ import annotations

from hashlib import blake2b
from pathlib import Path
from typing import Final

import msgspec

from primad.gguf.header import Header
from primad.gguf.layers import DIGEST_BYTES

MODELS_KEPT: Final = 16


class LayerDigests:
    """The known digests of one model's layers, kept in the JSON file ``memory``."""

    def __init__(self, header: Header, memory: Path) -> None:
        self._memory = memory
        self._key = _key(header)
        self._known = _read(memory).get(self._key, {})

    def get(self, layer: int) -> str | None:
        """The digest of ``layer``, if it is known."""
        return self._known.get(layer)

    def put(self, layer: int, digest: str) -> None:
        """Remember the digest of ``layer``; ``save`` keeps it."""
        self._known[layer] = digest

    def save(self) -> None:
        """Write what is known. A disk that refuses costs a second reading, nothing else."""
        models = _read(self._memory)
        models.pop(self._key, None)
        kept = dict(list(models.items())[-(MODELS_KEPT - 1) :]) | {self._key: self._known}
        partial = self._memory.with_suffix(".part")
        try:
            partial.write_bytes(msgspec.json.encode(kept))
            partial.replace(self._memory)
        except OSError:
            partial.unlink(missing_ok=True)


def _key(header: Header) -> str:
    files = sorted({tensor.path for tensor in header.tensors.values()} | {header.path})
    facts = [(str(path.absolute()), path.stat().st_size, path.stat().st_mtime_ns) for path in files]
    return blake2b(repr(facts).encode(), digest_size=16).hexdigest()


def _read(memory: Path) -> dict[str, dict[int, str]]:
    try:
        models = msgspec.json.decode(memory.read_bytes(), type=dict[str, dict[int, str]])
    except (OSError, msgspec.DecodeError):
        return {}
    return {
        key: {layer: digest for layer, digest in digests.items() if len(digest) == 2 * DIGEST_BYTES}
        for key, digests in models.items()
    }
