"""The page's owner rights: for clients that prove, as commands do, that they belong to the user who runs the head.

The proof is the head's key for its user's commands (``run/head.json``). It must not appear in a process list or a
browser's history. So ``primad page`` uses it to get a ticket, which is valid once and for a minute, and the page
exchanges the ticket for the key. A key for API clients (``--api-key``) gives no such rights.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from typing import Final

from primad.api.http.keys import ApiKey, digest_of, key_like
from primad.errors import RequestError

TICKET_S: Final = 60.0
_MAX_TICKETS: Final = 16
_HOW: Final = "; open the page with 'primad page' on the head's device"


class Owner:
    """The user who runs the head, recognised by ``key``; without a key no client is the owner."""

    def __init__(self, key: str | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._key, self._clock = key, clock
        self._tickets: dict[str, float] = {}
        """Expiry times by digest."""

    def is_owner(self, given: str | None) -> bool:
        """Whether this key is the owner's."""
        if self._key is None or given is None:
            return False
        return key_like(given, [ApiKey(name="owner", digest=digest_of(self._key))]) is not None

    def check(self, given: str | None, how: str = _HOW) -> None:
        """Raise ``RequestError`` (403) unless ``given`` is the owner's key; the error says ``how`` the owner proceeds."""
        if not self.is_owner(given):
            raise RequestError(f"only the owner of this head may do that{how}", status=403, code="not_the_owner")

    def ticket(self) -> str:
        """Return a new ticket."""
        now_s = self._clock()
        live = {digest: end_s for digest, end_s in self._tickets.items() if end_s > now_s}
        self._tickets = dict(list(live.items())[-(_MAX_TICKETS - 1) :])
        ticket = secrets.token_urlsafe(24)
        self._tickets[digest_of(ticket)] = now_s + TICKET_S
        return ticket

    def key_for(self, ticket: str) -> str:
        """Return the key, once per ticket. Raises ``RequestError`` (403) for a used, expired or unknown ticket."""
        end_s = self._tickets.pop(digest_of(ticket), 0.0)
        if self._key is None or end_s <= self._clock():
            raise RequestError(
                "this link was used already, or is older than a minute; 'primad page' makes a new one",
                status=403,
                code="ticket_over",
            )
        return self._key
