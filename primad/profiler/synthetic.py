"""Write windows of synthetic layers for timing: Llama's shape, any quantisation type, in files the engine loads.

Weights are random quants under fixed small scales, so that numbers stay finite and of ordinary size, as fast to compute
as any model's. One piece of 256 KiB repeats; a timed step still reads every byte from its own address.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final

import numpy as np

from halda.assignment import in_memory
from primad.engine.protocol import WindowSource
from primad.gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType
from primad.gguf.header import Value, scalar_value
from primad.gguf.layers import ALIGNMENT, LayerTensor, SmallTensor, layer_header, metadata_split

_PIECE_BYTES: Final = 256 << 10
_SCALE: Final = 2.0**-12
_SCALES_AT: Final[dict[str, tuple[int, ...]]] = {
    "Q8_0": (0,),
    "Q6_K": (208,),
    "Q5_K": (0, 2),
    "Q5_0": (0,),
    "Q5_1": (0, 2),
    "Q4_K": (0, 2),
    "Q4_0": (0,),
    "Q4_1": (0, 2),
    "Q3_K": (108,),
    "Q2_K": (80, 82),
    "IQ4_NL": (0,),
    "IQ4_XS": (0,),
    "IQ2_XXS": (0,),
    "IQ2_XS": (0,),
    "IQ2_S": (0,),
    "IQ3_XXS": (0,),
    "IQ3_S": (0,),
}
"""Offsets of the half-precision scales (and minimum) in a block of the type (ggml-common.h)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerShape:
    """The sizes of a layer: ``heads`` heads of ``width / heads`` channels, ``heads_kv`` of them for keys and values.

    One with ``experts`` has that many feed-forward networks, of which a row uses ``experts_used``.
    """

    width: int
    feed_forward: int
    heads: int
    heads_kv: int
    experts: int = 0
    experts_used: int = 0

    def matrices(self) -> dict[str, tuple[int, ...]]:
        """Name -> (columns, rows) of every matrix, and of those of experts how many."""
        keys = self.width // self.heads * self.heads_kv
        name, each = ("_exps", (self.experts,)) if self.experts else ("", ())
        return {
            "attn_q": (self.width, self.width),
            "attn_k": (self.width, keys),
            "attn_v": (self.width, keys),
            "attn_output": (self.width, self.width),
            f"ffn_gate{name}": (self.width, self.feed_forward, *each),
            f"ffn_up{name}": (self.width, self.feed_forward, *each),
            f"ffn_down{name}": (self.feed_forward, self.width, *each),
        }

    @property
    def expert_weights(self) -> int:
        """Number of weights of all experts."""
        return 3 * self.experts * self.feed_forward * self.width

    @property
    def weights(self) -> int:
        """Number of weights of all matrices."""
        return sum(math.prod(shape) for shape in self.matrices().values())

    @property
    def short_rows(self) -> int:
        """Rows of ``width`` values in the gate and up matrices of feed-forward."""
        return 2 * self.feed_forward

    def weight_bytes(self, kind: str) -> int:
        """Bytes of all matrices as ``kind``."""
        block, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
        return self.weights // block * block_bytes


BIG: Final = LayerShape(width=2048, feed_forward=8192, heads=32, heads_kv=8)
"""A layer like those of models with a billion weights or more."""
WIDE: Final = LayerShape(width=4096, feed_forward=14336, heads=32, heads_kv=8)
"""A layer like those of models with eight billion weights."""
MIDDLE: Final = LayerShape(width=768, feed_forward=2560, heads=12, heads_kv=4)
"""A layer like those of models with some hundred million weights."""
NARROW: Final = LayerShape(width=512, feed_forward=65_536, heads=8, heads_kv=2)
"""A layer with short rows, like the output matrices of small models."""
MIXED: Final = LayerShape(width=2048, feed_forward=512, heads=32, heads_kv=8, experts=32, experts_used=4)
"""A layer with experts, as thin as in models of which a token uses some billion weights."""
SMALL: Final = LayerShape(width=256, feed_forward=256, heads=4, heads_kv=1)
"""A layer that costs little besides its fixed cost."""


def write_window(folder: Path, shape: LayerShape, kind: str, layers: int, gpu_layers: int) -> WindowSource:
    """Write a window of ``layers`` layers of type ``kind`` to ``folder``. Raises ``OSError``."""
    tensors = _tensors(shape, kind)
    piece = piece_of(kind)
    norms, router = np.ones(shape.width, np.float32).tobytes(), piece_of("F32")

    def data(tensor: LayerTensor) -> bytes:
        is_norm, is_router = len(tensor.shape) == 1, "_inp." in tensor.name
        return norms if is_norm else router if is_router else piece

    paths = []
    for number in range(layers):
        path = folder / f"layer-{number}.gguf"
        write_layer(path, number, tensors, data)
        paths.append(str(path))
    metadata = folder / "window.gguf"
    metadata.write_bytes(_metadata(shape, layers, len(tensors)))
    assignment = in_memory(0, layers, gpu_layers=gpu_layers)
    return WindowSource(
        window=0, metadata=str(metadata), layers=tuple(paths), assignment=assignment, extra_buffers=False
    )


