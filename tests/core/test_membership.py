"""The rules of the membership core, one per test. ``Shell`` fails by itself if the core requests the impossible."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import pytest

from primad.membership import types as m
from primad.membership.due import REGAIN_S, RELIEVE_S
from primad.membership.step import (
    MAX_AGAIN_S,
    MAX_BREAKS,
    MAX_STRANGERS,
    phase_of,
    wake_at,
)
from primad.membership.transitions import BAR_S, FORGIVEN_S, LASTING_BAR_S, MAX_BAR_S
from tests.fakes.membership import SETTINGS, Shell

LOOK_S = SETTINGS.look_s
TIMINGS = SETTINGS.timings
AGAIN_S, GREETING_S, RETRY_S, SETTLE_S = TIMINGS.again_s, TIMINGS.greeting_s, TIMINGS.retry_s, TIMINGS.settle_s
SIGNS_S = 1.25
"""Interval of the devices' signs of life: the longest that makes none suspected."""


def head(**config) -> Shell:
    """A head that has just started."""
    return Shell.start(replace(SETTINGS, **config), now=1000.1)


def acts(effects: Iterable[m.Effect]) -> list[m.Effect]:
    """The effects without lines for the owner."""
    return [effect for effect in effects if not isinstance(effect, m.OwnerLine)]


def welcome(shell: Shell, *names: str) -> None:
    """The devices ``names`` appear, and are trusted, greeted and measured."""
    for name in names:
        shell.notify(m.Seen(name, True))
        shell.notify(m.Welcomed(name))
    if shell.measuring is not None:
        shell.notify(m.Measured(shell.measuring | set(names)))
    if shell.measuring is not None:
        shell.notify(m.Measured(shell.measuring))


def live(shell: Shell, seconds: float, *names: str) -> list[m.Effect]:
    """Let time pass while ``names`` give signs of life; the effects meanwhile."""
    end, start = shell.now + seconds, len(shell.effects)
    while shell.now < end:
        shell.wake(min(end, shell.now + SIGNS_S))
        for name in names:
            shell.notify(m.Heard(name))
    return acts(shell.effects[start:])


def solve(shell: Shell, *members: str, value: float = 1.0) -> list[m.Effect]:
    """Solve the current attempt, with all candidates if no members are named."""
    assert shell.attempt is not None
    return acts(shell.notify(m.Solved(shell.attempt, frozenset(members) or shell.candidates, value)))


def form(shell: Shell) -> list[m.Effect]:
    """Form the solved ring."""
    assert shell.attempt is not None
    return acts(shell.notify(m.Formed(shell.attempt)))


def serving(*names: str, **config) -> Shell:
    """A head whose ring of ``names`` has served long enough to look for a better plan."""
    shell = head(**config)
    welcome(shell, *names)
    live(shell, LOOK_S, *names)
    solve(shell)
    form(shell)
    live(shell, SETTLE_S, *names)
    assert shell.serving is not None
    assert shell.attempt is None
    return shell


def members(shell: Shell) -> frozenset[str]:
    assert shell.state.serving is not None
    return shell.state.serving.members


def broken(shell: Shell, device: str | None = None, *parties: str, **how: bool) -> list[m.Effect]:
    """The current attempt, or else the serving ring, breaks because of ``device`` or of one of ``parties``."""
    epoch = shell.attempt or shell.serving
    assert epoch is not None
    return acts(shell.notify(m.RingFailed(epoch, device, "it broke", parties=parties, **how)))


def no_plan(shell: Shell) -> list[m.Effect]:
    assert shell.attempt is not None
    return acts(shell.notify(m.NoPlan(shell.attempt, "too large")))


def solves(effects: Iterable[m.Effect]) -> list[frozenset[str]]:
    return [effect.candidates for effect in effects if isinstance(effect, m.Solve)]


# ---- the first ring -------------------------------------------------------------------------------------------------


def test_a_head_that_works_alone_waits_for_nobody():
    shell = head(solo=True)
    assert shell.effects == [m.Solve(1, frozenset())]
    assert solve(shell) == [m.Form(1)]
    assert form(shell) == [m.Serve(1, None)]


def test_the_first_ring_has_the_devices_that_came_while_the_head_looked():
    shell = head()
    welcome(shell, "ada", "bo")
    assert live(shell, LOOK_S - 0.1, "ada", "bo") == []
    assert solves(live(shell, 0.2, "ada", "bo")) == [{"ada", "bo"}]


def test_nobody_came_so_the_head_serves_alone():
    shell = head()
    assert acts(shell.wake(shell.now + LOOK_S)) == [m.Solve(1, frozenset())]


def test_a_device_that_is_being_greeted_is_waited_for_a_little_longer():
    shell = head()
    shell.notify(m.Seen("ada", True))
    assert acts(shell.wake(shell.now + LOOK_S + GREETING_S - 0.1)) == []
    assert acts(shell.wake(shell.now + 0.2)) == [m.Solve(1, frozenset())]


def test_the_first_ring_waits_for_measuring():
    shell = head()
    shell.notify(m.Seen("ada", True))
    assert shell.notify(m.Welcomed("ada")) == [m.Measure(frozenset({"ada"}))]
    assert live(shell, 30.0, "ada") == []
    assert acts(shell.notify(m.Measured(frozenset({"ada"})))) == [m.Solve(1, frozenset({"ada"}))]


def test_a_device_that_cannot_be_measured_does_not_hold_up_the_others_and_is_not_asked_without_a_pause():
    shell = head(solo=False)
    welcome(shell, "ada")
    shell.notify(m.Seen("bo", True))
    shell.notify(m.Welcomed("bo"))
    assert acts(shell.notify(m.Measured(frozenset({"ada"})))) == []
    assert "measured" in shell.state.devices["bo"].reason
    assert live(shell, 1.9, "ada", "bo") == []
    assert live(shell, 0.2, "ada", "bo") == [m.Measure(frozenset({"ada", "bo"}))]
    live(shell, LOOK_S, "ada", "bo")
    assert acts(shell.notify(m.Measured(frozenset({"ada"})))) == [m.Solve(1, frozenset({"ada"}))]


def test_as_soon_as_the_wanted_devices_are_there_it_begins():
    shell = head(wanted=2)
    welcome(shell, "ada")
    assert shell.attempt is None
    welcome(shell, "bo")
    assert shell.candidates == {"ada", "bo"}


def test_fewer_than_wanted_is_the_end_with_every_reason():
    shell = head(wanted=2)
    welcome(shell, "ada")
    shell.notify(m.Seen("bo", True))
    shell.notify(m.DeviceRefused("bo", "works for another head"))
    *_, last = live(shell, LOOK_S + GREETING_S, "ada")
    assert isinstance(last, m.GiveUp)
    assert "found 1 of 2" in last.reason
    assert "bo: works for another head" in last.reason


def test_after_the_end_nothing_is_done():
    shell = head(solo=True)
    assert no_plan(shell) == [m.GiveUp("too large")]
    assert shell.wake(shell.now + 100.0) == []
    assert shell.notify(m.Seen("ada", True)) == []
    assert wake_at(shell.state, shell.now) is None


