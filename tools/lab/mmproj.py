"""Tiny encoders of pictures for tests: a GGUF beside a model of ``tools/synth.py``, with random weights.

llama.cpp cannot be asked for an encoder's tensors, as ``tools/lab/zoo.py`` asks for a model's; the names and shapes here are
those that its loader (``tools/mtmd/clip.cpp``) reads, and it refuses a file that lacks one.
"""

from __future__ import annotations

import math
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
from gguf import GGUFWriter
from numpy.typing import NDArray

_Named = tuple[str, tuple[int, ...]]
"""A tensor and its shape, the outermost dimension first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Eye:
    """The sizes of an encoder. A picture of any size becomes ``side`` squared pixels, in patches of ``patch`` squared, of
    which ``merge`` squared are one row for the model."""

    width: int = 32
    heads: int = 2
    layers: int = 2
    feed_forward: int = 48
    side: int = 64
    patch: int = 8
    merge: int = 2

    @property
    def rows(self) -> int:
        """Rows for the model that a picture becomes."""
        return (self.side // self.patch // self.merge) ** 2


def write_encoder(path: Path, kind: str, model_width: int, eye: Eye | None = None, *, seed: int = 0) -> Eye:
    """Write an encoder to ``path`` for a model that is ``model_width`` wide.

    ``kind`` is libmtmd's name: ``gemma3``, whose rows look ahead, or ``janus_pro``, whose patches are a row each.
    """
    eye = eye or (Eye() if kind == "gemma3" else Eye(side=32, merge=1))
    writer = GGUFWriter(str(path), "clip")
    writer.add_bool("clip.has_vision_encoder", True)
    writer.add_bool("clip.use_gelu", True)
    writer.add_string("clip.projector_type", kind)
    for key, number in (
        ("image_size", eye.side),
        ("patch_size", eye.patch),
        ("embedding_length", eye.width),
        ("feed_forward_length", eye.feed_forward),
        ("block_count", eye.layers),
        ("attention.head_count", eye.heads),
        ("projection_dim", model_width),
        ("projector.scale_factor", eye.merge),
    ):
        writer.add_uint32(f"clip.vision.{key}", number)
    writer.add_float32("clip.vision.attention.layer_norm_epsilon", 1e-6)
    for key in ("image_mean", "image_std"):
        writer.add_array(f"clip.vision.{key}", [0.5, 0.5, 0.5])
    random = np.random.default_rng(seed)
    for name, shape in (*_tower(eye), *_PROJECTORS[kind](eye.width, model_width)):
        writer.add_tensor(name, _weights(random, name, shape))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return eye


def _tower(eye: Eye) -> Iterator[_Named]:
    width = eye.width
    yield "v.patch_embd.weight", (width, 3, eye.patch, eye.patch)
    yield "v.patch_embd.bias", (width,)
    yield "v.position_embd.weight", ((eye.side // eye.patch) ** 2, width)
    for layer in range(eye.layers):
        for matrix in ("attn_q", "attn_k", "attn_v", "attn_out"):
            yield from _biased(f"v.blk.{layer}.{matrix}", width, width)
        for norm in ("ln1", "ln2"):
            yield from _biased(f"v.blk.{layer}.{norm}", width)
        yield from _biased(f"v.blk.{layer}.ffn_up", eye.feed_forward, width)
        yield from _biased(f"v.blk.{layer}.ffn_down", width, eye.feed_forward)
    yield from _biased("v.post_ln", width)


def _biased(name: str, *shape: int) -> Iterator[_Named]:
    yield f"{name}.weight", shape
    yield f"{name}.bias", shape[:1]


def _gemma3_projector(width: int, model_width: int) -> Iterator[_Named]:
    yield "mm.input_projection.weight", (width, model_width)
    yield "mm.soft_emb_norm.weight", (width,)


def _janus_projector(width: int, model_width: int) -> Iterator[_Named]:
    yield from _biased("mm.0", model_width, width)
    yield from _biased("mm.1", model_width, model_width)


_PROJECTORS: Final = {"gemma3": _gemma3_projector, "janus_pro": _janus_projector}


def _weights(random: np.random.Generator, name: str, shape: tuple[int, ...]) -> NDArray[np.float32]:
    if len(shape) == 1:
        return random.normal(0.0 if name.endswith(".bias") else 1.0, 0.1, shape).astype(np.float32)
    return random.normal(0, 2 / math.sqrt(math.prod(shape[1:])), shape).astype(np.float32)


def png(pixels: NDArray[np.uint8]) -> bytes:
    """``pixels`` (height, width, 3) as a file."""
    height, width, _ = pixels.shape
    lines = b"".join(b"\0" + line.tobytes() for line in np.ascontiguousarray(pixels))
    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    parts = ((b"IHDR", head), (b"IDAT", zlib.compress(lines)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(_chunk(kind, data) for kind, data in parts)


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def noise(seed: int, width: int = 48, height: int = 40) -> bytes:
    """A picture of noise as a PNG."""
    return png(np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8))
