"""The HTTP server as ``primad serve`` runs it."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import uvicorn
from starlette.types import ASGIApp

from primad.api.app import create_app
from primad.api.http.health import HealthChecks
from primad.api.http.listener import Listener
from primad.api.http.patience import Patience
from primad.settings.timings import ApiTimings
from tests.fakes.backend import FakeBackend
from tests.fakes.http import PATIENCE_S


@asynccontextmanager
async def patient(
    backend: FakeBackend,
    *,
    timeout_s: float = ApiTimings().request_timeout_s,
    send_timeout_s: float = ApiTimings().send_timeout_s,
    app: ASGIApp | None = None,
    checks: HealthChecks | None = None,
    kind: type[Patience] = Patience,
    **limits: Any,
) -> AsyncIterator[int]:
    """The port of a server with ``app`` (default: the API over ``backend``) and ``checks`` (default: the app's own)."""
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    if app is None:
        app = own = create_app(backend)
        checks = own.state.checks
    patience = kind(timeout_s, send_timeout_s, checks=checks, **limits)
    config = uvicorn.Config(
        app, log_config=None, lifespan="off", ws="none", http=patience.protocol, timeout_keep_alive=PATIENCE_S
    )
    server = uvicorn.Server(config)
    async with asyncio.timeout(PATIENCE_S), asyncio.TaskGroup() as group:
        group.create_task(server.serve(sockets=[Listener(listener, patience)]))
        try:
            yield port
        finally:
            server.should_exit = True
