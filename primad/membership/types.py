"""The vocabulary of the membership core: the devices of a cluster, events and effects.

Values only. ``step.py`` decides with them; the head's daemon passes events and carries out effects.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum
from typing import Final

from primad.settings.timings import MembershipTimings


class DevicePhase(StrEnum):
    """The phase of a device."""

    DISCOVERED = "discovered"
    """Announces itself; its key is not trusted."""
    PAIRED = "paired"
    """Trusted, not contacted yet."""
    PROFILED = "profiled"
    """Welcomed, with its profile; its links are not measured."""
    READY = "ready"
    """May take part in a plan."""
    LOADING = "loading"
    """Has a part in the ring that is being formed."""
    SERVING = "serving"
    """Has a part in the serving ring."""
    SUSPECTED = "suspected"
    """Silent for a while."""
    GONE = "gone"
    """Silent for too long, or its link broke, or it left."""


PRESENT: Final = (DevicePhase.PROFILED, DevicePhase.READY)
"""The phases, apart from those in rings, in which a device is connected."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The owner's settings.

    Without a sign of life for ``suspect_after_s`` a device is suspected, after ``gone_after_s`` it is gone. A better
    plan is used if it gains at least the share ``gain``; with ``use_all`` any plan is used that has layers for one more
    device. ``wanted`` is the number of workers to wait for at the start, for ``look_s`` (infinity: until they are
    present); None uses those found by then. ``hold_s`` is how long open requests wait for a new ring. ``solo``: no
    worker is awaited. ``timings`` are the same in every home. Without ``plans`` there is no model to plan for: devices
    are welcomed and measured, so that a model can begin immediately.
    """

    head: str
    suspect_after_s: float
    gone_after_s: float
    gain: float
    use_all: bool
    wanted: int | None
    look_s: float
    hold_s: float
    solo: bool
    timings: MembershipTimings
    plans: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """A worker as the head knows it.

    ``phase`` is the device's own (discovered, paired, profiled, ready, suspected or gone); ``step.phase_of`` returns
    the one to show. ``before`` is the phase of a suspected device before it was suspected. The device is greeted once
    ``greet_at_s`` has come, unless ``greeting`` is under way. After ``failures`` it is barred until ``barred_until_s``.
    It was party to ``doubts`` breaks without a known culprit, the last one at ``doubted_s``. ``unproven``: a ring in
    preparation failed because of it, and no ring has served with it since. Until ``measure_at_s`` its links are not
    waited for. It was welcomed at ``welcomed_s``, and lost soon after a welcome ``flaps`` times in a row. ``leaving``:
    it asked to leave. ``reason`` explains its state in one line, or is empty.
    """

    phase: DevicePhase
    heard_s: float
    before: DevicePhase = DevicePhase.READY
    in_sight: bool = True
    greeting: bool = False
    greet_at_s: float = 0.0
    greets: int = 0
    welcomed_s: float = 0.0
    flaps: int = 0
    failures: int = 0
    barred_until_s: float = 0.0
    doubts: int = 0
    doubted_s: float = 0.0
    unproven: bool = False
    measure_at_s: float = 0.0
    leaving: bool = False
    reason: str = ""


def is_measured(device: Device) -> bool:
    """Return whether the device is connected and its links are known."""
    own = device.before if device.phase is DevicePhase.SUSPECTED else device.phase
    return own is DevicePhase.READY


class Purpose(StrEnum):
    """The purpose of a ring."""

    FIRST = "the first ring"
    RECOVERY = "a ring that broke"
    SUSPICION = "a device that went silent"
    LEAVING = "a device that leaves"
    PRESSURE = "a device that is short of memory"
    GAIN = "a better plan"


class LoadStage(IntEnum):
    """The stages of loading of a device in a ring in preparation."""

    FETCH = 1
    """It fetches layers."""
    LOAD = 2
    """It loads its windows."""
    READY = 3
    """It has loaded them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadPace:
    """A device reached ``share`` of ``stage`` at ``since_s``; it has ``LOAD_STALL_S`` from then on to make progress."""

    since_s: float
    stage: LoadStage = LoadStage.FETCH
    share: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """A ring in preparation: of the workers ``candidates``, of ``members`` once it is solved; ``formed`` once it could
    serve.

    While it is being formed, ``loading`` are the members that are not ready. ``memory_recovered`` are devices that have
    room again, ``corrected`` those with other figures than the serving ring was planned with: the attempt is made
    because of them.
    """

    epoch: int
    why: Purpose
    candidates: frozenset[str]
    memory_recovered: frozenset[str] = frozenset()
    corrected: frozenset[str] = frozenset()
    members: frozenset[str] | None = None
    loading: Mapping[str, LoadPace] = field(default_factory=dict)
    value: float = 0.0
    formed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingRing:
    """The serving ring: its workers, its candidates, and its objective (less is better)."""

    epoch: int
    members: frozenset[str]
    candidates: frozenset[str]
    value: float
    since_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """The state of the core.

    ``holding_s`` is the time since which open requests wait for a ring, None if none waits. ``measuring``: the devices
    whose links are being measured; the next measurement may begin at ``measure_at_s``. Links that do not work are
    measured again at ``again_at_s`` (None if all work), and were ``agains`` times since a device came. ``tried``: for
    each purpose, the candidates that were last tried in vain. ``last_resort``: there is no plan without barred devices,
    so they may take part. Until ``retry_at_s`` candidates that were tried are not tried again; ``failures`` is the
    number of attempts in a row that broke, ``breaks`` the number of rings in a row that broke soon after they began to
    serve. ``memory_low``: devices of the serving ring that are short of memory; the next search for a plan may begin at
    ``recover_at_s``. ``newly_limited``: those of them whose limit the head's owner lowered, for the line about them.
    ``memory_recovered``: devices that were short of memory and have room again; ``corrected``: devices with other
    figures than the serving ring was planned with; the next search for a better plan may begin at ``regain_at_s``.
    ``ended``: the core gave up.
    """

    settings: Settings
    started_s: float
    devices: Mapping[str, Device] = field(default_factory=dict)
    serving: ServingRing | None = None
    attempt: Attempt | None = None
    epoch: int = 0
    has_served: bool = False
    holding_s: float | None = None
    measuring: frozenset[str] = frozenset()
    measure_at_s: float = 0.0
    again_at_s: float | None = None
    agains: int = 0
    tried: Mapping[Purpose, frozenset[str]] = field(default_factory=dict)
    last_resort: bool = False
    retry_at_s: float = 0.0
    failures: int = 0
    breaks: int = 0
    memory_low: frozenset[str] = frozenset()
    newly_limited: frozenset[str] = frozenset()
    recover_at_s: float = 0.0
    memory_recovered: frozenset[str] = frozenset()
    corrected: frozenset[str] = frozenset()
    regain_at_s: float = 0.0
    ended: bool = False


