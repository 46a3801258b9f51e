"""The versions that a device runs and understands, and warnings for the owner if those of two devices differ."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from primad import __version__
from primad.network.messages import OLDEST, PROTOCOL
from primad.system.installed import Installer, installer, upgrade


@dataclass(frozen=True, slots=True, kw_only=True)
class Versions:
    """A device's version of primad, its newest protocol and the oldest."""

    primad: str
    protocol: int
    oldest: int

    def agreed(self, protocol: int, oldest: int) -> int | None:
        """Return the newest protocol that this device and one that speaks ``oldest`` to ``protocol`` share, or None."""
        common = min(self.protocol, protocol)
        return common if common >= max(self.oldest, oldest) else None


OURS: Final = Versions(primad=__version__, protocol=PROTOCOL, oldest=OLDEST)


def version_gap(
    ours: str, theirs: str, version: str, protocol: int, own: Versions = OURS, how: Installer | None = None
) -> str:
    """Return the line for the owner of two devices with incompatible versions, and what to type on the older one.

    ``how`` is the installer of primad here, detected by default. The other device's installer is unknown.
    """
    here = how or installer()
    if protocol > own.protocol:
        cure = f"on {ours} type: {upgrade(version, here)}"
    else:
        cure = f"on {theirs} install {own.primad}; installed as on {ours}, that is: {upgrade(own.primad, here)}"
    return (
        f"{theirs} runs primad {version} (protocol {protocol}), {ours} runs {own.primad} (protocol {own.protocol}), "
        f"and they do not understand each other; {cure}"
    )


def build_gap(ours: str, theirs: str, device: str) -> str:
    """Return the line for the owner of this device, whose llama.cpp is ``ours``, and of ``device``, whose is
    ``theirs``."""
    return (
        f"llama.cpp differs: {ours} here, {theirs} on {device}; output may differ in rare words; "
        "install the same version on both"
    )