def test_a_wanted_device_that_is_silent_for_a_moment_is_not_given_up():
    shell = head(wanted=2)
    welcome(shell, "ada", "bo")
    live(shell, LOOK_S, "ada", "bo")
    live(shell, 2.0, "ada")
    assert shell.state.devices["bo"].phase is m.DevicePhase.SUSPECTED
    assert not shell.ended
    shell.notify(m.Heard("bo"))
    assert shell.candidates == {"ada", "bo"}


def test_an_attempt_at_the_first_ring_that_breaks_without_a_device_at_fault_is_the_end():
    shell = head(solo=True)
    solve(shell)
    assert broken(shell) == [m.Abandon(1), m.GiveUp("it broke")]


def test_an_attempt_at_the_first_ring_that_is_to_load_once_more_is_made_again():
    shell = head(solo=True)
    solve(shell)
    shell.notify(m.RingFailed(1, None, "the GPU has room", again=True))
    assert not shell.ended
    live(shell, 3.0)
    assert shell.attempt == 2
    for _ in range(3):
        solve(shell)
        shell.notify(m.RingFailed(shell.attempt, None, "the GPU has room", again=True))
        live(shell, 10.0)
        if shell.ended:
            return
    raise AssertionError("it is tried without end")


def test_the_first_ring_is_formed_again_without_the_device_at_fault():
    shell = head(wanted=2)
    welcome(shell, "ada", "bo")
    solve(shell)
    assert broken(shell, "bo") == [m.Abandon(1), m.Solve(2, frozenset({"ada"}))]


def test_the_first_ring_takes_a_barred_device_rather_than_none_and_gives_up_after_three_failures():
    shell = head(wanted=1)
    welcome(shell, "ada")
    solve(shell)
    broken(shell, "ada")
    assert no_plan(shell) == [m.Solve(3, frozenset({"ada"}))]
    solve(shell)
    assert broken(shell, "ada") == [m.Abandon(3)]
    assert solves(live(shell, 4.1, "ada")) == [{"ada"}]
    solve(shell)
    assert broken(shell, "ada")[-1] == m.GiveUp("it broke")


def test_the_first_ring_is_formed_however_many_devices_it_must_do_without():
    names = ("ada", "bo", "cy", "dan", "eve")
    shell = head(wanted=len(names))
    welcome(shell, *names)
    for count, name in enumerate(names[:-1], 1):
        solve(shell)
        assert broken(shell, name, lasting=True) == [
            m.Abandon(count),
            m.Solve(count + 1, frozenset(names[count:])),
        ]
    solve(shell)
    assert m.Serve(5, None) in form(shell)


@pytest.mark.parametrize("solved", [False, True])
def test_a_device_lost_before_the_first_ring_serves_is_done_without(solved):
    shell = head()
    welcome(shell, "ada", "bo")
    live(shell, LOOK_S, "ada", "bo")
    if solved:
        solve(shell)
    effects = acts(shell.notify(m.Lost("bo", "its process ended")))
    assert effects == [m.Drop("bo"), m.Abandon(1), m.Solve(2, frozenset({"ada"}))]


# ---- which devices are greeted --------------------------------------------------------------------------------------


def test_a_device_without_trust_is_seen_and_nothing_more():
    shell = serving("ada")
    assert shell.notify(m.Seen("eve", False)) == []
    assert live(shell, 30.0, "ada", "eve") == []
    assert phase_of(shell.state, "eve") is m.DevicePhase.DISCOVERED


def test_a_device_is_greeted_once_it_is_trusted():
    shell = serving("ada")
    shell.notify(m.Seen("bo", False))
    assert shell.notify(m.Seen("bo", True)) == [m.Greet("bo")]
    assert phase_of(shell.state, "bo") is m.DevicePhase.PAIRED


def test_a_welcome_after_trust_was_withdrawn_is_dropped():
    shell = serving("ada")
    shell.notify(m.Seen("bo", True))
    shell.notify(m.Seen("bo", False))
    assert shell.notify(m.Welcomed("bo")) == [m.Drop("bo")]
    assert phase_of(shell.state, "bo") is m.DevicePhase.DISCOVERED


def test_a_crowd_of_strangers_is_not_remembered():
    shell = serving("ada")
    for count in range(10 * MAX_STRANGERS):
        shell.notify(m.Seen(f"eve{count}", False))
    assert len(shell.state.devices) == MAX_STRANGERS + 1
    assert m.Greet("bo") in shell.notify(m.Seen("bo", True))


def test_a_device_that_refuses_is_greeted_ever_more_rarely():
    shell = serving("ada")
    shell.notify(m.Seen("bo", True))
    pauses_s = []
    for _ in range(7):
        shell.notify(m.DeviceRefused("bo", "busy"))
        start = shell.now
        while not shell.greets:
            live(shell, 0.5, "ada")
        pauses_s.append(shell.now - start)
    assert pauses_s == pytest.approx([0.5, 1.0, 2.0, 4.0, 8.0, 10.0, 10.0])


def test_before_the_first_ring_a_device_that_refuses_is_greeted_every_half_second():
    shell = head()
    shell.notify(m.Seen("bo", True))
    for _ in range(4):
        shell.notify(m.DeviceRefused("bo", "busy"))
        assert acts(shell.wake(shell.now + 0.5)) == [m.Greet("bo")]


def test_a_device_that_vanished_is_forgotten_unless_there_is_a_link_to_it():
    shell = serving("ada")
    shell.notify(m.Seen("bo", False))
    shell.notify(m.Vanished("bo"))
    shell.notify(m.Vanished("ada"))
    assert list(shell.state.devices) == ["ada"]
    assert members(shell) == {"ada"}
    shell.notify(m.Lost("ada", "its process ended"))
    assert m.Greet("ada") not in shell.wake(shell.now + 60.0)


def test_a_device_that_vanished_while_it_was_greeted_is_forgotten_when_it_refuses():
    shell = serving("ada")
    shell.notify(m.Seen("bo", True))
    shell.notify(m.Vanished("bo"))
    assert "bo" in shell.state.devices
    shell.notify(m.DeviceRefused("bo", "no answer"))
    assert "bo" not in shell.state.devices


def test_a_device_shows_the_part_it_has():
    shell = head()
    welcome(shell, "ada", "bo")
    assert phase_of(shell.state, "ada") is m.DevicePhase.READY
    live(shell, LOOK_S, "ada", "bo")
    solve(shell, "ada")
    assert [phase_of(shell.state, name) for name in ("ada", "bo")] == [m.DevicePhase.LOADING, m.DevicePhase.READY]
    form(shell)
    assert [phase_of(shell.state, name) for name in ("ada", "bo")] == [m.DevicePhase.SERVING, m.DevicePhase.READY]


# ---- silence and loss -----------------------------------------------------------------------------------------------


