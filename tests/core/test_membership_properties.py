"""Whatever happens in whatever order: one ring of present devices serves, and every open request ends.

``Shell`` checks each effect. Here a world is invented around it: devices that come, go, fall silent and fail, work that
ends well, badly or never, and messages about old rings.
"""

from __future__ import annotations

import random
from dataclasses import replace

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from primad.membership import types as m
from primad.membership.step import step, wake_at
from tests.fakes.membership import SETTINGS, Shell

NAMES = ("ada", "bo", "cy", "di")
names = st.sampled_from(NAMES)
subsets = st.frozensets(names)
blames = st.one_of(st.none(), names, st.just("head"))
parties = st.lists(st.one_of(names, st.just("head")), max_size=3, unique=True).map(tuple)
stages = st.sampled_from(m.LoadStage)
values = st.sampled_from((1.0, 0.95, 0.8, 0.5))
pauses_s = st.one_of(st.sampled_from((0.0, 0.1, 0.5, 1.5, 2.5, 4.0, 5.0)), st.floats(0.0, 20.0))
sleeps_s = [0.01, 0.2, 0.7, 1.9, 3.3, 9.0, 31.0, 400.0]
starts = st.builds(
    replace,
    st.just(SETTINGS),
    wanted=st.sampled_from((None, None, 0, 1, 2)),
    solo=st.booleans(),
    hold_s=st.sampled_from((8.0, 20.0)),
)
quick = [Phase.explicit, Phase.reuse, Phase.generate, Phase.shrink]
MAX_AT_ONCE = 60
"""More replies than this at one instant, from a shell that needs no time, are an endless loop."""


def answer(shell: Shell, chance: random.Random, *, luck: float) -> bool:
    """Complete one pending effect, well with probability ``luck`` (0: never a plan); False if none is pending."""
    fails = chance.random() >= luck
    culprits = chance.choice((None, "head", *NAMES, *NAMES))
    if shell.greets:
        device = min(shell.greets)
        shell.notify(m.DeviceRefused(device, "busy") if fails else m.Welcomed(device))
    elif shell.measuring is not None:
        shell.notify(m.Measured(frozenset() if fails else shell.measuring))
    elif shell.attempt is None:
        return False
    elif not shell.forming and fails and (luck == 0.0 or chance.random() < 0.5):
        shell.notify(m.NoPlan(shell.attempt, "too large"))
    elif fails:
        shell.notify(m.RingFailed(shell.attempt, culprits, "it broke", lasting=chance.random() < 0.1))
    elif not shell.forming:
        shell.notify(m.Solved(shell.attempt, shell.candidates, chance.choice((1.0, 0.8))))
    elif not shell.formed:
        shell.notify(m.Formed(shell.attempt))
    else:
        return False
    return True


def answer_all(shell: Shell, chance: random.Random, *, luck: float, poison: bool = False) -> None:
    """Complete all outstanding effects at once; with ``poison`` every ring breaks the moment it serves."""
    for _ in range(MAX_AT_ONCE):
        if answer(shell, chance, luck=luck):
            continue
        if not poison or shell.serving is None:
            return
        shell.notify(m.RingFailed(shell.serving, chance.choice((None, *NAMES)), "it broke"))
    raise AssertionError("a loop at one instant")


def rest(
    shell: Shell, seconds: float, alive: frozenset[str], chance: random.Random, *, luck: float, poison: bool = False
) -> None:
    """Devices do nothing more except that those ``alive`` are heard; the shell completes all effects."""
    end = shell.now + seconds
    reported = len(shell.effects)
    answer_all(shell, chance, luck=luck, poison=poison)
    while shell.now < end:
        due = wake_at(shell.state, shell.now)
        shell.now = min(end, shell.now + 0.5, end if due is None else due)
        for name in sorted(alive):
            shell.notify(m.Heard(name))
        shell.notify(m.Tick())
        answer_all(shell, chance, luck=luck, poison=poison)
    assert len(shell.effects) - reported < MAX_AT_ONCE + 30 * seconds, "restless"


def begin(config: m.Settings, now: float, workers: frozenset[str]) -> Shell:
    """A head that has just started or, with ``workers``, one whose ring of them has served for a while."""
    shell = Shell.start(config, now)
    chance = random.Random(1)
    for name in sorted(workers):
        shell.notify(m.Seen(name, True))
    if workers:
        answer_all(shell, chance, luck=1.0)
        rest(shell, config.look_s + 12.0, workers, chance, luck=1.0)
    return shell


