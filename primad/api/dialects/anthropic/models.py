"""Models in Anthropic's form, for clients that send an API version. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Final, Literal

import msgspec
from msgspec import UnsetType

from primad.api.dialects.openai.shapes import Model

ANTHROPIC: Final = "anthropic-version"
"""The header of Anthropic's clients."""


class AnthropicModel(msgspec.Struct, frozen=True, kw_only=True):
    """The served model; ``max_input_tokens`` is its context."""

    type: Literal["model"] = "model"
    id: str
    display_name: str
    created_at: str
    max_input_tokens: int | UnsetType


class AnthropicModelList(msgspec.Struct, frozen=True, kw_only=True):
    """``GET /v1/models``, all on one page."""

    data: list[AnthropicModel]
    has_more: bool = False
    first_id: str | None
    last_id: str | None


def model_entry(model: Model) -> AnthropicModel:
    """Return ``model`` in Anthropic's form."""
    created = datetime.fromtimestamp(model.created, UTC).isoformat().replace("+00:00", "Z")
    return AnthropicModel(id=model.id, display_name=model.id, created_at=created, max_input_tokens=model.max_model_len)


def model_list(models: Sequence[Model]) -> AnthropicModelList:
    """Return ``models`` in Anthropic's form."""
    data = [model_entry(model) for model in models]
    return AnthropicModelList(data=data, first_id=data[0].id if data else None, last_id=data[-1].id if data else None)
