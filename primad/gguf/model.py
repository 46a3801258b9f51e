"""Open a model: one GGUF file, or all parts of a split one, as a single header.

A split model (``name-00001-of-00003.gguf``) keeps its metadata in the first part and its tensors in all of them; every
``TensorInfo`` names its file, so no other module needs to know about parts.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Final

from primad.errors import ModelError
from primad.gguf.header import Header, TensorInfo, read_header
from primad.gguf.layer_file import Stamp, stamp_of

SPLIT_COUNT: Final = "split.count"
SPLIT_NUMBER: Final = "split.no"
PART_NAME: Final = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")
_QUANTISATION: Final = re.compile(
    r"(?<![A-Za-z0-9])(I?Q\d\w*|MXFP4\w*|BF16|F16|F32|TQ\d\w*)(?![A-Za-z0-9])", re.IGNORECASE
)


def open_model(path: Path, *, header_only: bool = False) -> Header:
    """The header of the model at ``path`` with the tensors of all its parts.

    ``path`` is the file, or the first part of a split model. ``header_only`` accepts files that end before their tensors do.
    Raises ``ModelError`` for every kind of bad file, and names a part that is missing or belongs to another model.
    """
    header = read_header(path, header_only=header_only)
    count = header.count(SPLIT_COUNT, 0, maximum=99_999)
    if count > 1:
        header = _merge(header, count, header_only=header_only)
    if not header.tensors:
        raise ModelError(f"{path}: holds no tensors; give a complete model file")
    header.text("general.architecture")
    return header


def parts(path: Path, count: int) -> list[Path]:
    """The paths of the ``count`` parts of the split model whose first part is ``path``.

    Raises ``ModelError`` when the name does not say which part it is, or when it is not the first.
    """
    match = PART_NAME.fullmatch(path.name)
    if match is None or int(match["count"]) != count:
        raise ModelError(
            f"{path}: is part of a split model of {count} parts but its name does not end in "
            f"-00001-of-{count:05}.gguf; restore the original names"
        )
    if int(match["number"]) != 1:
        first = path.with_name(f"{match['stem']}-00001-of-{count:05}.gguf")
        raise ModelError(f"{path}: is part {int(match['number'])} of a split model; give the first part, {first}")
    return [path.with_name(f"{match['stem']}-{number:05}-of-{count:05}.gguf") for number in range(1, count + 1)]


def quantisation_in(stem: str) -> str:
    """The quantisation in a file's name, in capitals; empty if the name has none."""
    kinds = _QUANTISATION.findall(stem)
    return str(kinds[-1]).upper() if kinds else ""


def _merge(first: Header, count: int, *, header_only: bool) -> Header:
    tensors: dict[str, TensorInfo] = {}
    for number, path in enumerate(parts(first.path, count)):
        if not path.exists():
            raise ModelError(f"{path}: part {number + 1} of {count} of this split model is missing; fetch it as well")
        part = read_header(path, header_only=header_only) if number else first
        if part.count(SPLIT_NUMBER, 0) != number or part.count(SPLIT_COUNT, 0) != count:
            raise ModelError(f"{path}: is not part {number + 1} of {count} of {first.path.name}; fetch the parts again")
        for name, tensor in part.tensors.items():
            if name in tensors:
                raise ModelError(f"{path}: repeats tensor '{name}' of an earlier part; fetch the parts again")
            tensors[name] = tensor
    expected = first.count("split.tensors.count", len(tensors))
    if len(tensors) != expected:
        raise ModelError(f"{first.path}: the parts hold {len(tensors)} tensors, {expected} expected; fetch them again")
    return replace(first, tensors=tensors)


def stamps_of(header: Header) -> dict[Path, Stamp]:
    """The files of a model with their stamps. Raises ``ModelError`` when one cannot be looked at."""
    files = sorted({tensor.path for tensor in header.tensors.values()} | {header.path})
    return {path: _stamp(path) for path in files}


def check_unchanged(stamps: Mapping[Path, Stamp], remedy: str) -> None:
    """Raise ``ModelError`` if one of the files has changed since ``stamps_of``; ``remedy`` is the way to serve the new
    one."""
    for path, stamp in stamps.items():
        if _stamp(path) != stamp:
            raise ModelError(f"{path}: this file changed while it was served; put the old one back, or {remedy}")


def _stamp(path: Path) -> Stamp:
    try:
        return stamp_of(path.stat())
    except OSError as exc:
        raise ModelError(f"{path}: cannot be read any more: {exc.strerror or exc}; put it back") from exc
