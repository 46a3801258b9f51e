"""Why one device does not reach another, as reported to its head, and as text with the cure."""

from __future__ import annotations

from typing import Annotated, Final

import msgspec

from primad.network.contacts import DeviceName

SILENT: Final = "silent"
CLOSED: Final = "closed"
UNTRUSTED: Final = "untrusted"
SLOW: Final = "slow"


class Unreached(msgspec.Struct, frozen=True, kw_only=True):
    """A device that was not reached, at which address, and ``why``: silent (no response), closed (the port is closed),
    untrusted (it does not admit the caller) or slow; any other word counts as silent."""

    device: DeviceName
    place: Annotated[str, msgspec.Meta(max_length=80)]
    why: Annotated[str, msgspec.Meta(max_length=20)]


def unreached_line(source: str, found: Unreached) -> str:
    """Return the line that says that ``source`` does not reach a device, why, and what to do about it."""
    target = found.device
    match found.why:
        case "untrusted":
            why = f"{target} does not let it in"
            cure = (
                f"it was revoked there: 'primad devices trust {source} --key KEY' on {target} takes that back, with "
                f"the key that 'primad devices' shows on {source}"
            )
        case "slow":
            why = f"it replies too late at {found.place}"
            cure = "bring the two closer in the network, or use a cable"
        case "closed":
            why = f"{found.place} accepts no connection"
            cure = f"let the port through the firewall there; 'primad doctor' on {target} says how"
        case _:
            why = f"no response at {found.place}"
            cure = f"put both into one network, and look for a firewall with 'primad doctor' on {target}"
    return f"{source} does not reach {target} ({why}); {cure}"
