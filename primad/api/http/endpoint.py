"""The running server for all dialects: the served model, bodies, generated responses, metrics."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from primad.api.answering.backend import (
    Backend,
    Embeddings,
    ModelNames,
    ModelSettings,
    Preparation,
    Prepared,
    ServedModel,
)
from primad.api.answering.choices import together
from primad.api.answering.generation import MAX_TOKENS_AT_ONCE, Written, WrittenChoice, write
from primad.api.answering.job import Choice, Job
from primad.api.answering.models import Models
from primad.api.answering.timings import CompletionClock
from primad.api.http.access import caller, charged
from primad.api.http.connection import (
    MAX_BODY_BYTES,
    MAX_SEEN_BODY_BYTES,
    MessageStream,
    read_json,
    while_connected,
)
from primad.api.http.errors import RETRY_AFTER_S
from primad.api.http.framing import Framing
from primad.api.http.metrics import Metrics
from primad.api.http.offered import find_offered, state_line
from primad.errors import RequestError, RingError
from primad.settings.timings import ApiTimings
from primad.system.shares import Shares

MAX_LISTED: Final = 1 << 21
"""Limit of log-probabilities of responses that do not stream; each takes some 200 bytes until sent. Callers share it.
"""

CHOSEN: Final = "primad.chosen"
"""The scope's key for the ``Chosen`` model of a request, where there are several models."""


@dataclass(frozen=True, slots=True)
class Chosen:
    """The ``backend`` of the model that a request names, and the request's ``body``, which was read to find the name;
    ``embeddings`` if it is an embedding model."""

    backend: Backend
    body: bytes
    embeddings: Embeddings | None = None


class Endpoint:
    """The server as a dialect sees it. Its only state is its counters and the name of the model used last.

    ``models`` are the models that requests choose among; None if there is only one, which is ``backend``'s. With
    several, ``backend`` has no model and prepares requests that need none. ``check_owner`` raises ``RequestError``
    (403) for clients that may not download or delete models.
    """

    def __init__(
        self,
        backend: Backend,
        metrics: Metrics,
        timings: ApiTimings,
        names: ModelNames,
        embeddings: Embeddings | None = None,
        models: Models | None = None,
        check_owner: Callable[[Request], None] = lambda _: None,
    ) -> None:
        self.backend, self.embeddings, self.models = backend, embeddings, models
        self.any_model, self.check_owner = names.any_model, check_owner
        self.ended = asyncio.Event()
        """Set when the server shuts down, which ends every endless stream."""
        self._last = ""
        self.metrics, self.timings, self._names = metrics, timings, names
        self.listed = Shares(MAX_LISTED)

    def model(self) -> ServedModel | None:
        """Return the served model under all its names, or None until it is known."""
        served = self.backend.model()
        return None if served is None else replace(served, names=self._names)

    @property
    def max_body_bytes(self) -> int:
        """The largest body of a request to a model."""
        served = self.backend.model()
        sees = served is not None and (served.sees or served.hears)
        sees = sees or (self.models is not None and any(each.sees or each.hears for each in self.models.offered()))
        return MAX_SEEN_BODY_BYTES if sees else MAX_BODY_BYTES

    @property
    def answers_open(self) -> int:
        """The number of running and waiting requests."""
        return self.metrics.answers_open

    def serving(self, request: Request) -> ModelEndpoint:
        """Return the model for ``request``, if it is available. Raises ``RingError`` otherwise."""
        chosen: Chosen | None = request.scope.get(CHOSEN)
        return (
            ModelEndpoint(self, request, self.backend, self.model())
            if chosen is None
            else self._of(request, chosen.backend)
        )

    def _of(self, request: Request, backend: Backend) -> ModelEndpoint:
        served = backend.model()  # the request may use any of its names, or a part of one
        named = None if served is None else replace(served, names=replace(served.names, any_model=True))
        return ModelEndpoint(self, request, backend, named)

    def embeddings_for(self, request: Request) -> Embeddings | None:
        """Return the embedding model for ``request``, None if there is none."""
        chosen: Chosen | None = request.scope.get(CHOSEN)
        return self.embeddings if chosen is None else chosen.embeddings

    def used(self, backend: Backend) -> None:
        """Note that a request uses ``backend``, one of the loaded models."""
        assert self.models is not None, "there are several models"
        self._last = next((name for name, each in self.models.loaded().items() if each is backend), self._last)

    def shown(self, name: str = "") -> Backend:
        """Return the backend of the model ``name``. Without a name: of the model used last, else of any loaded model,
        else the backend without a model. Raises ``RequestError`` if ``name`` is not loaded."""
        loaded = {} if self.models is None else self.models.loaded()
        if not name or self.models is None:
            return loaded.get(self._last) or next(iter(loaded.values()), self.backend)
        found = find_offered(name, self.models.offered())
        if found.id not in loaded:
            raise RequestError(
                f"{state_line(found)}; POST /models/load loads it, and so does any request to generate",
                code="model_not_loaded",
                param="model",
            )
        return loaded[found.id]

    def looking(self, request: Request) -> ModelEndpoint | None:
        """Return the model that ``request`` inspects, without loading it: the one named in its query, or the one used
        last; None if no model is loaded. Raises ``RequestError`` if the named one is not loaded."""
        if self.models is None:
            return self.serving(request)
        name = request.query_params.get("model") or ""
        return self._of(request, self.shown(name)) if name or self.models.loaded() else None

    async def prepare(self, request: Request, preparation: Preparation[Prepared]) -> Prepared:
        """Return the result of ``preparation``, which needs no model, for the body of ``request``; raises like
        ``ModelEndpoint.prepare``."""
        chosen: Chosen | None = request.scope.get(CHOSEN)
        return await self.prepare_with(self.shown() if chosen is None else chosen.backend, request, preparation, None)

    async def prepare_with(
        self, backend: Backend, request: Request, preparation: Preparation[Prepared], served: ModelSettings | None
    ) -> Prepared:
        """As ``prepare``, with ``backend`` for the model ``served``."""
        chosen: Chosen | None = request.scope.get(CHOSEN)
        timeout_s, max_bytes = self.timings.body_timeout_s, self.max_body_bytes
        body = await read_json(request, timeout_s, max_bytes=max_bytes) if chosen is None else chosen.body
        return await while_connected(request.receive, backend.prepare(preparation, body, served, owner=caller()))

    def stream(self, messages: AsyncGenerator[msgspec.Struct, None], framing: Framing) -> Response:
        """Stream ``messages`` as they come; an error before the first one becomes an ordinary response."""
        return MessageStream(messages, framing, self.timings)


