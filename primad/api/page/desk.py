"""What the page shows of devices, and what the owner may ask of the daemon by it: the consumer owns the interface."""

from __future__ import annotations

from typing import Annotated, Final, Literal, Protocol

import msgspec
from msgspec import Meta

MAX_RAM_BYTES: Final = 1 << 50


class HeadKey(msgspec.Struct, frozen=True, kw_only=True):
    """The head: how to trust it by hand elsewhere."""

    device: str
    fingerprint: str
    key: str


class OpenCode(msgspec.Struct, frozen=True, kw_only=True):
    """A pairing code that is good for ``expires_s`` seconds more; ``addresses`` are where to bring it without multicast."""

    code: str
    expires_s: float
    port: int
    addresses: list[str] = []


class KnownDevice(msgspec.Struct, frozen=True, kw_only=True):
    """A device that is trusted, was, or announces itself. ``key`` has 64 hexadecimal digits.

    ``how`` and ``since`` say how it came to be trusted; of one that is only announced both are empty. The head uses nothing
    of it while it ``is_paused``, and of its memory no more than ``ram_bytes``.
    """

    device: str
    key: str
    fingerprint: str
    trusted: Literal["yes", "no", "revoked"]
    how: str
    since: str
    in_sight: bool
    is_paused: bool = False
    ram_bytes: int | None = None


class DevicesBody(msgspec.Struct, frozen=True, kw_only=True):
    """``GET /ui/devices``; ``code`` is the one that is open."""

    own: HeadKey
    devices: list[KnownDevice]
    code: OpenCode | None


class DeviceLimit(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the head may use of ``device``: nothing while it ``is_paused``, else ``ram_bytes`` at most (None: all)."""

    device: str
    is_paused: bool = False
    ram_bytes: Annotated[int, Meta(ge=0, le=MAX_RAM_BYTES)] | None = None


class ShownCode(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A code that another device shows, and where (``host:port``), if it has to be said."""

    code: str
    at: str | None = None


class Paired(msgspec.Struct, frozen=True, kw_only=True):
    """Who was paired with."""

    device: str


class OtherCluster(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Another cluster: ``without`` some devices, and with profiles that come with primad, on links of a speed
    (``1Gbit/s,0.5ms``)."""

    without: list[str] = []
    profiles: list[str] = []
    link: str = "1Gbit/s,0.5ms"


class PlannedDevice(msgspec.Struct, frozen=True, kw_only=True):
    """What a plan gives one device."""

    device: str
    layers: int
    gpu_layers: int
    streamed: int


class Imagined(msgspec.Struct, frozen=True, kw_only=True):
    """What a plan for another cluster promises, and what the one that serves does."""

    tokens_per_s: float
    ttft_ms: float
    sequences: int
    devices: list[PlannedDevice]
    now_tokens_per_s: float | None
    now_ttft_ms: float | None


class ProfileNames(msgspec.Struct, frozen=True, kw_only=True):
    """The profiles that come with primad."""

    profiles: list[str]


class AdminApi(Protocol):
    """The daemon as its owner talks to it. What cannot be done raises ``PrimadError``."""

    async def devices(self) -> DevicesBody:
        """All that are known."""

    async def open_code(self) -> OpenCode:
        """The code that is open, a new one if none is."""

    async def bring_code(self, shown: ShownCode) -> Paired:
        """Pair with the device that shows a code: it and this one trust each other from then on."""

    async def trust(self, device: str, key: str) -> None:
        """Trust the device with ``key`` under the name ``device``; it has to trust this one, too."""

    async def revoke(self, key: str) -> None:
        """Trust it no longer."""

    async def limit_device(self, device_limit: DeviceLimit) -> None:
        """Use no more of a device than ``device_limit`` says, from now on and after a restart."""

    async def what_if(self, asked: OtherCluster) -> Imagined:
        """What a plan for another cluster would promise."""

    def profiles(self) -> list[str]:
        """The profiles that come with primad, by name."""
