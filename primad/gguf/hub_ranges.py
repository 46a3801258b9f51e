"""Read byte ranges of files on a hub. Devices without the whole model fetch their layers with it.

The head names the file and is trusted with nothing else. A device contacts only its owner's hub: Hugging Face's, or
the one that ``HF_ENDPOINT`` names on this device. A hub may redirect, but only encrypted and to public addresses,
unless the hub itself is on this network. The URL includes the revision. A hub that does not state the hash that the
head saw, or states another size, now has another file and is refused. The owner's token is sent to the hub only.

Reads block. A ``HubRanges`` has one connection for one thread at a time; any thread may call ``abort``.
"""

from __future__ import annotations

import contextlib
import http.client
import socket
import ssl
import time
from collections.abc import Collection
from typing import Final
from urllib.parse import SplitResult, urljoin, urlsplit

from primad import __version__
from primad.errors import ClusterError, printable
from primad.gguf.hub_library import endpoint
from primad.gguf.origins import RemoteFile
from primad.system.public import is_public

DEFAULT_HUB: Final = "https://huggingface.co"
MAX_REDIRECTS: Final = 4
MAX_REDIRECT_BYTES: Final = 1 << 16
MAX_WAIT_S: Final = 60.0
"""Longest retry delay that a hub may request."""
MAX_RANGE_S: Final = 600.0
"""A range of a few MiB that takes longer is given up, even if some bytes still arrive."""
_REDIRECTS: Final = frozenset((301, 302, 303, 307, 308))


class HubError(ClusterError):
    """The hub did not serve a range. ``again``: a retry after ``wait_s`` may succeed."""

    def __init__(self, message: str, *, again: bool, wait_s: float = 0.0) -> None:
        super().__init__(message)
        self.again = again
        self.wait_s = wait_s


def own_hubs() -> frozenset[str]:
    """The hubs that this device's owner allows."""
    return frozenset((DEFAULT_HUB, (endpoint() or DEFAULT_HUB).rstrip("/")))


