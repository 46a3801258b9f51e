"""Offered models in Ollama's form, loaded or not. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from primad.api.answering.backend import ServedModel
from primad.api.answering.capabilities import capabilities_of
from primad.api.answering.models import OfferedModel
from primad.api.dialects.ollama.responses import NEVER, iso, model_details, model_entry, shown, tagged


def entry(model: OfferedModel) -> dict[str, Any]:
    """Return ``model`` as an entry of ``GET /api/tags``."""
    size = model.size_bytes
    return model_entry(tagged(model.id), model.created, size, f"{model.id} {size}", _details(model))


def loaded_entry(model: OfferedModel, served: ServedModel | None) -> dict[str, Any]:
    """Return ``model`` as an entry of ``GET /api/ps``. Its memory is the sum of all devices, ``size_vram`` the part on
    GPUs."""
    return entry(model) | {
        "size": sum(model.memory_bytes.values()) or model.size_bytes,
        "expires_at": NEVER if model.expires_at_s is None else iso(model.expires_at_s),
        "size_vram": model.vram_bytes,
        "context_length": 0 if served is None else served.context_tokens,
    }


def shown_model(model: OfferedModel, served: ServedModel | None) -> dict[str, Any]:
    """``POST /api/show``. Only a loaded model, given as ``served``, has its chat template here."""
    if served is not None:
        return shown(served) | {"details": _details(model)}
    architecture = model.architecture or "llama"
    context = {} if model.trained_context_tokens is None else {"context_length": model.trained_context_tokens}
    return {
        "modelfile": "",
        "parameters": "",
        "template": "",
        "details": _details(model),
        "model_info": {"general.architecture": architecture, "general.basename": model.id}
        | {f"{architecture}.{name}": value for name, value in context.items()},
        "capabilities": capabilities_of(model, None),
        "modified_at": iso(model.created),
    }


def listed(models: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return a list of entries."""
    return {"models": list(models)}


def _details(model: OfferedModel) -> dict[str, Any]:
    return model_details(model.architecture, model.parameters, model.quantisation)
