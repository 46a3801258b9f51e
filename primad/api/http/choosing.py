"""Gives each request the model that it names, where several models are offered.

The model is loaded first if necessary and stays loaded until the response has ended. Meanwhile a stream reports the
loading progress to its client; other requests wait. A client that disconnects stops waiting.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import replace
from functools import wraps
from typing import Any, Final, cast

from msgspec import Raw
from starlette.requests import Request
from starlette.responses import Response

from primad.api.answering.any_model import ANY_MODEL
from primad.api.answering.backend import Backend, Embeddings, ModelSettings, Preparation, Prepared, ServedModel
from primad.api.answering.models import Models, OfferedModel, Waiting
from primad.api.answering.pictures import PicturesWantedError
from primad.api.http.access import caller
from primad.api.http.connection import MessageStream, StreamNews, read_json, while_connected
from primad.api.http.dialect import Route
from primad.api.http.endpoint import CHOSEN, Chosen, Endpoint
from primad.api.http.offered import check_writer, find_embedder, find_offered, is_offered
from primad.api.http.wanted import Choosing, WantedModel, read_wanted
from primad.engine.pictures.headers import check_sent
from primad.errors import RequestError

EXPECTED: Final = "x-primad-expected-s"
"""The header of a stream with the seconds that its model takes to load, if they can be forecast."""
_UNREADABLE: Final = "the body must be strict JSON, an object whose 'model' is a text of at most 512 characters"
RouteHandler = Callable[[Request], Awaitable[Response]]


class ModelChoice:
    """Gives the requests of routes the model they want, one of ``models``."""

    def __init__(self, models: Models, endpoint: Endpoint) -> None:
        self._models, self._endpoint = models, endpoint

    def of(self, route: Route) -> Route:
        """Return ``route`` with a handler that gets the model of each request."""
        return route if route.chooses is None else replace(route, handler=self._chosen(route.handler, route.chooses))

    def _chosen(self, handler: RouteHandler, choosing: Choosing) -> RouteHandler:
        @wraps(handler)
        async def choose(request: Request) -> Response:
            timeout_s, max_bytes = self._endpoint.timings.body_timeout_s, self._endpoint.max_body_bytes
            body = await read_json(request, timeout_s, max_bytes=max_bytes)
            wants = read_wanted(body, choosing, request.query_params.get("model"))
            if not wants.is_readable:
                await self._check(request, handler, body)
                raise RequestError(_UNREADABLE)
            if choosing.instead is not None and (response := await choosing.instead(request, wants)) is not None:
                return response
            if choosing.embeds:
                return await self._embed(request, handler, wants, body)
            name, is_loaded = self._named(wants)
            if not is_loaded:
                await self._check(request, handler, body)
            if wants.streams and choosing.framing is not None:
                news = StreamNews()
                messages = self._streamed(request, handler, choosing, replace(wants, name=name), body, news)
                return MessageStream(messages, choosing.framing(wants), self._endpoint.timings, news)
            async with AsyncExitStack() as stack:
                using = stack.enter_async_context(self._use(replace(wants, name=name)))
                request.scope[CHOSEN] = Chosen(await while_connected(request.receive, using), body)
                response = await handler(request)
            assert not isinstance(response, MessageStream), "a stream lasts longer than its model is held here"
            return response

        return choose

    async def _streamed(
        self,
        request: Request,
        handler: RouteHandler,
        choosing: Choosing,
        wants: WantedModel,
        body: bytes,
        news: StreamNews,
    ) -> AsyncGenerator[Any, None]:
        def waiting(model: OfferedModel) -> None:
            if model.expected_s is not None:
                news.headers = {EXPECTED: f"{model.expected_s:.0f}"}
            news.tell(choosing.news(wants, model))

        async with self._use(wants, waiting) as backend:
            news.end()
            request.scope[CHOSEN] = Chosen(backend, body)
            response = await handler(request)
            if isinstance(response, MessageStream):
                async with aclosing(response.messages) as messages:
                    async for message in messages:
                        yield message
            else:  # the request only loads the model, which was not recognised from its first fields
                yield Raw(bytes(response.body))

    async def _embed(self, request: Request, handler: RouteHandler, wants: WantedModel, body: bytes) -> Response:
        """Embed with the request's embedding model: one of those offered, or the one of ``serve --embedding``."""
        await self._models.look()
        beside, offered = self._endpoint.embeddings, self._models.offered()
        is_beside = beside is not None and (
            wants.name in (None, beside.name)
            or (self._endpoint.any_model and not is_offered(wants.name or "", offered))
        )
        found = None if is_beside else find_embedder(wants.name, offered)
        if found is None:
            request.scope[CHOSEN] = Chosen(self._endpoint.shown(), body, beside)
            return await handler(request)
        if found.id not in self._models.loaded():
            await self._check(request, handler, body)
        async with AsyncExitStack() as stack:
            using = self._models.use(found.id, owner=caller(), keep_alive_s=wants.keep_alive_s)
            backend = await while_connected(request.receive, stack.enter_async_context(using))
            request.scope[CHOSEN] = Chosen(backend, body, cast(Embeddings, backend))
            return await handler(request)

    @asynccontextmanager
    async def _use(self, wants: WantedModel, waiting: Waiting = lambda _: None) -> AsyncIterator[Backend]:
        using = self._models.use(wants.name, owner=caller(), keep_alive_s=wants.keep_alive_s, waiting=waiting)
        async with using as backend:
            self._endpoint.used(backend)
            yield backend

    def _named(self, wants: WantedModel) -> tuple[str | None, bool]:
        """Return the name of the wanted model (None for the one used last), and whether it is loaded. Raises
        ``RequestError`` for an embedding model."""
        name, offered, loaded = wants.name, self._models.offered(), self._models.loaded()
        if name is not None and is_offered(name, offered):
            found = find_offered(name, offered)
            check_writer(found)
            return found.id, found.id in loaded
        if name is None or wants.is_any or self._endpoint.any_model:
            return None, bool(loaded)
        return name, False  # its file may be new

    async def _check(self, request: Request, handler: RouteHandler, body: bytes) -> None:
        """Have ``handler`` read the request for ``ANY_MODEL`` without generating anything. Raises ``RequestError`` if
        no model would accept the request."""
        request.scope[CHOSEN] = Chosen(_Reader(self._endpoint.backend), body)
        try:
            await handler(request)
        except _ReadError:
            pass
        except RequestError as exc:
            if not exc.of_model:
                raise


class _ReadError(Exception):
    """The request was read and has no error."""


class _Reader:
    """Reads requests for any model through ``backend``, which has no model; then raises ``_ReadError``."""

    def __init__(self, backend: Backend) -> None:
        self._prepare, self.health = backend.prepare, backend.health
        self.status, self.generate = backend.status, backend.generate

    def model(self) -> ServedModel | None:
        return ANY_MODEL

    async def prepare(
        self, preparation: Preparation[Prepared], body: bytes, served: ModelSettings | None, *, owner: str = ""
    ) -> Prepared:
        try:
            await self._prepare(preparation, body, served, owner=owner)
        except PicturesWantedError as exc:  # only the model can say whether it accepts them
            for picture in exc.pictures:
                if not picture.url:
                    check_sent(picture.data, picture.called)
        raise _ReadError
