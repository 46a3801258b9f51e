"""The page's view of devices, and the owner's actions: an interface that its consumer, the page, defines."""

from __future__ import annotations

from typing import Annotated, Final, Literal, Protocol

import msgspec
from msgspec import Meta

MAX_RAM_BYTES: Final = 1 << 50


class HeadKey(msgspec.Struct, frozen=True, kw_only=True):
    """The head's name and key, for trusting it by hand on another device."""

    device: str
    fingerprint: str
    key: str


class OpenCode(msgspec.Struct, frozen=True, kw_only=True):
    """A pairing code, valid for ``expires_s`` more seconds; ``addresses`` are for pairing without multicast."""

    code: str
    expires_s: float
    port: int
    addresses: list[str] = []


class KnownDevice(msgspec.Struct, frozen=True, kw_only=True):
    """A device that is or was trusted, or announces itself. ``key`` has 64 hexadecimal digits.

    ``how`` and ``since`` say how and when it became trusted; empty if it is only announced. The head does not use it
    while it ``is_paused``, and uses at most ``ram_bytes`` of its memory.
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
    """``GET /ui/devices``; ``code`` is the open pairing code."""

    own: HeadKey
    devices: list[KnownDevice]
    code: OpenCode | None


class DeviceLimit(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The head's limit of ``device``: no use while it ``is_paused``, else at most ``ram_bytes`` (None: all)."""

    device: str
    is_paused: bool = False
    ram_bytes: Annotated[int, Meta(ge=0, le=MAX_RAM_BYTES)] | None = None


class ShownCode(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A code from another device, and its address (``host:port``) if needed."""

    code: str
    at: str | None = None


class Paired(msgspec.Struct, frozen=True, kw_only=True):
    """The paired device."""

    device: str


class OtherCluster(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Another cluster: this one ``without`` some devices and with built-in profiles added, on links of a speed
    (``1Gbit/s,0.5ms``)."""

    without: list[str] = []
    profiles: list[str] = []
    link: str = "1Gbit/s,0.5ms"


class PlannedDevice(msgspec.Struct, frozen=True, kw_only=True):
    """A device in a plan."""

    device: str
    layers: int
    gpu_layers: int
    streamed: int


class Imagined(msgspec.Struct, frozen=True, kw_only=True):
    """The forecast for another cluster, and that of the serving plan."""

    tokens_per_s: float
    ttft_ms: float
    sequences: int
    devices: list[PlannedDevice]
    now_tokens_per_s: float | None
    now_ttft_ms: float | None


class ProfileNames(msgspec.Struct, frozen=True, kw_only=True):
    """The built-in profiles."""

    profiles: list[str]


class AdminApi(Protocol):
    """The daemon's actions for its owner. Failures raise ``PrimadError``."""

    async def devices(self) -> DevicesBody:
        """All known devices."""

    async def open_code(self) -> OpenCode:
        """Return the open code, a new one if there is none."""

    async def bring_code(self, shown: ShownCode) -> Paired:
        """Pair with the device that shows a code: from then on both trust each other."""

    async def trust(self, device: str, key: str) -> None:
        """Trust the device with ``key`` under the name ``device``; it has to trust this one, too."""

    async def revoke(self, key: str) -> None:
        """Stop trusting the device with ``key``."""

    async def limit_device(self, device_limit: DeviceLimit) -> None:
        """Limit the use of a device to ``device_limit``, from now on and after a restart."""

    async def what_if(self, asked: OtherCluster) -> Imagined:
        """Return the forecast of a plan for another cluster."""

    def profiles(self) -> list[str]:
        """The built-in profiles, by name."""
