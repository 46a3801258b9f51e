"""Facts about other devices for commands: devices in sight, their names, and the local daemon's view of them."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final

from primad.cli.output import err
from primad.cli.progress import RichReporter
from primad.errors import ClusterError
from primad.settings.config import Config

if TYPE_CHECKING:
    from primad.network.peer import Peer

_LOOK_S: Final = 2.0
"""How long to look for a device by its name."""
_DESCRIBE_S: Final = 2.0
"""How long to wait for the local daemon."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DaemonReport:
    """The local daemon's view: states of devices by name, keys that its head introduced, heads that revoked it, and
    devices that do not work for it, with the reason."""

    states: Mapping[str, str] = field(default_factory=dict)
    introduced: frozenset[str] = frozenset()
    revoked_by: frozenset[str] = frozenset()
    refused: Mapping[str, str] = field(default_factory=dict)


def report(home: Path) -> DaemonReport:
    """The view of the daemon of ``home``; empty if none runs or replies."""
    from primad.network.admin import Describe, Described, ask, is_running

    if not is_running(home):
        return DaemonReport()
    try:
        answer = ask(home, Describe(), _DESCRIBE_S)
    except ClusterError as exc:
        err.print(f"warning: {exc}")
        return DaemonReport()
    status = answer.status if isinstance(answer, Described) else {}
    return DaemonReport(
        states=_texts(status.get("devices")),
        introduced=_keys(status.get("introduced")),
        revoked_by=_keys(status.get("revoked_by")),
        refused=_texts(status.get("refused")),
    )


def _keys(raw: object) -> frozenset[str]:
    return frozenset(map(str, raw)) if isinstance(raw, list) else frozenset()


def _texts(raw: object) -> dict[str, str]:
    return {str(name): str(text) for name, text in raw.items()} if isinstance(raw, dict) else {}


def newest_of(peers: Sequence[Peer]) -> dict[str, Peer]:
    """The latest announcement of each device, by key. A renamed device may appear under both names for a while."""
    return {peer.key: peer for peer in sorted(peers, key=lambda peer: peer.revision)}


def called(config: Config, name: str) -> list[Peer]:
    """The devices in sight that 'primad devices' shows as ``name``, or that announce that name; each may have a port.

    Anyone can announce any name, so callers must show which device was found.
    """
    from primad.trust.identity import load_identity
    from primad.trust.trust import TrustStore

    trusted = TrustStore(config.home, load_identity(config.home))

    def names(peer: Peer) -> set[str]:
        known = {trusted.name_of(peer.key) or peer.device, peer.device}
        return known | {f"{each}:{peer.port}" for each in known}

    return [peer for peer in newest_of(peers_in_sight(config, _LOOK_S)).values() if name in names(peer)]


def peers_in_sight(config: Config, seconds: float) -> list[Peer]:
    """All devices that announce themselves within ``seconds``. Raises ``ClusterError`` if discovery does not work."""
    from primad.network.discovery import look

    with RichReporter(err).waiting("looking for devices"):
        return asyncio.run(look(config.host, seconds, config.interface))
