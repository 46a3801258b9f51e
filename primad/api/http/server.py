"""The HTTP server of a daemon: uvicorn in the daemon's loop, with bounded connections (``patience.py``)."""

from __future__ import annotations

import contextlib
import socket
import sys
from collections.abc import Callable, Iterator
from typing import Final

import uvicorn
from starlette.types import ASGIApp

from primad.api.http.health import HealthChecks
from primad.api.http.listener import Listener
from primad.api.http.patience import MAX_CONNECTIONS, Patience
from primad.errors import ConfigError
from primad.network.sockets import raise_descriptor_limit
from primad.settings.config import LOOPBACK, join_address
from primad.settings.timings import ApiTimings

HTTP_GRACE_S: Final = 1
"""Seconds that a server waits for open responses when it ends."""


class HttpServer(uvicorn.Server):
    """uvicorn without its own signal handlers: the daemon decides when it ends."""

    def __init__(self, config: uvicorn.Config, patience: Patience, close: Callable[[], None]) -> None:
        super().__init__(config)
        self._patience, self._close = patience, close

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        """Serve connections that there is room for; takes over ``sockets``."""
        await super().serve([Listener(each, self._patience) for each in sockets or ()])

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """End; disconnect listening pages first."""
        self._close()
        await super().shutdown(sockets)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def http_server(
    app: ASGIApp, timings: ApiTimings, checks: HealthChecks | None = None, close: Callable[[], None] = lambda: None
) -> HttpServer:
    """Return a server of ``app``. ``checks`` answer plain health checks without it; ``close`` ends its open streams."""
    descriptors = raise_descriptor_limit()
    maximum = MAX_CONNECTIONS if descriptors is None else min(MAX_CONNECTIONS, descriptors // 2)
    patience = Patience(timings.request_timeout_s, timings.send_timeout_s, maximum=maximum, checks=checks)
    config = uvicorn.Config(
        app,
        lifespan="off",
        http=patience.protocol,  # type: ignore[arg-type]
        ws="none",
        log_level="error",  # every invalid request is a warning, and a client may send any number
        access_log=False,
        timeout_graceful_shutdown=HTTP_GRACE_S,
    )
    return HttpServer(config, patience, close)


def bind_http(host: str, port: int, flag: str = "--port") -> socket.socket:
    """Return the listening socket of the HTTP server. Raises ``ConfigError`` that names ``flag`` if the port is taken."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # With the protocol given, asyncio sets TCP_NODELAY; otherwise each response after a connection's first takes 40 ms.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    if sys.platform != "win32":  # on Windows it would share a taken port
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(128)
    except OSError as exc:
        listener.close()
        raise ConfigError(
            f"{flag} {port}: cannot listen on {host}: {exc.strerror or exc}; choose another {flag}"
        ) from exc
    return listener


def local_url(host: str, port: int) -> str:
    """Return the URL of the server that listens at ``host``, for programs on this device."""
    return f"http://{join_address({'0.0.0.0': LOOPBACK, '::': '::1'}.get(host, host), port)}"
