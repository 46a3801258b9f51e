"""Who is it, and may it: API keys before everything but the health check.

Without keys everybody may ask who reaches the server. ``Door`` decides and knows neither HTTP nor a clock; ``KeyGuard``
(``guard.py``) asks it about each request, and what is written for that request is charged to its caller (``charged``).
"""

from __future__ import annotations

import contextvars
import ipaddress
from collections.abc import AsyncGenerator, Callable, Iterable
from contextlib import aclosing
from typing import Final

from primad.api.answering.generation import Written
from primad.api.http.keys import Allowance, ApiKey, key_like
from primad.errors import RequestError

OPEN_PATHS: Final = ("/health", "/v1/health", "/api/hello", "/", "/ui/owner")
"""What answers without a key: for who looks whether the server lives, and for the page until it has one."""
OPEN_FOLDER: Final = "/page/"
"""The page's files, which hold no secret."""

_asking: contextvars.ContextVar[Allowance | None] = contextvars.ContextVar("asking", default=None)
_address: contextvars.ContextVar[str] = contextvars.ContextVar("address", default="")


class Door:
    """Lets in who has one of ``keys()``, which are read anew each time and may change; None: everybody.

    ``this_machine``: everybody is who asks from this machine. Only its programs reach such a server, but a proxy may be one
    of them, and it asks for others. The allowance of a key lives as long as the key is the same.
    """

    def __init__(self, keys: Callable[[], Iterable[ApiKey]] | None = None, *, this_machine: bool = False) -> None:
        assert keys is None or not this_machine, "who has a key may be anywhere"
        self._keys, self._this_machine = keys, this_machine
        self._allowances: dict[str, Allowance] = {}

    def enter(self, path: str, said: str | None, now_s: float, *, from_elsewhere: bool = False) -> Allowance | None:
        """What the caller that ``said`` this key may ask; None: all it likes. ``from_elsewhere``: a proxy asks for somebody.

        Raises ``RequestError`` (401, 403, 429).
        """
        if path in OPEN_PATHS or path.startswith(OPEN_FOLDER):
            return None
        if self._keys is None:
            if self._this_machine and from_elsewhere:
                raise RequestError(
                    "a proxy asks this for another machine, and without keys this server is for programs of its own; give "
                    "'primad serve' an --api-key or --api-key-file, or say --no-auth",
                    status=403,
                    code="from_elsewhere",
                )
            return None
        key = None if said is None else key_like(said, self._keys())
        if key is None:
            wrong = "send an API key: Authorization: Bearer KEY" if said is None else "no such API key here"
            raise RequestError(wrong, status=401, code="invalid_api_key")
        allowance = self._allowances.get(key.name)
        if allowance is None or allowance.key != key:
            allowance = self._allowances[key.name] = Allowance(key, now_s)
        over = allowance.ask(now_s)
        if over is not None:
            what, wait_s = over
            raise TooOftenError(f"the key {key.name} has used up its {what}; come back in {wait_s} s", wait_s)
        return allowance


OPEN: Final = Door()
"""Lets everybody in."""
OF_THIS_MACHINE: Final = Door(this_machine=True)
"""Lets in who asks from this machine."""


class TooOftenError(RequestError):
    """A key's limit is reached; ``wait_s`` says for how long."""

    def __init__(self, message: str, wait_s: int) -> None:
        super().__init__(message, status=429, code="rate_limit_exceeded")
        self.wait_s = wait_s


def let_in(allowance: Allowance | None, address: str = "") -> None:
    """What is written in this context from now on is charged to ``allowance``, or is that of ``address`` without one."""
    _asking.set(allowance)
    _address.set(address)


def caller() -> str:
    """Whose share of the server this request takes: that of its key, or where there are no keys of the machine it is from.

    The programs of this machine are one, and have no name.
    """
    allowance = _asking.get()
    return machine_of(_address.get()) if allowance is None else allowance.key.name


def machine_of(address: str) -> str:
    """One name for all ways to write an IP ``address``; empty for this machine."""
    try:
        found = ipaddress.ip_address(address)
    except ValueError:
        return ""
    found = getattr(found, "ipv4_mapped", None) or found
    return "" if found.is_loopback else str(found)


def charge(tokens: int) -> None:
    """Take ``tokens`` from what the caller of this request may use."""
    allowance = _asking.get()
    if allowance is not None:
        allowance.used(tokens)


def charged(written: AsyncGenerator[Written, None], prompt_tokens: int) -> AsyncGenerator[Written, None]:
    """``written``, its tokens and those of its prompt taken from what the caller of this request may use."""
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
