"""API keys and their limits per minute. Pure: the time is passed in.

A key is 256 random bits, so a plain hash of it is safe to store. Only hashes are compared, with every stored key and in
constant time, so that timing reveals nothing.

A limit is a bucket that holds one minute's allowance and refills evenly. A request takes one from the bucket of
requests and needs a positive balance in the bucket of tokens. Its tokens are charged afterwards, so that balance may
become negative.
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
    """A key: its ``name`` and its SHA-256 ``digest``, in hexadecimal digits. A limit of None means no limit. With
    ``manages`` the holder may download and delete models."""

    name: str
    digest: str
    requests_per_min: int | None = None
    tokens_per_min: int | None = None
    manages: bool = False


def new_key() -> str:
    """A new random key."""
    return f"primad-{secrets.token_urlsafe(32)}"


def digest_of(key: str) -> str:
    """Return the stored form of ``key``."""
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).hexdigest()


def key_like(given: str, keys: Iterable[ApiKey]) -> ApiKey | None:
    """Return the one of ``keys`` that equals ``given``, in a time that depends only on their number."""
    digest, found = digest_of(given), None
    for key in keys:
        if hmac.compare_digest(digest, key.digest):
            found = key
    return found


@dataclass(slots=True)
class Bucket:
    """The balance of a limit of ``per_min`` at the time ``at_s`` of a monotonic clock."""

    per_min: int
    at_s: float
    left: float = field(init=False)

    def __post_init__(self) -> None:
        self.left = float(self.per_min)

    def fill(self, now_s: float) -> None:
        """Refill up to the time ``now_s``."""
        self.left = min(self.per_min, self.left + (now_s - self.at_s) * self.per_min / MINUTE_S)
        self.at_s = now_s

    def wait_s(self, wanted: float) -> int:
        """Return the whole seconds until ``wanted`` is available, at least one; 0 if it is available now."""
        short = wanted - self.left
        return 0 if short <= 0 else max(1, math.ceil(short * MINUTE_S / self.per_min))


class Allowance:
    """The remaining limits of one key."""

    def __init__(self, key: ApiKey, now_s: float) -> None:
        self.key = key
        self._requests = None if key.requests_per_min is None else Bucket(key.requests_per_min, now_s)
        self._tokens = None if key.tokens_per_min is None else Bucket(key.tokens_per_min, now_s)

    def ask(self, now_s: float) -> tuple[str, int] | None:
        """Charge one request, or return the exceeded limit and the seconds until a retry."""
        for bucket, what in ((self._requests, "requests"), (self._tokens, "tokens")):
            if bucket is not None:
                bucket.fill(now_s)
                wait_s = bucket.wait_s(1)
                if wait_s:
                    return f"{bucket.per_min} {what} per minute", wait_s
        if self._requests is not None:
            self._requests.left -= 1
        return None

    def used(self, tokens: int) -> None:
        """Charge the tokens of a request's prompt or response."""
        if self._tokens is not None:
            self._tokens.left -= tokens
