"""Whom a head waits for before its first ring, and why, as one line."""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

from primad.membership.transitions import usable
from primad.membership.types import Device, DevicePhase, State

_ON_THEIR_WAY: Final = (DevicePhase.PAIRED, DevicePhase.PROFILED, DevicePhase.SUSPECTED)


def waiting_line(state: State, measuring: Collection[str], measuring_s: float, now: float) -> str | None:
    """For whom ``--wait`` waits; None when it does not.

    ``measuring`` are the trusted devices that measure themselves, which takes about ``measuring_s`` seconds.
    """
    settings = state.settings
    if state.has_served or state.ended or state.attempt is not None or settings.solo or not settings.wanted:
        return None
    left = settings.wanted - len(usable(state, now))
    if left <= 0:
        return None
    known = [
        _standing(name, device)
        for name, device in sorted(state.devices.items())
        if device.phase is not DevicePhase.READY and name not in measuring
    ]
    known += [f"{name} is paired and measures itself, about {measuring_s:.0f} s more" for name in sorted(measuring)]
    on_their_way = {name for name, device in state.devices.items() if device.phase in _ON_THEIR_WAY}
    if left > len(on_their_way | set(measuring)):
        known.append("start 'primad join' on the others")
    return f"waiting for {left} of {settings.wanted} devices: " + "; ".join(known)


def _standing(name: str, device: Device) -> str:
    match device.phase:
        case DevicePhase.DISCOVERED:
            return f"{name} is in sight, but not paired ('primad pair' shows a code for it)"
        case DevicePhase.PROFILED | DevicePhase.SUSPECTED:
            return f"{name} is here, and the links to it are measured"
        case DevicePhase.GONE:
            return f"{name} is gone" + (f" ({device.reason})" if device.reason else "")
        case _:
            return f"{name} is paired" + (
                f", but {device.reason}" if device.reason else ", and is asked what it measured"
            )
