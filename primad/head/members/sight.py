"""The devices that a head sees, by label. Devices are identified by their keys: anyone can announce any name, and any
key.

So no stranger's announcement takes the place of a trusted device: a stranger gets a label that no trusted device has,
or none. If a stranger announces itself under the same mDNS name as a trusted device, the trusted device's earlier
announcement still counts. All places that are announced for a trusted key are tried, since only the holder of the key
can respond there: a few each time, so that false places cost time but hide no device.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from primad.network.peer import MAX_OF_ONE, Peer
from primad.trust.labels import Labels


@dataclass(frozen=True, slots=True)
class Sighted:
    """A device in sight, with all its announcements."""

    peers: tuple[Peer, ...]
    trusted: bool

    @property
    def key(self) -> str:
        """Its public key; a stranger only claims it."""
        return self.peers[0].key

    @property
    def is_measuring(self) -> bool:
        """Whether it is measuring itself and accepts no head yet."""
        return all(peer.is_measuring for peer in self.peers)

    @property
    def addresses(self) -> tuple[str, ...]:
        """Its announced addresses."""
        return tuple(dict.fromkeys(address for peer in self.peers for address in peer.addresses))

    def places(self, turn: int = 0) -> list[tuple[str, int]]:
        """Return the addresses with ports to try at attempt number ``turn``: those of the next few announcements."""
        lots = range(0, len(self.peers), MAX_OF_ONE)
        first = lots[turn % len(lots)]
        peers = self.peers[first : first + MAX_OF_ONE]
        return list(dict.fromkeys((address, peer.port) for peer in peers for address in peer.addresses))


class Sight:
    """The workers of ``cluster`` that the head ``own`` sees.

    ``devices`` are those in sight, by label; ``impostors`` are strangers with the label of another device; ``labels``
    are the labels of all trusted devices, by key.
    """

    def __init__(self, own: str, cluster: str) -> None:
        self._cluster = cluster
        self._own = own
        self._labels = Labels(own)
        self._heard: dict[tuple[str, str], Peer] = {}
        """Announcements of trusted devices, by mDNS name and key."""
        self.labels: dict[str, str] = {}
        self.devices: dict[str, Sighted] = {}
        self.impostors: list[Peer] = []

    def rename(self, key: str) -> None:
        """The owner renamed the device with ``key``."""
        self._labels.forget(key)

    def look(self, announced: Mapping[str, Peer], trusted: Mapping[str, str]) -> None:
        """Update from ``announced``, the devices in sight by mDNS name, and ``trusted``, the names of trusted devices
        by key."""
        self.labels = self._labels.of(trusted)
        kept = {(at, key): peer for (at, key), peer in self._heard.items() if at in announced and key in trusted}
        now = {(at, peer.key): peer for at, peer in announced.items() if peer.key in trusted}
        known: dict[str, list[Peer]] = {}
        self._heard = {}
        for (at, key), peer in (kept | now).items():  # earlier ones come first
            found = known.setdefault(self.labels[key], [])
            if peer.is_worker_of(self._cluster):
                found.append(peer)
                self._heard[at, key] = peer
        taken = {self._own, *self.labels.values()}
        strangers: dict[str, Sighted] = {}
        self.impostors = []
        for peer in announced.values():
            if peer.key in trusted or not peer.is_worker_of(self._cluster):
                continue
            if peer.device in taken:
                self.impostors.append(peer)
            else:
                strangers.setdefault(peer.device, Sighted((peer,), trusted=False))
        self.devices = strangers | {
            label: Sighted(tuple(peers), trusted=True) for label, peers in known.items() if peers
        }
