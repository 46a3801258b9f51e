"""A model that is loaded or being loaded: its processes, and the backend for its requests."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Protocol

from primad.api.answering.backend import Backend
from primad.api.answering.models import ModelForecast
from primad.daemon.embedding import EmbeddingService
from primad.errors import ClusterError, PlanError
from primad.head.daemon import HeadDaemon
from primad.head.model.checked import CheckedModel
from primad.head.model.service import Service
from primad.head.model.text_service import TextService
from primad.head.offer.without_model import WithoutModel
from primad.head.rings.backend import RingBackend
from primad.head.rings.taken import Taken
from primad.planning.forecast import Forecast


class HeldModel(Protocol):
    """A model, with everything that it occupies."""

    @property
    def backend(self) -> Backend:
        """The backend for its requests; an embedding model's is ``Embeddings`` as well."""

    @property
    def detail(self) -> str:
        """Its state, in a line."""

    @property
    def progress(self) -> float | None:
        """The share of it that is loaded, if known."""

    @property
    def expected_s(self) -> float | None:
        """Forecast of the seconds until it is loaded, if known."""

    @property
    def moves(self) -> bool:
        """Whether devices lacked layers of it when it was loaded."""

    def taken(self) -> Mapping[str, Taken]:
        """Return what it takes of each device."""

    def forecast(self) -> ModelForecast | None:
        """Return its forecast; None if not known."""

    async def load(self) -> None:
        """Load it, and return once it can serve requests. Raises ``PrimadError``."""

    def stop(self, reason: str) -> None:
        """End its requests with an error."""

    async def end(self) -> None:
        """Unload it; afterwards no device holds anything of it."""


class RingModel:
    """A model in rings of ``head``. A request that has not begun after ``max_wait_s`` is refused; ``lost`` is called if
    no ring will serve the model any more."""

    def __init__(
        self, head: HeadDaemon, checked: CheckedModel, max_wait_s: float | None, lost: Callable[[], None]
    ) -> None:
        self._head, self._lost = head, lost
        service = checked.service(head.node)
        self._texts = TextService(str(service.model.file), checked.template)
        self.backend = RingBackend(texts=self._texts, max_wait_s=max_wait_s)
        self.serving = head.begin(service, self.backend)
        self.serving.rings.gave_up = lost  # the next request loads the file again, and may claim others' memory
        self._running: asyncio.Task[None] | None = None

    @property
    def detail(self) -> str:
        return self.backend.health().detail

    @property
    def progress(self) -> float | None:
        return self.serving.progress

    @property
    def expected_s(self) -> float | None:
        return self.serving.rings.expected_s

    @property
    def moves(self) -> bool:
        return self.serving.rings.moves

    def taken(self) -> Mapping[str, Taken]:
        return self.serving.taken()

    def forecast(self) -> ModelForecast | None:
        offered = self.serving.rings.offered_forecast
        return None if offered is None else described(offered, self.serving.service)

    async def load(self) -> None:
        running = self._running = asyncio.create_task(self._head.serve(self.serving))
        ready = asyncio.create_task(self.serving.rings.serves.wait())
        try:
            await asyncio.wait([running, ready], return_when=asyncio.FIRST_COMPLETED)
        finally:
            ready.cancel()
        if running.done():
            running.result()
            raise ClusterError("its rings ended")
        running.add_done_callback(self._ended)

    def _ended(self, running: asyncio.Task[None]) -> None:
        if not running.cancelled():
            self.backend.fail(str(running.exception() or "its rings ended"))
            self._lost()

    def stop(self, reason: str) -> None:
        self.backend.fail(reason)

    async def end(self) -> None:
        self.backend.fail("the model is unloaded")
        if self._running is not None:
            self._running.cancel()
            await asyncio.wait([self._running])
        await self._head.end(self.serving)
        await self._texts.close()


class EmbeddingModel(WithoutModel):
    """The embedding model of ``service``, in a process of ``device``, which is this one. It is ``Embeddings`` as
    well."""

    def __init__(self, service: EmbeddingService, without: WithoutModel, device: str) -> None:
        super().__init__(without.texts, without.health, dict)
        self._service, self._device = service, device
        self._bytes = 0
        self.name, self.created = service.name, service.created

    @property
    def backend(self) -> Backend:
        return self

    @property
    def detail(self) -> str:
        return "serves embeddings" if self._bytes else "loading"

    @property
    def progress(self) -> float | None:
        return None

    @property
    def expected_s(self) -> float | None:
        return None

    @property
    def moves(self) -> bool:
        return False

    @property
    def width(self) -> int:
        """As in ``Embeddings``."""
        return self._service.width

    @property
    def max_text_tokens(self) -> int:
        """As in ``Embeddings``."""
        return self._service.max_text_tokens

    def taken(self) -> Mapping[str, Taken]:
        return {self._device: Taken(ram_bytes=self._bytes)} if self._bytes else {}

    async def embed(
        self, texts: Sequence[str | list[int]], called: Callable[[int], str], *, cuts: bool = False, owner: str = ""
    ) -> tuple[list[bytes], int]:
        """As in ``Embeddings``."""
        return await self._service.embed(texts, called, cuts=cuts, owner=owner)

    def forecast(self) -> ModelForecast | None:
        return None

    async def load(self) -> None:
        self._bytes = (await self._service.start()).bytes

    def stop(self, reason: str) -> None:
        del reason  # its requests take moments

    async def end(self) -> None:
        await self._service.close()


def described(forecast: Forecast, service: Service, goes: Collection[str] = ()) -> ModelForecast:
    """Return ``forecast`` for clients, once the models ``goes`` are unloaded. Raises ``PlanError`` for a plan by
    hand."""
    prediction = forecast.prediction
    if prediction is None:
        raise PlanError("its windows are set by hand, so there is no forecast")
    return ModelForecast(
        tokens_per_s=1 / prediction.tpot_s,
        ttft_ms=prediction.ttft_s * 1e3,
        prompt_tokens=service.workload.prompt_tokens,
        context_tokens=forecast.context_tokens,
        devices=tuple(forecast.plan.devices),
        streamed_bytes=sum(each.streamed_bytes for each in forecast.assignments.values()),
        goes=tuple(sorted(goes)),
    )
