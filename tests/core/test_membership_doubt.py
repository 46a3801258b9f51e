"""Devices that lie, stall or flap: whoever they accuse, the ring soon serves without them, and with the honest ones."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest

from primad.membership import types as m
from primad.membership.doubt import DOUBT_S
from primad.membership.due import LOAD_PARTS, LOAD_STALL_S
from primad.membership.step import wake_at
from primad.membership.transitions import BAR_S, FORGIVEN_S, LASTING_BAR_S
from tests.core.test_membership import (
    SETTLE_S,
    broken,
    form,
    head,
    live,
    members,
    no_plan,
    serving,
    solve,
    solves,
    welcome,
)
from tests.fakes.membership import Shell

HONEST = ("ada", "bo", "cy")
EVERYBODY = (*HONEST, "liar")


def barred(shell: Shell) -> set[str]:
    """The devices that are excluded now."""
    return {name for name, device in shell.state.devices.items() if device.barred_until_s > shell.now}


def left_out(shell: Shell, device: str | None, *parties: str) -> list[str]:
    """The devices excluded after a break by ``device`` or by one of ``parties``."""
    before = {name: each.failures for name, each in shell.state.devices.items()}
    broken(shell, device, *parties)
    return [name for name, each in shell.state.devices.items() if each.failures > before[name]]


def formed(shell: Shell, *names: str) -> frozenset[str]:
    """The members of the next ring; further rings are formed until one includes all of ``names``."""
    while shell.serving is None or not members(shell) >= set(names):
        if shell.attempt is None:
            live(shell, 1.0, *EVERYBODY)
        else:
            solve(shell, value=0.5**shell.attempt)
            form(shell)
    return members(shell)


# ---- who accuses whom -----------------------------------------------------------------------------------------------


def test_the_first_break_between_two_leaves_out_nobody_as_a_connection_may_have_been_interrupted():
    shell = serving("ada", "bo", "cy")
    assert solves(broken(shell, None, "bo", "ada")) == [{"ada", "bo", "cy"}]
    assert barred(shell) == set()


def test_the_second_one_leaves_out_the_accused_and_the_third_the_accuser():
    shell = serving("ada", "bo")
    at_fault = []
    for _ in range(5):
        at_fault.append(left_out(shell, None, "bo", "ada"))
        formed(shell, "ada", "bo")
    assert at_fault == [[], ["bo"], ["ada"], ["bo"], ["ada"]]


def test_a_device_that_breaks_what_it_sends_to_the_head_is_left_out_the_second_time():
    shell = serving("ada", "bo")
    broken(shell, None, "bo")
    assert formed(shell) == {"ada", "bo"}
    broken(shell, None, "bo")
    assert barred(shell) == {"bo"}
    assert formed(shell) == {"ada"}


def test_while_a_ring_is_formed_one_party_is_left_out_at_once():
    shell = head(wanted=2)
    welcome(shell, "ada", "bo")
    solve(shell)
    assert broken(shell, None, "bo", "ada") == [m.Abandon(1), m.Solve(2, frozenset({"ada"}))]


@pytest.mark.parametrize("seed", range(4))
def test_a_liar_gets_one_honest_device_left_out_at_most_and_then_itself(seed):
    """The liar accuses one neighbour after the other, has itself accused, or makes them fail with bad messages."""
    chance = random.Random(seed)
    shell, victim = serving(*EVERYBODY), ""
    at_fault: list[str] = []
    for _ in range(6):
        victim = chance.choice(sorted(members(shell) - {"liar", victim}))
        device, parties = chance.choice(
            [(None, (victim, "liar")), (None, ("liar", victim)), (victim, (victim, "liar"))],
        )
        at_fault += left_out(shell, device, *parties)
        formed(shell, *EVERYBODY)
    assert sum(name != "liar" for name in at_fault) <= 1, at_fault
    assert at_fault.count("liar") >= 4


@pytest.mark.parametrize("liar", EVERYBODY[::3])
def test_a_device_that_alters_messages_of_the_ring_is_found_since_it_is_in_each_broken_ring(liar):
    """The culprit is unknown, so each device may be excluded once, until the liar is."""
    shell = serving(*EVERYBODY)
    at_fault: list[str] = []
    for _ in range(10):
        at_fault += left_out(shell, None, *sorted(members(shell)))
        formed(shell, liar)
    assert all(at_fault.count(name) <= 1 for name in EVERYBODY if name != liar), at_fault
    assert at_fault.count(liar) >= 4


def test_a_device_that_fails_by_itself_takes_nobody_with_it():
    shell = serving("ada", "bo")
    for _ in range(4):
        broken(shell, "bo", "bo", "ada")
        assert barred(shell) == {"bo"}
        assert formed(shell) == {"ada"}
        formed(shell, "ada", "bo")


def test_a_device_that_makes_its_neighbours_fail_one_by_one_is_left_out_instead():
    shell = serving(*HONEST)
    broken(shell, "ada", "ada", "cy")
    assert barred(shell) == {"ada"}
    formed(shell)
    broken(shell, "bo", "bo", "cy")
    assert barred(shell) == {"ada", "cy"}


def test_a_doubt_is_forgotten_in_time():
    shell = serving("ada", "bo")
    broken(shell, None, "bo", "ada")
    formed(shell)
    live(shell, 1.0, "ada", "bo")
    shell.state = replace(shell.state, devices={
        name: replace(device, doubted_s=device.doubted_s - DOUBT_S) for name, device in shell.state.devices.items()
    })  # fmt: skip
    broken(shell, None, "bo", "ada")
    assert barred(shell) == set()


@pytest.mark.parametrize("has_served", [False, True])
def test_a_device_that_has_to_load_again_and_again_is_left_out(has_served):
    """The device reports no fault, so without this rule no ring would ever serve."""
    shell = serving("ada", "liar") if has_served else head(wanted=2)
    if not has_served:
        welcome(shell, "ada", "liar")
        solve(shell)
    for _ in range(2):
        broken(shell, None, "liar", again=True)
        assert barred(shell) == set()
        if has_served:
            formed(shell, "ada", "liar")
        else:
            live(shell, 5.0, "ada", "liar")
            solve(shell)
    broken(shell, None, "liar", again=True)
    assert barred(shell) == {"liar"}
    assert formed(shell) == {"ada"}


def test_parties_that_nobody_knows_are_none():
    shell = serving("ada", "bo")
    broken(shell, None, "eve", "head")
    assert barred(shell) == set()
    assert solves(shell.effects[-1:]) == [{"ada", "bo"}]


# ---- who loads ------------------------------------------------------------------------------------------------------


def loading() -> Shell:
    """A ring of two is being formed, and bo is ready."""
    shell = head(wanted=2)
    welcome(shell, "ada", "bo")
    solve(shell)
    shell.notify(m.Progressed(1, "bo", m.LoadStage.READY, 1.0))
    return shell


def loads(
    shell: Shell, seconds: float, every_s: float, stages: tuple[m.LoadStage, ...], share: float
) -> list[m.Effect]:
    """Ada reports progress of ``share`` every ``every_s``, cycling through ``stages``; the core's reaction."""
    start, done, count = len(shell.effects), 0.0, 0
    end = shell.now + seconds
    while shell.now < end:
        live(shell, every_s, "ada", "bo")
        done, count = done + share, count + 1
        shell.notify(m.Progressed(1, "ada", stages[count % len(stages)], done))
    return [each for each in shell.effects[start:] if isinstance(each, m.Abandon | m.Solve)]


