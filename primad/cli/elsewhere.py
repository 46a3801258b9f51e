"""The endpoint of a head on another machine, by its name or address in ``primad devices``."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from primad.cli.output import err
from primad.errors import ClusterError, printable
from primad.settings.config import Config, has_port, split_address

if TYPE_CHECKING:
    from primad.network.local_heads import LocalHead
    from primad.network.peer import Peer

_CONNECT_S: Final = 1.0


def head_elsewhere(config: Config, wanted: str, here: Sequence[LocalHead]) -> str:
    """The URL of the head ``wanted``, an address with a port, or a name to look up; heads ``here`` run on this machine.

    Raises ``ClusterError`` with the choices, or the reason why it cannot be reached.
    """
    from primad.cli.sight import called

    if _is_address(wanted):
        return f"http://{wanted}"
    found = sorted((peer for peer in called(config, wanted) if peer.role == "head"), key=lambda peer: peer.is_hidden)
    if len(found) == 1 or (found and found[1].is_hidden):
        return _url(found[0], wanted)
    if not found and has_port(wanted):
        return f"http://{wanted}"  # a name that the system knows
    if found:
        places = ", ".join(f"--head {peer.listens_at[0]}" for peer in found if peer.listens_at and not peer.is_hidden)
        raise ClusterError(f"--head {wanted}: {len(found)} heads have this name; choose one: {places}")
    from primad.network.local_heads import names

    choice = f"; on this device: {', '.join(f'--head {name}' for name in names(here))}" if here else ""
    raise ClusterError(
        f"--head {printable(wanted, 70)}: no head of this name was discovered; 'primad devices' lists them{choice}, "
        "or give its --url"
    )


def _url(peer: Peer, wanted: str) -> str:
    """The URL of ``peer``. It is printed, since the name is unverified."""
    if peer.is_hidden:
        raise ClusterError(
            f"--head {wanted}: it serves only programs of its own device; start it there with --host 0.0.0.0 and "
            "--api-key KEY"
        )
    for place in peer.listens_at:
        try:
            socket.create_connection(split_address(place), _CONNECT_S).close()
        except OSError:
            continue
        err.print(f"{printable(peer.device, 70)} is at http://{place}", markup=False, highlight=False)
        return f"http://{place}"
    places = ", ".join(peer.listens_at)
    raise ClusterError(f"--head {wanted}: no response at {places}; run 'primad doctor' there, a firewall may block it")


def _is_address(text: str) -> bool:
    if not has_port(text):
        return False
    try:
        ipaddress.ip_address(split_address(text)[0])
    except ValueError:
        return False
    return True
