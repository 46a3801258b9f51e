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
"""A device's own phases, apart from rings, in which it is connected."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The owner's settings.

    Without a sign of life for ``suspect_after_s`` a device is suspected, after ``gone_after_s`` gone. A better plan is
    taken when it gains at least the share ``gain``; with ``use_all`` any plan is that has layers for one more device.
    ``wanted`` is the number of workers to wait for at the start, for ``look_s`` (infinity: until they are there), None
    to take who is there then. ``hold_s`` is how long open answers wait for a new ring. ``solo``: no worker is awaited.
    ``timings`` are the same in every home. Without ``plans`` there is no model to plan for: devices are welcomed and
    measured, so that one can begin at once.
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

    ``phase`` is its own (discovered, paired, profiled, ready, suspected or gone; see ``membership.phase_of`` for the one to
    show). A suspected device was in ``before``. It is greeted when ``greet_at_s`` has come and ``greeting`` is not under
    way; after ``failures`` it gets no part until ``barred_until_s``. It was party to ``doubts`` breaks, the last one at
    ``doubted_s``, of which nobody knows who did it. ``unproven``: a ring on its way failed by it, and none has served with
    it since. Until ``measure_at_s`` nobody waits for its links. It was welcomed at ``welcomed_s``, and lost soon after that
    ``flaps`` times in a row. ``leaving``: it asked to go. ``reason`` is why it is where
    it is, one line or empty.
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
    """Whether it is here, and its links are known."""
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
    """The progress of a device of a ring in preparation."""

    FETCH = 1
    """It fetches layers."""
    LOAD = 2
    """It loads its windows."""
    READY = 3
    """It has loaded them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadPace:
    """A device got to ``share`` of ``stage`` at ``since_s``; it has ``LOAD_STALL_S`` from then on to get further."""

    since_s: float
    stage: LoadStage = LoadStage.FETCH
    share: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """A ring in preparation: of the workers ``candidates``, of ``members`` once it is solved; ``formed`` when it could
    serve.

    While it is formed, ``loading`` are the members that are not ready. ``memory_recovered`` are the devices that it is
    tried for since they have room again, ``corrected`` those whose figures are others than the serving ring was planned
    with.
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

    ``holding_s`` is since when open answers wait for a ring, None when none waits. ``measuring``: the devices whose
    links are being measured; from ``measure_at_s`` on the next may be. From ``again_at_s`` on those that did not work
    are measured again, which they were ``agains`` times since a device came; None when all work. ``tried``: the
    candidates that were tried last in vain, for what. ``last_resort``: there is no plan without devices that are
    barred, so they may take part. Until ``retry_at_s`` the candidates that were tried are not tried again; ``failures``
    is the number of attempts in a row that broke, ``breaks`` that of rings in a row that broke soon after they began to
    serve. ``memory_low``: devices of the serving ring that are short of memory; from ``recover_at_s`` on another plan
    may be looked for. ``newly_limited``: those of which the owner lends less, for what is said of it.
    ``memory_recovered``: devices that were and have room again, ``corrected``: those of which other figures are known
    than the serving ring was planned with; from ``regain_at_s`` on a better plan may be looked for. ``ended``: the core
    gave up.
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
    """A worker announces itself; ``trusted`` when its key is."""

    device: str
    trusted: bool


@dataclass(frozen=True, slots=True)
class Vanished:
    """It is not announced any more."""

    device: str


@dataclass(frozen=True, slots=True)
class Welcomed:
    """It said welcome and is spoken to from now on."""

    device: str


@dataclass(frozen=True, slots=True)
class DeviceRefused:
    """It did not answer, or does not work for this head now."""

    device: str
    reason: str


@dataclass(frozen=True, slots=True)
class Measured:
    """The links of ``devices`` are known. Others that were to be measured could not be.

    ``unreached``: some of the links do not work; a device that was busy may be why. Links of ``reached`` that did not
    work when they were measured before do now; plans from now on know.
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
    """Its link broke for good: its process ended, or it works for another head."""

    device: str
    reason: str


@dataclass(frozen=True, slots=True)
class DeviceLeaving:
    """It asks to leave once its work was handed over."""

    device: str
    reason: str


@dataclass(frozen=True, slots=True)
class DeviceMemoryLow:
    """A worker or the head itself is short of memory for its part in the serving ring; later plans respect it.

    ``by_owner``: the head's owner lowered its limit, and waits for that.
    """

    device: str
    by_owner: bool = False


@dataclass(frozen=True, slots=True)
class DeviceMemoryRecovered:
    """A worker or the head itself that was short of memory has room again; later plans use it.

    ``by_owner``: the head's owner raised its limit, and waits for that.
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

    ``serving_value`` is that of the plan that serves, with what is known now; None where that is not known.
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
    """Ring ``epoch`` broke, or could not be formed. ``device`` is at fault if that is known.

    Else one of the ``parties`` may be, the accused before the accuser (``doubt.py``); parties that ``device`` is one of may
    have made it fail. ``lasting``: the device, or without one the head, will not do better soon (as with a full disk).
    ``again``: form it once more, as the parties have other room than they loaded for. The link ``between`` two devices may
    have failed: it is measured again.
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
    """Time went by."""


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

    ``again``: also failed ones.
    """

    devices: frozenset[str]
    again: bool = False


@dataclass(frozen=True, slots=True)
class Solve:
    """Plan for the head and ``candidates``; the reply is ``Solved`` or ``NoPlan``.

    A plan is kept until ``Form`` or ``Abandon`` of its epoch. One with the windows of ring ``instead`` does not count.
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