def test_a_silent_device_is_suspected_and_a_ring_without_it_is_tried_in_the_shadow():
    shell = serving("ada", "bo")
    assert live(shell, 1.4, "ada") == []
    assert live(shell, 0.2, "ada") == [m.Solve(2, frozenset({"ada"}))]
    assert phase_of(shell.state, "bo") is m.DevicePhase.SUSPECTED
    assert solve(shell) == [m.Form(2)]
    assert form(shell) == []
    assert shell.serving == 1


def test_a_device_that_speaks_again_stays_and_the_shadow_is_forgotten():
    shell = serving("ada", "bo")
    live(shell, 2.0, "ada")
    solve(shell)
    form(shell)
    assert acts(shell.notify(m.Heard("bo"))) == [m.Abandon(2)]
    assert live(shell, 10.0, "ada", "bo") == []
    assert members(shell) == {"ada", "bo"}


def test_the_shadow_serves_the_moment_the_device_is_gone():
    shell = serving("ada", "bo")
    live(shell, 2.0, "ada")
    solve(shell)
    form(shell)
    effects = live(shell, 2.1, "ada")
    assert [type(effect) for effect in effects] == [m.Drop, m.Close, m.Serve]
    assert effects[-1] == m.Serve(2, None)
    assert shell.state.holding_s is None


def test_a_shadow_that_is_not_ready_when_the_device_is_gone_is_continued():
    shell = serving("ada", "bo")
    live(shell, 2.0, "ada")
    solve(shell)
    assert [type(effect) for effect in live(shell, 2.1, "ada")] == [m.Drop, m.Close]
    assert shell.state.holding_s is not None
    assert form(shell) == [m.Serve(2, None)]


def test_a_ring_being_formed_after_a_loss_is_kept_when_another_device_speaks_again():
    shell = serving("ada", "bo", "cy")
    live(shell, 2.0, "ada", "cy")
    solve(shell, "ada")
    live(shell, 2.1, "ada")
    assert phase_of(shell.state, "cy") is m.DevicePhase.SUSPECTED
    assert acts(shell.notify(m.Heard("cy"))) == []
    assert form(shell) == [m.Serve(2, None)]


def test_a_shadow_that_holds_the_last_suspect_is_replaced():
    shell = serving("ada", "bo", "cy")
    live(shell, 1.6, "ada", "cy")
    solve(shell)
    live(shell, 2.0, "ada")
    assert phase_of(shell.state, "cy") is m.DevicePhase.SUSPECTED
    assert acts(shell.notify(m.Heard("bo"))) == [m.Abandon(2), m.Solve(3, frozenset({"ada", "bo"}))]


def test_a_lost_device_is_done_without_at_once():
    shell = serving("ada", "bo")
    effects = acts(shell.notify(m.Lost("bo", "its process ended")))
    assert effects == [m.Drop("bo"), m.Close(1, "bo: its process ended"), m.Solve(2, frozenset({"ada"}))]
    assert solve(shell) + form(shell) == [m.Form(2), m.Serve(2, None)]


def test_the_loss_of_a_device_without_a_part_changes_no_ring():
    shell = serving("ada")
    welcome(shell, "bo")
    solve(shell, "ada", value=1.0)
    assert acts(shell.notify(m.Lost("bo", "its process ended"))) == [m.Drop("bo")]
    assert shell.serving == 1


def test_a_candidate_that_falls_silent_while_the_plan_is_solved_is_left_out():
    shell = serving("ada", "bo", "cy")
    shell.notify(m.Lost("cy", "its process ended"))
    assert shell.candidates == {"ada", "bo"}
    effects = live(shell, 1.6, "ada")
    assert m.Abandon(2) in effects
    assert solves(effects) == [{"ada"}]


@pytest.mark.parametrize("solved", [False, True])
def test_a_device_lost_during_recovery_is_done_without_too(solved):
    shell = serving("ada", "bo", "cy")
    shell.notify(m.Lost("cy", "its process ended"))
    if solved:
        solve(shell)
    assert acts(shell.notify(m.Lost("bo", "unplugged"))) == [m.Drop("bo"), m.Abandon(2), m.Solve(3, frozenset({"ada"}))]


def test_a_head_left_alone_serves_alone():
    shell = serving("ada")
    assert acts(shell.notify(m.Lost("ada", "unplugged")))[-1] == m.Solve(2, frozenset())
    assert solve(shell) + form(shell) == [m.Form(2), m.Serve(2, None)]


# ---- rings that break -----------------------------------------------------------------------------------------------


def test_a_broken_ring_is_formed_again_without_the_device_at_fault():
    shell = serving("ada", "bo")
    assert broken(shell, "bo") == [m.Close(1, "it broke"), m.Solve(2, frozenset({"ada"}))]


@pytest.mark.parametrize("device", [None, "head", "nobody"])
def test_a_broken_ring_is_formed_again_of_all_when_no_worker_is_at_fault(device):
    shell = serving("ada", "bo")
    assert broken(shell, device) == [m.Close(1, "it broke"), m.Solve(2, frozenset({"ada", "bo"}))]


def test_an_attempt_that_needs_the_device_at_fault_is_abandoned():
    shell = serving("ada", "bo", "cy")
    live(shell, 2.0, "ada", "bo")
    solve(shell)
    effects = acts(shell.notify(m.RingFailed(1, "bo", "it broke")))
    assert effects == [m.Abandon(2), m.Close(1, "it broke"), m.Solve(3, frozenset({"ada"}))]


def test_an_attempt_that_breaks_is_repeated_at_once_without_the_device_at_fault():
    shell = serving("ada", "bo", "cy")
    shell.notify(m.Lost("cy", "unplugged"))
    solve(shell)
    assert broken(shell, "bo") == [m.Abandon(2), m.Solve(3, frozenset({"ada"}))]


@pytest.mark.parametrize("device", [None, "head", "cy"])
def test_an_attempt_that_breaks_without_a_device_at_fault_is_repeated_after_a_doubling_pause(device):
    shell = serving("ada", "cy")
    shell.notify(m.Lost("cy", "unplugged"))
    for pause_s in (2.0, 4.0, 8.0):
        solve(shell)
        assert broken(shell, device) == [m.Abandon(shell.state.epoch)]
        assert solves(live(shell, pause_s - 0.1, "ada")) == []
        assert solves(live(shell, 0.2, "ada")) == [{"ada"}]


def test_failures_of_the_shadow_do_not_delay_recovery():
    shell = serving("ada", "bo")
    live(shell, 2.0, "ada")
    solve(shell)
    assert broken(shell) == [m.Abandon(2)]
    assert solves(shell.notify(m.Lost("bo", "unplugged"))) == [{"ada"}]


