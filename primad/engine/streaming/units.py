"""The units of a window: the file ranges of each of its layers' weights, and of its output matrix."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from primad.engine.protocol import WindowSource
from primad.engine.streaming.expert_loader import ExpertFiles, ExpertTensor
from primad.engine.streaming.expert_usage import whole_model_key
from primad.engine.streaming.pages import FileRange
from primad.errors import EngineError, ModelError
from primad.gguf.architectures.table import SUPPORTED
from primad.gguf.header import Header, TensorInfo, read_header
from primad.gguf.layer_file import hash_file
from primad.gguf.layers import DIGEST_BYTES, HEADER_BYTES, is_tree_of

_LAYER: Final = re.compile(r"blk\.(\d+)\.")
_EXPERTS: Final = re.compile(r"blk\.\d+\.ffn_(?:gate|up|down|gate_up)_exps\.weight")
EXPERT_TENSORS: Final = r"ffn_\w+_exps\."
"""What follows in the names of a layer's expert tensors, as a search pattern (llama.cpp's ``--n-cpu-moe`` moves the
same)."""
_GAP_BYTES: Final = 4096
"""Tensors of one layer with no more bytes between them are read as one range."""
_OUTPUT: Final = "output.weight"
_EMBEDDING: Final = "token_embd.weight"


@dataclass(frozen=True, slots=True)
class WindowUnits:
    """The file ranges of each layer that the CPU computes, in order, and of the output matrix (empty without one here).

    For a layer on the GPU with experts on the CPU they are those of the experts. ``experts`` are the expert tensors of
    each layer, within its ranges. ``rest`` is read a row at a time and never held: the embedding table that a whole
    model or a tail has in addition to its output matrix. ``output`` includes multi-token prediction layers, where they
    are loaded.
    """

    layers: tuple[tuple[FileRange, ...], ...]
    experts: tuple[ExpertFiles, ...]
    output: tuple[FileRange, ...]
    rest: tuple[FileRange, ...]


def units_of_window(source: WindowSource, *, predicts: bool = False) -> WindowUnits:
    """Return the units of a window of layer files; after the layers come the output matrix and, if it ``predicts``, MTP
    layers.

    Raises ``EngineError``.
    """
    ranges = []
    for path in source.layers:
        try:
            size = Path(path).stat().st_size
        except OSError as exc:
            raise EngineError(f"{path}: cannot be opened: {exc.strerror or exc}") from exc
        ranges.append((FileRange(path, HEADER_BYTES, size - HEADER_BYTES),))
    assignment = source.assignment
    output: tuple[FileRange, ...] = ()
    rest: tuple[FileRange, ...] = ()
    predicting: tuple[FileRange, ...] = ()
    for place in range(assignment.layers, len(ranges)):
        behind = _header(source.layers[place]).tensors
        if any(map(_LAYER.match, behind)):
            predicting += ranges[place] if predicts else ()
        elif _EMBEDDING in behind:  # else it makes per-layer inputs
            output = ranges[place]
            if _OUTPUT in behind:
                output = _ranges([tensor for name, tensor in behind.items() if name != _EMBEDDING])
                rest = _ranges([behind[_EMBEDDING]])
            output = () if assignment.output == "gpu" else (*predicting, *output)
    paths = source.layers[: assignment.ram_layers]
    found = [list(_header(path).tensors.values()) for path in paths]
    experts = [_experts(_digest(path), tensors) for path, tensors in zip(paths, found, strict=True)]
    experts_on_cpu = [_ranges(_of_experts(tensors)) for tensors in found[assignment.cpu_layers :]]
    return WindowUnits((*ranges[: assignment.cpu_layers], *experts_on_cpu), tuple(experts), output, rest)


def units_of_model(header: Header, source: WindowSource, *, predicts: bool = False) -> WindowUnits:
    """Return the units of a whole model computed from its own file, which may ``predict`` with its last layers."""
    on_cpu = source.assignment.cpu_layers
    layers: list[list[TensorInfo]] = [[] for _ in range(source.assignment.ram_layers)]
    predicting: list[TensorInfo] = []
    for name, tensor in header.tensors.items():
        match = _LAYER.match(name)
        if match is not None and int(match[1]) < len(layers):
            layers[int(match[1])].append(tensor)
        elif match is not None and predicts and int(match[1]) >= source.assignment.layers:
            predicting.append(tensor)
    own, embedding = header.tensors.get(_OUTPUT), header.tensors.get(_EMBEDDING)
    matrix = own or embedding
    output = _ranges([*predicting, matrix]) if matrix is not None and source.assignment.output != "gpu" else ()
    rest = _ranges([embedding]) if own is not None and embedding is not None else ()
    known = header.text("general.architecture") in SUPPORTED  # the router of another one may mean something else
    experts = [
        _experts(whole_model_key(header.path, layer), tensors if known else ()) for layer, tensors in enumerate(layers)
    ]
    layers[on_cpu:] = [_of_experts(tensors) for tensors in layers[on_cpu:]]
    return WindowUnits(tuple(map(_ranges, layers)), tuple(experts), output, rest)


def without(ranges: Iterable[FileRange], experts: ExpertFiles) -> tuple[FileRange, ...]:
    """Return ``ranges`` without those of ``experts``, each of which is inside one of them."""
    found = list(ranges)
    for tensor in experts.tensors:
        hole = tensor.whole
        parts = []
        for part in found:
            end, behind = part.offset + part.size, hole.offset + hole.size
            if part.path != hole.path or behind <= part.offset or end <= hole.offset:
                parts.append(part)
                continue
            parts.append(FileRange(part.path, part.offset, hole.offset - part.offset))
            parts.append(FileRange(part.path, behind, end - behind))
        found = [part for part in parts if part.size]
    return tuple(found)


def _experts(key: str, tensors: Iterable[TensorInfo]) -> ExpertFiles:
    """Return the expert tensors among those of one layer; none where they are of an unknown kind."""
    found = [tensor for tensor in tensors if _EXPERTS.fullmatch(tensor.name)]
    if len({tensor.shape[2:] for tensor in found}) != 1 or len(found[0].shape) != 3:
        return ExpertFiles(key, ())
    count = found[0].shape[2]
    return ExpertFiles(
        key, tuple(ExpertTensor(FileRange(str(each.path), each.offset, each.bytes), count) for each in found)
    )


def _of_experts(tensors: Iterable[TensorInfo]) -> list[TensorInfo]:
    return [tensor for tensor in tensors if re.search(EXPERT_TENSORS, tensor.name)]


def _header(path: str) -> Header:
    try:
        return read_header(Path(path))
    except ModelError as exc:
        raise EngineError(str(exc)) from exc


def _digest(path: str) -> str:
    """Return the digest in the name of a layer file."""
    return Path(path).stem.partition("-")[0]


def _ranges(tensors: Iterable[TensorInfo]) -> tuple[FileRange, ...]:
    """Return the ranges of ``tensors``, with adjacent ones joined."""
    found: list[FileRange] = []
    for tensor in sorted(tensors, key=lambda tensor: (str(tensor.path), tensor.offset)):
        path, last = str(tensor.path), found[-1] if found else None
        if last is not None and last.path == path and tensor.offset - last.offset - last.size <= _GAP_BYTES:
            found[-1] = FileRange(path, last.offset, tensor.offset + tensor.bytes - last.offset)
        else:
            found.append(FileRange(path, tensor.offset, tensor.bytes))
    return tuple(found)


def is_still_whole(path: str) -> bool:
    """Whether a layer file that was written to still holds the weights that its name says.

    The write may have changed only its header, for another window. A model file has no such name: False.
    """
    digest = _digest(path)
    try:
        if len(digest) != 2 * DIGEST_BYTES or Path(path).stat().st_size < HEADER_BYTES:
            return False
        tree, stamp = hash_file(Path(path))
        return stamp is not None and stamp[0] >= HEADER_BYTES and is_tree_of(tree, digest, stamp[0] - HEADER_BYTES)
    except OSError:
        return False
