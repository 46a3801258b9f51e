"""Opens the models that a head offers: checks what they need, and plans them alongside those that are loaded."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Sequence

from primad.api.answering.models import ModelForecast
from primad.daemon.embedding import EmbeddingService
from primad.errors import ConfigError
from primad.head.daemon import HeadDaemon
from primad.head.model.checked import CheckedModel
from primad.head.offer.held import EmbeddingModel, HeldModel, RingModel, described
from primad.head.offer.room import who_goes
from primad.head.offer.without_model import WithoutModel
from primad.head.rings.planner import Planner
from primad.library.library import LibraryModel
from primad.planning.forecast import Forecast
from primad.settings.quantities import show_bytes
from primad.system.memory import memory


class ModelOpening:
    """Makes models for ``head``. ``check`` opens a file with its settings; ``embedder`` returns the service of an
    embedding model; ``bring`` is called before a model is loaded. Requests that have not begun after ``max_wait_s`` are
    refused."""

    def __init__(
        self,
        head: HeadDaemon,
        without: WithoutModel,
        *,
        check: Callable[[LibraryModel], CheckedModel],
        embedder: Callable[[LibraryModel], EmbeddingService],
        bring: Callable[[LibraryModel], None] = lambda _: None,
        max_wait_s: float | None,
    ) -> None:
        self._head, self._without, self._check, self._embedder = head, without, check, embedder
        self._bring, self._max_wait_s = bring, max_wait_s
        self._checked: dict[str, CheckedModel] = {}

    async def who_goes(self, model: LibraryModel, idle: Sequence[str], busy: Sequence[str]) -> frozenset[str]:
        """As in ``Opens``."""
        candidates = await self._head.candidates()
        if model.embeds:
            return self._room_here(model, idle, busy)
        await asyncio.to_thread(self._bring, model)
        checked = self._checked[model.name] = await asyncio.to_thread(self._check, model)
        if checked.options.run.windows is not None or not (idle or busy):
            return frozenset()
        planner = Planner(checked.service(self._head.node), self._head.pool, model.name)

        async def objective_s(gone: Collection[str]) -> float:
            return (await planner.beside(candidates, gone))[1]

        return await who_goes(objective_s, idle, busy)

    async def forecast(self, model: LibraryModel, idle: Sequence[str], busy: Sequence[str]) -> ModelForecast:
        """As in ``Opens``."""
        if model.embeds:
            raise ConfigError(f"{model.name} makes embeddings, on the CPU of {self._head.node.config.name}")
        candidates = await self._head.candidates()
        service = (await asyncio.to_thread(self._check, model)).service(self._head.node)
        planner = Planner(service, self._head.pool, model.name)
        planned: dict[frozenset[str], Forecast] = {}

        async def objective_s(gone: Collection[str]) -> float:
            forecast, found_s = await planner.beside(candidates, gone, background=True)
            planned[frozenset(gone)] = forecast
            return found_s

        goes = await who_goes(objective_s, idle, busy)
        return described(planned[goes], service, goes)

    def _room_here(self, model: LibraryModel, idle: Sequence[str], busy: Sequence[str]) -> frozenset[str]:
        """Return the models to unload for a model that only this device loads."""
        free, loaded = memory().available_bytes, (*idle, *busy)
        for number in range(len(loaded) + 1):
            if model.size_bytes <= free:
                return frozenset(loaded[:number])
            if number < len(loaded):
                free += self._head.taken_here(loaded[number])
        raise ConfigError(
            f"{model.name} has {show_bytes(model.size_bytes)} of weights, and {show_bytes(free)} of memory can be free "
            "here; choose a smaller model"
        )

    def begin(self, model: LibraryModel, changed: Callable[[], None], lost: Callable[[], None]) -> HeldModel:
        """As in ``Opens``."""
        if model.embeds:
            return EmbeddingModel(self._embedder(model), self._without, self._head.node.config.name)
        made = RingModel(self._head, self._checked.pop(model.name), self._max_wait_s, lost)
        made.serving.changed = changed
        return made
