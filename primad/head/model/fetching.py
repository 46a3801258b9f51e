"""Fetches pictures by URL, if the owner allows it (``serve --fetch-images``).

The attack: a client sends a URL that makes the head request something only this network reaches, such as a router or a
camera: by an address, by a name that resolves to one, or through a site that redirects there. So each name is resolved
once; only public addresses outside this device's networks are accepted; the connection goes to the address that was
checked; and redirects are checked alike. No proxy, cookie or password is used.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Awaitable, Callable, Iterable, Sequence
from functools import cache
from ipaddress import ip_address
from typing import Final

import httpx

from primad import __version__
from primad.engine.pictures.messages import MAX_BYTES, EncodedPicture
from primad.errors import RequestError, printable
from primad.network.addresses import Interface, read_interfaces
from primad.system.public import is_public

TIMEOUT_S: Final = 20.0
"""Timeout of a picture, including redirects."""
MAX_REDIRECTS: Final = 3
AT_ONCE: Final = 4
"""Number of pictures that may be fetched concurrently, counting those that are fetched but not encoded yet."""
_ADDRESSES: Final = 2
"""Number of a name's addresses to try: usually one of each IP version."""
_HEADERS: Final = {
    "User-Agent": f"primad/{__version__}",
    "Accept": "image/*, audio/*",
    "Accept-Encoding": "identity",
    "Connection": "close",
}

Encode = Callable[[bytes, str], Awaitable[EncodedPicture]]
AllowedOf = Callable[[Iterable[str]], list[str]]


def public_addresses(found: Iterable[str], own: Sequence[Interface] = ()) -> list[str]:
    """Return the public addresses among ``found``, without those in networks of this device's ``own`` interfaces."""
    networks = [subnet.network for each in own for subnet in each.addresses]
    return [text for text in dict.fromkeys(found) if is_public(text, networks)]


class PictureFetcher:
    """Fetches pictures from addresses that ``allows`` returns out of all addresses of a name."""

    def __init__(
        self,
        allows: AllowedOf = lambda found: public_addresses(found, read_interfaces()),
        *,
        timeout_s: float = TIMEOUT_S,
        max_bytes: int = MAX_BYTES,
    ) -> None:
        self._allows, self._timeout_s, self._max_bytes = allows, timeout_s, max_bytes
        self._room = asyncio.Semaphore(AT_ONCE)

    async def encoded(self, url: str, called: str, encode: Encode) -> EncodedPicture:
        """Fetch the picture at ``url``, which its request calls ``called``, and encode it with ``encode``. Raises
        ``RequestError``."""
        async with self._room:
            return await encode(await self.fetch(url, called), called)

    async def fetch(self, url: str, called: str) -> bytes:
        """Return the file at ``url``. Raises ``RequestError``."""
        where = printable(url, 80)
        try:
            async with asyncio.timeout(self._timeout_s):
                return await self._fetched(httpx.URL(url))
        except TimeoutError:
            why = f"took longer than {self._timeout_s:g} s"
        except _RefusedError as exc:
            why = str(exc)
        except (httpx.HTTPError, httpx.InvalidURL, OSError, UnicodeError) as exc:
            why = f"cannot be fetched: {printable(str(exc) or type(exc).__name__, 120)}"
        raise RequestError(f"{called}: {where} {why}", code="not_fetched", param=called)

    async def _fetched(self, url: httpx.URL) -> bytes:
        for _ in range(MAX_REDIRECTS + 1):
            found = await self._asked(url)
            if isinstance(found, bytes):
                return found
            url = found
        raise _RefusedError("redirects too often")

    async def _asked(self, url: httpx.URL) -> bytes | httpx.URL:
        """Return the content of ``url``, or the URL that it redirects to."""
        if url.scheme not in ("http", "https") or not url.host or url.userinfo:
            raise _RefusedError("leads to something other than an http or https URL without a password")
        addresses = await self._addresses(url)
        for address in addresses[:-1]:
            try:
                return await self._from(address, url)
            except httpx.ConnectError:
                continue
        return await self._from(addresses[-1], url)

    async def _addresses(self, url: httpx.URL) -> list[str]:
        port = url.port or (443 if url.scheme == "https" else 80)
        loop = asyncio.get_running_loop()
        found = await loop.getaddrinfo(url.raw_host.decode("ascii"), port, type=socket.SOCK_STREAM)
        allowed = self._allows(str(place[0]) for *_, place in found)
        if not allowed:
            raise _RefusedError("leads to this network, or to an address that is not public")
        by_version = {ip_address(each.partition("%")[0]).version: each for each in reversed(allowed)}
        return [by_version[each] for each in sorted(by_version)][:_ADDRESSES]

    async def _from(self, address: str, url: httpx.URL) -> bytes | httpx.URL:
        headers = _HEADERS | {"Host": url.netloc.decode("ascii")}
        sni = {"sni_hostname": url.raw_host.decode("ascii")}
        async with (
            httpx.AsyncClient(verify=_verified(), trust_env=False, timeout=self._timeout_s) as client,
            client.stream("GET", url.copy_with(host=address), headers=headers, extensions=sni) as response,
        ):
            if response.has_redirect_location:
                return url.join(response.headers["Location"])
            if response.status_code != httpx.codes.OK:
                raise _RefusedError(f"is answered with status {response.status_code}")
            data = bytearray()
            async for piece in response.aiter_raw():
                data += piece
                if len(data) > self._max_bytes:
                    raise _RefusedError(f"has more than {self._max_bytes >> 20} MB")
            return bytes(data)


class _RefusedError(Exception):
    """The reason why the content of a URL is refused."""


@cache
def _verified() -> ssl.SSLContext:
    return httpx.create_ssl_context(trust_env=False)