class ModelEndpoint:
    """The model ``served`` for one request, and its generations; ``model`` is the same model under its own names.

    Raises ``RingError`` if requests cannot be taken.
    """

    def __init__(self, endpoint: Endpoint, request: Request, backend: Backend, served: ServedModel | None) -> None:
        health = backend.health()
        if not health.taken or served is None:
            raise RingError(f"not serving yet: {health.detail}")
        self.served, self.model = served, backend.model()
        self._endpoint, self._request, self._backend = endpoint, request, backend

    async def prepare(self, preparation: Preparation[Prepared]) -> Prepared:
        """Return the result of ``preparation`` for the body of the request and the model.

        Raises like ``Backend.prepare``, and ``ClientDisconnect`` if the client left.
        """
        settings = self.served.settings
        return await self._endpoint.prepare_with(self._backend, self._request, preparation, settings)

    def write(self, job: Job, choice: Choice) -> AsyncGenerator[Written, None]:
        """Yield the parts of ``choice``, counted in the metrics; close the generator to stop."""
        written = write(self._backend, self.served.vocabulary, job, choice, owner=caller(), clock=time.monotonic)
        if job.logprobs is not None:
            written = _in_turns(written)
        return self._endpoint.metrics.metered(charged(written, len(choice.prompt)), len(choice.prompt), self.served.id)

    async def whole(self, job: Job, clocks: Sequence[CompletionClock] = ()) -> list[WrittenChoice]:
        """Return all complete choices of ``job``; stop if the client leaves. Each choice has a clock in ``clocks``, or
        all share the last one."""
        return await while_connected(self._request.receive, self._completed(job, clocks))

    async def _completed(self, job: Job, clocks: Sequence[CompletionClock]) -> list[WrittenChoice]:
        parts: list[list[Written]] = [[] for _ in job.choices]
        begins = [partial(self.write, job, choice) for choice in job.choices]
        who, listed = caller(), 0
        try:
            async with aclosing(together(begins, self.served.sequences)) as written:
                async for place, part in written:
                    parts[place].append(part)
                    if job.logprobs is not None and part.tokens:
                        more = len(part.tokens) * (1 + job.logprobs)
                        self._list(who, more)
                        listed += more
                    if clocks:
                        clocks[min(place, len(clocks) - 1)].count(part.sampled, part.cached, time.perf_counter())
        finally:
            self._endpoint.listed.give_back(who, listed)
        return [WrittenChoice.of(choice, each) for choice, each in zip(job.choices, parts, strict=True)]

    def _list(self, who: str, logprobs: int) -> None:
        """Count more log-probabilities of the caller ``who``. Raises ``RequestError`` if there are too many."""
        if not self._endpoint.listed.has_room(who, logprobs):
            raise RequestError(
                "your running requests together have too many log-probabilities; request fewer, or use "
                "stream, which sends them as they come",
                code="too_many_logprobs",
                param="logprobs",
            )
        self._endpoint.listed.take(who, logprobs)


async def _in_turns(written: AsyncGenerator[Written, None]) -> AsyncGenerator[Written, None]:
    async with aclosing(written):
        async for part in written:
            yield part
            if len(part.tokens) >= MAX_TOKENS_AT_ONCE:
                await asyncio.sleep(0)


def json_response(body: object, status: int = 200) -> Response:
    """Return ``body`` as JSON; a 503 has Retry-After."""
    retry = {"retry-after": str(RETRY_AFTER_S)} if status == 503 else {}
    return Response(msgspec.json.encode(body), status_code=status, headers=retry, media_type="application/json")
