"""The HTTP server of a device that relays requests to its head. Only such a device loads it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from primad.api.http.server import HTTP_GRACE_S, bind_http, http_server
from primad.network.addresses import resolved_host
from primad.network.own_places import own_names, url_for_clients
from primad.relay.place import ApiPlace, HeadPlace
from primad.relay.relay import Relay
from primad.settings.config import join_address
from primad.settings.timings import ApiTimings
from primad.trust.identity import Identity


class RelayedApi:
    """The API of ``device`` at ``place``, which relays requests to the head that it follows. Raises ``ConfigError`` if
    the port is taken."""

    def __init__(self, identity: Identity, device: str, place: ApiPlace, timings: ApiTimings) -> None:
        self._listener = bind_http(place.host, place.port, "--api-port")
        port = self._listener.getsockname()[1]
        self.url = url_for_clients(place.host, port)
        self.listens_at = join_address(resolved_host(place.host), port)
        self._relay = Relay(identity, device)
        self._server = http_server(self._relay.guarded((place.host, *own_names(), *place.allowed_hosts)), timings)

    def follow(self, place: HeadPlace | None) -> None:
        """Send requests to the head at ``place`` from now on; None: there is no head."""
        self._relay.follow(place)

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        """Serve inside this context; at its end open requests end with an error."""
        serving = asyncio.create_task(self._server.serve(sockets=[self._listener]))
        try:
            yield
        finally:
            self._relay.follow(None)
            self._server.should_exit = True
            await asyncio.wait([serving], timeout=2 * HTTP_GRACE_S)
            serving.cancel()
            await asyncio.wait([serving])
            await self._relay.close()
            self._listener.close()