def test_the_bar_doubles_up_to_a_limit_and_is_forgiven():
    shell = serving("ada", "bo")
    bars_s = []
    for _ in range(8):
        broken(shell, "bo")
        bars_s.append(shell.state.devices["bo"].barred_until_s - shell.now)
        solve(shell)
        form(shell)
        live(shell, bars_s[-1] + SETTLE_S + 1.0, "ada", "bo")
        solve(shell, value=0.1 ** len(bars_s))
        form(shell)
        live(shell, SETTLE_S, "ada", "bo")
        assert members(shell) == {"ada", "bo"}
    assert bars_s == pytest.approx([BAR_S * 2**count for count in range(6)] + [MAX_BAR_S] * 2)
    live(shell, FORGIVEN_S + 1.0, "ada", "bo")
    broken(shell, "bo")
    assert shell.state.devices["bo"].barred_until_s - shell.now == pytest.approx(BAR_S)


def test_a_fault_that_lasts_bars_for_long_and_another_fault_does_not_shorten_that():
    shell = serving("ada", "bo")
    shell.notify(m.RingFailed(1, "bo", "disk full", lasting=True))
    until_s = shell.now + LASTING_BAR_S
    shell.notify(m.RingFailed(2, "bo", "it broke"))
    assert shell.state.devices["bo"].barred_until_s == until_s


def test_a_device_that_is_out_for_long_is_shown_with_the_reason_until_it_serves_again():
    shell = serving("ada", "bo")
    broken(shell, "ada")
    assert shell.state.devices["ada"].reason == "", "it is back in a moment"
    solve(shell)
    form(shell)
    shell = serving("ada", "bo")
    broken(shell, "bo", lasting=True)
    solve(shell)
    form(shell)
    live(shell, SETTLE_S, "ada", "bo")
    assert shell.state.devices["bo"].reason == "it broke"
    live(shell, LASTING_BAR_S, "ada", "bo")
    solve(shell, value=0.1)
    form(shell)
    assert members(shell) == {"ada", "bo"}
    assert shell.state.devices["bo"].reason == ""


def test_a_lasting_bar_becomes_short_once_the_device_reconnects():
    shell = serving("ada", "bo")
    shell.notify(m.RingFailed(1, "bo", "disk full", lasting=True))
    shell.notify(m.Lost("bo", "its primad ended"))
    shell.notify(m.Welcomed("bo"))
    assert shell.state.devices["bo"].barred_until_s == shell.now + BAR_S


def test_any_other_bar_outlasts_a_reconnect():
    shell = serving("ada", "bo")
    for epoch in (1, 2):
        shell.notify(m.RingFailed(epoch, "bo", "it broke"))
    until_s = shell.state.devices["bo"].barred_until_s
    shell.notify(m.Lost("bo", "its primad ended"))
    shell.notify(m.Welcomed("bo"))
    assert shell.state.devices["bo"].barred_until_s == until_s


def test_a_barred_device_takes_part_if_there_is_no_plan_without_it():
    shell = serving("ada", "bo")
    broken(shell, "bo")
    assert no_plan(shell) == [m.Solve(3, frozenset({"ada", "bo"}))]
    assert solve(shell) + form(shell) == [m.Form(3), m.Serve(3, None)]
    assert not shell.state.last_resort


def test_no_plan_with_barred_devices_either_ends_the_answers_once():
    shell = serving("ada", "bo")
    broken(shell, "bo")
    no_plan(shell)
    assert no_plan(shell) == [m.Fail("too large")]
    assert live(shell, RETRY_S - 0.1, "ada", "bo") == []


def test_the_last_resort_breaks_and_is_tried_again_after_a_pause():
    shell = serving("ada")
    broken(shell, "ada")
    no_plan(shell)
    solve(shell)
    assert broken(shell, "ada") == [m.Abandon(3)]
    assert solves(live(shell, 1.9, "ada")) == []
    assert solves(live(shell, 0.2, "ada")) == [{"ada"}]


def test_the_second_ring_that_breaks_soon_is_formed_at_once_a_later_one_after_a_pause():
    shell = serving("ada", "bo")
    for pause_s in (0.0, 0.0, 1.0, 2.0):
        assert broken(shell)[0] == m.Close(shell.state.epoch - (0 if pause_s else 1), "it broke")
        if pause_s:
            assert solves(live(shell, pause_s - 0.1, "ada", "bo")) == []
            live(shell, 0.2, "ada", "bo")
        solve(shell)
        form(shell)


def test_answers_that_break_ring_after_ring_end():
    shell = serving("ada", "bo")
    live(shell, SETTLE_S, "ada", "bo")
    failed = []
    for _ in range(MAX_BREAKS + 1):
        failed += [effect for effect in broken(shell) if isinstance(effect, m.Fail)]
        live(shell, 5.0, "ada", "bo")
        solve(shell)
        form(shell)
    assert failed == [m.Fail(f"{MAX_BREAKS} rings in a row broke: it broke")]
    live(shell, SETTLE_S, "ada", "bo")
    assert not any(isinstance(effect, m.Fail) for effect in broken(shell))


def test_breaks_with_a_device_at_fault_do_not_count_as_ring_after_ring():
    names = ["ada", "bo", "cy", "dee", "eve", "fay"]
    shell = serving(*names)
    live(shell, SETTLE_S, *names)
    for name in names[: MAX_BREAKS + 1]:
        assert not any(isinstance(effect, m.Fail) for effect in broken(shell, name))
        solve(shell)
        form(shell)


# ---- no ring --------------------------------------------------------------------------------------------------------


def test_without_a_plan_the_answers_end_at_once_and_the_same_devices_are_asked_again_later():
    shell = serving("ada", "bo")
    shell.notify(m.Lost("bo", "unplugged"))
    assert no_plan(shell) == [m.Fail("too large")]
    assert shell.state.holding_s is None
    assert solves(live(shell, RETRY_S - 0.1, "ada")) == []
    assert solves(live(shell, 0.2, "ada")) == [{"ada"}]


@pytest.mark.parametrize("speaks", [True, False])
def test_without_a_plan_the_answers_wait_for_a_suspected_device_until_it_speaks_or_is_gone(speaks):
    shell = serving("ada", "bo")
    live(shell, SETTINGS.suspect_after_s + 0.1, "ada")
    assert phase_of(shell.state, "bo") is m.DevicePhase.SUSPECTED
    no_plan(shell)
    broken(shell, None)
    assert no_plan(shell) == []
    if speaks:
        assert solves(shell.notify(m.Heard("bo"))) == [{"ada", "bo"}]
        return
    assert live(shell, SETTINGS.gone_after_s - shell.now + shell.state.devices["bo"].heard_s - 0.1, "ada") == []
    assert solves(live(shell, 0.2, "ada")) == [{"ada"}]
    assert no_plan(shell) == [m.Fail("too large")]


def test_where_the_heads_own_disk_is_full_the_answers_end_with_that_and_a_ring_is_tried_again():
    shell = serving("ada", "bo")
    shell.notify(m.Lost("bo", "unplugged"))
    solve(shell)
    assert shell.notify(m.RingFailed(2, None, "disk full", lasting=True)) == [m.Abandon(2), m.Fail("disk full")]
    assert shell.state.holding_s is None
    assert solves(live(shell, 1.9, "ada")) == []
    assert solves(live(shell, 0.2, "ada")) == [{"ada"}]
    assert solve(shell) + form(shell) == [m.Form(3), m.Serve(3, None)]