class Cluster(RuleBasedStateMachine):
    """A world whose shell honours its contract, in any order and with any delay."""

    @initialize(config=starts, now=st.floats(0.0, 1e5), workers=subsets)
    def start(self, config: m.Settings, now: float, workers: frozenset[str]) -> None:
        self.shell = begin(config, now, workers)

    @rule(name=names, trusted=st.sampled_from((True, True, True, False)))
    def announce(self, name, trusted):
        self.shell.notify(m.Seen(name, trusted))

    @rule(name=names)
    def vanish(self, name):
        self.shell.notify(m.Vanished(name))

    @rule()
    def everybody_comes(self):
        for name in NAMES:
            self.shell.notify(m.Seen(name, True))
            if name in self.shell.greets:
                self.shell.notify(m.Welcomed(name))
        if self.shell.measuring is not None:
            self.shell.notify(m.Measured(self.shell.measuring))

    @precondition(lambda self: self.shell.greets)
    @rule(data=st.data(), welcome=st.booleans())
    def answer_greeting(self, data, welcome):
        name = data.draw(st.sampled_from(sorted(self.shell.greets)))
        self.shell.notify(m.Welcomed(name) if welcome else m.DeviceRefused(name, "busy"))

    @precondition(lambda self: self.shell.measuring is not None)
    @rule(missed=subsets, unreached=st.booleans(), reached=subsets)
    def end_measuring(self, missed, unreached, reached):
        self.shell.notify(m.Measured(self.shell.measuring - missed, unreached, reached))

    @precondition(lambda self: self.shell.linked)
    @rule(silent=subsets)
    def hear(self, silent):
        for name in sorted(self.shell.linked - silent):
            self.shell.notify(m.Heard(name))

    @rule(name=names)
    def lose(self, name):
        self.shell.notify(m.Lost(name, "its process ended"))

    @rule(name=names)
    def leave(self, name):
        self.shell.notify(m.DeviceLeaving(name, "Ctrl-C"))

    @rule(name=st.one_of(names, st.just("head")))
    def report_memory_low(self, name):
        self.shell.notify(m.DeviceMemoryLow(name))

    @rule(name=st.one_of(names, st.just("head")))
    def relieve(self, name):
        self.shell.notify(m.DeviceMemoryRecovered(name))

    @precondition(lambda self: self.shell.attempt is not None and self.shell.solved is None)
    @rule(unused=subsets, value=values)
    def solve(self, unused, value):
        self.shell.notify(m.Solved(self.shell.attempt, self.shell.candidates - unused, value))

    @precondition(lambda self: self.shell.attempt is not None and self.shell.solved is None)
    @rule()
    def find_no_plan(self):
        self.shell.notify(m.NoPlan(self.shell.attempt, "too large"))

    @precondition(lambda self: self.shell.attempt is not None and self.shell.forming)
    @rule()
    def form(self):
        self.shell.notify(m.Formed(self.shell.attempt))

    @precondition(lambda self: self.shell.attempt is not None)
    @rule(culprits=blames, lasting=st.booleans(), parties=parties)
    def break_attempt(self, culprits, lasting, parties):
        self.shell.notify(m.RingFailed(self.shell.attempt, culprits, "it broke", lasting, parties=parties))

    @precondition(lambda self: self.shell.attempt is not None and self.shell.forming)
    @rule(name=names, stage=stages, share=st.floats(0.0, 1.0))
    def load(self, name, stage, share):
        self.shell.notify(m.Progressed(self.shell.attempt, name, stage, share))

    @precondition(lambda self: self.shell.serving is not None)
    @rule(culprits=blames, parties=parties)
    def break_ring(self, culprits, parties):
        self.shell.notify(m.RingFailed(self.shell.serving, culprits, "it broke", parties=parties))

    @rule(age=st.integers(1, 3), culprits=blames, members=subsets)
    def hear_of_long_ago(self, age, culprits, members):
        """Messages of rings that are neither attempted nor serving change nothing."""
        epoch = self.shell.state.epoch - age
        if epoch in (self.shell.serving, self.shell.attempt):
            return
        before = self.shell.state
        self.shell.notify(m.Tick())
        before = self.shell.state
        for event in (
            m.Solved(epoch, members, 0.1),
            m.NoPlan(epoch, "too large"),
            m.Formed(epoch),
            m.RingFailed(epoch, culprits, "it broke"),
        ):
            assert self.shell.notify(event) == []
            assert self.shell.state == before

    @rule(seconds=pauses_s)
    def wait(self, seconds):
        self.shell.wake(self.shell.now + seconds)

    @rule(seconds=pauses_s)
    def wait_with_signs_of_life(self, seconds):
        end = self.shell.now + seconds
        while self.shell.now < end:
            for name in sorted(self.shell.linked):
                self.shell.notify(m.Heard(name))
            self.shell.wake(min(end, self.shell.now + 1.0))

    @rule(
        alive=subsets,
        chance=st.randoms(use_true_random=False),
        luck=st.sampled_from((0.0, 0.4, 1.0)),
        poison=st.sampled_from((False, False, True)),
    )
    def come_to_rest(self, alive, chance, luck, poison):
        """No request waits for ever, whatever the outcome of the work."""
        waiting_s = self.shell.state.holding_s
        rest(self.shell, self.shell.state.settings.hold_s, alive, chance, luck=luck, poison=poison)
        assert waiting_s is None or self.shell.state.holding_s != waiting_s

    @invariant()
    def sleeps_past_nothing(self):
        if hasattr(self, "shell"):
            self.shell.check_sleep(sleeps_s)

    def teardown(self):
        """Once all work succeeds, a ring serves, with every device that is present and not leaving."""
        if not hasattr(self, "shell") or self.shell.ended:
            return
        present = frozenset(self.shell.linked)
        rest(self.shell, 30.0, present, random.Random(1), luck=1.0)
        assert self.shell.ended or self.shell.serving is not None
        assert self.shell.state.holding_s is None


