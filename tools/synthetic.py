"""Synthetic models that a benchmark needs: written once, or only for as long as it runs, where the disk has room."""

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
"""What stays free on the disk."""


def model_path(preset: str, *, layers: int | None = None, folder: Path = MODELS) -> Path:
    """Where the model of ``preset``, or one with another number of layers, lies in ``folder``."""
    name = f"synthetic-{preset.replace('q4k', 'q4_k')}"
    return folder.resolve() / (f"{name}.gguf" if layers is None else f"{name}-{layers}-layers.gguf")


def check_room(folder: Path, needed_bytes: int, what: str) -> None:
    """Raises ``LabError`` where the disk of ``folder`` has no room for ``what``."""
    free = shutil.disk_usage(folder).free
    if free < needed_bytes + ROOM_BYTES:
        raise LabError(
            f"{folder}: {free / 1e9:.1f} GB are free, but {needed_bytes / 1e9:.1f} GB are needed for {what}, and "
            f"{ROOM_BYTES / 1e9:.0f} GB stays free; make room or choose something smaller"
        )


def write(path: Path, preset: str, *, layers: int | None = None, besides_bytes: int = 0) -> Path:
    """Write the model to ``path`` unless it is there; nothing is left of one that could not be written whole.

    Raises ``LabError`` where there is no room for it and ``besides_bytes`` that are written later.
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
    """The model at ``path``, which is removed at the end unless it was there before or ``keep`` says otherwise.

    ``cut``: layer files are going to be cut from it, which take as much again. Raises ``LabError`` as ``write`` does.
    """
    there = path.exists()
    size = weight_bytes(preset, layers or PRESETS[preset].layers)
    try:
        yield write(path, preset, layers=layers, besides_bytes=size if cut else 0)
    finally:
        if not (there or keep):
            path.unlink(missing_ok=True)
