"""The backend of a head that offers several models, for requests that name none."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from typing import Any

from primad.api.answering.backend import Health, ModelSettings, Preparation, Prepared, ServedModel
from primad.errors import RingError
from primad.head.model.text_service import TextService
from primad.ring.messages import Generate, GenerationEvent


class WithoutModel:
    """Prepares requests that need no model, and requests for ``ANY_MODEL``, with ``texts``, which has no vocabulary.
    ``health_of`` returns the head's state, ``around`` the part of the status that does not depend on a ring."""

    def __init__(
        self, texts: TextService, health_of: Callable[[], Health], around: Callable[[], dict[str, Any]]
    ) -> None:
        self.texts, self._health_of, self._around = texts, health_of, around

    def health(self) -> Health:
        return self._health_of()

    def model(self) -> ServedModel | None:
        return None

    async def prepare(
        self, preparation: Preparation[Prepared], body: bytes, served: ModelSettings | None, *, owner: str = ""
    ) -> Prepared:
        return await self.texts.prepare(preparation, body, served, owner=owner)

    async def status(self) -> dict[str, Any]:
        return self._around()

    async def generate(self, asked: Generate, *, may_expire: bool = True) -> AsyncGenerator[GenerationEvent, None]:
        for event in _refuse(asked):
            yield event


def _refuse(_: Generate) -> list[GenerationEvent]:
    raise RingError("no model is loaded; name one")