@pytest.mark.parametrize(
    ("stages", "share"),
    [
        ((m.LoadStage.FETCH,), 0.0),  # nothing arrives
        ((m.LoadStage.FETCH,), 1e-9),  # a byte a second
        ((m.LoadStage.FETCH, m.LoadStage.LOAD), 1e-9),  # alternately reports fetching and loading
    ],
)
def test_a_device_that_never_loads_is_left_out_and_the_ring_is_formed_without_it(stages, share):
    shell = loading()
    patience_s = LOAD_STALL_S + 10 * (len(stages) - 1)
    assert loads(shell, LOAD_STALL_S - 10, 10.0, stages, share) == []
    assert loads(shell, patience_s - LOAD_STALL_S + 20, 10.0, stages, share) == [
        m.Abandon(1),
        m.Solve(2, frozenset({"bo"})),
    ]
    assert shell.state.devices["ada"].failures == 1


def test_a_slow_device_that_gets_on_is_waited_for():
    shell = loading()
    enough = 1.2 / LOAD_PARTS / LOAD_STALL_S * 20
    assert loads(shell, 4 * LOAD_STALL_S, 20.0, (m.LoadStage.FETCH,), enough) == []
    shell.notify(m.Progressed(1, "ada", m.LoadStage.LOAD, 0.0))
    live(shell, LOAD_STALL_S - 1, "ada", "bo")
    shell.notify(m.Progressed(1, "ada", m.LoadStage.READY, 1.0))
    live(shell, 2 * LOAD_STALL_S, "ada", "bo")
    assert shell.attempt == 1
    assert m.Serve(1, None) in form(shell)


