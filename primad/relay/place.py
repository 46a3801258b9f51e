"""The head that a device relays requests to, and the API that has to know it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadPlace:
    """A head: its ``name`` and public ``key``, where it accepts relayed requests (``port`` 0: it does not), and the
    silence after which it is gone. ``session`` tells its restarts apart."""

    name: str
    key: str
    address: str
    port: int
    session: int
    gone_after_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiPlace:
    """The address where a device accepts requests for its head, from clients that name an IP address, its own names or
    one of ``allowed_hosts``."""

    host: str
    port: int
    allowed_hosts: tuple[str, ...] = ()


class FollowsHead(Protocol):
    """The API of a device: for clients at ``url``, bound to ``listens_at`` (``host:port``)."""

    url: str
    listens_at: str

    def follow(self, place: HeadPlace | None) -> None:
        """Send requests to the head at ``place`` from now on; None: there is no head."""
