"""Whether this machine's way to others is Wi-Fi, where all devices of one access point share the air."""

from __future__ import annotations

from pathlib import Path
from typing import Final

_INTERFACES: Final = Path("/sys/class/net")
_MARKS: Final = ("wireless", "phy80211")


def is_wireless(interfaces: Path = _INTERFACES) -> bool:
    """Whether Wi-Fi is up here and no cable is.

    Linux tells; bridges, tunnels and other interfaces without hardware do not count. A system that does not tell (macOS,
    Windows) counts as wired: then its links are as fast as they were measured, and nothing is said to share the air.
    """
    try:
        up = [entry for entry in interfaces.iterdir() if (entry / "device").exists() and _is_up(entry)]
        return bool(up) and all(any((entry / mark).exists() for mark in _MARKS) for entry in up)
    except OSError:
        return False


def _is_up(interface: Path) -> bool:
    return (interface / "operstate").read_text().strip() == "up"
