"""Tiny picture encoders for tests: a GGUF next to a model of ``tools/synth.py``, with random weights.

Unlike a model's tensors (``tools/lab/zoo.py``), an encoder's cannot be listed by llama.cpp. The names and shapes here
are those that its loader (``tools/mtmd/clip.cpp``) reads; it refuses a file that lacks one.
"""

from __future__ import annotations

import math
import struct
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

import numpy as np
from gguf import GGUFWriter
from numpy.typing import NDArray

from tools.lab.encoders import FAMILIES, MEL_BINS, Content, Eye, Family, eye_of

__all__ = ["Eye", "noise", "png", "png_chunk", "tone", "write_encoder"]

_KERNELS: Final = (".peg.", ".block.0.0.", ".conv1d.", ".downsample.conv.", ".dw.")
_Named = tuple[str, tuple[int, ...]]
"""A tensor and its shape, the outermost dimension first."""


def write_encoder(
    path: Path, kind: str, model_width: int, eye: Eye | None = None, *, seed: int = 0, projector: str = ""
) -> Eye:
    """Write an encoder to ``path`` for a model of width ``model_width``; ``kind`` is a name of ``FAMILIES``.

    ``projector``, if given, is the type that the file declares.
    """
    family, eye = FAMILIES[kind], eye or eye_of(kind)
    writer = GGUFWriter(str(path), "clip")
    sense = "audio" if family.hears else "vision"
    sizes: dict[str, Content] = {"num_mel_bins": MEL_BINS} if family.hears else {}
    sizes |= {} if family.hears else {"image_size": eye.side, "patch_size": eye.patch}
    writer.add_bool(f"clip.has_{sense}_encoder", True)
    writer.add_bool(f"clip.{family.activation}", True)
    writer.add_string("clip.projector_type", projector or family.projector or kind)
    sizes |= {
        "embedding_length": eye.width,
        "feed_forward_length": eye.feed_forward,
        "block_count": eye.layers,
        "attention.head_count": eye.heads,
        "projection_dim": model_width,
    }
    for key, value in (sizes | dict(family.keys)).items():
        _add(writer, f"clip.{sense}", key, value)
    writer.add_float32(f"clip.{sense}.attention.layer_norm_epsilon", 1e-6)
    for key in ("image_mean", "image_std"):
        writer.add_array(f"clip.vision.{key}", [0.5, 0.5, 0.5])
    random = np.random.default_rng(seed)
    for name, shape in _tensors(family, eye.sizes(model_width), eye.layers):
        writer.add_tensor(name, _weights(random, name, shape))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return eye


def _add(writer: GGUFWriter, prefix: str, key: str, value: Content) -> None:
    if isinstance(value, list):
        writer.add_array(f"{prefix}.{key}", value)
    elif isinstance(value, float):
        writer.add_float32(f"{prefix}.{key}", value)
    elif key.startswith("clip."):
        writer.add_int32(key, value)
    else:
        writer.add_uint32(f"{prefix}.{key}", value)


def _tensors(family: Family, sizes: Mapping[str, int], layers: int) -> Iterator[_Named]:
    yield from _named(family.others, sizes)
    for layer in range(layers):
        for name, shape in _named(family.layer, sizes):
            yield f"{'a' if family.hears else 'v'}.blk.{layer}.{name}", shape


def _named(line: str, sizes: Mapping[str, int]) -> Iterator[_Named]:
    for word in line.split():
        name, dims = word.split(":")
        shape = tuple(_product(each, sizes) for each in dims.split(","))
        if name.endswith("="):
            yield name[:-1], shape
            continue
        yield f"{name.removesuffix('+')}.weight", shape
        if name.endswith("+"):
            yield f"{name[:-1]}.bias", shape[:1]


def _product(dimension: str, sizes: Mapping[str, int]) -> int:
    letter = dimension[-1]
    return int(dimension) if letter.isdigit() else int(dimension[:-1] or 1) * sizes[letter]


def _weights(random: np.random.Generator, name: str, shape: tuple[int, ...]) -> NDArray[np.float32 | np.float16]:
    if len(shape) == 1:
        return random.normal(0.0 if name.endswith(".bias") else 1.0, 0.1, shape).astype(np.float32)
    is_kernel = any(each in name for each in _KERNELS) and name.endswith(".weight")
    kind = np.float16 if is_kernel else np.float32  # llama.cpp accepts no other
    return random.normal(0, 2 / math.sqrt(math.prod(shape[1:])), shape).astype(kind)


def tone(seed: int, seconds: float = 1.0) -> bytes:
    """Return audio as a WAV file: some notes and noise, 16,000 samples per second."""
    random, times = np.random.default_rng(seed), np.arange(int(16_000 * seconds)) / 16_000
    waves = sum(np.sin(2 * np.pi * each * times) for each in random.uniform(80, 4000, 4))
    samples = (3000 * (waves + random.normal(0, 0.3, len(times)))).clip(-32_768, 32_767).astype("<i2").tobytes()
    form = struct.pack("<HHIIHH", 1, 1, 16_000, 32_000, 2, 16)
    parts = b"WAVE" + b"".join(
        struct.pack("<4sI", name, len(data)) + data for name, data in ((b"fmt ", form), (b"data", samples))
    )
    return struct.pack("<4sI", b"RIFF", len(parts)) + parts


def png(pixels: NDArray[np.uint8]) -> bytes:
    """Return ``pixels`` (height, width, 3) as a PNG file."""
    height, width, _ = pixels.shape
    lines = b"".join(b"\0" + line.tobytes() for line in np.ascontiguousarray(pixels))
    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    parts = ((b"IHDR", head), (b"IDAT", zlib.compress(lines)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(png_chunk(kind, data) for kind, data in parts)


def png_chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def noise(seed: int, width: int = 48, height: int = 40) -> bytes:
    """Return a picture of noise as a PNG."""
    return png(np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8))
