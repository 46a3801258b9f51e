"""Layer files: one GGUF split per layer, identified by the hash of its weights.

A layer file is a fixed-size header (``HEADER_BYTES``, filled up with a padding key) followed by the layer's tensors.
Only the header says which ``blk.N`` of which window the tensors are, so moving a layer to another window rewrites 16 KiB
and copies nothing. The weights after the header never change: their digest is the layer's name in every cache and
message. The digest has two levels, so that each chunk can be verified by itself:

    tree      the BLAKE2b digests of the chunks of ``CHUNK_BYTES``, one after another
    digest    BLAKE2b of the size and the tree

The head cuts layers directly from the model file (``LayerCut.read``); no other device needs that file. The output matrix
travels the same way, as one more layer file that only the tail window loads.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from hashlib import blake2b
from io import FileIO
from typing import Annotated, Final, TypeVar

import msgspec
from msgspec import Meta

from primad.errors import ModelError, ProtocolError, UnreadableError
from primad.gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType
from primad.gguf.header import MAGIC, Header, TensorInfo, Value, scalar_value

_Chunk = TypeVar("_Chunk", bytes, memoryview)

HEADER_BYTES: Final = 16_384
ALIGNMENT: Final = 32
DIGEST_BYTES: Final = 32
CHUNK_BYTES: Final = 4 << 20
"""Bytes covered by one digest of the tree: the size of all chunks of a layer except its last."""
MAX_LAYER_BYTES: Final = 1 << 40
MAX_LAYER_TENSORS: Final = 100
MAX_WINDOW_LAYERS: Final = 1025
"""Layers of the largest model that is accepted, plus an output matrix."""
_TREE: Final = b"primad layer tree 2"
_VERSION: Final = 3
_PADDING_KEY: Final = "primad.padding"
_LAYER: Final = "*"
_NAME: Final = re.compile(r"(?=.{1,60}\Z)[\w.-]*\*?[\w.-]*", re.ASCII)
"""At most one ``*``, so that a name with the layer's number in it still fits the header."""
_TYPES: Final = frozenset(int(kind) for kind in GGMLQuantizationType)


class LayerTensor(msgspec.Struct, frozen=True, array_like=True):
    """One tensor of a layer file.

    ``name`` has ``*`` in place of the layer's number (``blk.*.attn_q.weight``); ``offset`` counts bytes from the start
    of the weights; ``shape`` is in ggml order.
    """

    name: str
    type: int
    shape: Annotated[tuple[int, ...], Meta(max_length=4)]
    offset: int
    size_bytes: int


class LayerRef(msgspec.Struct, frozen=True, array_like=True):
    """The identity of a layer file: digest (hex) and size of its weights, and the position of each tensor in them."""

    digest: str
    size_bytes: int
    tensors: Annotated[tuple[LayerTensor, ...], Meta(max_length=MAX_LAYER_TENSORS)]

    @property
    def file_bytes(self) -> int:
        """Size of the file on disk."""
        return HEADER_BYTES + self.size_bytes


StopHashing = Callable[[], bool]
"""Returns whether hashing can stop because no request waits for it any more."""


class HashingStopped(Exception):  # noqa: N818 - nothing went wrong
    """No request waited any more; raised and caught in the thread that hashes."""


def never() -> bool:
    """A ``StopHashing`` that stops nothing."""
    return False


def until(stop: StopHashing, chunks: Iterable[_Chunk]) -> Iterator[_Chunk]:
    """``chunks`` as they come. Raises ``HashingStopped`` instead of the next one once ``stop`` says so."""
    for chunk in chunks:
        if stop():
            raise HashingStopped
        yield chunk