class HubRanges:
    """Ranges of files on ``hubs``; connecting may take ``connect_timeout_s``, each response ``silence_timeout_s``."""

    def __init__(
        self,
        hubs: Collection[str],
        token: str | None = None,
        *,
        connect_timeout_s: float = 5.0,
        silence_timeout_s: float = 30.0,
    ) -> None:
        self._hubs, self._token = hubs, token
        self._connect_timeout_s, self._silence_timeout_s = connect_timeout_s, silence_timeout_s
        self._connection: http.client.HTTPConnection | None = None
        self._there: tuple[str, str] | None = None
        self._moved: dict[str, str] = {}
        self._local_hubs: set[tuple[str, str]] = set()
        self._aborted = False

    def read(self, file: RemoteFile, offset: int, size: int) -> bytes:
        """``size`` bytes of ``file`` from ``offset``. Raises ``HubError``."""
        if not any(file.url.startswith(f"{hub}/") for hub in self._hubs):
            raise HubError(f"{_host(file.url)} is no hub of this device's owner (HF_ENDPOINT names one)", again=False)
        try:
            moved = self._moved.get(file.url)
            if moved is not None:
                with contextlib.suppress(_Expired):
                    return self._read(file, moved, offset, size)
                del self._moved[file.url]
            return self._read(file, file.url, offset, size)
        except (OSError, http.client.HTTPException) as exc:
            self.close()
            what = "it takes too long" if isinstance(exc, TimeoutError) else _text(exc)
            again = not self._aborted and not isinstance(exc, ssl.SSLCertVerificationError)
            raise HubError(f"{_host(file.url)} cannot be reached: {what}", again=again) from exc
        except BaseException:
            self.close()  # the unread part of this response would be taken for the next one
            raise

    def abort(self) -> None:
        """End the running read, and refuse further ones."""
        self._aborted = True
        sock = getattr(self._connection, "sock", None)
        if sock is not None:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the connection; the next ``read`` opens another."""
        connection, self._connection, self._there = self._connection, None, None
        if connection is not None:
            connection.close()

    def __del__(self) -> None:
        self.close()

    def _read(self, file: RemoteFile, url: str, offset: int, size: int) -> bytes:
        for _ in range(MAX_REDIRECTS + 1):
            answer = self._ask(file, url, offset, size)
            is_hub = url == file.url or _origin(url) == _origin(file.url)
            if is_hub:
                _check_hash(file, answer)
            if answer.status not in _REDIRECTS:
                return self._body(file, url, answer, offset, size)
            answer.read(MAX_REDIRECT_BYTES)
            if not answer.isclosed():
                self.close()
            url = self._judge(file, urljoin(url, answer.headers.get("Location", "")))
            self._moved[file.url] = url
        raise HubError(f"{_host(file.url)} redirects without end", again=False)

    def _judge(self, file: RemoteFile, url: str) -> str:
        """The target of a hub's redirect, if it is allowed."""
        parts = urlsplit(url)
        if parts.scheme != "https" and not (parts.scheme == "http" and _origin(file.url) in self._local_hubs):
            raise HubError(
                f"{_host(file.url)} redirects to {printable(url, 80)!r}, which is not encrypted", again=False
            )
        return url

    def _body(self, file: RemoteFile, url: str, answer: http.client.HTTPResponse, offset: int, size: int) -> bytes:
        host, status = _host(file.url), answer.status
        if status in (401, 403, 404, 410) and url != file.url:
            self.close()
            raise _Expired  # the redirect's link was valid for a limited time
        if status in (401, 403):
            raise HubError(f"{host} does not let everybody read it (status {status})", again=False)
        if status == 429 or status >= 500:
            raise HubError(f"{host} is busy (status {status})", again=True, wait_s=_wait_s(answer))
        if status == 200:
            raise HubError(f"{host} gives no byte ranges", again=False)
        if status != 206:
            raise HubError(
                f"{host} does not have it any more (status {status}); 'primad rm' the model and serve it again",
                again=False,
            )
        if answer.headers.get("Content-Range", "") != f"bytes {offset}-{offset + size - 1}/{file.size_bytes}":
            raise HubError(f"{host} gives another range, or the file changed there", again=False)
        data, until = bytearray(), time.monotonic() + MAX_RANGE_S
        while len(data) < size and (piece := answer.read1(size - len(data))):
            data += piece
            if time.monotonic() > until:
                raise TimeoutError
        if len(data) != size or answer.read(1):
            raise http.client.IncompleteRead(bytes(data), size - len(data))
        return bytes(data)

    def _ask(self, file: RemoteFile, url: str, offset: int, size: int) -> http.client.HTTPResponse:
        parts = urlsplit(url)
        headers = {
            "Host": parts.netloc.rpartition("@")[2],
            "Range": f"bytes={offset}-{offset + size - 1}",
            "Accept-Encoding": "identity",
            "User-Agent": f"primad/{__version__}",
        }
        if self._token and _origin(url) == _origin(file.url):
            headers["Authorization"] = f"Bearer {self._token}"
        path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        kept = self._there == _origin(url)
        try:
            return self._report_line(file, parts, path, headers)
        except (OSError, http.client.HTTPException):
            if not kept or self._aborted:
                raise
            self.close()  # the hub may have closed a connection that was idle for long
            return self._report_line(file, parts, path, headers)

    def _report_line(
        self, file: RemoteFile, parts: SplitResult, path: str, headers: dict[str, str]
    ) -> http.client.HTTPResponse:
        there = _origin(parts.geturl())
        if self._connection is None or self._there != there:
            self.close()
            self._connection, self._there = self._connected(file, parts), there
        if self._aborted:
            raise OSError("it was given up")
        self._connection.request("GET", path, headers=headers)
        return self._connection.getresponse()

    def _connected(self, file: RemoteFile, parts: SplitResult) -> http.client.HTTPConnection:
        host, is_secure = parts.hostname or "", parts.scheme == "https"
        port = parts.port or (443 if is_secure else 80)
        sock = self._socket(file, host, port, is_hub=_origin(parts.geturl()) == _origin(file.url), is_secure=is_secure)
        try:
            if is_secure:
                sock = ssl.create_default_context().wrap_socket(sock, server_hostname=host)
            sock.settimeout(self._silence_timeout_s)
        except BaseException:
            sock.close()
            raise
        connection = http.client.HTTPConnection(host, port)
        connection.sock = sock
        return connection

    def _socket(self, file: RemoteFile, host: str, port: int, *, is_hub: bool, is_secure: bool) -> socket.socket:
        """A connection to an allowed address of ``host``, resolved once, so that the checked address is used."""
        error: OSError = OSError(f"{printable(host, 80)} has no address")
        for *_, place in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
            may_be_asked = is_public(str(place[0]))
            if is_hub and not may_be_asked:
                self._local_hubs.add(_origin(file.url))
            if may_be_asked and not is_secure:
                raise HubError(
                    f"{printable(host, 80)} is asked without encryption; give HF_ENDPOINT as https", again=False
                )
            if not may_be_asked and not is_hub and _origin(file.url) not in self._local_hubs:
                raise HubError(
                    f"{_host(file.url)} redirects to {printable(host, 80)}, which is not public", again=False
                )
            try:
                return socket.create_connection((str(place[0]), port), self._connect_timeout_s)
            except OSError as exc:
                error = exc
        raise error


class _Expired(Exception):  # noqa: N818 - the hub is asked for another one
    """The hub's link has expired."""


def _check_hash(file: RemoteFile, answer: http.client.HTTPResponse) -> None:
    """Raise ``HubError`` if the hub that serves the file states another hash, or none."""
    if answer.status not in _REDIRECTS and answer.status not in (200, 206):
        return
    stated = answer.headers.get("X-Linked-ETag") or answer.headers.get("ETag") or ""
    if stated.removeprefix("W/").strip('"').lower() != file.sha256:
        if answer.status in _REDIRECTS and not stated:
            return  # to another name of the same repository; there it says so
        raise HubError(
            f"{_host(file.url)} has another file there by now; 'primad rm' the model and serve it again", again=False
        )


def _wait_s(answer: http.client.HTTPResponse) -> float:
    text = answer.headers.get("Retry-After", "")
    return min(float(text), MAX_WAIT_S) if text.isdecimal() and len(text) < 6 else 0.0


def _origin(url: str) -> tuple[str, str]:
    parts = urlsplit(url)
    return parts.scheme, parts.netloc.rpartition("@")[2].lower()


def _host(url: str) -> str:
    return printable(urlsplit(url).netloc.rpartition("@")[2], 80)


def _text(exc: BaseException) -> str:
    return printable(getattr(exc, "strerror", None) or exc or type(exc).__name__, 120)
