"""Access to the API in tests: in memory, as a bare ASGI client that can leave, and over a real loopback port."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, closing, contextmanager
from http.server import ThreadingHTTPServer
from typing import Any

import httpx
import uvicorn
from starlette.types import ASGIApp

from primad.api.answering.backend import Backend, Embeddings, ModelNames
from primad.api.app import create_app

PATIENCE_S = 180


@contextmanager
def answering(server: ThreadingHTTPServer) -> Iterator[str]:
    """Run ``server`` in a thread; yields its URL."""
    with server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def in_memory(
    backend: Backend, names: ModelNames = ModelNames(), embeddings: Embeddings | None = None
) -> httpx.AsyncClient:
    """A client of the app without a socket."""
    return _client(create_app(backend, names=names, embeddings=embeddings))


def _client(app: ASGIApp) -> httpx.AsyncClient:
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    return httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:8080")


def ask(app: ASGIApp, method: str, path: str, **request: Any) -> httpx.Response:
    """The response to one request to ``app``, for tests that are not async."""

    async def once() -> httpx.Response:
        async with asyncio.timeout(PATIENCE_S), _client(app) as client:
            return await client.request(method, path, **request)

    return asyncio.run(once())


def call(
    backend: Backend,
    method: str,
    path: str,
    *,
    names: ModelNames = ModelNames(),
    embeddings: Embeddings | None = None,
    **request: Any,
) -> httpx.Response:
    """The response to one request."""
    return ask(create_app(backend, names=names, embeddings=embeddings), method, path, **request)


def post(backend: Backend, path: str, **body: Any) -> httpx.Response:
    """The response to one JSON request."""
    return call(backend, "POST", path, json=body)


def events(response: httpx.Response) -> list[Any]:
    """The data of each server-sent event; ``[DONE]`` as that string."""
    assert response.headers["content-type"].startswith("text/event-stream")
    *lines, rest = response.text.split("\n\n")
    assert rest == ""
    assert all(line.startswith("data: ") for line in lines)
    return [line[6:] if line == "data: [DONE]" else json.loads(line[6:]) for line in lines]


class BareClient:
    """An ASGI client whose request is already sent; it collects the response and can leave at any time."""

    def __init__(self, path: str, **body: Any) -> None:
        self.got: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self.left = asyncio.Event()
        self.blocked = asyncio.Event()
        """If set, the client accepts no more data."""
        self._requests = [{"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}]
        self.scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": "POST",
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "root_path": "",
            "headers": [(b"host", b"localhost"), (b"content-type", b"application/json")],
            "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 2),
        }

    async def receive(self) -> dict[str, Any]:
        if self._requests:
            return self._requests.pop()
        await self.left.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        if self.blocked.is_set():
            await asyncio.Event().wait()
        self.got.put_nowait(message)


@asynccontextmanager
async def served(backend: Backend, *, patience_s: float = PATIENCE_S, **more: Any) -> AsyncIterator[str]:
    """Serve the app with uvicorn on a free loopback port in this loop; yields its URL. ``more`` goes to the app."""
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    listener.listen()
    port = listener.getsockname()[1]
    config = uvicorn.Config(create_app(backend, **more), log_config=None, lifespan="off", ws="none")
    server = uvicorn.Server(config)
    with closing(listener):
        async with asyncio.timeout(patience_s), asyncio.TaskGroup() as group:
            group.create_task(server.serve(sockets=[listener]))
            try:
                yield f"http://127.0.0.1:{port}"
            finally:
                server.should_exit = True


@contextmanager
def served_in_thread(backend: Backend, graceful_s: int | None = None, **more: Any) -> Iterator[str]:
    """Serve the app with uvicorn on a free loopback port in a thread; yields its URL. ``more`` goes to the app.

    At the end connections are closed after ``graceful_s``; None waits for them.
    """
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        app = create_app(backend, **more)
        config = uvicorn.Config(app, log_config=None, lifespan="off", ws="none", timeout_graceful_shutdown=graceful_s)
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            app.state.close()
            server.should_exit = True
            thread.join()
