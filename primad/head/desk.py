"""The head's desk: what its owner sees and does by way of the page."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import Final

from primad.api.page.desk import DevicesBody, HeadKey, KnownDevice, OpenCode
from primad.daemon.pairing_service import PairingService
from primad.daemon.station import Station
from primad.errors import ClusterError
from primad.network.peer import Peer
from primad.trust.identity import fingerprint, key_hex, parse_key
from primad.trust.trust import BY_HAND, TrustStore, trusted_now

MOST_SHOWN: Final = 256


class HeadDesk:
    """The desk of one head. ``peers`` gives the devices in sight."""

    def __init__(
        self, station: Station, pairing: PairingService, peers: Callable[[], Iterable[Peer]], *, alone: bool
    ) -> None:
        self._station, self._pairing, self._peers, self._alone = station, pairing, peers, alone

    async def devices(self) -> DevicesBody:
        own = self._station.identity.public
        known = await asyncio.to_thread(known_devices, self._station.trust, list(self._peers()))
        code = self._pairing.shown()
        return DevicesBody(
            own=HeadKey(device=self._station.config.name, fingerprint=fingerprint(own), key=key_hex(own)),
            devices=known,
            code=None if code is None else OpenCode(code=code.code, expires_s=code.expires_s, port=code.port),
        )

    async def open_code(self) -> OpenCode:
        if self._alone:
            raise ClusterError(f"{self._station.config.name} serves with --alone; start it without to pair devices")
        code = await self._pairing.open()
        return OpenCode(code=code.code, expires_s=code.expires_s, port=code.port)

    async def trust(self, device: str, key: str) -> None:
        await asyncio.to_thread(self._station.trust.add, trusted_now(device, parse_key(key), BY_HAND))

    async def revoke(self, key: str) -> None:
        await asyncio.to_thread(self._station.trust.revoke, parse_key(key))


def known_devices(trust: TrustStore, peers: Iterable[Peer]) -> list[KnownDevice]:
    """Those that are trusted, those that were, and those in sight, by name."""
    in_sight = {peer.key: peer.device for peer in peers}
    trusted = {each.key: each for each in trust.entries()}
    revoked = {each.key: each for each in trust.lost()}
    names = in_sight | {key: each.device for key, each in (revoked | trusted).items()}
    found = []
    for key in sorted(names, key=lambda key: (names[key], key))[:MOST_SHOWN]:
        entry = trusted.get(key)
        found.append(
            KnownDevice(
                device=names[key],
                key=key_hex(key),
                fingerprint=fingerprint(key),
                trusted="yes" if entry is not None else "revoked" if key in revoked else "no",
                how="" if entry is None else entry.how,
                since="" if entry is None else entry.since,
                in_sight=key in in_sight,
            )
        )
    return found
