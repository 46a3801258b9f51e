"""Finds what is due in the membership core after any event: silence, greetings, measurements, another ring."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import replace
from typing import Final

from primad.membership.transitions import abandon, dismissals, give_up, is_spoken_to, lose, put, suspects, usable
from primad.membership.types import (
    PRESENT,
    Attempt,
    Device,
    DevicePhase,
    Effect,
    Fail,
    Greet,
    Measure,
    OwnerLine,
    Purpose,
    Serve,
    ServingRing,
    Solve,
    State,
    is_measured,
)

RELIEVE_S: Final = 60.0
"""Time between two searches for a plan that uses less of devices which are short of memory."""
LOAD_STALL_S: Final = 300.0
"""A device that makes no progress in loading for this long is not waited for."""
LOAD_PARTS: Final = 16
"""Number of steps in which progress counts, of all missing bytes or of windows. So a device that needs more than 80
minutes is not waited for either."""
MAX_NAMED: Final = 4
"""Maximum number of untrusted devices in the line about devices that are waited for."""
REGAIN_S: Final = 60.0
"""Time between two searches for a better plan after devices have room again."""
_ON_THEIR_WAY: Final = (DevicePhase.PAIRED, DevicePhase.PROFILED, DevicePhase.SUSPECTED)


def settled_s(state: State, serving: ServingRing) -> float:
    """Return when ``serving`` has served long enough to look for another ring."""
    return serving.since_s + state.settings.timings.settle_s


def pursue(state: State, now: float, effects: list[Effect]) -> State:
    """Ask in turn what is due now, and do it."""
    state = _judge_silence(state, now, effects)
    state = _greet(state, now, effects)
    state = _swap(state, now, effects)
    state = _attempt(state, now, effects)
    state = _measure(state, now, effects)
    return _end_hold(state, now, effects)


def wake_at(state: State, now: float) -> float | None:
    """Return when a ``Tick`` is due if nothing else happens; None if time alone changes nothing.

    ``state`` must be the result of a step at ``now``: otherwise events that came due in between would be missed.
    """
    settings, timings = state.settings, state.settings.timings
    if state.ended:
        return None
    look_s = state.started_s + settings.look_s
    times = [state.retry_at_s, state.measure_at_s, look_s, look_s + timings.greeting_s]
    for device in state.devices.values():
        times += [device.barred_until_s, device.measure_at_s]
        if is_spoken_to(device):
            times += [device.heard_s + settings.suspect_after_s, device.heard_s + settings.gone_after_s]
        elif device.phase is not DevicePhase.DISCOVERED and device.in_sight and not device.greeting:
            times.append(device.greet_at_s)
    if state.serving is not None:
        times.append(state.serving.since_s + timings.settle_s)
    if state.again_at_s is not None and (state.serving is not None or not settings.plans):
        times.append(state.again_at_s)
    if state.attempt is not None:
        times += [pace.since_s + LOAD_STALL_S for pace in state.attempt.loading.values()]
    if state.memory_low:
        times.append(state.recover_at_s)
    if state.memory_recovered or state.corrected:
        times.append(state.regain_at_s)
    if state.holding_s is not None:
        times.append(state.holding_s + settings.hold_s)
    return min((time for time in times if now < time < math.inf), default=None)


# Due times are compared as ``since + after <= now``, as ``wake_at`` computes them. ``now - since >= after`` may still
# be false at that very moment because of rounding, and no later check would follow.


def _judge_silence(state: State, now: float, effects: list[Effect]) -> State:
    settings = state.settings
    for name, device in state.devices.items():
        if not is_spoken_to(device):
            continue
        if device.heard_s + settings.gone_after_s <= now:
            state = lose(state, name, f"no message for {now - device.heard_s:.1f} s", now, effects)
        elif device.phase in PRESENT and device.heard_s + settings.suspect_after_s <= now:
            state = put(state, name, replace(device, phase=DevicePhase.SUSPECTED, before=device.phase))
            attempt = state.attempt
            if attempt is not None and attempt.members is None and name in attempt.candidates:
                state = abandon(state, effects)
    return state


def _greet(state: State, now: float, effects: list[Effect]) -> State:
    for name, device in state.devices.items():
        waits = device.phase in (DevicePhase.PAIRED, DevicePhase.GONE) and device.in_sight and not device.greeting
        if waits and device.greet_at_s <= now:
            effects.append(Greet(name))
            state = put(state, name, replace(device, greeting=True))
    return state


def _swap(state: State, now: float, effects: list[Effect]) -> State:
    """Let a formed ring serve, unless it waits for a suspected device to be gone."""
    attempt, serving = state.attempt, state.serving
    if attempt is None or not attempt.formed or attempt.members is None:
        return state
    if serving is not None and attempt.why is Purpose.SUSPICION:
        return state
    effects.append(Serve(attempt.epoch, None if serving is None else serving.epoch))
    effects += dismissals(state)
    ring = ServingRing(
        epoch=attempt.epoch,
        members=attempt.members,
        candidates=attempt.candidates,
        value=attempt.value,
        since_s=now,
    )
    memory_low = state.memory_low & (ring.members | {state.settings.head})
    well = {
        name: replace(device, reason="", unproven=False)  # whatever the reason for its bar
        for name, device in state.devices.items()
        if name in ring.members and not device.leaving
    }
    return replace(
        state,
        devices={**state.devices, **well},
        serving=ring,
        attempt=None,
        has_served=True,
        holding_s=None,
        tried={},
        last_resort=False,
        failures=0,
        memory_low=frozenset() if attempt.why is Purpose.PRESSURE else memory_low,
    )


def _may_be_measured(state: State, device: Device, now: float) -> bool:
    """Return whether the device's links are unknown, and may be waited for."""
    return device.phase is DevicePhase.PROFILED and (state.last_resort or device.measure_at_s <= now)


