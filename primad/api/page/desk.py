"""What the page shows of devices, and what the owner may ask of the daemon by it: the consumer owns the interface."""

from __future__ import annotations

from typing import Literal, Protocol

import msgspec


class HeadKey(msgspec.Struct, frozen=True, kw_only=True):
    """The head: how to trust it by hand elsewhere."""

    device: str
    fingerprint: str
    key: str


class OpenCode(msgspec.Struct, frozen=True, kw_only=True):
    """A pairing code that is good for ``expires_s`` seconds more; ``port`` is where to bring it without multicast."""

    code: str
    expires_s: float
    port: int


class KnownDevice(msgspec.Struct, frozen=True, kw_only=True):
    """A device that is trusted, was, or announces itself. ``key`` has 64 hexadecimal digits.

    ``how`` and ``since`` say how it came to be trusted; of one that is only announced both are empty.
    """

    device: str
    key: str
    fingerprint: str
    trusted: Literal["yes", "no", "revoked"]
    how: str
    since: str
    in_sight: bool


class DevicesBody(msgspec.Struct, frozen=True, kw_only=True):
    """``GET /ui/devices``; ``code`` is the one that is open."""

    own: HeadKey
    devices: list[KnownDevice]
    code: OpenCode | None


class Desk(Protocol):
    """The daemon as its owner talks to it. What cannot be done raises ``PrimadError``."""

    async def devices(self) -> DevicesBody:
        """All that are known."""

    async def open_code(self) -> OpenCode:
        """The code that is open, a new one if none is."""

    async def trust(self, device: str, key: str) -> None:
        """Trust the device with ``key`` under the name ``device``; it has to trust this one, too."""

    async def revoke(self, key: str) -> None:
        """Trust it no longer."""
