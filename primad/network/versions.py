"""The versions that a device runs and understands, and what to tell the owner when two devices differ in them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from primad import __version__
from primad.network.messages import OLDEST, PROTOCOL


@dataclass(frozen=True, slots=True, kw_only=True)
class Versions:
    """What a device runs: its version of primad, the newest protocol that it speaks and the oldest."""

    primad: str
    protocol: int
    oldest: int

    def agreed(self, protocol: int, oldest: int) -> int | None:
        """The newest protocol that this device and one of ``oldest`` to ``protocol`` both speak, None without one."""
        common = min(self.protocol, protocol)
        return common if common >= max(self.oldest, oldest) else None


OURS: Final = Versions(primad=__version__, protocol=PROTOCOL, oldest=OLDEST)


def version_gap(ours: str, theirs: str, version: str, protocol: int, own: Versions = OURS) -> str:
    """What to tell the owner of two devices whose versions do not understand each other."""
    return (
        f"{theirs} runs primad {version} (protocol {protocol}), {ours} runs {own.primad} (protocol {own.protocol}), and "
        "they do not understand each other; install the same version on both"
    )


def build_gap(ours: str, theirs: str, device: str) -> str:
    """What to tell the owner of this device, whose llama.cpp is ``ours``, and of ``device``, whose is ``theirs``."""
    return (
        f"llama.cpp differs: {ours} here, {theirs} on {device}; answers may differ from those of one build in rare words; "
        "install the same version on both"
    )
