"""Tiny GGUF files, written by the ``gguf`` package instead of our code."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
from gguf import GGUFWriter
from numpy.typing import NDArray

Arrays = Mapping[str, NDArray[np.float32]]


def array(*shape: int, seed: int = 0) -> NDArray[np.float32]:
    """Random weights; ``shape`` in numpy order (row length last)."""
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(np.float32)


def toy_arrays(layers: int = 3, *, same: bool = False) -> dict[str, NDArray[np.float32]]:
    """The tensors of a toy model; the layers have equal content if ``same``."""
    arrays = {"token_embd.weight": array(10, 8), "output_norm.weight": array(8)}
    for layer in range(layers):
        seed = 0 if same else layer + 1
        arrays[f"blk.{layer}.attn_norm.weight"] = array(9, seed=seed)
        arrays[f"blk.{layer}.attn_q.weight"] = array(5, 8, seed=seed)
    return arrays


def write_gguf(path: Path, arrays: Arrays, values: Mapping[str, int | str] | None = None) -> Path:
    """A GGUF of architecture ``llama`` with ``arrays``; whole numbers of ``values`` become UINT32 (``split.*``: UINT16)."""
    writer = GGUFWriter(path, "llama")
    for key, value in (values or {}).items():
        if isinstance(value, str):
            writer.add_string(key, value)
        elif key == "split.tensors.count":
            writer.add_int32(key, value)
        elif key.startswith("split."):
            writer.add_uint16(key, value)
        else:
            writer.add_uint32(key, value)
    for name, content in arrays.items():
        writer.add_tensor(name, content)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def write_split(folder: Path, arrays: Arrays, parts: int, *, stem: str = "toy") -> list[Path]:
    """The same model in ``parts`` files, named as by llama.cpp's gguf-split."""
    names = list(arrays)
    paths = []
    for number in range(parts):
        chosen = {name: arrays[name] for name in names[number::parts]}
        values = {"split.no": number, "split.count": parts, "split.tensors.count": len(names)}
        paths.append(write_gguf(folder / f"{stem}-{number + 1:05}-of-{parts:05}.gguf", chosen, values))
    return paths


def write_adapter(
    path: Path,
    tensors: Mapping[str, tuple[int, ...]],
    *,
    architecture: str = "llama",
    rank: int = 4,
    alpha: float = 8.0,
    seed: int = 0,
    kind: str = "adapter",
) -> Path:
    """A LoRA adapter with random matrices for ``tensors``: the names and shapes, in ggml order, of what it changes.

    For the token embedding the first matrix has one row per token.
    """
    writer = GGUFWriter(path, architecture)
    writer.add_string("general.type", kind)
    writer.add_string("adapter.type", "lora")
    writer.add_float32("adapter.lora.alpha", alpha)
    for number, (name, (inner, outer, *experts)) in enumerate(tensors.items()):
        if name == "token_embd.weight":
            writer.add_tensor(f"{name}.lora_a", array(outer, rank, seed=seed + number))
            writer.add_tensor(f"{name}.lora_b", array(inner, rank, seed=seed + number + 1000))
            continue
        writer.add_tensor(f"{name}.lora_a", array(*experts, rank, inner, seed=seed + number) / np.float32(inner**0.5))
        writer.add_tensor(f"{name}.lora_b", array(*experts, outer, rank, seed=seed + number + 1000))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
