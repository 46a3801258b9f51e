"""A shell for the membership core that only keeps account, and fails if the core requests the impossible."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from primad.membership import types as m
from primad.membership.step import step, usable, wake_at
from primad.settings.timings import MembershipTimings

SETTINGS = m.Settings(
    head="head",
    suspect_after_s=1.5,
    gone_after_s=4.0,
    gain=0.10,
    use_all=False,
    wanted=None,
    look_s=3.0,
    hold_s=60.0,
    solo=False,
    timings=MembershipTimings(),
)
USELESS = (m.DevicePhase.GONE, m.DevicePhase.DISCOVERED, m.DevicePhase.PAIRED, m.DevicePhase.PROFILED)
"""A device in one of these phases has no place in a plan."""


@dataclass
class Shell:
    """Sends events to the core and checks each effect against earlier ones. ``now`` is its clock, in seconds."""

    state: m.State
    now: float
    greets: set[str] = field(default_factory=set)
    linked: set[str] = field(default_factory=set)
    measuring: frozenset[str] | None = None
    attempt: int | None = None
    candidates: frozenset[str] = frozenset()
    solved: frozenset[str] | None = None
    forming: bool = False
    formed: bool = False
    serving: int | None = None
    ended: bool = False
    effects: list[m.Effect] = field(default_factory=list)

    @classmethod
    def start(cls, settings: m.Settings = SETTINGS, now: float = 0.0) -> Shell:
        """A head that has just started."""
        shell = cls(m.State(settings=settings, started_s=now), now)
        shell.notify(m.Tick())
        return shell

    def notify(self, event: m.Event) -> list[m.Effect]:
        """Send ``event`` to the core and check the effects."""
        self._note(event)
        before = self.state
        self.state, effects = step(before, event, self.now)
        barred = not (before.last_resort or self.state.last_resort)
        for effect in effects:
            assert not self.ended, f"{effect} after the end"
            if isinstance(effect, m.LetGo):
                assert any(state.devices[effect.device].leaving for state in (before, self.state))
            self._do(effect, barred=barred)
        self._agree()
        self.effects += effects
        return list(effects)

    def wake(self, until: float) -> list[m.Effect]:
        """Advance the time to ``until``, with a tick whenever the core requested one; the effects."""
        start = len(self.effects)
        while (due := wake_at(self.state, self.now)) is not None and due <= until:
            assert due > self.now, "a tick in the past"
            self.now = due
            self.notify(m.Tick())
        self.now = max(self.now, until)
        self.notify(m.Tick())
        return self.effects[start:]

    def check_sleep(self, times: list[float]) -> None:
        """Check that nothing is due at ``times`` (seconds from now) before the tick that the core requested."""
        due = wake_at(self.state, self.now)
        moments = [self.now + seconds for seconds in times]
        if due is not None:
            moments = [moment for moment in moments if moment < due] + [math.nextafter(due, -math.inf)]
        for moment in moments:
            assert step(self.state, m.Tick(), moment) == (self.state, ()), f"due at {moment}, but asked for {due}"

    def _note(self, event: m.Event) -> None:
        match event:
            case m.Welcomed(device):
                self.greets.discard(device)
                self.linked.add(device)
            case m.DeviceRefused(device):
                self.greets.discard(device)
            case m.Measured():
                self.measuring = None
            case m.Solved(epoch, members) if epoch == self.attempt and self.solved is None:
                self.solved = members
            case m.NoPlan(epoch) if epoch == self.attempt and self.solved is None:
                self.attempt = None
            case m.Formed(epoch) if epoch == self.attempt and self.forming:
                self.formed = True
            case _:
                return

    def _do(self, effect: m.Effect, *, barred: bool) -> None:
        match effect:
            case m.Greet(device):
                assert device not in self.greets, "greeted twice at a time"
                assert self.state.devices[device].phase in (m.DevicePhase.PAIRED, m.DevicePhase.GONE)
                self.greets.add(device)
            case m.Drop(device):
                assert device in self.linked, "a link that is not there"
                self.linked.remove(device)
            case m.Measure(devices):
                assert self.measuring is None, "measured twice at a time"
                assert frozenset() < devices <= self.linked
                self.measuring = devices
            case m.LetGo(device):
                assert device in self.linked
            case m.Fail():
                assert self.serving is None
            case m.GiveUp():
                assert not self.state.has_served
                self.ended = True
            case m.OwnerLine(text):
                assert text.splitlines() == [text]
            case _:
                self._do_ring(effect, barred=barred)

    def _do_ring(self, effect: m.Effect, *, barred: bool) -> None:
        match effect:
            case m.Solve(epoch, candidates, instead):
                assert self.attempt is None, "two attempts at a time"
                assert instead in (None, self.serving), "a plan unlike that of a ring that does not serve"
                assert epoch > max(self.serving or 0, self.candidate_epoch), "an epoch was used again"
                self.candidate_epoch = self.attempt = epoch
                self.candidates, self.solved, self.forming, self.formed = candidates, None, False, False
                self._check_plan(candidates, barred=barred)
            case m.Form(epoch):
                assert (epoch, self.forming) == (self.attempt, False)
                assert self.solved is not None
                self.forming = True
                self._check_plan(self.solved, barred=barred)
            case m.Abandon(epoch):
                assert epoch == self.attempt, "abandoned what is not there"
                self.attempt = None
            case m.Serve(epoch, instead):
                assert (epoch, self.formed) == (self.attempt, True)
                assert self.solved is not None
                assert instead == self.serving, "two rings serve"
                assert epoch > (self.serving or 0)
                self.serving, self.attempt = epoch, None
                self._check_plan(self.solved, barred=barred)
            case m.Close(epoch):
                assert epoch == self.serving, "closed what does not serve"
                self.serving = None
            case _:
                raise AssertionError(effect)

    candidate_epoch: int = 0

    def _check_plan(self, names: frozenset[str], *, barred: bool) -> None:
        for name in names:
            device = self.state.devices[name]
            assert device.phase not in USELESS, f"a plan with {name}, which is {device.phase}"
            assert not device.leaving, f"a plan with {name}, which leaves"
            assert not barred or device.barred_until_s <= self.now, f"a plan with {name}, which is barred"

    def _agree(self) -> None:
        state = self.state
        assert state.ended == self.ended
        if state.ended:
            return
        assert (state.serving.epoch if state.serving else None) == self.serving
        assert (state.attempt.epoch if state.attempt else None) == self.attempt
        assert self.greets == {name for name, device in state.devices.items() if device.greeting}
        assert bool(state.measuring) == (self.measuring is not None)
        for name in state.serving.members if state.serving else ():
            assert state.devices[name].phase in (m.DevicePhase.READY, m.DevicePhase.SUSPECTED), "a gone device serves"
        if state.holding_s is not None:
            assert state.serving is None, "requests wait though a ring serves"
            assert self.now < state.holding_s + state.settings.hold_s, "answers wait too long"
        if state.serving is None and state.has_served and not state.attempt:
            assert self.now < state.retry_at_s, "nobody looks for a ring"
            assert state.tried.get(m.Purpose.RECOVERY) == usable(state, self.now), "others could be asked"
