"""A head's admin API in memory, for tests of the page."""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from primad.api.page.admin_api import (
    DeviceLimit,
    DevicesBody,
    HeadKey,
    Imagined,
    KnownDevice,
    OpenCode,
    OtherCluster,
    Paired,
    PlannedDevice,
    ShownCode,
)
from primad.errors import ClusterError, ConfigError, PlanError


def known(device: str, trusted: str = "yes", *, in_sight: bool = True) -> KnownDevice:
    """A device whose key is derived from its name."""
    key = device.encode().hex().ljust(64, "0")[:64]
    how = "paired" if trusted == "yes" else ""
    return KnownDevice(
        device=device,
        key=key,
        fingerprint="-".join(["abcd"] * 8),
        trusted=trusted,
        how=how,
        since="2026-11-26T10:00:00Z" if how else "",
        in_sight=in_sight,
    )


@dataclass
class FakeAdminApi:
    """Trusts and revokes in memory; ``calls`` records the requests."""

    known: list[KnownDevice] = field(default_factory=list)
    code: OpenCode | None = None
    calls: list[tuple[str, ...]] = field(default_factory=list)

    async def devices(self) -> DevicesBody:
        own = known("desk")
        return DevicesBody(
            own=HeadKey(device="desk", fingerprint=own.fingerprint, key=own.key), devices=self.known, code=self.code
        )

    async def open_code(self) -> OpenCode:
        self.calls.append(("open_code",))
        self.code = OpenCode(code="7-lamp-river", expires_s=600.0, port=7771)
        return self.code

    async def bring_code(self, shown: ShownCode) -> Paired:
        self.calls.append(("bring_code", shown.code, shown.at or ""))
        if shown.code != "9-maple-stone":
            raise ClusterError("wrong code")
        self.known = [*self.known, known("sofa")]
        return Paired(device="sofa")

    async def trust(self, device: str, key: str) -> None:
        self.calls.append(("trust", device, key))
        self._become(key, "yes")
        self.known = [msgspec.structs.replace(each, how="by hand") if each.key == key else each for each in self.known]

    async def revoke(self, key: str) -> None:
        self.calls.append(("revoke", key))
        self._become(key, "revoked")

    async def limit_device(self, device_limit: DeviceLimit) -> None:
        self.calls.append(("lend", device_limit.device))
        self.known = [
            msgspec.structs.replace(each, is_paused=device_limit.is_paused, ram_bytes=device_limit.ram_bytes)
            if each.device == device_limit.device
            else each
            for each in self.known
        ]

    async def what_if(self, asked: OtherCluster) -> Imagined:
        self.calls.append(("what_if", *asked.without, *asked.profiles))
        if "mini" in asked.without and "laptop" in asked.without:
            raise PlanError("there is no such plan: 1 device is short of 2.10 GB")
        names = [each.device for each in self.known if each.trusted == "yes" and each.device not in asked.without]
        return Imagined(
            tokens_per_s=14.2 - 5.1 * len(asked.without) + 3.4 * len(asked.profiles),
            ttft_ms=900.0,
            sequences=4,
            devices=[
                PlannedDevice(device=name, layers=8, gpu_layers=0, streamed=2)
                for name in ("desk", *names, *asked.profiles)
            ],
            now_tokens_per_s=14.2,
            now_ttft_ms=900.0,
        )

    def profiles(self) -> list[str]:
        return ["mac-mini-m4-24gb", "mini-pc-n100-16gb"]

    def _become(self, key: str, trusted: str) -> None:
        if not any(each.key == key for each in self.known):
            raise ConfigError(f"no device {key} is trusted")
        self.known = [known(each.device, trusted) if each.key == key else each for each in self.known]