def test_a_device_that_returns_while_there_is_no_ring_is_taken_at_once_though_it_is_barred():
    shell = serving("ada", "bo")
    shell.notify(m.Lost("bo", "unplugged"))
    no_plan(shell)
    live(shell, 0.6, "ada")
    welcome(shell, "bo")
    assert shell.state.devices["bo"].barred_until_s > shell.now
    assert shell.candidates == {"ada", "bo"}


def test_devices_that_came_while_no_plan_was_found_are_asked_before_the_answers_end():
    shell = serving("ada", "bo")
    shell.notify(m.Seen("cy", True))
    shell.notify(m.Welcomed("cy"))
    shell.notify(m.Lost("bo", "unplugged"))
    shell.notify(m.Measured(frozenset({"ada", "cy"})))
    assert shell.candidates == {"ada"}
    assert no_plan(shell) == [m.Solve(3, frozenset({"ada", "cy"}))]
    assert shell.state.holding_s is not None


def test_answers_wait_for_a_ring_for_so_long_and_no_longer():
    shell = serving("ada", "bo", hold_s=10.0)
    shell.notify(m.Lost("bo", "unplugged"))
    solve(shell)
    assert live(shell, 9.9, "ada") == [m.Greet("bo")]
    (fail,) = live(shell, 0.2, "ada")
    assert fail == m.Fail("no ring could be formed within 10 s")
    assert form(shell) == [m.Serve(2, None)]


# ---- a better plan --------------------------------------------------------------------------------------------------


def test_a_plan_that_gains_enough_is_taken():
    shell = serving("ada")
    welcome(shell, "bo")
    assert shell.candidates == {"ada", "bo"}
    assert solve(shell, value=0.9) == [m.Form(2)]
    assert form(shell) == [m.Serve(2, 1)]


def test_a_plan_that_gains_too_little_is_not_taken_and_not_asked_for_again():
    shell = serving("ada")
    welcome(shell, "bo")
    assert solve(shell, value=0.91) == [m.Abandon(2)]
    assert live(shell, 1000.0, "ada", "bo") == []
    shell.notify(m.Lost("bo", "unplugged"))
    live(shell, 1.0, "ada")
    welcome(shell, "bo")
    assert live(shell, 1000.0, "ada", "bo") == []


def test_where_every_device_is_to_have_layers_a_new_one_is_taken_whatever_it_costs():
    shell = serving("ada", use_all=True)
    welcome(shell, "bo")
    assert solve(shell, value=3.0) == [m.Form(2)]
    assert form(shell) == [m.Serve(2, 1)]


def test_a_silence_does_not_make_the_same_plan_worth_asking_again():
    shell = serving("ada")
    welcome(shell, "bo")
    solve(shell, value=0.95)
    live(shell, 2.0, "bo")
    no_plan(shell)
    shell.notify(m.Heard("ada"))
    assert live(shell, 100.0, "ada", "bo") == []


def test_a_new_device_is_a_reason_to_ask_again():
    shell = serving("ada")
    welcome(shell, "bo")
    solve(shell, value=0.95)
    welcome(shell, "cy")
    assert shell.candidates == {"ada", "bo", "cy"}


def test_a_ring_settles_before_a_better_plan_is_looked_for():
    shell = head(solo=True)
    solve(shell)
    form(shell)
    welcome(shell, "ada")
    assert live(shell, SETTLE_S - 0.1, "ada") == []
    assert solves(live(shell, 0.2, "ada")) == [{"ada"}]


def test_a_device_that_comes_and_goes_is_taken_ever_more_rarely():
    shell = serving("ada")
    welcome(shell, "bo")
    solve(shell, value=0.5)
    form(shell)
    waits_s = []
    for _ in range(4):
        live(shell, SETTLE_S, "ada", "bo")
        shell.notify(m.Lost("bo", "Wi-Fi"))
        start = shell.now
        solve(shell, value=1.0)
        form(shell)
        live(shell, 0.6, "ada")
        welcome(shell, "bo")
        while shell.attempt is None:
            live(shell, 0.5, "ada", "bo")
        waits_s.append(shell.now - start)
        solve(shell, value=0.5)
        form(shell)
    assert waits_s == pytest.approx([5.0, 10.0, 20.0, 40.0], abs=0.7)


@pytest.mark.parametrize("lasting", [False, True])
def test_a_better_plan_that_cannot_be_formed_leaves_the_ring_as_it_is(lasting):
    shell = serving("ada")
    welcome(shell, "bo")
    solve(shell, value=0.5)
    assert acts(shell.notify(m.RingFailed(2, None, "disk full", lasting=lasting))) == [m.Abandon(2)]
    assert live(shell, 1000.0, "ada", "bo") == []
    assert shell.serving == 1


def test_a_device_that_broke_a_better_plan_is_tried_again_when_its_bar_ends():
    shell = serving("ada")
    welcome(shell, "bo")
    for times in range(3):
        solve(shell, value=0.5)
        assert broken(shell, "bo") == [m.Abandon(2 + times)]
        assert live(shell, BAR_S * 2**times - 1.0, "ada", "bo") == []
        assert solves(live(shell, 2.0, "ada", "bo")) == [frozenset({"ada", "bo"})]


# ---- memory pressure ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["ada", "head"])
def test_for_a_device_that_is_short_of_memory_another_plan_is_formed_while_the_ring_serves(name):
    """The new plan serves though it gains nothing. No step or sequence is lost: the first ring serves until then."""
    shell = serving("ada", "bo")
    assert acts(shell.notify(m.DeviceMemoryLow(name))) == [m.Solve(2, frozenset({"ada", "bo"}), 1)]
    assert any(isinstance(effect, m.OwnerLine) and effect.text.startswith(f"{name}: ") for effect in shell.effects)
    assert solve(shell, value=5.0) == [m.Form(2)]
    assert shell.serving == 1
    assert form(shell) == [m.Serve(2, 1)]
    assert live(shell, 1000.0, "ada", "bo") == []


@pytest.mark.parametrize("name", ["cy", "nobody"])
def test_a_memory_shortage_of_a_device_without_a_part_changes_nothing(name):
    shell = serving("ada", "bo")
    assert acts(shell.notify(m.DeviceMemoryLow(name))) == []
    assert live(shell, 1000.0, "ada", "bo") == []


def test_without_another_plan_the_ring_continues_unchanged():
    shell = serving("ada", "bo")
    shell.notify(m.DeviceMemoryLow("bo"))
    assert no_plan(shell) == []
    assert shell.effects[-1] == m.OwnerLine("no other plan asks less of bo: too large")
    assert live(shell, 1000.0, "ada", "bo") == []
    assert shell.serving == 1