# ---- events ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Seen:
    """A worker announces itself; ``trusted`` if its key is trusted."""

    device: str
    trusted: bool


@dataclass(frozen=True, slots=True)
class Vanished:
    """The worker is not announced any more."""

    device: str


@dataclass(frozen=True, slots=True)
class Welcomed:
    """The worker replied with a welcome; there is a link to it from now on."""

    device: str


@dataclass(frozen=True, slots=True)
class DeviceRefused:
    """The worker did not reply, or does not work for this head now."""

    device: str
    reason: str


@dataclass(frozen=True, slots=True)
class Measured:
    """The links of ``devices`` are known. The links of others that were to be measured could not be.

    ``unreached``: some of the links do not work, perhaps because a device was busy. Links of ``reached`` that did not
    work before do now; later plans use them.
    """

    devices: frozenset[str]
    unreached: bool = False
    reached: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Heard:
    """A sign of life."""

    device: str


@dataclass(frozen=True, slots=True)
class Lost:
    """The device's link broke for good: its process ended, or it works for another head."""

    device: str
    reason: str


@dataclass(frozen=True, slots=True)
class DeviceLeaving:
    """The device asks to leave once its work has been handed over."""

    device: str
    reason: str


@dataclass(frozen=True, slots=True)
class DeviceMemoryLow:
    """A worker or the head itself is short of memory for its part in the serving ring; later plans respect that.

    ``by_owner``: the head's owner lowered its limit, and waits for the change.
    """

    device: str
    by_owner: bool = False


@dataclass(frozen=True, slots=True)
class DeviceMemoryRecovered:
    """A worker or the head itself that was short of memory has room again; later plans use it.

    ``by_owner``: the head's owner raised its limit, and waits for the change.
    """

    device: str
    by_owner: bool = False


