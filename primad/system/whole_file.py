"""Replace a file at once: who reads it meanwhile has the old one or the new one, and never a part."""

from __future__ import annotations

import os
from pathlib import Path


def write_whole(path: Path, data: bytes) -> None:
    """Put ``data`` in place of ``path``. Raises ``OSError``; then nothing has changed."""
    partial = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        partial.write_bytes(data)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
