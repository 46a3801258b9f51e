"""The endpoint of a running head, as commands talk to it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Final

import typer

from primad.errors import ClusterError
from primad.settings.config import DEFAULT_HTTP_PORT, LOOPBACK

if TYPE_CHECKING:
    import httpx

Url = Annotated[str, typer.Option(help="The endpoint.")]
DEFAULT_URL: Final = f"http://{LOOPBACK}:{DEFAULT_HTTP_PORT}"
CONNECT_TIMEOUT_S: Final = 5.0


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
            raise ClusterError(f"{url}: {exc or type(exc).__name__}; is 'primad serve' running there?") from exc