@dataclass(frozen=True, slots=True)
class DevicesCorrected:
    """Corrected figures of workers or of the head itself are known; later plans use them."""

    devices: frozenset[str]


@dataclass(frozen=True, slots=True)
class Solved:
    """The plan of attempt ``epoch`` gives work to the workers ``members`` and has the objective ``value``.

    ``serving_value`` is the objective of the serving plan with current knowledge; None if not known.
    """

    epoch: int
    members: frozenset[str]
    value: float
    serving_value: float | None = None


@dataclass(frozen=True, slots=True)
class NoPlan:
    """The candidates of attempt ``epoch`` cannot hold the model."""

    epoch: int
    reason: str


@dataclass(frozen=True, slots=True)
class Formed:
    """Every device of ring ``epoch`` has loaded its windows and a warm-up pass returned."""

    epoch: int


@dataclass(frozen=True, slots=True)
class Progressed:
    """A member of attempt ``epoch`` reports that ``share`` (0 to 1) of ``stage`` is done."""

    epoch: int
    device: str
    stage: LoadStage
    share: float = 0.0


@dataclass(frozen=True, slots=True)
class RingFailed:
    """Ring ``epoch`` broke, or could not be formed. ``device`` is at fault, if known.

    Otherwise one of the ``parties`` may be, the accused before the accuser (``doubt.py``). If ``device`` is given,
    other parties may have made it fail. ``lasting``: the device, or without one the head, will not recover soon (for
    example, its disk is full). ``again``: form the ring once more, as the parties have more or less memory than they
    loaded for. The link ``between`` two devices may have failed: it is measured again.
    """

    epoch: int
    device: str | None
    reason: str
    lasting: bool = False
    again: bool = False
    parties: tuple[str, ...] = ()
    between: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed."""


Event = (
    Seen
    | Vanished
    | Welcomed
    | DeviceRefused
    | Measured
    | Heard
    | Lost
    | DeviceLeaving
    | DeviceMemoryLow
    | DeviceMemoryRecovered
    | DevicesCorrected
    | Solved
    | NoPlan
    | Progressed
    | Formed
    | RingFailed
    | Tick
)


# ---- effects --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Greet:
    """Greet the device; the reply is ``Welcomed`` or ``DeviceRefused``."""

    device: str


@dataclass(frozen=True, slots=True)
class Drop:
    """Close the link to the device."""

    device: str


@dataclass(frozen=True, slots=True)
class Measure:
    """Measure the missing links between the head and ``devices``; the reply is ``Measured``.

    ``again``: also links that failed before.
    """

    devices: frozenset[str]
    again: bool = False


@dataclass(frozen=True, slots=True)
class Solve:
    """Plan for the head and ``candidates``; the reply is ``Solved`` or ``NoPlan``.

    A plan is kept until ``Form`` or ``Abandon`` of its epoch. A plan with the same windows as ring ``instead`` counts
    as no plan.
    """

    epoch: int
    candidates: frozenset[str]
    instead: int | None = None


@dataclass(frozen=True, slots=True)
class Form:
    """Form the ring planned as ``epoch``; the reply is ``Formed`` or ``RingFailed``."""

    epoch: int


@dataclass(frozen=True, slots=True)
class Abandon:
    """Drop attempt ``epoch`` and its plan: stop solving or forming, release its devices. It may have ended by
    itself."""

    epoch: int


@dataclass(frozen=True, slots=True)
class Serve:
    """Ring ``epoch`` serves from now on; the steps of ``instead`` end first, and its requests resume here."""

    epoch: int
    instead: int | None


@dataclass(frozen=True, slots=True)
class Close:
    """Ring ``epoch`` is broken: close it; open requests wait."""

    epoch: int
    reason: str


@dataclass(frozen=True, slots=True)
class Fail:
    """End all open requests with ``reason``; there is no ring to wait for."""

    reason: str


@dataclass(frozen=True, slots=True)
class LetGo:
    """Tell a device that asked to leave that it may. This may be repeated."""

    device: str


@dataclass(frozen=True, slots=True)
class OwnerLine:
    """One line for the owner."""

    text: str


@dataclass(frozen=True, slots=True)
class GiveUp:
    """There is no first ring: end the program with ``reason``."""

    reason: str


Effect = Greet | Drop | Measure | Solve | Form | Abandon | Serve | Close | Fail | LetGo | OwnerLine | GiveUp
