"""Authentication: API keys for everything except health checks.

Without keys every client that reaches the server is admitted. ``Door`` decides and knows neither HTTP nor a clock.
``KeyGuard`` (``guard.py``) asks it about each request, and the request's tokens are charged to its caller
(``charged``).
"""

from __future__ import annotations

import contextvars
import ipaddress
from collections.abc import AsyncGenerator, Callable, Collection, Iterable
from contextlib import aclosing
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

from primad.api.answering.generation import Written
from primad.api.http.keys import Allowance, ApiKey, key_like
from primad.errors import RequestError

OPEN_PATHS: Final = ("/health", "/v1/health", "/api/hello", "/", "/ui/owner")
"""Paths without a key: for health checks, and for the page until it has one."""
OPEN_FOLDER: Final = "/page/"
"""The page's files, which contain no secrets."""

_asking: contextvars.ContextVar[Allowance | None] = contextvars.ContextVar("asking", default=None)
_address: contextvars.ContextVar[str] = contextvars.ContextVar("address", default="")


class Door:
    """Admits holders of one of ``keys()``, which is called for each request because keys may change; None: admits
    everybody.

    ``this_machine``: only requests from this machine are admitted. Only local programs reach such a server, but one of
    them may be a proxy that acts for other machines. A key's allowance lives as long as the key is unchanged.
    """

    def __init__(self, keys: Callable[[], Iterable[ApiKey]] | None = None, *, this_machine: bool = False) -> None:
        assert keys is None or not this_machine, "who has a key may be anywhere"
        self._keys, self._this_machine = keys, this_machine
        self._allowances: dict[str, Allowance] = {}

    def enter(self, path: str, given: str | None, now_s: float, *, from_elsewhere: bool = False) -> Allowance | None:
        """Return the allowance of the caller with the key ``given``; None: unlimited. ``from_elsewhere``: a proxy or
        relay acts for another machine.

        Raises ``RequestError`` (401, 403, 429).
        """
        if path in OPEN_PATHS or path.startswith(OPEN_FOLDER):
            return None
        if self._keys is None:
            if self._this_machine and from_elsewhere:
                raise RequestError(
                    "a proxy or relay forwards this for another machine, and without keys this server is for local "
                    "programs; give 'primad serve' an --api-key or --api-key-file, or --no-auth",
                    status=403,
                    code="from_elsewhere",
                )
            return None
        key = None if given is None else key_like(given, self._keys())
        if key is None:
            wrong = "send an API key: Authorization: Bearer KEY" if given is None else "invalid API key"
            raise RequestError(wrong, status=401, code="invalid_api_key")
        allowance = self._allowances.get(key.name)
        if allowance is None or allowance.key != key:
            allowance = self._allowances[key.name] = Allowance(key, now_s)
        over = allowance.ask(now_s)
        if over is not None:
            what, wait_s = over
            raise TooOftenError(f"the key {key.name} has used up its {what}; retry in {wait_s} s", wait_s)
        return allowance


OPEN: Final = Door()
"""Admits everybody."""
OF_THIS_MACHINE: Final = Door(this_machine=True)
"""Admits requests from this machine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Admission:
    """Which clients may use a server: those that ``door`` admits, if they address it as localhost, by an IP address or
    by one of the names ``hosts``; and web pages of ``origins``. Holders of ``owner_key`` may also change things."""

    door: Door = OPEN
    hosts: Collection[str] = ()
    origins: Collection[str] = ()
    owner_key: str | None = None


class TooOftenError(RequestError):
    """A key's limit is reached; retry after ``wait_s``."""

    def __init__(self, message: str, wait_s: int) -> None:
        super().__init__(message, status=429, code="rate_limit_exceeded")
        self.wait_s = wait_s


def let_in(allowance: Allowance | None, address: str = "") -> None:
    """Charge tokens generated in this context to ``allowance``, or to ``address`` if there is none."""
    _asking.set(allowance)
    _address.set(address)


def caller() -> str:
    """Return the caller whose share of the server this request takes: its key, or without keys its machine.

    The programs of this machine are one caller, without a name.
    """
    allowance = _asking.get()
    return machine_of(_address.get()) if allowance is None else allowance.key.name


@lru_cache(maxsize=1024)
def machine_of(address: str) -> str:
    """Return one name for all spellings of an IP ``address``; empty for this machine."""
    try:
        found = ipaddress.ip_address(address)
    except ValueError:
        return ""
    found = getattr(found, "ipv4_mapped", None) or found
    return "" if found.is_loopback else str(found)


def may_manage() -> bool:
    """Whether the key of this request has the right to download and delete models."""
    allowance = _asking.get()
    return allowance is not None and allowance.key.manages


def charge(tokens: int) -> None:
    """Charge ``tokens`` to the caller of this request."""
    allowance = _asking.get()
    if allowance is not None:
        allowance.used(tokens)


def charged(written: AsyncGenerator[Written, None], prompt_tokens: int) -> AsyncGenerator[Written, None]:
    """Yield ``written``, and charge its tokens and ``prompt_tokens`` to the caller of this request."""
    allowance = _asking.get()
    if allowance is None or allowance.key.tokens_per_min is None:
        return written
    return _charge(written, prompt_tokens, allowance)


async def _charge(
    written: AsyncGenerator[Written, None], prompt_tokens: int, allowance: Allowance
) -> AsyncGenerator[Written, None]:
    allowance.used(prompt_tokens)
    async with aclosing(written):
        async for part in written:
            allowance.used(part.sampled)
            yield part
