"""Where models are on this system: the owner's folders, primad's own, and the stores of other programs.

Ollama: ``OLLAMA_MODELS``, else ``~/.ollama/models`` on every system; the Linux service runs as its own user, with
``/usr/share/ollama/.ollama/models`` (Ollama's FAQ, "Where are models stored?").
LM Studio: ``models`` in its home. The file ``~/.lmstudio-home-pointer`` names that; without it, it is
``~/.cache/lm-studio`` if that is there, else ``~/.lmstudio`` (lmstudio.js, ``findLMStudioHome.ts``). ``settings.json`` in
it names another folder as ``downloadsFolder``.
Hugging Face: ``HF_HUB_CACHE``, ``HUGGINGFACE_HUB_CACHE``, ``HF_HOME`` with ``hub``, else ``huggingface/hub`` in
``XDG_CACHE_HOME`` or ``~/.cache``, on every system (huggingface_hub, "Environment variables").
llama.cpp: ``LLAMA_CACHE`` has either layout. Older versions: ``llama.cpp`` in the system's folder for caches
(``fs_get_cache_directory`` in ``common.cpp``); newer ones share Hugging Face's cache (``hf-cache.cpp``).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

SYSTEM_OLLAMA: Final = Path("/usr/share/ollama/.ollama/models")
_MAX_BYTES: Final = 1 << 20

StoreLayout = Literal["folder", "repositories", "hub", "llama.cpp", "ollama"]
"""``folder``: GGUF files anywhere in it; ``repositories``: in folders ``owner/repo``; ``hub``: Hugging Face's cache;
``llama.cpp``: its own flat cache."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelPlace:
    """A ``folder`` with models of the program ``source``. It may be missing, unless the owner ``named`` it."""

    source: str
    layout: StoreLayout
    folder: Path
    named: bool = False


def model_places(
    folders: Sequence[Path], own: Path, environ: Mapping[str, str], user: Path, platform: str
) -> list[ModelPlace]:
    """Return the places in order: the owner's ``folders``, primad's ``own`` folder, and those of other programs of
    ``user``, according to the variables in ``environ``."""
    found = [
        *(ModelPlace(source="folder", layout="folder", folder=folder, named=True) for folder in folders),
        ModelPlace(source="primad", layout="repositories", folder=own),
        *(ModelPlace(source="Ollama", layout="ollama", folder=each) for each in _ollama(environ, user, platform)),
        *(ModelPlace(source="LM Studio", layout="repositories", folder=each) for each in _lm_studio(user)),
        *_caches(environ, user, platform),
    ]
    return list(dict.fromkeys(found))


def _ollama(environ: Mapping[str, str], user: Path, platform: str) -> Iterator[Path]:
    yield _named(environ, "OLLAMA_MODELS", user / ".ollama" / "models", user)
    if platform == "linux":
        yield SYSTEM_OLLAMA


def _lm_studio(user: Path) -> Iterator[Path]:
    pointed = small_text(user / ".lmstudio-home-pointer").strip()
    is_path = "\0" not in pointed and Path(pointed).is_absolute()
    homes = [*([Path(pointed)] if is_path else []), user / ".cache" / "lm-studio", user / ".lmstudio"]
    for home in dict.fromkeys(homes):
        yield home / "models"
        try:
            settings = json.loads(small_text(home / "settings.json") or "{}")
        except (ValueError, RecursionError):
            continue
        other = settings.get("downloadsFolder") if isinstance(settings, dict) else None
        if isinstance(other, str) and "\0" not in other and Path(other).is_absolute():
            yield Path(other)


def _caches(environ: Mapping[str, str], user: Path, platform: str) -> Iterator[ModelPlace]:
    xdg = _named(environ, "XDG_CACHE_HOME", user / ".cache", user)
    hub = _named(environ, "HF_HOME", xdg / "huggingface", user) / "hub"
    for variable in ("HUGGINGFACE_HUB_CACHE", "HF_HUB_CACHE"):
        hub = _named(environ, variable, hub, user)
    caches = {
        "darwin": user / "Library" / "Caches",
        "win32": _named(environ, "LOCALAPPDATA", user / "AppData" / "Local", user),
    }
    flat = _named(environ, "LLAMA_CACHE", caches.get(platform, xdg) / "llama.cpp", user)
    yield ModelPlace(source="Hugging Face", layout="hub", folder=hub)
    if environ.get("LLAMA_CACHE"):
        yield ModelPlace(source="llama.cpp", layout="hub", folder=flat)
    yield ModelPlace(source="llama.cpp", layout="llama.cpp", folder=flat)


def _named(environ: Mapping[str, str], variable: str, default: Path, user: Path) -> Path:
    """Return the folder that ``variable`` names; ``~`` stands for ``user``."""
    given = environ.get(variable, "")
    return user / given[2:] if given.startswith("~/") else Path(given) if given else default


def small_text(path: Path) -> str:
    """Return the text of a small file; empty if it is not a file or cannot be read."""
    try:
        if not path.is_file():
            return ""
        with path.open("rb") as file:
            return file.read(_MAX_BYTES).decode(errors="replace")
    except OSError:
        return ""
