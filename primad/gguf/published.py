"""Public files of well-known models: their names on the hub, their sizes, and other names for them.

Ollama uses different names, such as ``qwen3:8b``. They state family and size, as the built-in shapes do.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Final

from halda import LayerProfile, ModelProfile
from primad.gguf.shapes import popular_shapes, read_shape, shape

QUANTISATION: Final = "q4k"
"""The quantisation of shapes that is closest to the files."""
_OLLAMA: Final = re.compile(r"(?:[\w.-]+/)*(?P<family>[a-z][\w.-]*?)(?::(?P<tag>[\w.-]+))?", re.IGNORECASE)


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedModel:
    """A file on the hub: its model's ``shape``, what ``--model`` takes, and its size."""

    shape: str
    title: str
    hub: str
    file_bytes: int


def published_models() -> list[PublishedModel]:
    """The known files, smallest first."""
    found = [(name, read_shape(name)) for name in popular_shapes()]
    models = [
        PublishedModel(shape=name, title=each.name, hub=each.hub, file_bytes=each.file_bytes)
        for name, each in found
        if each.hub
    ]
    return sorted(models, key=lambda model: model.file_bytes)


def published_file(name: str) -> PublishedModel | None:
    """The file that the shape ``name``, quantisation included, describes."""
    found = {f"{model.shape}-{QUANTISATION}": model for model in published_models()}
    return found.get(name)


def published_profile(model: PublishedModel) -> ModelProfile:
    """The file's profile for a plan: its shape, with layers scaled to the file's size."""
    profile = shape(f"{model.shape}-{QUANTISATION}")
    layers_bytes = sum(layer.size_bytes for layer in profile.layers)
    share = (model.file_bytes - profile.size_bytes + layers_bytes) / layers_bytes
    return replace(profile, layers=tuple(_grown(layer, share) for layer in profile.layers))


def _grown(layer: LayerProfile, share: float) -> LayerProfile:
    return replace(
        layer,
        bytes_by_type={kind: round(size * share) for kind, size in layer.bytes_by_type.items()},
        expert_bytes_by_type={kind: round(size * share) for kind, size in layer.expert_bytes_by_type.items()},
    )


def meant(text: str) -> list[PublishedModel]:
    """The models that ``text`` may mean, in Ollama's form: family, family:size or more of a tag."""
    match = _OLLAMA.fullmatch(text)
    if match is None:
        return []
    tag = (match["tag"] or "").lower().removeprefix("latest")
    asked = f"{match['family'].lower()}-{tag}".rstrip("-")
    return [
        model
        for model in published_models()
        if any(
            asked == name or asked.startswith(f"{name}-") or name.startswith(f"{asked}-")
            for name in (model.shape, *read_shape(model.shape).also)
        )
    ]
