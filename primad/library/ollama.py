"""Reads Ollama's store: a manifest for each name, and blobs by hash.

    manifests/HOST/NAMESPACE/MODEL/TAG       JSON; a link into blobs in manifests-v2
    blobs/sha256-HEX                         the GGUF of a layer application/vnd.ollama.image.model, and others

The names, the types of layers and lists of manifests (one per format) follow Ollama's ``manifest/manifest.go``,
``manifest/paths.go`` and ``types/model/name.go``; the fields of the configuration follow ``server/images.go``. A
manifest is not trusted: it may name blobs by hash only, and a manifest that is a link must lead into its store.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Final, TypeVar

import msgspec
from msgspec import Meta

from primad.library.places import ModelPlace
from primad.library.stores import FolderWalk, StoredModel, is_folder

MAX_MANIFEST_BYTES: Final = 1 << 20
_DIGEST: Final = re.compile(r"sha256[:-][0-9a-fA-F]{64}")
_PART: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}")
_MANIFESTS: Final = ("manifests-v2", "manifests")
_HOST: Final = "registry.ollama.ai"
_NAMESPACE: Final = "library"
_TYPE: Final = "application/vnd.ollama.image."
_Json = TypeVar("_Json")


class OllamaLayer(msgspec.Struct, frozen=True, rename="camel"):
    """A blob of a model, and its type."""

    media_type: str = ""
    digest: str = ""
    size: Annotated[int, Meta(ge=0)] = 0


class OllamaManifest(msgspec.Struct, frozen=True, rename="camel"):
    """A model's blobs; or, for a list, the same model in several formats, each here or in the blob ``digest``."""

    config: OllamaLayer = OllamaLayer()
    layers: Annotated[tuple[OllamaLayer, ...], Meta(max_length=4096)] = ()
    manifests: Annotated[tuple[OllamaManifest, ...], Meta(max_length=64)] = ()
    digest: str = ""


class OllamaConfig(msgspec.Struct, frozen=True):
    """What Ollama records of a model: its parameters (``3.2B``) and its quantisation."""

    model_type: str = ""
    file_type: str = ""


class _BadManifestError(Exception):
    """The reason why a manifest is refused."""


def models_of_ollama(place: ModelPlace, walk: FolderWalk) -> Iterator[StoredModel]:
    """Yield the models in the store ``place``."""
    known: set[str] = set()
    for folder in _MANIFESTS:
        for parts, path in _manifests(place.folder / folder, walk):
            name = shown_name(*parts)
            if name.casefold() in known:
                continue
            known.add(name.casefold())
            names = (name, name.removesuffix(":latest")) if name.endswith(":latest") else (name,)
            try:
                yield _model(place.folder, path, names)
            except _BadManifestError as exc:
                walk.report(path, f"{name} cannot be used: {exc}")


def shown_name(host: str, namespace: str, model: str, tag: str) -> str:
    """Return the model's name in Ollama, with its tag."""
    if host.lower() == _HOST:
        return f"{model}:{tag}" if namespace.lower() == _NAMESPACE else f"{namespace}/{model}:{tag}"
    return f"{host}/{namespace}/{model}:{tag}"


def _manifests(root: Path, walk: FolderWalk) -> list[tuple[tuple[str, ...], Path]]:
    """Return the manifests in ``root``, each with the four parts of its name."""
    found: list[tuple[tuple[str, ...], Path]] = [((), root)]
    for depth in range(4):
        found = [
            ((*parts, entry.name), Path(entry.path))
            for parts, folder in found
            for entry in walk.listed(folder)
            if _PART.fullmatch(entry.name) and is_folder(entry) == (depth < 3)
        ]
    return found


def _model(store: Path, path: Path, names: tuple[str, ...]) -> StoredModel:
    manifest = _gguf_manifest(store, _read(path, store, OllamaManifest))
    layers = {layer.media_type: layer for layer in reversed(manifest.layers)}
    weights = layers.get(f"{_TYPE}model")
    if weights is None:
        raise _BadManifestError("it has no GGUF file here (another format, or a model in the cloud)")
    blob, projector, adapter = _blob(store, weights), layers.get(f"{_TYPE}projector"), layers.get(f"{_TYPE}adapter")
    problem = ""
    if adapter is not None:
        problem = f"{blob}: {names[0]} is this model with an adapter: --model {blob} --lora {_blob(store, adapter)}"
    config = OllamaConfig()
    if manifest.config.digest:
        with suppress(_BadManifestError):  # the model file has most of it too
            config = _read(_blob(store, manifest.config), store, OllamaConfig)
    return StoredModel(
        source="Ollama",
        files=(blob,),
        names=names,
        problem=problem,
        projector=None if projector is None else _blob(store, projector),
        size_bytes=weights.size or None,
        parameters=config.model_type[:16],
        quantisation=config.file_type[:16],
    )


def _gguf_manifest(store: Path, manifest: OllamaManifest) -> OllamaManifest:
    """Return ``manifest``, or for a list the first one with a GGUF file."""
    for each in manifest.manifests:
        found = _read(_blob(store, OllamaLayer(digest=each.digest)), store, OllamaManifest) if each.digest else each
        if any(layer.media_type == f"{_TYPE}model" for layer in found.layers):
            return found
    return manifest


def _blob(store: Path, layer: OllamaLayer) -> Path:
    if not _DIGEST.fullmatch(layer.digest):
        raise _BadManifestError(f"{layer.digest[:80]!r} is not the hash of a blob")
    return store / "blobs" / layer.digest.replace(":", "-").lower()


def _read(path: Path, store: Path, kind: type[_Json]) -> _Json:
    """Read the small JSON file ``path``, which must be in ``store``."""
    try:
        own = [os.path.realpath(store / folder) for folder in ("", "blobs", *_MANIFESTS)]  # each may be on its own disk
        if not any(Path(os.path.realpath(path)).is_relative_to(folder) for folder in own):
            raise _BadManifestError(f"{path.name} is a link to a place outside the store")
        if not path.is_file():
            raise _BadManifestError(f"{path.name} is not a file")
        with path.open("rb") as file:
            data = file.read(MAX_MANIFEST_BYTES + 1)
    except OSError as exc:
        raise _BadManifestError(f"{path.name} cannot be read: {exc.strerror or exc}") from exc
    if len(data) > MAX_MANIFEST_BYTES:
        raise _BadManifestError(f"{path.name} is larger than {MAX_MANIFEST_BYTES >> 20} MiB")
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.MsgspecError, RecursionError) as exc:
        raise _BadManifestError(f"{path.name} is not as Ollama writes it: {exc}") from exc
