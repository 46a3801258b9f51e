"""Access to the server: keeps out foreign web pages, and with keys everybody but their holders.

A server on 127.0.0.1 can be reached by any page the user has open. Two rules keep such pages out. The API sends CORS
headers only to origins named by its owner, and requires JSON from browsers (``connection.read_json``), so another
origin can neither read a response nor start work. This guard refuses foreign host names, so a page cannot become our
own origin by pointing its name at 127.0.0.1 (DNS rebinding). An IP address in ``Host`` is always fine, as no attacker's
name is involved. So is ``host.docker.internal``, the name of this machine in containers: no public name ends like that.
A server without keys on 127.0.0.1 is for programs of its machine. A proxy or a tunnel there would admit others, so
requests marked as forwarded for another machine are refused.
"""

from __future__ import annotations

import ipaddress
import re
import time
from collections.abc import Callable, Collection
from typing import Final

from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from primad.api.http.access import Door, TooOftenError, let_in
from primad.errors import PrimadError, RequestError

Refusing = Callable[[str, PrimadError], Response]
"""Returns the response that refuses a request to a path, in the shape of its dialect."""
RELAYED: Final = "primad.relayed"
"""The scope's key that marks a request relayed by another device, which has already checked the host name."""


_FORWARDED: Final = ("x-forwarded-for", "x-real-ip", "cf-connecting-ip", "true-client-ip")
"""Headers in which proxies and tunnels name their client, besides ``Forwarded`` (RFC 7239)."""
MAX_HOPS: Final = 32
"""Limit of the proxies on one machine; a request that names more counts as another machine's."""
_FORWARDED_FOR: Final = re.compile(r'(?i)\bfor\s*=\s*("[^"]*"|[^;,\s]+)')
OF_CONTAINERS: Final = "host.docker.internal"
"""The name of the host machine inside a container."""


class HostGuard:
    """Refuses (403) requests whose ``Host`` is neither an IP address, ``localhost`` nor one of ``hosts``.

    A name that starts with ``*.`` matches all names with that ending.
    """

    def __init__(self, app: ASGIApp, hosts: Collection[str], refuse: Refusing) -> None:
        self._app, self._refuse = app, refuse
        self._hosts = frozenset(host.lower() for host in hosts)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        host = Headers(scope=scope).get("host") if scope["type"] == "http" else None
        if host is None or RELAYED in scope or is_allowed(host, self._hosts):
            await self._app(scope, receive, send)
            return
        refusal = RequestError(
            f"the host name {host[:200]!r} is not one of this server's; see 'primad serve --allow-host'",
            status=403,
            code="host_not_allowed",
        )
        await self._refuse(scope["path"], refusal)(scope, receive, send)


def is_allowed(host: str, hosts: Collection[str]) -> bool:
    """Whether the ``Host`` header ``host`` (with or without a port) is allowed; ``hosts`` are in lower case."""
    name = _without_port(host.strip().lower()).removesuffix(".")
    if name in ("localhost", OF_CONTAINERS) or name.endswith(".localhost") or name in hosts:
        return True
    if any(host.startswith("*.") and name.endswith(host[1:]) and len(name) > len(host) - 1 for host in hosts):
        return True
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


class KeyGuard:
    """Asks ``door`` about each HTTP request of ``app``. CORS preflights, which carry no key, are handled before this."""

    def __init__(self, app: ASGIApp, door: Door, refuse: Refusing, clock: Callable[[], float] = time.monotonic) -> None:
        self._app, self._door, self._refuse, self._clock = app, door, refuse, clock

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            try:
                headers = Headers(scope=scope)
                proxied = RELAYED in scope or comes_from_elsewhere(headers)
                allowance = self._door.enter(scope["path"], claimed_key(headers), self._clock(), from_elsewhere=proxied)
                let_in(allowance, (scope.get("client") or ("",))[0])
            except RequestError as exc:
                response = self._refuse(scope["path"], exc)
                if isinstance(exc, TooOftenError):
                    response.headers["retry-after"] = str(exc.wait_s)
                elif exc.status == 401:
                    response.headers["www-authenticate"] = "Bearer"
                await response(scope, receive, send)
                return
        await self._app(scope, receive, send)


def _without_port(host: str) -> str:
    """A name or an address, perhaps with a port."""
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0] if host.count(":") == 1 else host


def comes_from_elsewhere(headers: Headers) -> bool:
    """Whether a proxy marks the request as another machine's. A proxy that sets no such header looks like a local
    program."""
    given = [text for name in _FORWARDED for text in headers.getlist(name)]
    given += [word for text in headers.getlist("forwarded") for word in _FORWARDED_FOR.findall(text) or [text]]
    clients = [client for text in given for client in text.split(",")]
    return len(clients) > MAX_HOPS or any(not _is_here(client.strip().strip('"')) for client in clients)


def _is_here(client: str) -> bool:
    """Whether an address (with or without port) is a loopback address."""
    bare = _without_port(client)
    try:
        return ipaddress.ip_address(bare).is_loopback
    except ValueError:
        return bare.lower() == "localhost"


def claimed_key(headers: Headers) -> str | None:
    """Return the key in ``Authorization: Bearer`` or ``x-api-key``."""
    scheme, _, given = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer" and given.strip():
        return given.strip()
    return headers.get("x-api-key") or None