def test_other_plans_are_not_looked_for_all_the_time():
    shell = serving("ada", "bo")
    shell.notify(m.DeviceMemoryLow("bo"))
    no_plan(shell)
    assert acts(shell.notify(m.DeviceMemoryLow("bo"))) == []
    assert acts(shell.notify(m.DeviceMemoryLow("ada"))) == []
    assert live(shell, RELIEVE_S - 0.5, "ada", "bo") == []
    assert live(shell, 1.0, "ada", "bo") == [m.Solve(3, frozenset({"ada", "bo"}), 1)]


def test_a_limit_changed_by_the_owner_counts_at_once():
    shell = serving("ada", "bo")
    shell.notify(m.DeviceMemoryLow("bo"))
    no_plan(shell)
    assert shell.notify(m.DeviceMemoryLow("bo", by_owner=True)) == [
        m.OwnerLine("bo: the owner lowered its limit; looking for a plan that uses less of it"),
        m.Solve(3, frozenset({"ada", "bo"}), 1),
    ]
    solve(shell, "ada", value=2.0)
    form(shell)
    live(shell, SETTLE_S + 0.5, "ada", "bo")
    for epoch in (4, 5):
        assert acts(shell.notify(m.DeviceMemoryRecovered("bo", by_owner=True))) == [
            m.Solve(epoch, frozenset({"ada", "bo"}))
        ]
        solve(shell, value=2.0)


def test_a_ring_settles_before_a_memory_shortage_changes_it():
    shell = serving("ada", "bo")
    shell.notify(m.DeviceMemoryLow("bo"))
    solve(shell)
    form(shell)
    live(shell, RELIEVE_S, "ada", "bo")
    shell.notify(m.DeviceLeaving("bo", "Ctrl-C"))
    solve(shell)
    form(shell)
    assert acts(shell.notify(m.DeviceMemoryLow("ada"))) == []
    assert solves(live(shell, SETTLE_S + 0.5, "ada", "bo")) == [{"ada"}]


def test_a_better_plan_under_way_comes_first():
    shell = serving("ada")
    welcome(shell, "bo")
    assert acts(shell.notify(m.DeviceMemoryLow("ada"))) == []
    solve(shell, value=0.5)
    assert form(shell) == [m.Serve(2, 1)]
    assert live(shell, SETTLE_S + 0.5, "ada", "bo") == [m.Solve(3, frozenset({"ada", "bo"}), 2)]


def test_an_attempt_that_breaks_is_made_again_later():
    shell = serving("ada", "bo")
    shell.notify(m.DeviceMemoryLow("ada"))
    solve(shell)
    assert broken(shell) == [m.Abandon(2)]
    assert shell.serving == 1
    assert live(shell, RELIEVE_S - 1, "ada", "bo") == []
    assert live(shell, 2.0, "ada", "bo") == [m.Solve(3, frozenset({"ada", "bo"}), 1)]


def test_a_ring_that_breaks_meanwhile_is_formed_of_the_same_plan():
    """That plan already accounts for the shortage."""
    shell = serving("ada", "bo")
    shell.notify(m.DeviceMemoryLow("ada"))
    solve(shell)
    assert acts(shell.notify(m.RingFailed(1, None, "it broke"))) == [m.Close(1, "it broke")]
    assert form(shell) == [m.Serve(2, None)]
    assert live(shell, 1000.0, "ada", "bo") == []


def test_a_leaving_device_comes_before_devices_short_of_memory():
    shell = serving("ada", "bo")
    shell.notify(m.DeviceMemoryLow("ada"))
    shell.notify(m.DeviceLeaving("bo", "Ctrl-C"))
    assert shell.state.attempt is not None
    assert shell.state.attempt.why is m.Purpose.LEAVING
    solve(shell)
    assert form(shell) == [m.Serve(3, 1), m.LetGo("bo")]


@pytest.mark.parametrize("name", ["ada", "head"])
def test_when_a_device_has_room_again_a_plan_that_gains_enough_is_taken(name):
    shell = serving("ada", "bo")
    assert shell.notify(m.DeviceMemoryRecovered(name)) == [
        m.OwnerLine(f"{name}: there is memory again; looking for a better plan"),
        m.Solve(2, frozenset({"ada", "bo"})),
    ]
    assert solve(shell, value=0.5) == [m.Form(2)]
    assert form(shell) == [m.Serve(2, 1)]
    assert live(shell, 1000.0, "ada", "bo") == []


def test_a_device_that_lost_its_part_for_want_of_memory_gets_one_again():
    shell = serving("ada", "bo")
    shell.notify(m.DeviceMemoryLow("bo"))
    solve(shell, "ada", value=2.0)
    form(shell)
    assert live(shell, 1000.0, "ada", "bo") == []
    assert acts(shell.notify(m.DeviceMemoryRecovered("bo"))) == [m.Solve(3, frozenset({"ada", "bo"}))]
    assert solve(shell, value=1.0) == [m.Form(3)]
    assert form(shell) == [m.Serve(3, 2)]
    assert members(shell) == {"ada", "bo"}


@pytest.mark.parametrize("use_all", [False, True])
def test_room_that_gains_too_little_changes_nothing(use_all):
    shell = serving("ada", "bo", use_all=use_all)
    shell.notify(m.DeviceMemoryRecovered("bo"))
    assert solve(shell, value=0.95) == [m.Abandon(2)]
    assert live(shell, 1000.0, "ada", "bo") == []
    shell.notify(m.DeviceMemoryRecovered("bo"))
    assert shell.attempt == 3, "it has more room now than it had then"


def test_better_plans_are_not_looked_for_each_time_that_somebody_has_room():
    shell = serving("ada", "bo")
    shell.notify(m.DeviceMemoryRecovered("bo"))
    solve(shell, value=1.0)
    assert acts(shell.notify(m.DeviceMemoryRecovered("ada"))) == []
    assert acts(shell.notify(m.DeviceMemoryRecovered("bo"))) == []
    assert live(shell, REGAIN_S - 0.5, "ada", "bo") == []
    assert solves(live(shell, 1.0, "ada", "bo")) == [{"ada", "bo"}]
    solve(shell, value=1.0)
    assert live(shell, 1000.0, "ada", "bo") == []


def test_room_of_a_device_that_is_not_there_is_no_reason():
    shell = serving("ada", "bo")
    assert acts(shell.notify(m.DeviceMemoryRecovered("nobody"))) == []
    shell.notify(m.DeviceMemoryRecovered("bo"))
    solve(shell, value=1.0)
    shell.notify(m.DeviceMemoryRecovered("ada"))
    shell.notify(m.Lost("ada", "unplugged"))
    solve(shell)
    form(shell)
    assert solves(live(shell, 1000.0, "bo")) == []


def test_a_device_whose_memory_recovers_before_its_plan_is_no_longer_short():
    shell = serving("ada")
    welcome(shell, "bo")
    shell.notify(m.DeviceMemoryLow("ada"))
    shell.notify(m.DeviceMemoryRecovered("ada"))
    looks = m.Solve(3, frozenset({"ada", "bo"}))
    assert solve(shell, value=1.0) == [m.Abandon(2), looks], "for a better plan, not for one that asks less"
    assert solve(shell, value=1.0) == [m.Abandon(3)]
    assert live(shell, 1000.0, "ada", "bo") == []


