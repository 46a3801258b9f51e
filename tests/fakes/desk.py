"""A head's desk in memory, for tests of the page."""

from __future__ import annotations

from dataclasses import dataclass, field

from primad.api.page.desk import DevicesBody, HeadKey, KnownDevice, OpenCode
from primad.errors import ConfigError


def known(device: str, trusted: str = "yes", *, in_sight: bool = True) -> KnownDevice:
    """A device whose key is made of its name."""
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
class FakeDesk:
    """Trusts and revokes in memory; ``calls`` has what was asked."""

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

    async def trust(self, device: str, key: str) -> None:
        self.calls.append(("trust", device, key))
        self._become(key, "yes")

    async def revoke(self, key: str) -> None:
        self.calls.append(("revoke", key))
        self._become(key, "revoked")

    def _become(self, key: str, trusted: str) -> None:
        if not any(each.key == key for each in self.known):
            raise ConfigError(f"no device {key} is trusted")
        self.known = [known(each.device, trusted) if each.key == key else each for each in self.known]
