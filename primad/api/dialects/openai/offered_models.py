"""Offered models, loaded or not, as entries of ``/v1/models`` with the fields of llama-server's router. Pure."""

from __future__ import annotations

from typing import Any

from msgspec import UNSET

from primad.api.answering.backend import ServedModel
from primad.api.answering.capabilities import capabilities_of
from primad.api.answering.models import ModelState, OfferedModel
from primad.api.dialects.openai.shapes import LoadProgress, Model, ModelMeta


def offered_entry(model: OfferedModel, served: ServedModel | None) -> Model:
    """Return the entry of ``model``, with its context as ``served`` if it is loaded, else as trained if that is known."""
    trained = UNSET if model.trained_context_tokens is None else model.trained_context_tokens
    context = UNSET if served is None else served.context_tokens
    takes = model if served is None else served
    sees, hears = takes.sees, takes.hears
    return Model(
        id=model.id,
        created=model.created,
        owned_by="primad",
        max_model_len=trained if context is UNSET else context,
        meta=ModelMeta(n_ctx=context, n_ctx_train=trained, size=model.size_bytes or UNSET),
        aliases=list(model.aliases),
        status=router_status(model),
        architecture=modalities(sees=sees, hears=hears, makes="embeddings" if model.embeds else "text"),
        capabilities=[*capabilities_of(model, served), *(["multimodal"] if sees or hears else [])],
    )


def modalities(*, sees: bool, hears: bool, makes: str = "text") -> dict[str, list[str]]:
    """Return a model's inputs and outputs in llama-server's router's form; its word for "vision" is "multimodal"."""
    takes = ["text", *(["image"] if sees else []), *(["audio"] if hears else [])]
    return {"input_modalities": takes, "output_modalities": [makes]}


def router_status(model: OfferedModel) -> dict[str, Any]:
    """Return the state in llama-server's router's form: a failed model is unloaded. Unknown values are missing."""
    failed = model.state is ModelState.FAILED
    more = {
        "failed": failed or None,
        "detail": model.detail or None,
        "progress": model.progress,
        "expected_s": model.expected_s,
        "expires_at": model.expires_at_s,
        "pinned": model.pinned or None,
    }
    value = ModelState.UNLOADED if failed else model.state
    return {"value": value.value} | {name: each for name, each in more.items() if each is not None}


def load_progress(model: OfferedModel) -> LoadProgress:
    """Return the loading progress of ``model``, for a client that waits for it."""
    return LoadProgress(status=model.state, value=model.progress, expected_s=model.expected_s)
