"""What to tell the owner when two devices run different versions of primad or of llama.cpp."""

from __future__ import annotations

from primad import __version__
from primad.network.messages import PROTOCOL


def version_gap(ours: str, theirs: str, version: str, protocol: int) -> str:
    """What to tell the owner of two devices whose versions do not understand each other."""
    return (
        f"{theirs} runs primad {version} (protocol {protocol}), {ours} runs {__version__} (protocol {PROTOCOL}), and they "
        "do not understand each other; install the same version on both"
    )


def build_gap(ours: str, theirs: str, device: str) -> str:
    """What to tell the owner of this device, whose llama.cpp is ``ours``, and of ``device``, whose is ``theirs``."""
    return (
        f"llama.cpp differs: {ours} here, {theirs} on {device}; answers may differ from those of one build in rare words; "
        "install the same version on both"
    )
