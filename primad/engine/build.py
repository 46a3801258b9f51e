"""Identifies the installed llama.cpp without loading it, so that the daemon stays free of it."""

from __future__ import annotations

import platform
from hashlib import blake2b
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

from primad.errors import EngineError

PACKAGE = "llama-cpp-python"


def build_id() -> str:
    """Return the package version and a digest of its libraries' names and sizes, which distinguishes builds.

    Raises ``EngineError`` when llama-cpp-python is not installed.
    """
    spec = find_spec("llama_cpp")
    try:
        number = version(PACKAGE)
    except PackageNotFoundError as exc:
        raise EngineError(f"{PACKAGE} is not installed; install primad with its dependencies") from exc
    if spec is None or spec.origin is None:
        raise EngineError(f"{PACKAGE} {number} is damaged; install it again")
    libraries = sorted((Path(spec.origin).parent / "lib").glob("*"))
    sizes = [(path.name, path.stat().st_size) for path in libraries]
    digest = blake2b(repr((sizes, platform.machine())).encode(), digest_size=6).hexdigest()
    return f"{PACKAGE} {number} ({digest})"
