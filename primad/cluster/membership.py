"""Who belongs to the cluster and which ring serves, as one pure function: ``step(state, event, now) -> state, effects``.

The rules, each in one place below:

* A device that is silent is suspected, then gone; one whose link breaks is gone at once. While a device of the serving ring
  is suspected, a ring without it is formed in the shadow: it serves the moment the device is gone, and is forgotten when the
  device speaks again.
* There is one serving ring and at most one attempt at another. When the serving ring breaks, open answers wait for the next
  one; they end with an error as soon as no plan exists, or after ``hold_s``.
* A better plan is taken only if it gains enough; candidates that gave none are not asked again until they change.
* A device to blame for a break gets no part for a while, which doubles each time, unless there is no plan without it.

Nothing here waits, sends or looks at a clock.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any, Final

from primad.cluster.members import (
    PRESENT,
    Abandon,
    Attempt,
    Broken,
    Close,
    Device,
    Dismiss,
    Drop,
    Effect,
    Event,
    Fail,
    Form,
    Formed,
    GiveUp,
    Greet,
    Heard,
    Leaving,
    Lost,
    Measure,
    Measured,
    NoPlan,
    Phase,
    Refused,
    Ring,
    Say,
    Seen,
    Serve,
    Solve,
    Solved,
    State,
    Tick,
    Vanished,
    Welcomed,
    Why,
)

SETTLE_S: Final = 5.0
"""A ring serves at least this long before a better plan is looked for."""
BAR_S: Final = 5.0
LASTING_BAR_S: Final = 600.0
MOST_BAR_S: Final = 300.0
FORGIVEN_S: Final = 300.0
"""A device that did no harm for so long after its bar starts anew."""
RETRY_S: Final = 15.0
"""After no plan was found, the same devices are asked again so much later: their memory may have changed."""
FIRST_FAILURES: Final = 3
_GREET_S: Final = 0.5
_MOST_GREET_S: Final = 10.0
_GREETING_S: Final = 1.5
"""How much longer than ``look_s`` the first ring waits for devices that are being greeted."""


def step(state: State, event: Event, now: float) -> tuple[State, tuple[Effect, ...]]:
    """What becomes of ``state`` by ``event`` at ``now`` (seconds on any scale), and what is to be done for it, in order."""
    effects: list[Effect] = []
    state = _take(state, event, now, effects)
    return _pursue(state, now, effects), tuple(effects)


def wake_at(state: State, now: float) -> float | None:
    """When a ``Tick`` is due if nothing else happens, None when time alone changes nothing."""
    settings = state.settings
    times = [state.retry_at_s, state.started_s + settings.look_s, state.started_s + settings.look_s + _GREETING_S]
    for device in state.devices.values():
        times.append(device.barred_until_s)
        match device.phase:
            case Phase.PROFILED | Phase.READY:
                times.append(device.heard_s + settings.suspect_after_s)
            case Phase.SUSPECTED:
                times.append(device.heard_s + settings.gone_after_s)
            case Phase.PAIRED | Phase.GONE if device.in_sight and not device.greeting:
                times.append(device.greet_at_s)
    if state.serving is not None:
        times.append(state.serving.since_s + SETTLE_S)
    if state.holding_s is not None:
        times.append(state.holding_s + settings.hold_s)
    return min((time for time in times if time > now), default=None)


def phase_of(state: State, name: str) -> Phase:
    """The phase of the device ``name`` as people are shown it: its part in a ring counts more than being ready."""
    phase = state.devices[name].phase
    if phase is Phase.READY and state.serving is not None and name in state.serving.members:
        return Phase.SERVING
    if phase is Phase.READY and state.attempt is not None and name in (state.attempt.members or ()):
        return Phase.LOADING
    return phase


def usable(state: State, now: float) -> frozenset[str]:
    """The workers that a plan may use now."""
    return frozenset(
        name
        for name, device in state.devices.items()
        if device.phase is Phase.READY and not device.leaving and (state.last_resort or device.barred_until_s <= now)
    )


# ---- events ---------------------------------------------------------------------------------------------------------


def _take(state: State, event: Event, now: float, effects: list[Effect]) -> State:
    match event:
        case Seen(device, trusted):
            return _seen(state, device, trusted, now)
        case Vanished(device):
            return _vanished(state, device)
        case Welcomed(device):
            known = state.devices.get(device)
            fresh = known or Device(phase=Phase.PROFILED, heard_s=now)
            return _set(
                state, device, replace(fresh, phase=Phase.PROFILED, heard_s=now, greeting=False, greets=0, reason="")
            )
        case Refused(device, reason):
            return _refused(state, device, reason, now)
        case Measured(devices):
            for name in devices & state.devices.keys():
                state = _measured(state, name)
            return replace(state, measuring=False)
        case Heard(device):
            return _heard(state, device, now, effects)
        case Lost(device, reason):
            return _lose(state, device, reason, now, effects)
        case Leaving(device, reason):
            return _leaving(state, device, reason, effects)
        case Solved():
            return _solved(state, event, effects)
        case NoPlan(epoch, reason):
            return _no_plan(state, epoch, reason, now, effects)
        case Formed(epoch):
            if state.attempt is None or state.attempt.epoch != epoch or state.attempt.members is None:
                return state
            return replace(state, attempt=replace(state.attempt, formed=True))
        case Broken():
            return _broken(state, event, now, effects)
        case Tick():
            return state


def _seen(state: State, name: str, trusted: bool, now: float) -> State:
    known = state.devices.get(name)
    if known is None:
        phase = Phase.PAIRED if trusted else Phase.DISCOVERED
        return _set(state, name, Device(phase=phase, heard_s=now, greet_at_s=now))
    if known.phase in (Phase.DISCOVERED, Phase.PAIRED, Phase.GONE):
        phase = Phase.PAIRED if trusted else Phase.DISCOVERED
        return _set(state, name, replace(known, phase=phase, in_sight=True, greet_at_s=now, greets=0))
    return _set(state, name, replace(known, in_sight=True))


def _vanished(state: State, name: str) -> State:
    known = state.devices.get(name)
    if known is None:
        return state
    if known.phase in (Phase.DISCOVERED, Phase.PAIRED, Phase.GONE) and not known.greeting:
        return _without(state, name)
    return _set(state, name, replace(known, in_sight=False))  # its link tells whether it is there


def _refused(state: State, name: str, reason: str, now: float) -> State:
    known = state.devices.get(name)
    if known is None or not known.greeting:
        return state
    if not known.in_sight:
        return _without(state, name)
    pause_s = min(_GREET_S * 2**known.greets, _MOST_GREET_S) if state.has_served else _GREET_S
    return _set(
        state,
        name,
        replace(known, greeting=False, greets=min(known.greets + 1, 10), greet_at_s=now + pause_s, reason=reason),
    )


def _measured(state: State, name: str) -> State:
    device = state.devices[name]
    if device.phase is Phase.PROFILED:
        return _set(state, name, replace(device, phase=Phase.READY))
    if device.phase is Phase.SUSPECTED and device.before is Phase.PROFILED:
        return _set(state, name, replace(device, before=Phase.READY))
    return state


def _heard(state: State, name: str, now: float, effects: list[Effect]) -> State:
    device = state.devices.get(name)
    if device is None or device.phase not in (*PRESENT, Phase.SUSPECTED):
        return state
    if device.phase is not Phase.SUSPECTED:
        return _set(state, name, replace(device, heard_s=now))
    effects.append(Say(f"{name} answers again"))
    state = _set(state, name, replace(device, phase=device.before, heard_s=now))
    if state.attempt is not None and state.attempt.why is Why.SUSPICION and not _suspects(state):
        return _abandon(state, effects)
    return state


def _lose(state: State, name: str, reason: str, now: float, effects: list[Effect]) -> State:
    device = state.devices.get(name)
    if device is None or device.phase not in (*PRESENT, Phase.SUSPECTED):
        return state
    effects.append(Drop(name))
    left = device.leaving
    device = replace(
        device, phase=Phase.GONE, greeting=False, leaving=False, reason=reason, greet_at_s=now + _GREET_S, greets=1
    )
    state = _set(state, name, device)
    attempt, serving = state.attempt, state.serving
    if attempt is not None and name in (attempt.candidates if attempt.members is None else attempt.members):
        state = _abandon(state, effects)
    if serving is not None and name in serving.members:
        effects.append(Say(f"{name} {'left' if left else 'is gone'}: {reason}"))
        state = _bar(state, name, now, lasting=False)
        return _close(state, f"{name}: {reason}", now, effects)
    if state.has_served:
        effects.append(Say(f"{name} {'left' if left else 'is gone'}: {reason}"))
    return state


def _leaving(state: State, name: str, reason: str, effects: list[Effect]) -> State:
    device = state.devices.get(name)
    if device is None or device.phase not in (*PRESENT, Phase.SUSPECTED) or device.leaving:
        return state
    state = _set(state, name, replace(device, leaving=True, reason=reason))
    if state.attempt is not None and name in state.attempt.candidates:
        state = _abandon(state, effects)
    if state.serving is None or name not in state.serving.members:
        effects.append(Dismiss(name))
    else:
        effects.append(Say(f"{name} leaves ({reason}); handing its layers over"))
    return state


def _solved(state: State, event: Solved, effects: list[Effect]) -> State:
    attempt = state.attempt
    if attempt is None or attempt.epoch != event.epoch:
        return state
    assert event.members <= attempt.candidates, "a plan with devices that nobody offered"
    serving = state.serving
    if attempt.why is Why.GAIN and serving is not None:
        gain = 1 - event.value / serving.value if serving.value > 0 else 0.0
        if gain < state.settings.gain:
            return replace(state, attempt=None, considered=attempt.candidates)
        effects.append(Say(f"a plan with {_names(event.members)} is {gain:.0%} better; changing to it"))
    effects.append(Form(event.epoch))
    return replace(state, attempt=replace(attempt, members=event.members, value=event.value))


def _no_plan(state: State, epoch: int, reason: str, now: float, effects: list[Effect]) -> State:
    attempt = state.attempt
    if attempt is None or attempt.epoch != epoch:
        return state
    state = replace(state, attempt=None, considered=attempt.candidates)
    if state.serving is not None:
        if attempt.why is Why.LEAVING:
            effects.append(Say(f"the other devices cannot take over: {reason}"))
            effects += _dismissals(state, frozenset())
        return state
    if not state.has_served:
        effects.append(GiveUp(reason))
        return state
    barred = any(device.phase is Phase.READY and device.barred_until_s > now for device in state.devices.values())
    if barred and not state.last_resort:
        return replace(state, last_resort=True, considered=None, retry_at_s=now)
    effects.append(Fail(reason))
    return replace(state, holding_s=None, last_resort=False, retry_at_s=now + RETRY_S)


def _broken(state: State, event: Broken, now: float, effects: list[Effect]) -> State:
    attempt, serving = state.attempt, state.serving
    if attempt is not None and attempt.epoch == event.epoch:
        state = _abandon(state, effects)
        failures = state.failures + 1
        blamed = event.device is not None and event.device in state.devices
        if not state.has_served and (not blamed or failures >= FIRST_FAILURES):
            effects.append(GiveUp(event.reason))
            return state
        effects.append(Say(f"{event.reason}; forming the ring again"))
        pause_s = 0.0 if blamed and not state.last_resort else min(2.0**failures, 30.0)
        state = replace(state, failures=failures, retry_at_s=now + pause_s)
        if serving is not None:
            state = replace(state, considered=attempt.candidates)
        return _bar(state, event.device, now, lasting=event.lasting)
    if serving is not None and serving.epoch == event.epoch:
        effects.append(Say(f"{event.reason}; forming the ring again"))
        state = _bar(state, event.device, now, lasting=event.lasting)
        return _close(state, event.reason, now, effects)
    return state


# ---- what follows from the state ------------------------------------------------------------------------------------


def _pursue(state: State, now: float, effects: list[Effect]) -> State:
    """A ladder of small questions: what is due now?"""
    state = _judge_silence(state, now, effects)
    state = _greet(state, now, effects)
    state = _swap(state, now, effects)
    state = _measure(state, effects)
    state = _attempt(state, now, effects)
    return _end_hold(state, now, effects)


def _judge_silence(state: State, now: float, effects: list[Effect]) -> State:
    for name, device in state.devices.items():
        silent_s = now - device.heard_s
        if device.phase in (*PRESENT, Phase.SUSPECTED) and silent_s >= state.settings.gone_after_s:
            state = _lose(state, name, f"no sign of life for {silent_s:.1f} s", now, effects)
        elif device.phase in PRESENT and silent_s >= state.settings.suspect_after_s:
            state = _set(state, name, replace(device, phase=Phase.SUSPECTED, before=device.phase))
            attempt = state.attempt
            if attempt is not None and attempt.members is None and name in attempt.candidates:
                state = _abandon(state, effects)
    return state


def _greet(state: State, now: float, effects: list[Effect]) -> State:
    for name, device in state.devices.items():
        waits = device.phase in (Phase.PAIRED, Phase.GONE) and device.in_sight and not device.greeting
        if waits and device.greet_at_s <= now:
            effects.append(Greet(name))
            state = _set(state, name, replace(device, greeting=True))
    return state


def _swap(state: State, now: float, effects: list[Effect]) -> State:
    """A ring that is formed serves, unless it waits for a suspected device to be gone."""
    attempt, serving = state.attempt, state.serving
    if attempt is None or not attempt.formed or attempt.members is None:
        return state
    if serving is not None and attempt.why is Why.SUSPICION:
        return state
    effects.append(Serve(attempt.epoch, None if serving is None else serving.epoch))
    effects += _dismissals(state, attempt.members)
    return replace(
        state,
        serving=Ring(
            epoch=attempt.epoch,
            members=attempt.members,
            candidates=attempt.candidates,
            value=attempt.value,
            since_s=now,
        ),
        attempt=None,
        has_served=True,
        holding_s=None,
        considered=None,
        last_resort=False,
        failures=0,
    )


def _measure(state: State, effects: list[Effect]) -> State:
    is_due = any(device.phase is Phase.PROFILED for device in state.devices.values())
    if not is_due or state.measuring or state.attempt is not None or state.holding_s is not None:
        return state
    present = frozenset(name for name, device in state.devices.items() if device.phase in PRESENT)
    effects.append(Measure(present))
    return replace(state, measuring=True)


def _attempt(state: State, now: float, effects: list[Effect]) -> State:
    """Start an attempt at another ring if there is a reason for one."""
    if state.attempt is not None:
        return state
    candidates = usable(state, now)
    why = _reason_to_try(state, candidates, now, effects)
    if why is None:
        return state
    epoch = state.epoch + 1
    effects.append(Solve(epoch, candidates))
    return replace(state, epoch=epoch, attempt=Attempt(epoch=epoch, why=why, candidates=candidates))


def _reason_to_try(state: State, candidates: frozenset[str], now: float, effects: list[Effect]) -> Why | None:
    serving = state.serving
    if serving is None:
        if not state.has_served:
            return Why.FIRST if now >= state.retry_at_s and _gathered(state, candidates, now, effects) else None
        waits = now < state.retry_at_s and state.considered in (candidates, None)
        return None if waits else Why.RECOVERY
    if state.considered == candidates:
        return None
    if any(name in serving.members for name, device in state.devices.items() if device.leaving):
        return Why.LEAVING
    if _suspects(state):
        return Why.SUSPICION
    if state.measuring or now < serving.since_s + SETTLE_S or now < state.retry_at_s:
        return None
    return Why.GAIN if candidates - serving.candidates else None


def _gathered(state: State, candidates: frozenset[str], now: float, effects: list[Effect]) -> bool:
    """Whether the devices for the first ring are there."""
    settings = state.settings
    if settings.solo:
        return True
    is_late = now >= state.started_s + settings.look_s
    if settings.wanted is not None:
        if len(candidates) >= settings.wanted:
            return not _unmeasured(state)
        if is_late and not _unmeasured(state):
            effects.append(GiveUp(_too_few(state, len(candidates))))
        return False
    greeting = any(device.greeting for device in state.devices.values())
    patient = greeting and now < state.started_s + settings.look_s + _GREETING_S
    return is_late and not patient and not _unmeasured(state)


def _unmeasured(state: State) -> bool:
    return state.measuring or any(device.phase is Phase.PROFILED for device in state.devices.values())


def _too_few(state: State, found: int) -> str:
    settings = state.settings
    why = "; ".join(f"{name}: {device.reason}" for name, device in sorted(state.devices.items()) if device.reason)
    return (
        f"--wait {settings.wanted}: found {found} of {settings.wanted} devices in {settings.look_s:g} s"
        + (f" ({why})" if why else "")
        + "; start 'primad join' on the others or name them with --device"
    )


def _end_hold(state: State, now: float, effects: list[Effect]) -> State:
    if state.holding_s is None or now - state.holding_s < state.settings.hold_s:
        return state
    effects.append(Fail(f"no ring could be formed within {state.settings.hold_s:g} s"))
    return replace(state, holding_s=None)


# ---- small moves ----------------------------------------------------------------------------------------------------


def _close(state: State, reason: str, now: float, effects: list[Effect]) -> State:
    assert state.serving is not None
    effects.append(Close(state.serving.epoch, reason))
    return replace(state, serving=None, holding_s=now, considered=None)


def _abandon(state: State, effects: list[Effect]) -> State:
    assert state.attempt is not None
    effects.append(Abandon(state.attempt.epoch))
    return replace(state, attempt=None)


def _bar(state: State, name: str | None, now: float, *, lasting: bool) -> State:
    device = state.devices.get(name) if name is not None else None
    if name is None or device is None:
        return state
    failures = 1 if now - device.barred_until_s > FORGIVEN_S else device.failures + 1
    pause_s = LASTING_BAR_S if lasting else min(BAR_S * 2 ** (failures - 1), MOST_BAR_S)
    return _set(state, name, replace(device, failures=failures, barred_until_s=now + pause_s))


def _dismissals(state: State, members: frozenset[str]) -> Iterable[Effect]:
    return [Dismiss(name) for name, device in state.devices.items() if device.leaving and name not in members]


def _suspects(state: State) -> frozenset[str]:
    """The suspected devices of the serving ring."""
    members = state.serving.members if state.serving is not None else frozenset()
    return frozenset(name for name in members if state.devices[name].phase is Phase.SUSPECTED)


def _set(state: State, name: str, device: Device) -> State:
    return replace(state, devices={**state.devices, name: device})


def _without(state: State, name: str) -> State:
    devices: dict[str, Any] = {key: device for key, device in state.devices.items() if key != name}
    return replace(state, devices=devices)


def _names(names: frozenset[str]) -> str:
    return ", ".join(sorted(names)) or "the head alone"