def is_being_measured(state: State, name: str, now: float) -> bool:
    """Return whether the links of device ``name`` are being measured, or are next."""
    if name in state.measuring:
        return not is_measured(state.devices[name])
    return state.measure_at_s <= now and _may_be_measured(state, state.devices[name], now)


def _measure_is_due(state: State, now: float) -> bool:
    profiled = any(_may_be_measured(state, device, now) for device in state.devices.values())
    return profiled and not state.measuring and state.measure_at_s <= now


def _measure(state: State, now: float, effects: list[Effect]) -> State:
    """Measure new devices, but not during an attempt: measuring would slow both and distort the figures."""
    if state.attempt is not None or state.measuring:
        return state
    again = _measure_again_is_due(state, now)
    if not again and not _measure_is_due(state, now):
        return state
    present = frozenset(
        name
        for name, device in state.devices.items()
        if device.phase is DevicePhase.READY or _may_be_measured(state, device, now)
    )
    if not present:
        return replace(state, again_at_s=None)
    effects.append(Measure(present, again))
    if again:
        state = replace(state, again_at_s=None, agains=state.agains + 1)
    return replace(state, measuring=present)


def _measure_again_is_due(state: State, now: float) -> bool:
    """Return whether to check if failed links work now: rarely, as each may take seconds to fail."""
    serving, at_s = state.serving, state.again_at_s
    if at_s is None or (serving is None and state.settings.plans):
        return False
    return (at_s if serving is None else max(settled_s(state, serving), at_s)) <= now


def _attempt(state: State, now: float, effects: list[Effect]) -> State:
    """Start an attempt at another ring if there is a reason for one, or give up if there will be no ring."""
    if state.attempt is not None or not state.settings.plans:
        return state
    too_few = _too_few(state, now)
    if too_few is not None:
        return give_up(state, too_few, effects)
    candidates = usable(state, now)
    why = _why_any(state, candidates, now) if state.serving is None else _why_another(state, candidates, now)
    if why is None:
        return state
    epoch = state.epoch + 1
    instead: int | None = None
    if why is Purpose.PRESSURE:
        assert state.serving is not None
        why_less = {
            "other programs need the memory": state.memory_low - state.newly_limited,
            "the owner lowered its limit": state.memory_low & state.newly_limited,
        }
        for reason, devices in why_less.items():
            if devices:
                names = ", ".join(sorted(devices))
                effects.append(OwnerLine(f"{names}: {reason}; looking for a plan that uses less of it"))
        instead, state = state.serving.epoch, replace(state, recover_at_s=now + RELIEVE_S)
    attempt = Attempt(epoch=epoch, why=why, candidates=candidates)
    if why is Purpose.GAIN and (state.memory_recovered or state.corrected):
        reasons = {"there is memory again": state.memory_recovered, "figures are corrected": state.corrected}
        for reason, devices in reasons.items():
            if devices:
                effects.append(OwnerLine(f"{', '.join(sorted(devices))}: {reason}; looking for a better plan"))
        attempt = replace(attempt, memory_recovered=state.memory_recovered, corrected=state.corrected)
        state = replace(state, memory_recovered=frozenset(), corrected=frozenset(), regain_at_s=now + REGAIN_S)
    effects.append(Solve(epoch, candidates, instead))
    return replace(state, epoch=epoch, attempt=attempt)


def _why_any(state: State, candidates: frozenset[str], now: float) -> Purpose | None:
    """Return why to try a ring while none serves."""
    if state.has_served:
        waits = now < state.retry_at_s and state.tried.get(Purpose.RECOVERY) == candidates
        return None if waits else Purpose.RECOVERY
    return Purpose.FIRST if now >= state.retry_at_s and _gathered(state, now) else None


