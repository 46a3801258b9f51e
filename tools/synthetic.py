"""Synthetic models for benchmarks: written once, or only for the duration of a run, if the disk has room."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from tools.lab import LabError
from tools.synth import PRESETS, weight_bytes

ROOT: Final = Path(__file__).parent.parent
MODELS: Final = ROOT / ".models"
ROOM_BYTES: Final = 1 << 30
"""Disk space that stays free."""


def model_path(preset: str, *, layers: int | None = None, folder: Path = MODELS) -> Path:
    """Path in ``folder`` of the model of ``preset``, with the preset's or another number of layers."""
    name = f"synthetic-{preset.replace('q4k', 'q4_k')}"
    return folder.resolve() / (f"{name}.gguf" if layers is None else f"{name}-{layers}-layers.gguf")


def check_room(folder: Path, needed_bytes: int, what: str) -> None:
    """Raise ``LabError`` where the disk of ``folder`` has no room for ``what``."""
    free = shutil.disk_usage(folder).free
    if free < needed_bytes + ROOM_BYTES:
        raise LabError(
            f"{folder}: {free / 1e9:.1f} GB are free, but {needed_bytes / 1e9:.1f} GB are needed for {what}, and "
            f"{ROOM_BYTES / 1e9:.0f} GB stays free; make room or choose something smaller"
        )


def write(path: Path, preset: str, *, layers: int | None = None, besides_bytes: int = 0) -> Path:
    """Write the model to ``path`` unless it exists; an incomplete file is removed.

    Raises ``LabError`` where there is no room for it and for ``besides_bytes`` that are written later.
    """
    if path.exists():
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    size = weight_bytes(preset, layers or PRESETS[preset].layers)
    also = " and what is cut from it" if besides_bytes else ""
    check_room(path.parent, size + besides_bytes, f"{path.name}{also}")
    print(f"writing {path}: {size / 1e9:.1f} GB", flush=True)
    partial = path.with_suffix(".part")
    command = [sys.executable, str(ROOT / "tools" / "synth.py"), "--preset", preset, "--out", str(partial)]
    try:
        subprocess.run([*command, *(["--layers", str(layers)] if layers else [])], check=True)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
    return path


@contextmanager
def borrowed(path: Path, preset: str, *, layers: int | None = None, cut: bool = False, keep: bool) -> Iterator[Path]:
    """Provide the model at ``path``, which is removed at the end unless it existed before or ``keep`` is set.

    ``cut``: layer files will be cut from it, which take the same space again. Raises ``LabError`` as ``write`` does.
    """
    there = path.exists()
    size = weight_bytes(preset, layers or PRESETS[preset].layers)
    try:
        yield write(path, preset, layers=layers, besides_bytes=size if cut else 0)
    finally:
        if not (there or keep):
            path.unlink(missing_ok=True)
