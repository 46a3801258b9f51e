"""The API of a device that computes for a head: it relays each request to the device's current head.

The device checks only what the head cannot: that the host name is one of its own (``HostGuard``), and that connections
stay bounded. Keys, rights, limits and errors are the head's, which knows by the device's key that the request comes
from another machine.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection

import zmq.asyncio
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Receive, Scope, Send

from primad.api.dialects.table import refuse
from primad.api.http.guard import HostGuard
from primad.errors import RingError
from primad.relay.link import HeadLink
from primad.relay.place import HeadPlace
from primad.system.tasks import Tasks
from primad.trust.identity import Identity


class Relay:
    """An ASGI application that relays to the head that it follows."""

    def __init__(self, identity: Identity, device: str) -> None:
        self._identity, self._device = identity, device
        self._context = zmq.asyncio.Context()
        self._place: HeadPlace | None = None
        self._link: HeadLink | None = None
        self._closing = Tasks()

    def guarded(self, hosts: Collection[str]) -> ASGIApp:
        """This application, for clients that name an IP address, localhost or one of ``hosts``."""
        return HostGuard(self, hosts, refuse)

    def follow(self, place: HeadPlace | None) -> None:
        """Send requests to the head at ``place`` from now on; None: there is no head."""
        if place != self._place:
            self._drop("the head went away")
            self._place = place

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self._to_head().carry(scope, receive, send)
        except ClientDisconnect:
            return
        except RingError as exc:
            await refuse(scope["path"], exc)(scope, receive, send)

    def _to_head(self) -> HeadLink:
        place = self._place
        if place is None:
            raise RingError(f"{self._device} has no head now; start 'primad serve' on one, or try again later")
        if not place.port:
            raise RingError(f"the head {place.name} accepts no relayed requests; install this version of primad there")
        if self._link is not None and self._link.broken:
            self._drop(self._link.broken)
        if self._link is None:
            self._link = HeadLink(self._context, self._identity, place)
        return self._link

    def _drop(self, why: str) -> None:
        if self._link is not None:
            self._link.end(why)
            self._closing.start(self._link.close(why))
            self._link = None

    async def close(self) -> None:
        """End all open requests."""
        self._place = None
        self._drop("this device is shutting down")
        await self._closing.wait()
        await asyncio.sleep(0)
        self._context.destroy(linger=0)