def test_the_deadline_of_a_loading_device_is_a_moment_to_wake_at():
    shell = loading()
    live(shell, 1.0, "ada", "bo")
    due_s = shell.state.attempt.loading["ada"].since_s + LOAD_STALL_S
    while shell.now < due_s - 1:
        live(shell, 1.0, "ada", "bo")
    shell.notify(m.Heard("ada"))
    shell.notify(m.Heard("bo"))
    assert wake_at(shell.state, shell.now) <= due_s
    live(shell, due_s - shell.now, "ada", "bo")
    assert barred(shell) == {"ada"}


def stalls(shell: Shell) -> None:
    """Ada and bo load; the liars claim to load but make no progress."""
    for name in members_being_formed(shell) & {"ada", "bo"}:
        shell.notify(m.Progressed(shell.attempt, name, m.LoadStage.READY, 1.0))
    live(shell, LOAD_STALL_S + 1, "ada", "bo", "liar", "fraud")


def goes(shell: Shell) -> None:
    """A liar is lost just before its deadline and returns at once."""
    liar = max(members_being_formed(shell) - {"ada", "bo"})
    live(shell, LOAD_STALL_S - 10, "ada", "bo", "liar", "fraud")
    shell.notify(m.Lost(liar, "it closed the link"))
    welcome(shell, liar)


def leaves(shell: Shell) -> None:
    """A liar asks to leave and returns at once."""
    liar = max(members_being_formed(shell) - {"ada", "bo"})
    live(shell, LOAD_STALL_S - 10, "ada", "bo", "liar", "fraud")
    shell.notify(m.DeviceLeaving(liar, "its owner ended it"))
    shell.notify(m.Lost(liar, "it left"))
    welcome(shell, liar)


def members_being_formed(shell: Shell) -> set[str]:
    """The members of the ring being formed."""
    assert shell.state.attempt is not None
    return set(shell.state.attempt.members or ())


@pytest.mark.parametrize("holds_up", [stalls, goes, leaves])
@pytest.mark.parametrize("served", [False, True])
def test_each_of_several_stalling_devices_holds_up_one_ring(holds_up, served):
    """An exclusion shorter than the time that they waste would readmit them in turns, two rings later, for ever."""
    liars = ("liar", "fraud")
    shell = serving("ada", "bo", hold_s=1e6) if served else head(wanted=4, look_s=math.inf)
    welcome(shell, *(liars if served else ("ada", "bo", *liars)))
    if served:
        solve(shell, value=10.0)  # they are not worth another plan
        broken(shell)
    for _ in liars:
        assert shell.candidates > {"ada", "bo"}
        solve(shell)
        holds_up(shell)
    assert shell.attempt is not None
    assert shell.candidates == {"ada", "bo"}
    solve(shell)
    form(shell)
    assert members(shell) == {"ada", "bo"}


def test_a_device_that_held_up_a_ring_must_prove_itself_while_another_serves():
    shell = loading()
    live(shell, LOAD_STALL_S + 1, "ada", "bo")
    solve(shell)
    form(shell)
    assert members(shell) == {"bo"}
    live(shell, SETTLE_S, "ada", "bo")
    assert shell.candidates == {"ada", "bo"}
    solve(shell, value=0.1)
    assert m.Abandon(shell.attempt) in shell.notify(m.RingFailed(shell.serving, "bo", "it broke"))
    assert shell.candidates == set(), "while no ring serves nobody waits for it"
    solve(shell)
    form(shell)
    formed(shell, "ada")
    assert not shell.state.devices["ada"].unproven
    broken(shell, None, "bo")
    assert "ada" in shell.candidates


def test_a_device_that_held_up_a_ring_is_waited_for_if_there_is_no_plan_without_it():
    shell = loading()
    live(shell, LOAD_STALL_S + 1, "ada", "bo")
    assert solves(no_plan(shell)) == [{"ada", "bo"}]


def test_attempts_that_fail_by_one_device_after_the_other_do_not_end_the_head_while_there_are_others():
    shell = head(wanted=4)
    welcome(shell, *EVERYBODY)
    for left in range(len(EVERYBODY), 0, -1):
        assert len(shell.candidates) == left
        solve(shell)
        broken(shell, None, *sorted(shell.candidates))
    assert shell.candidates == set()
    solve(shell)
    assert m.Serve(shell.attempt, None) in form(shell)