def chunk_count(size_bytes: int) -> int:
    """How many chunks a layer of ``size_bytes`` has."""
    return -(-size_bytes // CHUNK_BYTES)


def chunk_size(size_bytes: int, number: int) -> int:
    """Bytes of chunk ``number`` of a layer of ``size_bytes``."""
    return min(CHUNK_BYTES, size_bytes - number * CHUNK_BYTES)


def chunk_digest(chunk: bytes | bytearray | memoryview) -> bytes:
    """The ``DIGEST_BYTES`` of one chunk."""
    return blake2b(chunk, digest_size=DIGEST_BYTES).digest()


def tree_of(chunks: Iterable[bytes | memoryview]) -> bytes:
    """The tree of a layer from its chunks, ``DIGEST_BYTES`` each."""
    return b"".join(map(chunk_digest, chunks))


def layer_digest(size_bytes: int, tree: bytes) -> str:
    """The digest (hex) of a layer of ``size_bytes`` with this tree."""
    return blake2b(_TREE + struct.pack("<Q", size_bytes) + tree, digest_size=DIGEST_BYTES).hexdigest()


def is_tree_of(tree: bytes, digest: str, size_bytes: int) -> bool:
    """Whether ``tree`` has as many digests as a layer of ``size_bytes`` has chunks, and ``digest`` is theirs."""
    return len(tree) == chunk_count(size_bytes) * DIGEST_BYTES and layer_digest(size_bytes, tree) == digest


def is_chunk_of(chunk: bytes | memoryview, tree: bytes, number: int) -> bool:
    """Whether ``chunk`` is chunk ``number`` of the layer with this tree."""
    return chunk_digest(chunk) == tree[number * DIGEST_BYTES : (number + 1) * DIGEST_BYTES]


@dataclass(frozen=True, slots=True)
class LayerCut:
    """A layer in the model file: its tensors in order, each with its place in the layer file.

    ``known`` is its tree if the weights were hashed before.
    """

    sources: tuple[TensorInfo, ...]
    tensors: tuple[LayerTensor, ...]
    size_bytes: int
    known: bytes | None = None

    def chunks(self) -> Iterator[bytes]:
        """The weights from start to end in pieces of at most ``CHUNK_BYTES``."""
        for offset in range(0, self.size_bytes, CHUNK_BYTES):
            yield self.read(offset, min(CHUNK_BYTES, self.size_bytes - offset))

    def read(self, offset: int, size: int) -> bytes:
        """``size`` bytes of the weights from ``offset``, padding between tensors included.

        Raises ``ModelError`` when the model file became shorter or cannot be read.
        """
        assert 0 <= offset <= offset + size <= self.size_bytes
        out = bytearray(size)
        with ExitStack() as stack:
            for source, tensor in zip(self.sources, self.tensors, strict=True):
                start, end = max(offset, tensor.offset), min(offset + size, tensor.offset + tensor.size_bytes)
                if start >= end:
                    continue
                into = memoryview(out)[start - offset : end - offset]
                try:
                    file = stack.enter_context(source.path.open("rb", buffering=0))
                    short = not all(
                        _reads(file, place, into[at : at + count])
                        for at, place, count in source.runs(start - tensor.offset, end - start)
                    )
                except OSError as exc:
                    raise UnreadableError(str(source.path), exc.strerror or exc) from exc
                if short:
                    raise ModelError(f"{source.path}: became shorter while it was read; fetch the file again")
        return bytes(out)

    def tree(self) -> bytes:
        """The digests of the chunks; reads and hashes all weights (about 1 GB/s) unless they are ``known``."""
        return tree_of(self.chunks()) if self.known is None else self.known

    def hashed(self, known: bytes | None = None, stop: StopHashing = never) -> LayerCut:
        """The same layer with its tree: ``known`` if it has the right length, else hashed from the weights.

        Raises ``HashingStopped`` at ``stop``.
        """
        known = self.known if known is None else known
        fits = known is not None and len(known) == chunk_count(self.size_bytes) * DIGEST_BYTES
        return replace(self, known=known if fits else tree_of(until(stop, self.chunks())))

    def ref(self) -> LayerRef:
        """The identity of this layer; reads all weights unless they were hashed."""
        return LayerRef(layer_digest(self.size_bytes, self.tree()), self.size_bytes, self.tensors)


def _reads(file: FileIO, offset: int, into: memoryview) -> bool:
    """Fill ``into`` from ``offset``; False if the file ends before ``into`` is full."""
    file.seek(offset)
    return file.readinto(into) == len(into)


def cut(tensors: Mapping[str, TensorInfo]) -> LayerCut:
    """Lay out ``tensors`` (name in the layer file -> where it lies in the model) as one layer file."""
    sources, placed, offset = [], [], 0
    for name, source in tensors.items():
        placed.append(LayerTensor(name, int(source.type), source.shape, offset, source.bytes))
        sources.append(source)
        offset += -(-source.bytes // ALIGNMENT) * ALIGNMENT
    return LayerCut(tuple(sources), tuple(placed), offset)


def cut_layer(header: Header, layer: int) -> LayerCut:
    """Layer ``layer`` of the model. Raises ``ModelError`` when the model holds no such layer."""
    prefix = f"blk.{layer}."
    tensors = {
        f"blk.{_LAYER}.{name.removeprefix(prefix)}": tensor
        for name, tensor in header.tensors.items()
        if name.startswith(prefix)
    }
    if not tensors:
        raise ModelError(f"{header.path}: has no tensors of layer {layer}; the file is not a complete model")
    return cut(tensors)


def check_ref(ref: LayerRef) -> None:
    """Check a ``LayerRef`` from a peer. Raises ``ProtocolError`` naming the fault."""
    if len(ref.digest) != 2 * DIGEST_BYTES or set(ref.digest) - set("0123456789abcdef"):
        raise ProtocolError(f"layer digest {ref.digest[:80]!r} is not {DIGEST_BYTES} bytes of lower-case hex")
    if not 0 < ref.size_bytes <= MAX_LAYER_BYTES or not 0 < len(ref.tensors) <= MAX_LAYER_TENSORS:
        raise ProtocolError(f"layer {ref.digest[:12]} has {ref.size_bytes} bytes and {len(ref.tensors)} tensors")
    if len({tensor.name for tensor in ref.tensors}) != len(ref.tensors):
        raise ProtocolError(f"layer {ref.digest[:12]} has two tensors of one name")
    at = 0
    for tensor in ref.tensors:
        if not _NAME.fullmatch(tensor.name) or not 1 <= len(tensor.shape) <= 4 or min(tensor.shape) < 1:
            raise ProtocolError(f"layer {ref.digest[:12]} has a tensor of impossible name or shape")
        if _tensor_bytes(tensor) != tensor.size_bytes or tensor.offset != at:
            raise ProtocolError(
                f"layer {ref.digest[:12]}: tensor {tensor.name!r} has an impossible type, size or offset"
            )
        at += -(-tensor.size_bytes // ALIGNMENT) * ALIGNMENT
    if at != ref.size_bytes:
        raise ProtocolError(f"layer {ref.digest[:12]} has {ref.size_bytes} bytes; its tensors take {at}")


def _tensor_bytes(tensor: LayerTensor) -> int:
    if tensor.type not in _TYPES or max(tensor.shape) > 1 << 40:
        return -1
    block, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType(tensor.type)]
    elements = 1
    for extent in tensor.shape:
        elements *= extent
    return -1 if tensor.shape[0] % block else elements // block * block_bytes


def layer_header(tensors: Sequence[LayerTensor], *, number: int, split: int) -> bytes:
    """The ``HEADER_BYTES`` of a layer file that is layer ``number`` of its window and split ``split`` of its model."""
    values = {"split.no": scalar_value(GGUFValueType.UINT16, split)}
    infos = b"".join(_tensor_info(t.name.replace(_LAYER, str(number)), t.shape, t.type, t.offset) for t in tensors)
    fixed = len(_head(len(tensors), len(values) + 1)) + len(_pairs(values)) + len(infos)
    room = HEADER_BYTES - fixed - len(_pairs({_PADDING_KEY: scalar_value(GGUFValueType.STRING, "")}))
    assert room >= 0, f"a layer with {len(tensors)} tensors does not fit a header of {HEADER_BYTES} bytes"
    values[_PADDING_KEY] = scalar_value(GGUFValueType.STRING, "." * room)
    return _head(len(tensors), len(values)) + _pairs(values) + infos


@dataclass(frozen=True, slots=True, kw_only=True)
class SmallTensor:
    """A tensor in the metadata split itself: a few kB that every window of the model needs."""

    name: str
    type: GGMLQuantizationType
    shape: tuple[int, ...]
    data: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Hole:
    """A tensor of zeros after the metadata split, for which a file system need not allocate space."""

    name: str
    type: GGMLQuantizationType
    shape: tuple[int, ...]
    data: bytes = b""

    @property
    def size_bytes(self) -> int:
        """Bytes of its zeros."""
        block, block_bytes = GGML_QUANT_SIZES[self.type]
        return math.prod(self.shape) // block * block_bytes

    @property
    def padded_bytes(self) -> int:
        """``size_bytes`` rounded up to where the next tensor may begin."""
        return -(-self.size_bytes // ALIGNMENT) * ALIGNMENT


def metadata_split(
    values: Mapping[str, Value], small: Sequence[SmallTensor | Hole], *, splits: int, tensors: int
) -> bytes:
    """The first split of a window: its metadata and small tensors, with each ``Hole`` after all others. ``tensors``
    counts those of all ``splits``."""
    pairs = dict(values)
    for key, kind, content in (
        ("split.no", GGUFValueType.UINT16, 0),
        ("split.count", GGUFValueType.UINT16, splits),
        ("split.tensors.count", GGUFValueType.INT32, tensors),
        ("general.alignment", GGUFValueType.UINT32, ALIGNMENT),
    ):
        pairs[key] = scalar_value(kind, content)
    infos, body, zeros = bytearray(), bytearray(), 0
    for tensor in small:
        infos += _tensor_info(tensor.name, tensor.shape, int(tensor.type), len(body) + zeros)
        body += _padded(tensor.data)
        zeros += tensor.padded_bytes if isinstance(tensor, Hole) else 0
    return _padded(_head(len(small), len(pairs)) + _pairs(pairs) + infos) + body


def gguf_header(values: Mapping[str, Value], layers: Sequence[tuple[int, LayerRef]]) -> bytes:
    """The header of a separate file, to be followed by the weights of ``layers``, each with its number in that file."""
    infos, offset = bytearray(), 0
    for number, ref in layers:
        for each in ref.tensors:
            infos += _tensor_info(each.name.replace(_LAYER, str(number)), each.shape, each.type, offset + each.offset)
        offset += ref.size_bytes
    return _padded(_head(sum(len(ref.tensors) for _, ref in layers), len(values)) + _pairs(values) + infos)


def _padded(data: bytes) -> bytes:
    return data + bytes(-len(data) % ALIGNMENT)


def _head(tensors: int, values: int) -> bytes:
    return MAGIC + struct.pack("<IQQ", _VERSION, tensors, values)


def _text(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


def _pairs(values: Mapping[str, Value]) -> bytes:
    return b"".join(_text(key) + struct.pack("<I", value.type) + value.raw for key, value in values.items())


def _tensor_info(name: str, shape: Sequence[int], kind: int, offset: int) -> bytes:
    return _text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)
