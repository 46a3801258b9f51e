"""Decides which devices belong to the cluster and which ring serves, as one pure function: ``step(state, event, now) ->
state, effects``.

Each rule is in one place: here, in ``due.py`` (what is due) or in ``transitions.py`` (what both need):

- A silent device is suspected, later gone; a device whose link breaks is gone immediately. While a device of the
  serving ring is suspected, a ring without it is formed in the background: it serves the moment the device is gone, and
  is dropped when the device speaks again.
- There is one serving ring and at most one attempt at another. When the serving ring breaks, open requests wait for the
  next one. They end with an error as soon as there is no plan and no device is suspected, or after ``hold_s``, or when
  several rings in a row break.
- A better plan is used only if it gains enough; candidates that did not give one are not planned with again until they
  change.
- A link that does not work is measured again while a ring serves, after a pause that doubles each time; when it works,
  its devices are planned with as if they were new. The link at which a group broke is measured as soon as another ring
  serves.
- A device at fault for a break is barred for a while, which doubles each time, unless there is no plan without it. If
  several devices may be at fault, one of them is chosen (``doubt.py``). Going away and coming back does not lift the
  bar. A device that goes away while links are measured, or does not measure them, is at fault as well: all others wait
  for it.
- A device that makes no progress in loading, or hardly any, is at fault like one that fails to load. If the head's own
  disk fails and no ring serves, open requests end with that error; a ring is tried again after a pause.
- While no ring serves, a device that made a ring in preparation fail is not waited for a second time, unless there is
  no plan without it. It may join again while a ring serves, and counts as any other device once a ring has served with
  it.
- A device that leaves hands its layers over first; if no other device can take them it may leave nonetheless.
- For a device that is short of memory another plan is formed in the background, whether it gains or not; if there is
  none the ring continues as it is. When the device has room again, a plan that gains enough is used, as when a device
  joins.

Nothing here waits, sends or looks at a clock.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from primad.membership.doubt import culprit, doubt
from primad.membership.due import LOAD_PARTS, LOAD_STALL_S, pursue, settled_s, wake_at
from primad.membership.transitions import (
    GREET_S,
    MAX_BAR_S,
    MAX_FLAPS,
    abandon,
    bar,
    bar_s,
    close,
    dismissals,
    give_up,
    holds_up,
    is_spoken_to,
    lose,
    put,
    suspects,
    takes_part,
    usable,
    without,
)
from primad.membership.types import (
    Attempt,
    Device,
    DeviceLeaving,
    DeviceMemoryLow,
    DeviceMemoryRecovered,
    DevicePhase,
    DeviceRefused,
    DevicesCorrected,
    Drop,
    Effect,
    Event,
    Fail,
    Form,
    Formed,
    Heard,
    LetGo,
    LoadPace,
    LoadStage,
    Lost,
    Measured,
    NoPlan,
    OwnerLine,
    Progressed,
    Purpose,
    RingFailed,
    Seen,
    Solved,
    State,
    Tick,
    Vanished,
    Welcomed,
)

__all__ = ["phase_of", "step", "usable", "wake_at"]

FIRST_FAILURES: Final = 3
"""After this number of attempts at the first ring that one device broke, give up."""
MAX_BREAKS: Final = 4
"""After this number of rings in a row broke within ``settle_s``, open requests end: they may be the cause."""
MAX_STRANGERS: Final = 64
"""Number of untrusted announcements that are remembered: anyone can make them."""
_MAX_GREET_S: Final = 10.0
_MEASURE_AGAIN_S: Final = 2.0
MAX_AGAIN_S: Final = 3600.0
"""The longest pause until a failed link is measured again."""
_MAX_PAUSE_S: Final = 30.0


def step(state: State, event: Event, now: float) -> tuple[State, tuple[Effect, ...]]:
    """Return the next ``state`` after ``event`` at ``now`` (seconds on any scale), and the effects, in order."""
    effects: list[Effect] = []
    if not state.ended:
        state = _take(state, event, now, effects)
    if not state.ended:
        state = _judge_loading(state, now, effects)
    if not state.ended:
        state = pursue(state, now, effects)
    return state, tuple(effects)


def phase_of(state: State, name: str) -> DevicePhase:
    """Return the phase of the known device ``name`` for people: its part in a ring takes precedence over being
    ready."""
    phase = state.devices[name].phase
    if phase is DevicePhase.READY and state.serving is not None and name in state.serving.members:
        return DevicePhase.SERVING
    if phase is DevicePhase.READY and state.attempt is not None and name in (state.attempt.members or ()):
        return DevicePhase.LOADING
    return phase


def _take(state: State, event: Event, now: float, effects: list[Effect]) -> State:
    match event:
        case Seen(device, trusted):
            return _seen(state, device, trusted, now)
        case Vanished(device):
            return _vanished(state, device, now)
        case Welcomed(device):
            return _welcomed(state, device, now, effects)
        case DeviceRefused(device, reason):
            return _refused(state, device, reason, now)
        case Measured():
            return _measured(state, event, now)
        case Heard(device):
            return _heard(state, device, now, effects)
        case Lost(device, reason):
            return lose(state, device, reason, now, effects)
        case DeviceLeaving(device, reason):
            return _leaving(state, device, reason, effects)
        case DeviceMemoryLow(device, by_owner):
            return _memory_low(state, device, by_owner)
        case DeviceMemoryRecovered(device, by_owner):
            return _memory_recovered(state, device, by_owner)
        case DevicesCorrected(devices):
            return _corrected(state, devices)
        case Solved():
            return _solved(state, event, now, effects)
        case NoPlan(epoch, reason):
            return _no_plan(state, epoch, reason, now, effects)
        case Progressed():
            return _progressed(state, event, now)
        case Formed(epoch):
            return _formed(state, epoch)
        case RingFailed():
            return _broken(state, event, now, effects)
        case Tick():
            return state


# ---- devices --------------------------------------------------------------------------------------------------------


def _seen(state: State, name: str, trusted: bool, now: float) -> State:
    known = state.devices.get(name)
    phase = DevicePhase.PAIRED if trusted else DevicePhase.DISCOVERED
    if known is None:
        strangers = sum(device.phase is DevicePhase.DISCOVERED for device in state.devices.values())
        if not trusted and strangers >= MAX_STRANGERS:
            return state
        return put(state, name, Device(phase=phase, heard_s=now, greet_at_s=now))
    if is_spoken_to(known):
        return put(state, name, replace(known, in_sight=True))
    greet_at_s = now if known.flaps <= MAX_FLAPS else known.greet_at_s
    return put(state, name, replace(known, phase=phase, in_sight=True, greet_at_s=greet_at_s, greets=0))


def _vanished(state: State, name: str, now: float) -> State:
    known = state.devices.get(name)
    if known is None:
        return state
    if not is_spoken_to(known) and not known.greeting:
        return without(state, name, now)
    return put(state, name, replace(known, in_sight=False))  # its link shows whether it is there


def _welcomed(state: State, name: str, now: float, effects: list[Effect]) -> State:
    known = state.devices.get(name, Device(phase=DevicePhase.PAIRED, heard_s=now))
    if is_spoken_to(known):
        return _heard(state, name, now, effects)
    if known.phase is DevicePhase.DISCOVERED:  # its trust was withdrawn while it was greeted
        effects.append(Drop(name))
        return put(state, name, replace(known, greeting=False)) if known.in_sight else without(state, name, now)
    # A long bar for a lasting fault is shortened to a usual one when the device comes back: its owner may have made
    # room and restarted it.
    until_s = known.barred_until_s
    if until_s > now + MAX_BAR_S:
        until_s = now + bar_s(known.failures)
    fresh = replace(
        known,
        phase=DevicePhase.PROFILED,
        heard_s=now,
        welcomed_s=now,
        greeting=False,
        greets=0,
        reason="",
        barred_until_s=until_s,
    )
    return replace(put(state, name, fresh), agains=0)


def _refused(state: State, name: str, reason: str, now: float) -> State:
    known = state.devices.get(name)
    if known is None or not known.greeting:
        return state
    if not known.in_sight:
        return without(state, name, now)
    is_patient = state.has_served or not state.settings.plans
    pause_s = min(GREET_S * 2**known.greets, _MAX_GREET_S) if is_patient else GREET_S
    greets = min(known.greets + 1, 10)
    return put(state, name, replace(known, greeting=False, greets=greets, greet_at_s=now + pause_s, reason=reason))


def _measured(state: State, event: Measured, now: float) -> State:
    asked = state.measuring
    state = replace(state, measuring=frozenset())
    for name in asked & state.devices.keys():
        device = state.devices[name]
        own = device.before if device.phase is DevicePhase.SUSPECTED else device.phase
        if own is not DevicePhase.PROFILED:
            continue
        if name not in event.devices:
            state = put(state, name, replace(device, reason="the links to it could not be measured"))
            state = replace(state, measure_at_s=now + _MEASURE_AGAIN_S)
        elif device.phase is DevicePhase.SUSPECTED:
            state = put(state, name, replace(device, before=DevicePhase.READY))
        else:
            state = put(state, name, replace(device, phase=DevicePhase.READY, reason=""))
    if event.unreached:
        at_s = now + min(state.settings.timings.again_s * 2.0 ** min(state.agains, 10), MAX_AGAIN_S)
        state = replace(state, again_at_s=at_s if state.again_at_s is None else min(at_s, state.again_at_s))
    if state.serving is None or not event.reached:
        return state
    # They may be useful now, so they count as new candidates for a plan better than the serving one.
    serving = replace(state.serving, candidates=state.serving.candidates - event.reached)
    tried = dict(state.tried)
    tried.pop(Purpose.GAIN, None)
    return replace(state, serving=serving, tried=tried)


def _heard(state: State, name: str, now: float, effects: list[Effect]) -> State:
    device = state.devices.get(name)
    if device is None or not is_spoken_to(device):
        return state
    if device.phase is not DevicePhase.SUSPECTED:
        return put(state, name, replace(device, heard_s=now))
    effects.append(OwnerLine(f"{name} responds again"))
    state = put(state, name, replace(device, phase=device.before, heard_s=now))
    attempt = state.attempt
    if attempt is not None and attempt.why is Purpose.SUSPICION and suspects(state) <= (attempt.members or frozenset()):
        return abandon(state, effects)  # it includes all devices that are still suspected
    return state


def _leaving(state: State, name: str, reason: str, effects: list[Effect]) -> State:
    device = state.devices.get(name)
    if device is None or not is_spoken_to(device) or device.leaving:
        return state
    state = put(state, name, replace(device, leaving=True, reason=reason))
    if takes_part(state.attempt, name):
        state = abandon(holds_up(state, name), effects)
    if state.serving is None or name not in state.serving.members:
        effects.append(LetGo(name))
        return state
    effects.append(OwnerLine(f"{name} leaves ({reason}); handing its layers over"))
    if state.attempt is not None and state.attempt.why is Purpose.SUSPICION and name not in state.attempt.candidates:
        return replace(state, attempt=replace(state.attempt, why=Purpose.LEAVING))  # it leaves anyway, so do not wait
    return state


def _memory_low(state: State, name: str, by_owner: bool) -> State:
    serving = state.serving
    if serving is None or name not in serving.members | {state.settings.head}:
        return state
    state = replace(state, memory_low=state.memory_low | {name}, newly_limited=state.newly_limited - {name})
    return replace(state, newly_limited=state.newly_limited | {name}, recover_at_s=0.0) if by_owner else state


def _memory_recovered(state: State, name: str, by_owner: bool) -> State:
    state = replace(state, memory_low=state.memory_low - {name}, newly_limited=state.newly_limited - {name})
    if state.serving is None or name not in state.devices.keys() | {state.settings.head}:
        return state
    state = replace(state, memory_recovered=state.memory_recovered | {name})
    return replace(state, regain_at_s=0.0) if by_owner else state


def _corrected(state: State, names: frozenset[str]) -> State:
    """Record corrected devices, unless the head is alone and so has nothing to plan again."""
    if state.serving is None or not state.serving.candidates:
        return state
    return replace(state, corrected=state.corrected | (names & (state.devices.keys() | {state.settings.head})))


# ---- attempts and rings ---------------------------------------------------------------------------------------------


def _solved(state: State, event: Solved, now: float, effects: list[Effect]) -> State:
    attempt, serving = state.attempt, state.serving
    if attempt is None or attempt.epoch != event.epoch or attempt.members is not None:
        return state
    assert event.members <= attempt.candidates, "a plan with devices that nobody offered"
    if attempt.why is Purpose.GAIN and serving is not None:
        present = serving.value if event.serving_value is None else event.serving_value
        is_enough = event.value <= (1 - state.settings.gain) * present
        is_due = state.settings.use_all and not event.members <= serving.members
        if present <= 0 or not (is_enough or is_due):
            state = _in_vain(state, attempt)
            return abandon(replace(state, attempt=_granted(attempt)), effects)
        names = ", ".join(sorted(event.members)) or "the head alone"
        better = 1 - event.value / present
        how = (
            f"is {better:.0%} better; changing to it" if better > 0 else "takes over, as every device is to have layers"
        )
        effects.append(OwnerLine(f"a plan with {names} {how}"))
    effects.append(Form(event.epoch))
    loading = {name: LoadPace(since_s=now) for name in event.members}
    return replace(state, attempt=replace(attempt, members=event.members, loading=loading, value=event.value))


def _granted(attempt: Attempt) -> Attempt:
    """Return the attempt without the reason for it, which is met."""
    return replace(attempt, memory_recovered=frozenset(), corrected=frozenset())


def _no_plan(state: State, epoch: int, reason: str, now: float, effects: list[Effect]) -> State:
    attempt = state.attempt
    if attempt is None or attempt.epoch != epoch or attempt.members is not None:
        return state
    state = replace(_in_vain(state, attempt), attempt=None)
    if attempt.why is Purpose.PRESSURE:
        effects.append(OwnerLine(f"no other plan asks less of {', '.join(sorted(state.memory_low))}: {reason}"))
        return replace(state, memory_low=frozenset())
    if state.serving is not None:
        return _not_handed_over(state, attempt, reason, effects)
    if usable(state, now) != attempt.candidates:
        return state  # others came meanwhile
    # From here on barred devices may take part: those that are present, and any that come back.
    is_last = state.last_resort
    state = replace(state, last_resort=True)
    if not is_last and usable(state, now) != attempt.candidates:
        return state
    silent = [device.heard_s for device in state.devices.values() if device.phase is DevicePhase.SUSPECTED]
    if silent:
        return replace(state, retry_at_s=max(silent) + state.settings.gone_after_s)  # sooner if one speaks again
    if not state.has_served:
        return give_up(state, reason, effects)
    effects.append(Fail(reason))
    return replace(state, holding_s=None, retry_at_s=now + state.settings.timings.retry_s)


def _progressed(state: State, event: Progressed, now: float) -> State:
    """Record progress in loading. It counts only if it is large enough; reports about an earlier stage are ignored."""
    attempt = state.attempt
    before = attempt.loading.get(event.device) if attempt is not None and attempt.epoch == event.epoch else None
    if attempt is None or before is None:
        return state
    loading = dict(attempt.loading)
    if event.stage is LoadStage.READY:
        del loading[event.device]
    elif event.stage > before.stage or (event.stage, event.share) >= (before.stage, before.share + 1 / LOAD_PARTS):
        loading[event.device] = LoadPace(since_s=now, stage=event.stage, share=event.share)
    return replace(state, attempt=replace(attempt, loading=loading))


def _judge_loading(state: State, now: float, effects: list[Effect]) -> State:
    """End the attempt because of the device with the longest time without progress, if that time is too long."""
    attempt = state.attempt
    if attempt is None or not attempt.loading:
        return state
    name, pace = min(attempt.loading.items(), key=lambda each: each[1].since_s)
    if now < pace.since_s + LOAD_STALL_S:
        return state
    what = "fetches its layers" if pace.stage is LoadStage.FETCH else "loads its windows"
    reason = f"{name} {what} too slowly: {pace.share:.0%} done, and hardly any more in {LOAD_STALL_S:g} s"
    return _broken(state, RingFailed(attempt.epoch, name, reason), now, effects)


def _formed(state: State, epoch: int) -> State:
    attempt = state.attempt
    if attempt is None or attempt.epoch != epoch or attempt.members is None:
        return state
    return replace(state, attempt=replace(attempt, loading={}, formed=True))


def _broken(state: State, event: RingFailed, now: float, effects: list[Effect]) -> State:
    attempt, serving = state.attempt, state.serving
    served = serving is not None and serving.epoch == event.epoch
    if not served and (attempt is None or attempt.epoch != event.epoch):
        return state
    state = doubt(state, event, now)
    event = replace(event, device=culprit(state, event, served=served))
    if event.between:
        state = replace(state, again_at_s=now)
    if attempt is not None and not served:
        return _attempt_broke(state, attempt, event, now, effects)
    return _ring_broke(state, event, now, effects)


def _attempt_broke(state: State, attempt: Attempt, event: RingFailed, now: float, effects: list[Effect]) -> State:
    at_fault = event.device in attempt.candidates
    if attempt.why is not Purpose.GAIN or not at_fault:
        # A device that broke a better plan is barred, and the plan may be tried again when the bar ends.
        state = replace(_in_vain(state, attempt), attempt=_granted(attempt))
    state = abandon(holds_up(state, event.device or ""), effects)
    failures = state.failures + 1
    is_fatal = not at_fault and not event.again
    if not state.has_served and (is_fatal or _is_hopeless(state, attempt, event.device, failures)):
        return give_up(state, event.reason, effects)
    if event.lasting and not at_fault and state.serving is None:  # the head's disk: no request waits for its owner
        effects.append(Fail(event.reason))
        state = replace(state, holding_s=None)
    else:
        effects.append(OwnerLine(f"{event.reason}; forming the ring again"))
    # Without the device at fault the next attempt is another ring, which need not wait.
    pause_s = 0.0 if at_fault and not state.last_resort else min(2.0 ** min(failures, 10), _MAX_PAUSE_S)
    state = bar(
        replace(state, failures=failures, retry_at_s=now + pause_s),
        event.device,
        event.reason,
        now,
        lasting=event.lasting,
    )
    if not at_fault:
        return _not_handed_over(state, attempt, event.reason, effects)
    return state


def _is_hopeless(state: State, attempt: Attempt, name: str | None, failures: int) -> bool:
    """Return whether the first ring was tried often enough. While there are other devices, it is formed without one
    that breaks it."""
    device = state.devices.get(name) if name is not None else None
    if device is not None and not state.last_resort:
        return False
    again = device is None or device.failures + 1 >= FIRST_FAILURES
    return failures >= FIRST_FAILURES and (again or failures >= FIRST_FAILURES * len(attempt.candidates))


def _ring_broke(state: State, event: RingFailed, now: float, effects: list[Effect]) -> State:
    assert state.serving is not None
    effects.append(OwnerLine(f"{event.reason}; forming the ring again"))
    device = None if event.device is None else state.devices.get(event.device)
    # The next ring does without the device at fault, unless there is no plan without it: then the device was barred and
    # is used nevertheless.
    is_cured = device is not None and device.barred_until_s <= now
    breaks = state.breaks + (not is_cured) if now < settled_s(state, state.serving) else 0
    state = bar(replace(state, breaks=breaks), event.device, event.reason, now, lasting=event.lasting)
    if event.device is not None and takes_part(state.attempt, event.device):
        state = abandon(state, effects)
    state = close(state, event.reason, now, effects)
    if breaks > 1:
        pause_s = min(2.0 ** min(breaks - 2, 10), _MAX_PAUSE_S)
        state = replace(state, retry_at_s=now + pause_s, tried={Purpose.RECOVERY: usable(state, now)})
    if breaks < MAX_BREAKS:
        return state
    effects.append(Fail(f"{breaks} rings in a row broke: {event.reason}"))
    return replace(state, holding_s=None)


def _in_vain(state: State, attempt: Attempt) -> State:
    return replace(state, tried={**state.tried, attempt.why: attempt.candidates})


def _not_handed_over(state: State, attempt: Attempt, reason: str, effects: list[Effect]) -> State:
    """Release the devices that asked to leave, if this attempt was to hand over their layers: no others can take
    them."""
    if state.serving is not None and attempt.why is Purpose.LEAVING:
        effects.append(OwnerLine(f"the other devices cannot take over: {reason}"))
        effects += dismissals(state)
    return state
