"""Loopback as the network of devices that are made of this machine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from halda import LinkProfile

ROUND_TRIP_S: Final = 2e-4
LINK_BYTES_PER_S: Final = 1e9
"""What loopback is taken for."""


def loopback_links(names: Sequence[str]) -> list[LinkProfile]:
    """A link from each device to each other."""
    return [
        LinkProfile(source=a, target=b, address="", round_trip_s=ROUND_TRIP_S, bytes_per_s=LINK_BYTES_PER_S)
        for a in names
        for b in names
        if a != b
    ]
