"""The running server for all dialects: the served model, bodies, generated responses, metrics."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import replace
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
from primad.api.answering.timings import CompletionClock
from primad.api.http.access import caller, charged
from primad.api.http.connection import MessageStream, read_json, while_connected
from primad.api.http.errors import RETRY_AFTER_S
from primad.api.http.framing import Framing
from primad.api.http.metrics import Metrics
from primad.errors import RequestError, RingError
from primad.settings.timings import ApiTimings
from primad.system.shares import Shares

MAX_LISTED: Final = 1 << 21
"""Log-probabilities of responses that do not stream; each takes some 200 bytes until sent. Callers share them."""


class Endpoint:
    """The server as a dialect sees it. Its only state are counters."""

    def __init__(
        self,
        backend: Backend,
        metrics: Metrics,
        timings: ApiTimings,
        names: ModelNames,
        embeddings: Embeddings | None = None,
    ) -> None:
        self.backend, self.embeddings = backend, embeddings
        self.any_model = names.any_model
        self.metrics, self.timings, self._names = metrics, timings, names
        self.listed = Shares(MAX_LISTED)

    def model(self) -> ServedModel | None:
        """The served model under all its names, or None until it is known."""
        served = self.backend.model()
        return None if served is None else replace(served, names=self._names)

    @property
    def answers_open(self) -> int:
        """The number of running and waiting requests."""
        return self.metrics.answers_open

    def serving(self, request: Request) -> Serving:
        """The model for ``request``, if it is available. Raises ``RingError`` otherwise."""
        return Serving(self, request, self.backend, self.model())

    async def prepare(self, request: Request, preparation: Preparation[Prepared]) -> Prepared:
        """The result of ``preparation``, which needs no model, for the body of ``request``; raises as ``Serving`` does."""
        return await self.prepare_with(self.backend, request, preparation, None)

    async def prepare_with(
        self, backend: Backend, request: Request, preparation: Preparation[Prepared], served: ModelSettings | None
    ) -> Prepared:
        """As above, by ``backend`` for the model ``served``."""
        body = await read_json(request, self.timings.body_timeout_s)
        return await while_connected(request.receive, backend.prepare(preparation, body, served, owner=caller()))

    def stream(self, messages: AsyncGenerator[msgspec.Struct, None], framing: Framing) -> Response:
        """``messages`` as they come; an error before the first one becomes an ordinary response."""
        return MessageStream(messages, framing, self.timings)


class Serving:
    """The model ``served`` for one request, and its work. Raises ``RingError`` if requests cannot be taken."""

    def __init__(self, endpoint: Endpoint, request: Request, backend: Backend, served: ServedModel | None) -> None:
        health = backend.health()
        if not health.taken or served is None:
            raise RingError(f"not serving yet: {health.detail}")
        self.served = served
        self._endpoint, self._request, self._backend = endpoint, request, backend

    async def prepare(self, preparation: Preparation[Prepared]) -> Prepared:
        """The result of ``preparation`` for the body of the request and the model.

        Raises like ``Backend.prepare``, and ``ClientDisconnect`` if the client left.
        """
        settings = self.served.settings
        return await self._endpoint.prepare_with(self._backend, self._request, preparation, settings)

    def write(self, job: Job, choice: Choice) -> AsyncGenerator[Written, None]:
        """The parts of ``choice``, counted in the metrics; close it to stop."""
        written = write(self._backend, self.served.vocabulary, job, choice, owner=caller(), clock=time.monotonic)
        if job.logprobs is not None:
            written = _in_turns(written)
        return self._endpoint.metrics.metered(charged(written, len(choice.prompt)), len(choice.prompt))

    async def whole(self, job: Job, clocks: Sequence[CompletionClock] = ()) -> list[WrittenChoice]:
        """All complete choices of ``job``, each observed by its clock, or all by one; it stops if the client leaves."""
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
        """Count more log-probabilities of ``who``. Raises ``RequestError`` if there are too many."""
        if not self._endpoint.listed.has_room(who, logprobs):
            raise RequestError(
                "your running requests have too many log-probabilities together; request fewer, or use "
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
    """``body`` as JSON; a 503 has Retry-After."""
    retry = {"retry-after": str(RETRY_AFTER_S)} if status == 503 else {}
    return Response(msgspec.json.encode(body), status_code=status, headers=retry, media_type="application/json")