Cluster.TestCase.settings = settings(
    max_examples=50,
    stateful_step_count=40,
    deadline=None,
    phases=quick,
    suppress_health_check=[HealthCheck.too_slow],
)
TestCluster = Cluster.TestCase

epochs = st.integers(0, 6)
reasons = st.just("a reason")
events = st.one_of(
    st.builds(m.Seen, names, st.booleans()),
    st.builds(m.Vanished, names),
    st.builds(m.Welcomed, names),
    st.builds(m.DeviceRefused, names, reasons),
    st.builds(m.Measured, subsets, st.booleans(), subsets),
    st.builds(m.Heard, names),
    st.builds(m.Lost, names, reasons),
    st.builds(m.DeviceLeaving, names, reasons),
    st.builds(m.DeviceMemoryLow, st.one_of(names, st.just("head"))),
    st.builds(m.DeviceMemoryRecovered, st.one_of(names, st.just("head"))),
    st.builds(m.DevicesCorrected, st.frozensets(st.one_of(names, st.just("head")))),
    st.builds(m.Solved, epochs, subsets, values),
    st.builds(m.NoPlan, epochs, reasons),
    st.builds(m.Formed, epochs),
    st.builds(m.Progressed, epochs, names, stages, st.floats(0.0, 1.0)),
    st.builds(m.RingFailed, epochs, blames, reasons, st.booleans(), parties=parties),
    st.just(m.Tick()),
)


@settings(max_examples=100, deadline=None)
@given(
    config=starts, now=st.floats(0.0, 1e5), workers=subsets, story=st.lists(st.tuples(events, pauses_s), max_size=60)
)
def test_any_events_in_any_order_leave_one_sound_ring_at_most(config, now, workers, story):
    shell = begin(config, now, workers)
    for event, pause_s in story:
        if isinstance(event, m.Solved) and event.epoch == shell.attempt:
            event = m.Solved(event.epoch, event.members & shell.candidates, event.value)
        shell.notify(event)
        shell.wake(shell.now + pause_s / 10)


@settings(max_examples=50, deadline=None)
@given(chance=st.randoms(use_true_random=False), now=st.floats(0.0, 1e5))
def test_ticks_every_ten_milliseconds_find_nothing_to_do_before_the_core_asked(chance, now):
    shell = Shell.start(now=now)
    for name in NAMES[:3]:
        shell.notify(m.Seen(name, True))
    answer_all(shell, chance, luck=1.0)
    for _ in range(12):
        if chance.random() < 0.5:
            for name in sorted(shell.linked):
                if chance.random() < 0.7:
                    shell.notify(m.Heard(name))
        if chance.random() < 0.7:
            answer_all(shell, chance, luck=chance.choice((0.4, 1.0, 1.0)))
        due = wake_at(shell.state, shell.now)
        end = min(due or shell.now + 20.0, shell.now + 20.0)
        moment, state = shell.now + 0.01, shell.state
        while moment < end:
            state, effects = step(state, m.Tick(), moment)
            assert effects == (), f"due at {moment}, but asked for {due}"
            moment += 0.01
        assert state == shell.state
        shell.now = end
        shell.notify(m.Tick())