def test_a_plan_for_more_room_that_a_device_breaks_is_tried_again():
    shell = serving("ada", "bo")
    shell.notify(m.DeviceMemoryRecovered("bo"))
    solve(shell, value=0.5)
    assert broken(shell, "bo") == [m.Abandon(2)]
    assert shell.state.memory_recovered == {"bo"}
    assert solves(live(shell, REGAIN_S + 1.0, "ada", "bo")) == [{"ada", "bo"}]
    solve(shell, value=0.5)
    assert broken(shell) == [m.Abandon(3)]
    assert live(shell, 1000.0, "ada", "bo") == []


def test_a_ring_that_breaks_is_formed_with_what_everybody_has_now():
    shell = serving("ada", "bo")
    shell.notify(m.DeviceMemoryRecovered("bo"))
    assert acts(shell.notify(m.RingFailed(1, None, "it broke"))) == [m.Close(1, "it broke")]
    solve(shell)
    assert form(shell) == [m.Serve(2, None)]
    assert live(shell, 1000.0, "ada", "bo") == []


# ---- corrected figures ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["ada", "head"])
def test_when_figures_are_corrected_a_plan_that_gains_enough_is_taken(name):
    shell = serving("ada", "bo")
    assert shell.notify(m.DevicesCorrected(frozenset({name}))) == [
        m.OwnerLine(f"{name}: figures are corrected; looking for a better plan"),
        m.Solve(2, frozenset({"ada", "bo"})),
    ]
    assert solve(shell, value=0.5) == [m.Form(2)]
    assert form(shell) == [m.Serve(2, 1)]
    assert live(shell, 1000.0, "ada", "bo") == []


@pytest.mark.parametrize(("value", "is_taken"), [(1.75, True), (1.85, False)])
def test_a_plan_is_better_than_what_serves_is_known_to_take_now(value, is_taken):
    shell = serving("ada", "bo")
    shell.notify(m.DevicesCorrected(frozenset({"ada"})))
    reported = acts(shell.notify(m.Solved(2, frozenset({"bo"}), value, serving_value=2.0)))
    assert reported == ([m.Form(2)] if is_taken else [m.Abandon(2)])


def test_better_plans_are_not_looked_for_after_each_answer():
    shell = serving("ada")
    shell.notify(m.DevicesCorrected(frozenset({"ada"})))
    solve(shell, value=1.0)
    assert acts(shell.notify(m.DevicesCorrected(frozenset({"ada"})))) == []
    assert live(shell, REGAIN_S - 0.5, "ada") == []
    assert solves(live(shell, 1.0, "ada")) == [{"ada"}]
    solve(shell, value=1.0)
    assert live(shell, 1000.0, "ada") == []


def test_figures_of_nobody_or_of_a_head_alone_are_no_reason():
    shell = serving("ada")
    assert shell.notify(m.DevicesCorrected(frozenset({"nobody"}))) == []
    alone = head(solo=True)
    solve(alone)
    form(alone)
    assert acts(alone.notify(m.DevicesCorrected(frozenset({"head"})))) == []
    assert live(alone, 1000.0) == []


def test_a_plan_for_corrected_figures_that_a_device_breaks_is_tried_again():
    shell = serving("ada", "bo")
    shell.notify(m.DevicesCorrected(frozenset({"ada"})))
    solve(shell, value=0.5)
    assert broken(shell, "bo") == [m.Abandon(2)]
    assert shell.state.corrected == {"ada"}
    assert solves(live(shell, REGAIN_S + 1.0, "ada", "bo")) == [{"ada", "bo"}]


def test_corrected_figures_of_a_device_that_is_lost_are_no_reason():
    shell = serving("ada", "bo")
    shell.notify(m.DevicesCorrected(frozenset({"bo"})))
    solve(shell, value=1.0)
    shell.notify(m.DevicesCorrected(frozenset({"ada"})))
    shell.notify(m.Lost("ada", "unplugged"))
    solve(shell)
    form(shell)
    assert solves(live(shell, 1000.0, "bo")) == []


# ---- links that did not work ----------------------------------------------------------------------------------------


UNREACHED = m.Measured(frozenset(), unreached=True)
REACHED = m.Measured(frozenset(), reached=frozenset({"bo"}))


def measures(effects: Iterable[m.Effect]) -> list[m.Measure]:
    return [effect for effect in effects if isinstance(effect, m.Measure)]


def test_a_link_that_did_not_work_is_measured_again_after_a_while_and_less_and_less_often():
    shell = serving("ada", "bo")
    shell.notify(UNREACHED)
    pause_s = AGAIN_S
    for _ in range(8):
        assert live(shell, pause_s - 1.0, "ada", "bo") == []
        shell.notify(UNREACHED)  # as after another device appeared
        assert live(shell, 1.5, "ada", "bo") == [m.Measure(frozenset({"ada", "bo"}), again=True)]
        shell.notify(m.Measured(frozenset({"ada", "bo"}), unreached=True))
        pause_s = min(2 * pause_s, MAX_AGAIN_S)
    assert pause_s == MAX_AGAIN_S


def test_once_all_links_work_none_is_measured_again():
    shell = serving("ada")
    shell.notify(UNREACHED)
    assert measures(live(shell, AGAIN_S, "ada")) == [m.Measure(frozenset({"ada"}), again=True)]
    shell.notify(m.Measured(frozenset({"ada"})))
    assert live(shell, 3 * MAX_AGAIN_S, "ada") == []


def test_a_device_that_comes_has_its_links_measured_again_soon():
    shell = serving("ada")
    shell.notify(UNREACHED)
    for _ in range(3):
        live(shell, MAX_AGAIN_S, "ada")
        shell.notify(m.Measured(frozenset({"ada"}), unreached=True))
    welcome(shell, "bo")
    shell.notify(UNREACHED)
    solve(shell, value=1.0)
    assert measures(live(shell, AGAIN_S + 1.0, "ada", "bo")) == [m.Measure(frozenset({"ada", "bo"}), again=True)]


def test_a_device_that_is_reached_now_is_planned_for_as_if_it_had_just_come():
    shell = serving("ada", "bo")
    assert acts(shell.notify(REACHED)) == [m.Solve(2, frozenset({"ada", "bo"}))]
    assert solve(shell, value=1.0) == [m.Abandon(2)], "unless that gains nothing"
    assert live(shell, 1000.0, "ada", "bo") == []
    assert acts(shell.notify(REACHED)) == [m.Solve(3, frozenset({"ada", "bo"}))], "another link, another plan"
    assert solve(shell, value=0.5) == [m.Form(3)]


def test_links_are_not_measured_again_while_no_ring_serves_or_another_is_formed():
    shell = serving("ada", "bo")
    shell.notify(UNREACHED)
    live(shell, AGAIN_S - 1.0, "ada", "bo")
    shell.notify(m.RingFailed(1, None, "it broke"))
    assert measures(live(shell, 10.0, "ada", "bo")) == []
    solve(shell)
    form(shell)
    assert measures(live(shell, SETTLE_S - 1.0, "ada", "bo")) == [], "it has requests to resume"
    assert measures(live(shell, 2.0, "ada", "bo")) == [m.Measure(frozenset({"ada", "bo"}), again=True)]


