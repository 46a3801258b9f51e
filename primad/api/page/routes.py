"""The page's requests under ``/ui``.

Pages of other origins are refused, whatever ``--cors-origin`` allows elsewhere: the browser states where a request
comes from (``Origin``, ``Sec-Fetch-Site``), and bodies must be JSON and carry the key in a header, never in a cookie.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Annotated, Final, TypeVar
from urllib.parse import urlsplit

import msgspec
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response

from primad.api.answering.models import Models
from primad.api.http.connection import MessageStream, decoded, read_json, while_connected
from primad.api.http.dialect import Route
from primad.api.http.endpoint import json_response
from primad.api.http.guard import claimed_key
from primad.api.http.status import StatusBody
from primad.api.page import files
from primad.api.page.admin_api import AdminApi, DeviceLimit, OtherCluster, ProfileNames, ShownCode
from primad.api.page.owner import Owner
from primad.api.page.watch import SNAPSHOTS, Watch
from primad.errors import PrimadError, RequestError
from primad.library.names import MAX_CHARS
from primad.settings.timings import ApiTimings

MAX_ASKED_BYTES: Final = 64 << 10
"""Bodies are read in the event loop, so they must be small."""
A = TypeVar("A")
T = TypeVar("T", bound=msgspec.Struct)


class Ticket(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A ticket, valid once, that is exchanged for the owner's key."""

    ticket: str


class OwnerKey(msgspec.Struct, frozen=True, kw_only=True):
    """The owner's key, which allows changes."""

    key: str


