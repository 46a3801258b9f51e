"""Whether this machine reaches others by Wi-Fi, where all devices of one access point share its bandwidth."""

from __future__ import annotations

from pathlib import Path
from typing import Final

_INTERFACES: Final = Path("/sys/class/net")
_MARKS: Final = ("wireless", "phy80211")


def is_wireless(interfaces: Path = _INTERFACES) -> bool:
    """Whether Wi-Fi is up here and no cable is.

    Only Linux reports it; bridges, tunnels and other interfaces without hardware do not count. Other systems (macOS,
    Windows) count as wired: their links are as fast as measured, and no shared Wi-Fi bandwidth is assumed.
    """
    try:
        up = [entry for entry in interfaces.iterdir() if (entry / "device").exists() and _is_up(entry)]
        return bool(up) and all(any((entry / mark).exists() for mark in _MARKS) for entry in up)
    except OSError:
        return False


def _is_up(interface: Path) -> bool:
    return (interface / "operstate").read_text().strip() == "up"
