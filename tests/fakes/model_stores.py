"""Model stores of other programs, with tiny GGUF files."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from tests.fakes.gguf import toy_arrays, write_gguf

COMMIT = "c" * 40
IMAGE = "application/vnd.ollama.image."


def toy(path: Path, title: str = "", **values: int | str) -> Path:
    """A tiny model; another ``title`` gives other content."""
    path.parent.mkdir(parents=True, exist_ok=True)
    known = {"general.name": title or path.stem, "llama.context_length": 2048}
    return write_gguf(path, toy_arrays(1), known | {key.replace("__", "."): value for key, value in values.items()})


def blob(store: Path, data: bytes) -> dict[str, object]:
    """``data`` as a blob in Ollama's store: its hash and size."""
    digest = hashlib.sha256(data).hexdigest()
    (store / "blobs").mkdir(parents=True, exist_ok=True)
    (store / "blobs" / f"sha256-{digest}").write_bytes(data)
    return {"digest": f"sha256:{digest}", "size": len(data)}


def manifest(store: Path, name: str, content: object, root: str = "manifests") -> Path:
    """Write the manifest ``name`` (HOST/NAMESPACE/MODEL/TAG)."""
    path = store / root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def ollama_model(store: Path, name: str, data: bytes, *, config: object = None, **layers: bytes) -> Path:
    """A model with weights ``data`` and other ``layers``, such as a projector; the path of its weights."""
    weights = blob(store, data)
    parts = [{"mediaType": f"{IMAGE}model", **weights}]
    parts += ({"mediaType": IMAGE + kind, **blob(store, content)} for kind, content in layers.items())
    about = blob(store, json.dumps(config or {}).encode())
    manifest(store, name, {"schemaVersion": 2, "config": about, "layers": parts})
    return store / "blobs" / str(weights["digest"]).replace(":", "-")


def hub_file(cache: Path, repository: str, source: Path, *, commit: str = COMMIT, name: str = "") -> Path:
    """``source`` as a file of ``repository`` in Hugging Face's cache: a link in a snapshot."""
    home = cache / f"models--{repository.replace('/', '--')}"
    digest = hashlib.sha256(source.read_bytes()).hexdigest()
    for folder in ("blobs", "refs", f"snapshots/{commit}"):
        (home / folder).mkdir(parents=True, exist_ok=True)
    (home / "blobs" / digest).write_bytes(source.read_bytes())
    (home / "refs" / "main").write_text(commit)
    link = home / "snapshots" / commit / (name or source.name)
    link.symlink_to(Path("../../blobs") / digest)
    return link