# ---- who comes and goes ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("announces", [False, True])
def test_a_device_that_is_lost_as_soon_as_it_is_welcomed_is_greeted_later_each_time(announces):
    """Otherwise it would produce two log lines a second, for ever."""
    shell, lost = serving("ada"), 0
    shell.notify(m.Seen("liar", trusted=True))
    for _ in range(2400):
        if announces:
            shell.notify(m.Vanished("liar"))
            shell.notify(m.Seen("liar", trusted=True))
        if "liar" in shell.greets:
            shell.notify(m.Welcomed("liar"))
            shell.notify(m.Lost("liar", "it refuses"))
            lost += 1
        live(shell, 0.25, "ada")
    assert 5 <= lost <= 12


def test_a_device_that_vanishes_and_comes_back_is_not_forgiven_for_that():
    shell = serving("ada", "bo")
    pauses_s = []
    for _ in range(4):
        shell.notify(m.Lost("bo", "it closed the link"))
        shell.notify(m.Vanished("bo"))
        pauses_s.append(shell.state.devices["bo"].barred_until_s - shell.now)
        formed(shell)
        live(shell, 1.0, "ada")
        welcome(shell, "bo")
        formed(shell, "bo")
    assert pauses_s == pytest.approx([BAR_S, 2 * BAR_S, 4 * BAR_S, 8 * BAR_S])


def test_a_device_that_did_no_harm_for_long_is_forgotten_when_it_leaves():
    shell = serving("ada", "bo")
    broken(shell, "bo")
    formed(shell)
    shell.notify(m.Lost("bo", "it closed the link"))
    live(shell, BAR_S + FORGIVEN_S + 1, "ada")
    shell.notify(m.DeviceRefused("bo", "busy"))
    shell.notify(m.Vanished("bo"))
    assert "bo" not in shell.state.devices


def test_a_lasting_fault_that_ends_at_each_reconnect_counts_as_any_other():
    shell = serving("ada", "bo")
    pauses_s = []
    for _ in range(3):
        broken(shell, "bo", lasting=True)
        assert shell.state.devices["bo"].barred_until_s - shell.now == pytest.approx(LASTING_BAR_S)
        formed(shell)
        shell.notify(m.Lost("bo", "it closed the link"))
        welcome(shell, "bo")
        pauses_s.append(shell.state.devices["bo"].barred_until_s - shell.now)
        formed(shell, "bo")
    assert pauses_s == pytest.approx([BAR_S, 2 * BAR_S, 4 * BAR_S])


# ---- who is measured ------------------------------------------------------------------------------------------------


def test_a_device_that_does_not_measure_its_links_is_ignored_for_longer_each_time():
    """Meanwhile the others are measured without it, as are newly arriving devices."""
    shell = serving("ada", "bo")
    shell.notify(m.Seen("liar", True))
    pauses_s = []
    for number in range(4):
        shell.notify(m.Welcomed("liar"))
        while shell.measuring is None:
            live(shell, 0.5, *EVERYBODY)
        assert shell.measuring == members(shell) | {"liar"}
        shell.notify(m.Lost("liar", "it did not measure its links"))
        shell.notify(m.Measured(members(shell)))
        pauses_s.append(shell.state.devices["liar"].barred_until_s - shell.now)
        shell.notify(m.Welcomed("liar"))
        if number == 1:
            assert not shell.measuring
            shell.notify(m.Seen("cy", True))
            shell.notify(m.Welcomed("cy"))
            assert shell.measuring == {"ada", "bo", "cy"}
            shell.notify(m.Measured(shell.measuring))
            assert formed(shell, "cy") == {"ada", "bo", "cy"}
    assert pauses_s == pytest.approx([BAR_S, 2 * BAR_S, 4 * BAR_S, 8 * BAR_S])


def test_the_first_ring_does_not_wait_for_a_device_that_does_not_measure_its_links():
    shell = head(wanted=2)
    for name in ("ada", "bo", "liar"):
        shell.notify(m.Seen(name, True))
        shell.notify(m.Welcomed(name))
    shell.notify(m.Measured(frozenset({"ada"})))
    assert shell.measuring == {"ada", "bo", "liar"}
    shell.notify(m.Lost("liar", "it did not measure its links"))
    shell.notify(m.Welcomed("liar"))
    assert solves(shell.notify(m.Measured(frozenset({"ada", "bo"})))) == [{"ada", "bo"}]
