"""Transitions of the membership core that several rules share: from a state to a state, with effects.

A step appends to the list ``effects`` in the order in which effects are to be carried out.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Final

from primad.membership.types import (
    PRESENT,
    Abandon,
    Attempt,
    Close,
    Device,
    DevicePhase,
    Drop,
    Effect,
    GiveUp,
    LetGo,
    OwnerLine,
    Purpose,
    State,
)

GREET_S: Final = 0.5
"""Time after its loss at which a device in sight is greeted again."""
STEADY_S: Final = 10.0
"""A device lost sooner than this after its welcome is greeted later each time: otherwise it would get a line every half
second."""
MAX_FLAPS: Final = 3
"""A device lost so more often than this is not greeted immediately when it announces itself again."""
BAR_S: Final = 5.0
LASTING_BAR_S: Final = 600.0
MAX_BAR_S: Final = 300.0
FORGIVEN_S: Final = 300.0
"""The failures of a device that stays without fault for this long after its bar are forgotten."""


def usable(state: State, now: float) -> frozenset[str]:
    """Return the workers that a plan may use now. While no ring serves all requests wait for them, so none may be
    unproven."""

    def is_trusted_with_it(device: Device) -> bool:
        return device.barred_until_s <= now and not (device.unproven and state.serving is None)

    return frozenset(
        name
        for name, device in state.devices.items()
        if device.phase is DevicePhase.READY
        and not device.leaving
        and (state.last_resort or is_trusted_with_it(device))
    )


def is_spoken_to(device: Device) -> bool:
    """Return whether there is a link to the device, silent or not."""
    return device.phase in PRESENT or device.phase is DevicePhase.SUSPECTED


def takes_part(attempt: Attempt | None, name: str) -> bool:
    """Return whether ``attempt`` needs the device ``name``: as a candidate while it is solved, as a member
    afterwards."""
    return attempt is not None and name in (attempt.candidates if attempt.members is None else attempt.members)


def suspects(state: State) -> frozenset[str]:
    """Return the suspected devices of the serving ring."""
    members = state.serving.members if state.serving is not None else frozenset()
    return frozenset(name for name in members if state.devices[name].phase is DevicePhase.SUSPECTED)


def unproven(state: State) -> frozenset[str]:
    """Return the devices that are not waited for while no ring serves."""
    return frozenset(name for name, device in state.devices.items() if device.unproven)


def dismissals(state: State) -> Iterable[Effect]:
    """Return permission to leave for every device that asked."""
    return [LetGo(name) for name, device in state.devices.items() if device.leaving]


def put(state: State, name: str, device: Device) -> State:
    """Return the state with ``device`` under ``name``."""
    return replace(state, devices={**state.devices, name: device})


def without(state: State, name: str, now: float) -> State:
    """Return the state without the absent device ``name``; its faults are remembered until they expire."""
    device = state.devices[name]
    is_remembered = device.failures or device.unproven or device.flaps
    if is_remembered and now <= max(device.barred_until_s, device.heard_s) + FORGIVEN_S:
        return put(state, name, replace(device, in_sight=False, greeting=False))
    return replace(state, devices={key: device for key, device in state.devices.items() if key != name})


def abandon(state: State, effects: list[Effect]) -> State:
    """Drop the running attempt."""
    assert state.attempt is not None
    effects.append(Abandon(state.attempt.epoch))
    return replace(
        state,
        attempt=None,
        memory_recovered=state.memory_recovered | state.attempt.memory_recovered,
        corrected=state.corrected | state.attempt.corrected,
    )


def holds_up(state: State, name: str) -> State:
    """Mark the device ``name`` as unproven if it is a member of the running attempt, which failed because of it."""
    attempt, device = state.attempt, state.devices.get(name)
    if attempt is None or device is None or name not in (attempt.members or ()):
        return state
    return put(state, name, replace(device, unproven=True))


def give_up(state: State, reason: str, effects: list[Effect]) -> State:
    """Give up: there will be no first ring, and no further effects."""
    effects.append(GiveUp(reason))
    return replace(state, ended=True)


def close(state: State, reason: str, now: float, effects: list[Effect]) -> State:
    """Close the serving ring; open requests wait for the next one.

    A running attempt now serves that purpose. A device that asked to leave has nothing left to hand over.
    """
    assert state.serving is not None
    effects.append(Close(state.serving.epoch, reason))
    effects += dismissals(state)
    if state.attempt is not None and any(takes_part(state.attempt, name) for name in unproven(state)):
        state = abandon(state, effects)
    attempt = (
        None
        if state.attempt is None
        else replace(state.attempt, why=Purpose.RECOVERY, memory_recovered=frozenset(), corrected=frozenset())
    )
    state = replace(state, memory_low=frozenset(), memory_recovered=frozenset(), corrected=frozenset())
    return replace(state, serving=None, attempt=attempt, holding_s=now, tried={}, failures=0)


def bar(state: State, name: str | None, reason: str, now: float, *, lasting: bool) -> State:
    """Bar the device ``name``, if it is known, for a while, longer each time; a lasting ``reason`` is shown."""
    device = state.devices.get(name) if name is not None else None
    if name is None or device is None:
        return state
    failures = 1 if now - device.barred_until_s > FORGIVEN_S else device.failures + 1
    pause_s = LASTING_BAR_S if lasting else bar_s(failures)
    until_s = max(device.barred_until_s, now + pause_s)
    shown = reason if lasting else device.reason
    return put(state, name, replace(device, failures=failures, barred_until_s=until_s, reason=shown))


def bar_s(failures: int) -> float:
    """Return how long a device is barred after this number of ``failures``."""
    return min(BAR_S * 2.0 ** min(failures - 1, 10), MAX_BAR_S)


def lose(state: State, name: str, reason: str, now: float, effects: list[Effect]) -> State:
    """Record that the device ``name`` is gone: no attempt and no ring continues with it.

    A device that others waited for, in their ring or while links were measured, is barred for a while.
    """
    device = state.devices.get(name)
    if device is None or not is_spoken_to(device):
        return state
    effects.append(Drop(name))
    left = device.leaving
    flaps = device.flaps + 1 if now < device.welcomed_s + STEADY_S else 0
    greet_at_s = now + min(GREET_S * 2.0 ** min(max(0, flaps - 1), 10), MAX_BAR_S)
    device = replace(
        device, phase=DevicePhase.GONE, leaving=False, reason=reason, greet_at_s=greet_at_s, greets=1, flaps=flaps
    )
    state = replace(
        put(state, name, device),
        memory_recovered=state.memory_recovered - {name},
        corrected=state.corrected - {name},
    )
    serves = state.serving is not None and name in state.serving.members
    if state.has_served:
        effects.append(OwnerLine(f"{name} {'left' if left else 'is gone'}: {reason}"))
    if takes_part(state.attempt, name):
        state = abandon(holds_up(state, name), effects)
    if serves or name in state.measuring:
        state = bar(state, name, reason, now, lasting=False)
    if name in state.measuring:
        barred = state.devices[name]
        state = put(state, name, replace(barred, measure_at_s=barred.barred_until_s))
    return close(state, f"{name}: {reason}", now, effects) if serves else state
