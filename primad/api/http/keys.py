"""API keys and what each may ask a minute: pure, with the time passed in.

A key is 256 bits of chance, so a plain hash of it is safe to keep: nobody guesses one. Only hashes are compared, each with
every other and in constant time, so that how long it takes tells nothing.

A limit is a bucket that holds a minute's worth and fills evenly. A request takes one from the bucket of requests, and needs
something to be left in that of tokens; what it used is taken afterwards, so that bucket may go below zero.
"""

from __future__ import annotations

import hashlib
import hmac
import math
import secrets
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

MINUTE_S: Final = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiKey:
    """A key by its ``name`` and the SHA-256 ``digest`` of it, in hexadecimal digits. None means no limit."""

    name: str
    digest: str
    requests_per_min: int | None = None
    tokens_per_min: int | None = None


def new_key() -> str:
    """A key that nobody can guess."""
    return f"primad-{secrets.token_urlsafe(32)}"


def digest_of(key: str) -> str:
    """What is kept of ``key``."""
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).hexdigest()


def key_like(said: str, keys: Iterable[ApiKey]) -> ApiKey | None:
    """The one of ``keys`` that ``said`` is, in a time that depends on their number only."""
    digest, found = digest_of(said), None
    for key in keys:
        if hmac.compare_digest(digest, key.digest):
            found = key
    return found


@dataclass(slots=True)
class Bucket:
    """What is left of ``per_min`` at the time ``at_s``, a clock that does not go back."""

    per_min: int
    at_s: float
    left: float = field(init=False)

    def __post_init__(self) -> None:
        self.left = float(self.per_min)

    def fill(self, now_s: float) -> None:
        """Time has passed."""
        self.left = min(self.per_min, self.left + (now_s - self.at_s) * self.per_min / MINUTE_S)
        self.at_s = now_s

    def wait_s(self, wanted: float) -> int:
        """Whole seconds until ``wanted`` is there, at least one; 0 when it is there."""
        short = wanted - self.left
        return 0 if short <= 0 else max(1, math.ceil(short * MINUTE_S / self.per_min))


class Allowance:
    """What the holder of one key may still ask."""

    def __init__(self, key: ApiKey, now_s: float) -> None:
        self.key = key
        self._requests = None if key.requests_per_min is None else Bucket(key.requests_per_min, now_s)
        self._tokens = None if key.tokens_per_min is None else Bucket(key.tokens_per_min, now_s)

    def ask(self, now_s: float) -> tuple[str, int] | None:
        """Take a request; or what there were too many of (with the limit), and in how many seconds to come back."""
        for bucket, what in ((self._requests, "requests"), (self._tokens, "tokens")):
            if bucket is not None:
                bucket.fill(now_s)
                wait_s = bucket.wait_s(1)
                if wait_s:
                    return f"{bucket.per_min} {what} a minute", wait_s
        if self._requests is not None:
            self._requests.left -= 1
        return None

    def used(self, tokens: int) -> None:
        """A request computed so many tokens, of prompt or answer."""
        if self._tokens is not None:
            self._tokens.left -= tokens