def _why_another(state: State, candidates: frozenset[str], now: float) -> Purpose | None:
    """Return why to try a ring besides the serving one. A failed attempt is not repeated with the same devices."""
    serving = state.serving
    assert serving is not None
    if any(state.devices[name].leaving for name in serving.members):
        return Purpose.LEAVING if state.tried.get(Purpose.LEAVING) != candidates else None
    if suspects(state):
        return Purpose.SUSPICION if state.tried.get(Purpose.SUSPICION) != candidates else None
    if state.memory_low and now >= max(settled_s(state, serving), state.retry_at_s, state.recover_at_s):
        return Purpose.PRESSURE
    if _measures(state, now) or _measure_again_is_due(state, now):
        return None
    if now < max(settled_s(state, serving), state.retry_at_s):
        return None
    is_new = candidates - serving.candidates and state.tried.get(Purpose.GAIN) != candidates
    changed = (state.memory_recovered | state.corrected) & (candidates | {state.settings.head})
    return Purpose.GAIN if is_new or (changed and now >= state.regain_at_s) else None


def _gathered(state: State, now: float) -> bool:
    """Return whether the devices for the first ring are present."""
    settings = state.settings
    if settings.solo:
        return True
    if settings.wanted is None:
        return _looked(state, now)
    return _found(state, now) >= settings.wanted and not _measures(state, now)


def _too_few(state: State, now: float) -> str | None:
    """Return the line for the owner if too few workers came for the first ring."""
    settings = state.settings
    if state.has_served or settings.solo or settings.wanted is None or not _looked(state, now):
        return None
    found = _found(state, now)
    if found >= settings.wanted:
        return None
    why = "; ".join(f"{name}: {device.reason}" for name, device in sorted(state.devices.items()) if device.reason)
    return (
        f"--wait {settings.wanted}: found {found} of {settings.wanted} devices in {settings.look_s:g} s"
        + (f" ({why})" if why else "")
        + "; start 'primad join' on the others or name them with --device"
    )


def _found(state: State, now: float) -> int:
    """Return the number of workers found, including barred ones."""
    return len(usable(replace(state, last_resort=True), now))


def _looked(state: State, now: float) -> bool:
    """Return whether the time to look for devices is over, and nothing in progress may soon add another device."""
    look_s = state.started_s + state.settings.look_s
    greeting = any(device.greeting for device in state.devices.values())
    suspected = any(device.phase is DevicePhase.SUSPECTED for device in state.devices.values())
    return (
        now >= look_s + (state.settings.timings.greeting_s if greeting else 0.0)
        and not suspected
        and not _measures(state, now)
    )


def _measures(state: State, now: float) -> bool:
    return bool(state.measuring) or _measure_is_due(state, now)


def _end_hold(state: State, now: float, effects: list[Effect]) -> State:
    if state.holding_s is None or now < state.holding_s + state.settings.hold_s:
        return state
    effects.append(Fail(f"no ring could be formed within {state.settings.hold_s:g} s"))
    return replace(state, holding_s=None)


def waiting_line(state: State, measuring: Collection[str], measuring_s: float, now: float) -> str | None:
    """Return the line that ``--wait`` shows while it waits, with the missing devices; None if it does not wait.

    ``measuring`` are the trusted devices that are measuring themselves, which takes about ``measuring_s`` seconds.
    """
    settings = state.settings
    if state.has_served or state.ended or state.attempt is not None or settings.solo or not settings.wanted:
        return None
    if not settings.plans:
        return None
    left = settings.wanted - len(usable(state, now))
    if left <= 0:
        return None
    known = [
        _standing(name, device)
        for name, device in sorted(state.devices.items())
        if device.phase not in (DevicePhase.READY, DevicePhase.DISCOVERED) and name not in measuring
    ]
    strangers = sorted(name for name, device in state.devices.items() if device.phase is DevicePhase.DISCOVERED)
    if len(strangers) > MAX_NAMED:  # anyone can announce any number of names, and would get a line for each
        known.append("many untrusted devices were discovered")
        strangers = []
    known += [_standing(name, state.devices[name]) for name in strangers]
    known += [f"{name} is paired and is measuring itself, about {measuring_s:.0f} s more" for name in sorted(measuring)]
    on_their_way = {name for name, device in state.devices.items() if device.phase in _ON_THEIR_WAY}
    if left > len(on_their_way | set(measuring)):
        known.append("start 'primad join' on the others")
    return f"waiting for {left} of {settings.wanted} devices: " + "; ".join(known)


def _standing(name: str, device: Device) -> str:
    match device.phase:
        case DevicePhase.DISCOVERED:
            return f"{name} was discovered, but is not paired ('primad pair' shows a code for it)"
        case DevicePhase.PROFILED | DevicePhase.SUSPECTED:
            return f"{name} is here, and its links are being measured"
        case DevicePhase.GONE:
            return f"{name} is gone" + (f" ({device.reason})" if device.reason else "")
        case _:
            return f"{name} is paired" + (
                f", but {device.reason}" if device.reason else ", and is being asked for its profile"
            )
