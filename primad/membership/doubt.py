"""Decides which device is left out after a ring broke between devices that accuse each other: values in, values out.

One of two neighbours reports that the other sent an invalid step, or nothing. One of them is at fault, or the
connection between them, and the head cannot see which: a liar may accuse each neighbour in turn. But a liar is party to
every break that it causes. So each break raises doubt about all its parties, whichever accused which, and the party
with the most doubts is left out: after the first honest neighbour that is the liar. Two devices that only ever accuse
each other are left out in turn. The head is trusted and never a party: a break between it and its neighbour is the
neighbour's alone.

A device that has to load again, because it has more or less memory than it loaded for, is not at fault. But one that
reports this for the third time while it is in doubt behaves like a liar.

A connection may be interrupted once, for example by a restarting router. So no device is left out for the first break
of a ring that served, if none of its parties was in doubt.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from primad.membership.types import Device, RingFailed, State

DOUBT_S: Final = 1800.0
"""A device that was party to no break for this long is no longer in doubt."""
MAX_RELOADS: Final = 3
"""At this number of breaks a device in doubt is left out even if it reports a change of its memory."""


def doubt(state: State, event: RingFailed, now: float) -> State:
    """Raise the doubt about each party to ``event``."""
    doubted = {name: _doubted(state.devices[name], now) for name in event.parties if name in state.devices}
    return replace(state, devices={**state.devices, **doubted})


def _doubted(device: Device, now: float) -> Device:
    before = device.doubts if now - device.doubted_s <= DOUBT_S else 0
    return replace(device, doubts=before + 1, doubted_s=now)


def culprit(state: State, event: RingFailed, *, served: bool) -> str | None:
    """Return the device to leave out for ``event``, whose parties are in doubt already; ``served``: the ring had
    served.

    ``event.device`` failed by its own account, or by the head's: another party is left out instead only if it is in
    more doubt.
    """
    parties = [name for name in event.parties if name in state.devices]
    if not parties:
        return event.device

    def weight(name: str) -> tuple[int, bool, int]:
        device = state.devices[name]
        return device.doubts, name == event.device, -device.failures

    worst = max(parties, key=weight)  # among equals the first, which is the accused
    if event.again and state.devices[worst].doubts < MAX_RELOADS:
        return None
    is_first = event.device is None and state.devices[worst].doubts == 1
    return None if served and is_first else worst