def test_the_link_by_which_a_group_broke_is_measured_as_soon_as_another_ring_serves():
    shell = serving("ada", "bo")
    shell.notify(m.RingFailed(1, "bo", "ada: bo of this group cannot be reached any more", between=("bo", "ada")))
    solve(shell)
    assert measures(form(shell)) == []
    assert measures(live(shell, SETTLE_S + 1.0, "ada", "bo")) == [m.Measure(frozenset({"ada", "bo"}), again=True)]


def test_a_device_that_is_reached_while_no_ring_serves_is_a_candidate_already():
    shell = serving("ada", "bo")
    shell.notify(m.RingFailed(1, None, "it broke"))
    assert shell.notify(REACHED) == []
    assert shell.candidates == {"ada", "bo"}


# ---- leaving --------------------------------------------------------------------------------------------------------


def test_a_device_that_leaves_hands_over_first():
    shell = serving("ada", "bo")
    assert acts(shell.notify(m.DeviceLeaving("bo", "Ctrl-C"))) == [m.Solve(2, frozenset({"ada"}))]
    assert solve(shell) == [m.Form(2)]
    assert form(shell) == [m.Serve(2, 1), m.LetGo("bo")]
    assert acts(shell.notify(m.Lost("bo", "left"))) == [m.Drop("bo")]
    assert shell.serving == 2


@pytest.mark.parametrize("fails", [no_plan, broken])
def test_a_device_whose_layers_nobody_can_take_may_leave_nonetheless(fails):
    shell = serving("ada", "bo")
    shell.notify(m.DeviceLeaving("bo", "Ctrl-C"))
    assert fails(shell)[-1] == m.LetGo("bo")
    assert live(shell, 100.0, "ada", "bo") == []
    assert shell.serving == 1


def test_handing_over_continues_without_the_device_that_broke_it():
    shell = serving("ada", "bo", "cy")
    shell.notify(m.DeviceLeaving("cy", "Ctrl-C"))
    solve(shell)
    assert broken(shell, "bo") == [m.Abandon(2), m.Solve(3, frozenset({"ada"}))]


def test_a_device_without_a_part_may_leave_at_once():
    shell = serving("ada")
    welcome(shell, "bo")
    solve(shell, "ada", value=1.0)
    assert shell.notify(m.DeviceLeaving("bo", "Ctrl-C")) == [m.LetGo("bo")]


def test_a_device_that_leaves_the_ring_being_formed_is_left_out():
    shell = head()
    welcome(shell, "ada", "bo")
    live(shell, LOOK_S, "ada", "bo")
    solve(shell)
    effects = shell.notify(m.DeviceLeaving("bo", "Ctrl-C"))
    assert effects == [m.Abandon(1), m.LetGo("bo"), m.Solve(2, frozenset({"ada"}))]


def test_a_device_that_leaves_without_a_part_does_not_disturb_the_ring_being_formed():
    shell = head()
    welcome(shell, "ada", "bo")
    live(shell, LOOK_S, "ada", "bo")
    solve(shell, "ada")
    assert shell.notify(m.DeviceLeaving("bo", "Ctrl-C")) == [m.LetGo("bo")]


def test_a_device_that_waits_to_hand_over_may_leave_when_the_ring_breaks():
    shell = serving("ada", "bo", "cy")
    shell.notify(m.DeviceLeaving("cy", "Ctrl-C"))
    effects = acts(shell.notify(m.Lost("bo", "unplugged")))
    assert m.LetGo("cy") in effects
    assert shell.candidates == {"ada"}


def test_a_suspected_device_that_leaves_need_not_be_waited_for():
    shell = serving("ada", "bo")
    live(shell, 2.0, "ada")
    solve(shell)
    form(shell)
    assert acts(shell.notify(m.DeviceLeaving("bo", "asleep soon"))) == [m.Serve(2, 1), m.LetGo("bo")]


def test_a_plan_that_gained_too_little_does_not_keep_a_device_from_handing_over():
    shell = serving("ada", "bo")
    welcome(shell, "cy")
    solve(shell, value=0.5)
    broken(shell, "bo")
    assert shell.candidates == {"ada", "cy"}
    solve(shell, value=1.0)
    assert acts(shell.notify(m.DeviceLeaving("bo", "Ctrl-C"))) == [m.Solve(4, frozenset({"ada", "cy"}))]


# ---- outdated messages ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "event",
    [
        m.Solved(1, frozenset({"ada"}), 0.1),
        m.NoPlan(1, "too large"),
        m.Formed(1),
        m.RingFailed(1, "ada", "it broke"),
        m.RingFailed(1, None, "it broke", parties=("ada",)),
        m.Progressed(1, "ada", m.LoadStage.LOAD, 0.5),
        m.Formed(7),
        m.RingFailed(7, "ada", "it broke"),
        m.Heard("eve"),
        m.Lost("eve", "unplugged"),
        m.DeviceLeaving("eve", "Ctrl-C"),
        m.Vanished("eve"),
        m.DeviceRefused("eve", "busy"),
        m.Measured(frozenset({"eve"})),
    ],
    ids=repr,
)
def test_events_of_other_rings_and_devices_change_nothing(event):
    shell = serving("ada", "bo")
    shell.notify(m.Lost("bo", "unplugged"))
    solve(shell)
    form(shell)
    before = shell.state
    assert shell.notify(event) == []
    assert shell.state == before


def test_a_plan_counts_once():
    shell = serving("ada", "bo")
    shell.notify(m.Lost("bo", "unplugged"))
    solve(shell)
    before = shell.state
    for event in (m.Solved(2, frozenset(), 0.1), m.NoPlan(2, "too large")):
        assert shell.notify(event) == []
        assert shell.state == before


def test_a_due_moment_is_not_missed_by_rounding():
    """At such a moment rounding often makes the elapsed time slightly less than the patience."""
    for count in range(1000):
        shell = Shell.start(replace(SETTINGS, suspect_after_s=1.1, gone_after_s=3.3), 1000.0 + count * 0.1)
        welcome(shell, "ada")
        shell.wake(shell.now + 1.1)
        assert shell.state.devices["ada"].phase is m.DevicePhase.SUSPECTED
        shell.wake(shell.state.devices["ada"].heard_s + 3.3)
        assert shell.state.devices["ada"].phase is m.DevicePhase.GONE


def test_the_end_of_a_bar_is_a_moment_to_wake_at():
    shell = serving("ada", "bo")
    broken(shell, "bo")
    live(shell, 1.0, "ada", "bo")
    solve(shell)
    form(shell)
    live(shell, BAR_S - 1.1, "ada", "bo")
    assert wake_at(shell.state, shell.now) == shell.state.devices["bo"].barred_until_s