class Nothing(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An empty object, for requests without fields."""


class NamedKey(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A device by its name and its key, as 64 hexadecimal digits."""

    device: str
    key: str


class ForecastOf(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A model by its name."""

    model: Annotated[str, Meta(max_length=MAX_CHARS)]


class Asker(msgspec.Struct, frozen=True, kw_only=True):
    """The rights of the caller."""

    is_owner: bool


class DownloadRoom(msgspec.Struct, frozen=True, kw_only=True):
    """Free space for models; null if unknown."""

    free_bytes: int | None


class Page:
    """The page's routes. ``look`` returns the status; the ``owner`` may change things through ``admin_api``, if there
    is one. ``models`` are those that requests choose among; None if there is only one."""

    def __init__(
        self,
        look: Callable[[], Awaitable[StatusBody]],
        admin_api: AdminApi | None,
        owner: Owner,
        timings: ApiTimings,
        models: Models | None = None,
    ) -> None:
        self._admin_api, self._owner, self._timings, self._models = admin_api, owner, timings, models
        self._watch = Watch(look, timings.page_every_s)

    def close(self) -> None:
        """End all event streams: the server ends."""
        self._watch.close()

    def routes(self) -> Sequence[Route]:
        """Return all routes except ``/``."""
        return (
            Route(path="/page/{name:path}", handler=self.file, methods=("GET", "HEAD")),
            Route(path="/ui/events", handler=self.events, methods=("GET",)),
            Route(path="/ui/who", handler=self.who, methods=("GET",)),
            Route(path="/ui/ticket", handler=self.ticket),
            Route(path="/ui/owner", handler=self.owner),
            Route(path="/ui/devices", handler=self.devices, methods=("GET",)),
            Route(path="/ui/models", handler=self.models, methods=("GET",)),
            Route(path="/ui/forecast", handler=self.forecast),
            Route(path="/ui/pair", handler=self.pair),
            Route(path="/ui/bring", handler=self.bring),
            Route(path="/ui/trust", handler=self.trust),
            Route(path="/ui/revoke", handler=self.revoke),
            Route(path="/ui/lend", handler=self.limit_device),
            Route(path="/ui/profiles", handler=self.profiles, methods=("GET",)),
            Route(path="/ui/what-if", handler=self.what_if),
        )

    async def file(self, request: Request) -> Response:
        """Return a file of the page."""
        return files.response(request, request.path_params["name"])

    async def events(self, request: Request) -> Response:
        """Stream the status, once a second, as server-sent events."""
        check_origin(request)
        return MessageStream(self._watch.snapshots(), SNAPSHOTS, self._timings)

    async def who(self, request: Request) -> Response:
        """Return whether the caller may change things."""
        check_origin(request)
        return json_response(Asker(is_owner=self._owner.is_owner(claimed_key(request.headers))))

    async def ticket(self, request: Request) -> Response:
        """Return a ticket to the owner, for another browser."""
        await self._asked(request, Nothing)
        return json_response(Ticket(ticket=self._owner.ticket()))

    async def owner(self, request: Request) -> Response:
        """Return the owner's key in exchange for a ticket."""
        check_origin(request)
        asked = decoded(await self._body(request), Ticket)
        return json_response(OwnerKey(key=self._owner.key_for(asked.ticket)))

    async def devices(self, request: Request) -> Response:
        """Return known devices, and the open pairing code."""
        check_origin(request)
        self._owner.check(claimed_key(request.headers))
        return json_response(await done(self._open_admin_api().devices()))

    async def models(self, request: Request) -> Response:
        """Return the free space for downloads."""
        check_origin(request)
        self._owner.check(claimed_key(request.headers))
        return json_response(DownloadRoom(free_bytes=None if self._models is None else self._models.free_bytes()))

    async def forecast(self, request: Request) -> Response:
        """Return the forecast for a model, to any caller: it loads nothing."""
        check_origin(request)
        asked = decoded(await self._body(request), ForecastOf)
        if self._models is None:
            raise RequestError("this server has one model", status=404)
        work = done(self._models.forecast(asked.model))
        return json_response(await while_connected(request.receive, work))

    async def pair(self, request: Request) -> Response:
        """Return a pairing code."""
        await self._asked(request, Nothing)
        return json_response(await done(self._open_admin_api().open_code()))

    async def bring(self, request: Request) -> Response:
        """Pair with the device that shows a code."""
        shown = await self._asked(request, ShownCode)
        return json_response(await done(self._open_admin_api().bring_code(shown)))

    async def trust(self, request: Request) -> Response:
        """Trust a device by its key."""
        asked = await self._asked(request, NamedKey)
        await done(self._open_admin_api().trust(asked.device, asked.key))
        return json_response(Nothing())

    async def revoke(self, request: Request) -> Response:
        """Stop trusting a device."""
        asked = await self._asked(request, NamedKey)
        await done(self._open_admin_api().revoke(asked.key))
        return json_response(Nothing())

    async def limit_device(self, request: Request) -> Response:
        """Limit the use of a device."""
        device_limit = await self._asked(request, DeviceLimit)
        await done(self._open_admin_api().limit_device(device_limit))
        return json_response(Nothing())

    async def profiles(self, request: Request) -> Response:
        """Return the profiles for what-if."""
        check_origin(request)
        return json_response(ProfileNames(profiles=self._open_admin_api().profiles()))

    async def what_if(self, request: Request) -> Response:
        """Return the forecast of another cluster, to any caller: it changes nothing."""
        check_origin(request)
        asked = decoded(await self._body(request), OtherCluster)
        return json_response(await done(self._open_admin_api().what_if(asked)))

    async def _body(self, request: Request) -> bytes:
        return await read_json(request, self._timings.body_timeout_s, only_json=True, max_bytes=MAX_ASKED_BYTES)

    def _open_admin_api(self) -> AdminApi:
        if self._admin_api is None:
            raise RequestError("this server has no devices", status=404)
        return self._admin_api

    async def _asked(self, request: Request, kind: type[T]) -> T:
        """Return the body of the owner's request. Raises ``RequestError`` for other callers."""
        check_origin(request)
        self._owner.check(claimed_key(request.headers))
        return decoded(await self._body(request), kind)


def check_origin(request: Request) -> None:
    """Raise ``RequestError`` (403) for a page of another origin."""
    origin, site = request.headers.get("origin"), request.headers.get("sec-fetch-site", "same-origin")
    is_ours = origin is None or _host_of(origin) == request.headers.get("host", "").lower()
    if not is_ours or site not in ("same-origin", "none"):
        raise RequestError("pages of other origins are not allowed here", status=403, code="foreign_origin")


def _host_of(origin: str) -> str:
    try:
        return urlsplit(origin).netloc.lower()
    except ValueError:  # the header is not a valid address
        return ""


async def done(work: Awaitable[A]) -> A:
    """Return the result of ``work``. Raises ``RequestError`` (409) if the daemon refuses."""
    try:
        return await work
    except RequestError:
        raise
    except PrimadError as exc:
        raise RequestError(str(exc), status=409, code="refused") from exc
