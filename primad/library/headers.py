"""Reads facts about a model from the beginning of its GGUF file, and caches them by path, size and modification time.

Only the first ``BEGINNING_BYTES`` are read: the metadata before the vocabulary. So listing 200 models takes the time of
200 small reads, and a file that is cut off after its header is only noticed when it is opened.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import msgspec

from primad.errors import ConfigError, ModelError, printable
from primad.gguf.constants import LlamaFileType
from primad.gguf.header import Header, read_beginning
from primad.gguf.projectors import projector_facts, wants_projector
from primad.system.files import write_private

BEGINNING_BYTES: Final = 1 << 16
MAX_LABEL_CHARS: Final = 16
MAX_KEPT: Final = 20_000
"""With more files than this, only those of the last list are kept."""
_PARAMETERS: Final = re.compile(
    r"(?<![A-Za-z0-9.])(\d+x)?\d+(\.\d+)?[BM](-A\d+(\.\d+)?B)?(?![A-Za-z0-9])", re.IGNORECASE
)
_NOT_A_MODEL: Final = ("mmproj", "adapter", "imatrix", "clip", "vocab")
_EMBEDS: Final = (1, 2, 3)
"""llama.cpp's pooling types: the mean, the first token, the last token. 4 is for ranking."""
_ENCODERS: Final = ("bert", "nomic-bert", "nomic-bert-moe", "jina-bert-v2", "jina-bert-v3", "modern-bert", "neo-bert")


class HeaderFacts(msgspec.Struct, frozen=True, array_like=True):
    """Facts of a file.

    ``kind`` is its ``general.type`` (``model``, ``mmproj``, ``adapter``). Architecture, parameters and quantisation are
    empty if unknown. ``context_tokens`` is the context that the model was trained with; it ``embeds`` if it makes one
    vector of a text. An encoder of pictures and sound ``sees`` or ``hears``, in a process that takes ``encoder_bytes``;
    ``refused`` is the reason why it cannot be used, or empty. A model that ``wants_encoder`` can see or hear with an
    encoder."""

    kind: str = "model"
    architecture: str = ""
    parameters: str = ""
    quantisation: str = ""
    context_tokens: int | None = None
    embeds: bool = False
    sees: bool = False
    hears: bool = False
    refused: str = ""
    encoder_bytes: int = 0
    wants_encoder: bool = False

    @property
    def is_model(self) -> bool:
        """Whether this is a model by itself."""
        return self.kind not in _NOT_A_MODEL

    @property
    def is_projector(self) -> bool:
        """Whether this encodes pictures or sound for another model."""
        return self.kind in ("mmproj", "clip")


class KeptHeaders(msgspec.Struct, frozen=True):
    """The file in the home folder: size, time (ns) and facts by path."""

    version: int
    files: dict[str, tuple[int, int, HeaderFacts]]


VERSION: Final = 3


@dataclass(slots=True)
class HeaderCache:
    """Facts of files, some of them from ``file``."""

    file: Path
    is_kept: bool = True
    """Whether new facts are written."""
    _kept: dict[str, tuple[int, int, HeaderFacts]] = field(default_factory=dict)
    _used: dict[str, tuple[int, int, HeaderFacts]] = field(default_factory=dict)

    def load(self) -> None:
        """Read the file; an unreadable file counts as empty."""
        try:
            kept = msgspec.json.decode(self.file.read_bytes(), type=KeptHeaders)
        except (OSError, msgspec.MsgspecError):
            return
        if kept.version == VERSION:
            self._kept = kept.files

    def save(self) -> None:
        """Write the facts that are new since ``load``. A home that cannot be written stays as it is."""
        known = self._kept | self._used
        if known == self._kept or not self.is_kept:
            return
        if len(known) > MAX_KEPT:
            known = self._used
        try:
            write_private(self.file, msgspec.json.encode(KeptHeaders(VERSION, known)))
        except ConfigError:
            return

    def facts(self, path: Path, status: os.stat_result) -> HeaderFacts:
        """Return the facts of the file ``path``, which has ``status``. Raises ``ModelError`` if it is not GGUF."""
        key, kept = str(path), self._kept.get(str(path))
        if kept is None or kept[:2] != (status.st_size, status.st_mtime_ns):
            kept = status.st_size, status.st_mtime_ns, facts_in(read_beginning(path, BEGINNING_BYTES))
        if key.isprintable():  # other paths may not be valid text
            self._used[key] = kept
        return kept[2]


def facts_in(header: Header) -> HeaderFacts:
    """Return the facts in the beginning of a file."""
    architecture = _text(header, "general.architecture")
    if architecture == "clip":
        found = projector_facts(header)
        return HeaderFacts(
            kind="clip",
            architecture="clip",
            sees=found.sees,
            hears=found.hears,
            refused=found.problem,
            encoder_bytes=found.memory_bytes,
        )
    return HeaderFacts(
        kind=_text(header, "general.type") or "model",
        architecture=architecture,
        parameters=_text(header, "general.size_label"),
        quantisation=_quantisation(header),
        context_tokens=_count(header, f"{architecture}.context_length"),
        embeds=_count(header, f"{architecture}.pooling_type") in _EMBEDS or architecture in _ENCODERS,
        wants_encoder=wants_projector(header),
    )


def parameters_in(name: str) -> str:
    """Return the number of parameters in a ``name``, such as ``8B``; empty if it has none."""
    match = _PARAMETERS.search(name)
    return "" if match is None else match[0].upper()


def _text(header: Header, key: str) -> str:
    try:
        return printable(header.text(key, ""), 64)
    except ModelError:
        return ""


def _count(header: Header, key: str) -> int | None:
    try:
        return header.count(key) if key in header.values else None
    except ModelError:
        return None


def _quantisation(header: Header) -> str:
    number = _count(header, "general.file_type")
    try:
        return "" if number is None else LlamaFileType(number).name.removeprefix("MOSTLY_").removeprefix("ALL_")
    except ValueError:
        return ""
