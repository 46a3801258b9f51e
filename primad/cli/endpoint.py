"""The endpoint of a running head, as commands talk to it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Final

import typer

from primad.errors import ClusterError, ConfigError
from primad.settings.config import DEFAULT_HTTP_PORT, LOOPBACK, load_config

if TYPE_CHECKING:
    import httpx

Url = Annotated[
    str | None,
    typer.Option(
        help="The endpoint of a head elsewhere [default: the head that runs on this device].", show_default=False
    ),
]
HeadName = Annotated[
    str | None,
    typer.Option(
        "--head", help="Which head, where several run on this device: its name, or name:port.", show_default=False
    ),
]
DEFAULT_URL: Final = f"http://{LOOPBACK}:{DEFAULT_HTTP_PORT}"
CONNECT_TIMEOUT_S: Final = 5.0


def endpoint_url(url: str | None, head: str | None) -> str:
    """``url``, or the endpoint of the head on this device that is called ``head``; the usual one where none is found.

    Without ``head`` that of the home folder that ``PRIMAD_HOME`` names counts before all others.

    Raises ``ClusterError`` with the names to choose from, ``ConfigError`` when both are given.
    """
    if url is not None:
        if head is not None:
            raise ConfigError("--head: contradicts --url; leave one of them out")
        return url
    from primad.network.local_heads import chosen_head, home_note, local_heads, read_head

    home = load_config({}).home
    own = read_head(home_note(home)) if head is None and os.environ.get("PRIMAD_HOME") else None
    found = own if own is not None else chosen_head(local_heads(home), head)
    return DEFAULT_URL if found is None else found.url


@contextmanager
def connected(url: str, timeout_s: float | None) -> Iterator[httpx.Client]:
    """A client of the endpoint. What fails in talking to it is a ``ClusterError``."""
    import httpx

    try:
        client = httpx.Client(base_url=url, timeout=httpx.Timeout(timeout_s, connect=CONNECT_TIMEOUT_S))
    except (httpx.InvalidURL, ValueError) as exc:
        raise ClusterError(f"--url {url}: is no address of an endpoint; try {DEFAULT_URL}") from exc
    with client:
        try:
            yield client
        except (httpx.HTTPError, httpx.InvalidURL) as exc:
            raise in_our_words(url, exc) from exc


def in_our_words(url: str, failure: Exception) -> ClusterError:
    """What happened when the HTTP library failed so in talking to the endpoint at ``url``."""
    import httpx

    match failure:
        case httpx.InvalidURL() | httpx.UnsupportedProtocol() | ValueError():
            return ClusterError(f"--url {url}: is no address of an endpoint; try {DEFAULT_URL}")
        case httpx.ConnectError() | httpx.ConnectTimeout():
            return ClusterError(f"{url}: nobody answers there; is 'primad serve' running?")
        case httpx.TimeoutException():
            return ClusterError(f"{url}: gave no answer in time; look at the terminal of 'primad serve'")
        case httpx.RemoteProtocolError() | httpx.NetworkError():
            return ClusterError(f"{url}: the head went away before its answer ended; start 'primad serve' again")
        case _:
            return ClusterError(f"{url}: {failure or type(failure).__name__}; is 'primad serve' running there?")