def write_layer(path: Path, number: int, tensors: Sequence[LayerTensor], data: Callable[[LayerTensor], bytes]) -> None:
    """Write layer ``number`` of ``tensors`` to ``path``, the ``data`` of each again and again. Raises ``OSError``."""
    with path.open("wb") as file:
        file.write(layer_header(tensors, number=number, split=number + 1))
        for tensor in tensors:
            fill(file, data(tensor), tensor.size_bytes)
            file.write(bytes(-tensor.size_bytes % ALIGNMENT))


def fill(file: BinaryIO, piece: bytes, size: int) -> None:
    """Write ``size`` bytes, ``piece`` again and again."""
    for _ in range(size // len(piece)):
        file.write(piece)
    file.write(piece[: size % len(piece)])


def laid_out(sizes: Mapping[str, tuple[GGMLQuantizationType, tuple[int, ...]]]) -> list[LayerTensor]:
    """The tensors of a layer, one after another: types and extents by their names in it."""
    tensors, offset = [], 0
    for name, (type_, extents) in sizes.items():
        block, block_bytes = GGML_QUANT_SIZES[type_]
        size = math.prod(extents) // block * block_bytes
        tensors.append(LayerTensor(f"blk.*.{name}", int(type_), extents, offset, size))
        offset += -(-size // ALIGNMENT) * ALIGNMENT
    return tensors


def _tensors(shape: LayerShape, kind: str) -> list[LayerTensor]:
    norm = (GGMLQuantizationType.F32, (shape.width,))
    sizes: dict[str, tuple[GGMLQuantizationType, tuple[int, ...]]] = {"attn_norm": norm, "ffn_norm": norm}
    sizes |= {name: (GGMLQuantizationType[kind], matrix) for name, matrix in shape.matrices().items()}
    if shape.experts:
        sizes["ffn_gate_inp"] = (GGMLQuantizationType.F32, (shape.width, shape.experts))
    return laid_out({f"{name}.weight": size for name, size in sizes.items()})


def _metadata(shape: LayerShape, layers: int, tensors: int) -> bytes:
    numbers: dict[str, float | int | str] = {
        "general.architecture": "llama",
        "llama.context_length": 4096,
        "llama.embedding_length": shape.width,
        "llama.block_count": layers,
        "llama.feed_forward_length": shape.feed_forward,
        "llama.attention.head_count": shape.heads,
        "llama.attention.head_count_kv": shape.heads_kv,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "llama.rope.dimension_count": shape.width // shape.heads,
        "llama.expert_count": shape.experts,
        "llama.expert_used_count": shape.experts_used,
        "llama.vocab_size": 1,
        "tokenizer.ggml.model": "none",
    }
    kinds = {int: GGUFValueType.UINT32, float: GGUFValueType.FLOAT32, str: GGUFValueType.STRING}
    values: dict[str, Value] = {key: scalar_value(kinds[type(number)], number) for key, number in numbers.items()}
    row = np.ones(shape.width, np.float32).tobytes()
    small = [
        SmallTensor(name=name, type=GGMLQuantizationType.F32, shape=extents, data=row)
        for name, extents in (("output_norm.weight", (shape.width,)), ("token_embd.weight", (shape.width, 1)))
    ]
    return metadata_split(values, small, splits=1 + layers, tensors=len(small) + layers * tensors)


def piece_of(kind: str) -> bytes:
    """Weights of type ``kind``."""
    random = np.random.default_rng(0)
    if kind in ("F32", "F16", "BF16"):
        numbers = random.standard_normal(_PIECE_BYTES // 4).astype(np.float32) * np.float32(0.02)
        if kind == "BF16":
            return bytes((numbers.view(np.uint32) >> 16).astype(np.uint16).tobytes())
        return bytes(numbers.astype(np.float16 if kind == "F16" else np.float32).tobytes())
    block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType[kind]][1]
    data = np.frombuffer(bytearray(random.bytes(_PIECE_BYTES // block_bytes * block_bytes)), np.uint8)
    blocks = data.reshape(-1, block_bytes)
    for at in _SCALES_AT[kind]:
        blocks[:, at : at + 2] = np.frombuffer(np.float16(_SCALE).tobytes(), np.uint8)
    return bytes(blocks.tobytes())
