"""The endpoint of a running head, for the commands that talk to it."""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Final, TypeVar
from urllib.parse import urlsplit

import typer

from primad.cli.completion import head_names
from primad.errors import ClusterError, ConfigError, printable
from primad.settings.config import DEFAULT_HTTP_PORT, LOOPBACK, load_config

if TYPE_CHECKING:
    import httpx

Url = Annotated[
    str | None,
    typer.Option(
        help="URL of a head on another device [default: the head that runs on this device].", show_default=False
    ),
]
HeadName = Annotated[
    str | None,
    typer.Option(
        "--head",
        help="Which head: its name or address, as 'primad devices' shows them.",
        show_default=False,
        autocompletion=head_names,
    ),
]
Key = Annotated[
    str | None,
    typer.Option(
        "--api-key",
        help="API key of a head on another device; a head on this device admits its own user.",
        envvar="PRIMAD_API_KEY",
        show_default=False,
    ),
]
C = TypeVar("C", "httpx.Client", "httpx.AsyncClient")
DEFAULT_URL: Final = f"http://{LOOPBACK}:{DEFAULT_HTTP_PORT}"
ASKS_FOR_KEY: Final = "requires an API key; give --api-key KEY, or set PRIMAD_API_KEY"
CONNECT_TIMEOUT_S: Final = 5.0
_PROXIES: Final = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY")
_CERTIFICATES: Final = ("SSL_CERT_FILE", "SSL_CERT_DIR")


class KeyRefusedError(ClusterError):
    """The endpoint requires a key, or another one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reached:
    """The endpoint's URL and key. A head of this device (``is_own``) is reached without a proxy."""

    url: str
    key: str | None = None
    is_own: bool = True

    @property
    def headers(self) -> dict[str, str]:
        """Headers of every request."""
        return {} if not self.key else {"authorization": f"Bearer {self.key}"}


def reached(url: str | None, head: str | None, key: str | None) -> Reached:
    """Choose ``url``, or the endpoint of the head named ``head``, on this device or in sight; by default the usual one.

    A head of this device leaves a key for its user's commands, which is used; ``key`` is for others. Without ``head``
    the head of the home folder in ``PRIMAD_HOME`` has precedence.

    Raises ``ClusterError`` with the names to choose from, ``ConfigError`` when both are given.
    """
    if url is not None:
        if head is not None:
            raise ConfigError("--head: contradicts --url; leave one of them out")
        there = url.rstrip("/").removesuffix("/v1")  # as serve also prints it for clients
        return Reached(url=there, key=_sound(key), is_own=_is_this_device(there))
    from primad.network.local_heads import chosen_head, home_note, is_called, local_heads, read_head

    config = load_config({})
    own = read_head(home_note(config.home)) if head is None and os.environ.get("PRIMAD_HOME") else None
    heads = local_heads(config.home)
    if head is not None and not any(is_called(each, head) for each in heads):
        from primad.cli.elsewhere import head_elsewhere

        there = head_elsewhere(config, head, heads)
        return Reached(url=there, key=_sound(key), is_own=_is_this_device(there))
    found = own if own is not None else chosen_head(heads, head)
    if found is None:
        return Reached(url=DEFAULT_URL, key=_sound(key))
    return Reached(url=found.url, key=found.key or _sound(key))


def _is_this_device(url: str) -> bool:
    try:
        host = urlsplit(url).hostname or ""
        return host == "localhost" or host.endswith(".localhost") or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _sound(key: str | None) -> str | None:
    if key is not None and not (key.isascii() and key.isprintable()):
        raise ConfigError("--api-key: not a key; give it as 'primad key add' printed it")
    return key


def check_let_in(url: str, status: int) -> None:
    """Raise ``KeyRefusedError`` if the endpoint requires a key, or another one."""
    if status == 401:
        raise KeyRefusedError(f"{url}: {ASKS_FOR_KEY}")


def error_in(response: httpx.Response) -> str:
    """The error in ``response``, which has been read, in the endpoint's words if it gives any."""
    if response.status_code == 401:
        return ASKS_FOR_KEY
    try:
        return str(response.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"returned {response.status_code}; is it a primad endpoint?"


@contextmanager
def connected(there: Reached, timeout_s: float | None) -> Iterator[httpx.Client]:
    """A client of the endpoint. Failures are raised as ``ClusterError``."""
    import httpx

    with opened(httpx.Client, there, timeout_s) as client:
        try:
            yield client
        except (httpx.HTTPError, httpx.InvalidURL) as exc:
            raise in_our_words(there, exc) from exc


def opened(kind: type[C], there: Reached, timeout_s: float | None) -> C:
    """Open a client of the HTTP library's ``kind`` for the endpoint.

    Raises ``ClusterError`` for an invalid address, and for an invalid proxy or certificate variable of the environment.
    """
    import httpx

    timeout = httpx.Timeout(timeout_s, connect=CONNECT_TIMEOUT_S)
    try:
        httpx.URL(there.url)
    except (httpx.InvalidURL, ValueError) as exc:
        raise in_our_words(there, exc) from exc
    try:
        return kind(base_url=there.url, headers=there.headers, timeout=timeout, trust_env=not there.is_own)
    except OSError as exc:
        raise _broken(there, _CERTIFICATES, exc) from exc
    except (ImportError, httpx.InvalidURL, ValueError) as exc:  # SOCKS needs an extra package
        raise _broken(there, _PROXIES, exc) from exc


def _broken(there: Reached, names: tuple[str, ...], why: Exception) -> ClusterError:
    first, *_ = str(why).split(". ")
    return ClusterError(
        f"{there.url}: {_set_of(names)} cannot be used: {printable(first, 200)}; correct it, or unset it"
    )


def _set_of(names: tuple[str, ...]) -> str:
    """Name the variables of ``names`` that are set, in upper or lower case."""
    found = [name for each in names for name in (each, each.lower()) if os.environ.get(name)]
    return " or ".join(found) or "the system's proxy settings"


def in_our_words(there: Reached, failure: Exception) -> ClusterError:
    """Translate a failure of the HTTP library to an error about the endpoint ``there``."""
    import httpx

    url = there.url
    match failure:
        case httpx.InvalidURL() | httpx.UnsupportedProtocol() | ValueError():
            return ClusterError(f"--url {url}: not an address of an endpoint; try {DEFAULT_URL}")
        case httpx.ConnectError() | httpx.ConnectTimeout():
            from urllib.request import getproxies

            proxy = "" if there.is_own or not getproxies() else f" ({_set_of(_PROXIES)} may lead elsewhere)"
            return ClusterError(f"{url}: no response; is 'primad serve' running?{proxy}")
        case httpx.TimeoutException():
            return ClusterError(f"{url}: timed out; look at the terminal of 'primad serve'")
        case httpx.RemoteProtocolError() | httpx.NetworkError():
            return ClusterError(f"{url}: the head ended during the response; start 'primad serve' again")
        case _:
            return ClusterError(f"{url}: {failure or type(failure).__name__}; is 'primad serve' running there?")
