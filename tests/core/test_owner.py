"""When a device pauses for its owner, and how its computing yields to other programs."""

from __future__ import annotations

import os
import subprocess
import sys

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from primad.daemon import owner
from primad.daemon.owner import BATTERY_EVERY_S, BY_HAND, ON_BATTERY, SETTLED_S, OwnerPause, PausePolicy
from primad.errors import ConfigError
from primad.system import niceness
from primad.system.niceness import apply_nice


def policy(**changes) -> PausePolicy:
    return PausePolicy(**({"pause_on_battery": True, "by_hand": False} | changes))


def follow(start: PausePolicy, *readings: tuple[float, bool | None]) -> PausePolicy:
    for now_s, plugged in readings:
        start = start.power(plugged, now_s)
    return start


# ---- the policy -----------------------------------------------------------------------------------------------------


def test_a_device_computes_by_default():
    assert policy().paused is None


def test_its_owner_pauses_and_resumes_it():
    assert policy().pause().paused == BY_HAND
    assert policy().pause().resume().paused is None


def test_on_battery_it_pauses_when_that_has_lasted():
    assert follow(policy(), (0, False)).paused is None
    assert follow(policy(), (0, False), (SETTLED_S - 0.1, False)).paused is None
    assert follow(policy(), (0, False), (SETTLED_S, False)).paused == ON_BATTERY


def test_on_mains_it_resumes_when_that_has_lasted():
    empty = follow(policy(), (0, False), (SETTLED_S, False))
    assert follow(empty, (20, True)).paused == ON_BATTERY
    assert follow(empty, (20, True), (20 + SETTLED_S, True)).paused is None


def test_a_loose_plug_changes_nothing():
    readings = [(float(now), now % 2 == 0) for now in range(100)]
    assert follow(policy(), *readings).paused is None
    empty = follow(policy(), (0, False), (SETTLED_S, False))
    assert follow(empty, *readings).paused == ON_BATTERY


def test_a_battery_matters_only_if_the_owner_configured_it():
    assert follow(policy(pause_on_battery=False), (0, False), (100, False)).paused is None


def test_an_unknown_power_source_counts_as_mains():
    assert follow(policy(), (0, None), (100, None)).paused is None


def test_resuming_by_hand_does_not_override_the_battery():
    both = follow(policy(), (0, False), (SETTLED_S, False)).pause()
    assert both.paused == BY_HAND
    assert both.resume().paused == ON_BATTERY


def test_the_next_look_is_when_a_change_would_count():
    assert policy().next_look_s(0) == BATTERY_EVERY_S
    assert follow(policy(), (0, False)).next_look_s(4) == SETTLED_S - 4
    assert follow(policy(), (0, False)).next_look_s(100) == 0
    assert follow(policy(), (0, False), (SETTLED_S, False)).next_look_s(SETTLED_S) == BATTERY_EVERY_S


STEP = st.tuples(st.floats(0, 30), st.sampled_from([True, False, None, "pause", "resume"]))


@given(st.lists(STEP, max_size=40), st.booleans())
def test_whatever_happens_the_reason_follows_from_hand_and_settled_battery(steps, pause_on_battery):
    now_s, state, by_hand = 0.0, policy(pause_on_battery=pause_on_battery), False
    same_for_s, last = 0.0, None
    for wait_s, event in steps:
        now_s += wait_s
        if isinstance(event, str):
            state = state.pause() if event == "pause" else state.resume()
            by_hand = event == "pause"
            same_for_s += wait_s
        else:
            state = state.power(event, now_s)
            same_for_s = same_for_s + wait_s if (event is False) == last else 0.0
            last = event is False
            if same_for_s >= SETTLED_S + 1e-6:
                assert state.on_battery == last
        assert (state.paused == BY_HAND) == by_hand
        assert by_hand or (state.paused == ON_BATTERY) == (pause_on_battery and state.on_battery)
        assert 0 <= state.next_look_s(now_s) <= BATTERY_EVERY_S


# ---- the shell ------------------------------------------------------------------------------------------------------


def test_a_pause_by_hand_outlives_a_restart(tmp_path):
    reported: list[str | None] = []
    first = OwnerPause(tmp_path, pause_on_battery=False, changed=reported.append)
    assert first.paused is None
    assert "also after a restart" in first.pause()
    assert "paused already" in first.pause()
    again = OwnerPause(tmp_path, pause_on_battery=False, changed=reported.append)
    assert again.paused == BY_HAND
    assert again.resume() == "computes again"
    assert again.resume() == "was not paused"
    assert OwnerPause(tmp_path, pause_on_battery=False, changed=reported.append).paused is None
    assert reported == [BY_HAND, None]


def test_a_pause_that_cannot_be_kept_is_one_clear_error(tmp_path):
    (tmp_path / "file").write_text("")
    pause = OwnerPause(tmp_path / "file", pause_on_battery=False, changed=lambda _: pytest.fail("did not happen"))
    with pytest.raises(ConfigError, match=r"paused.json: cannot be written: "):
        pause.pause()
    assert pause.paused is None


async def watched(tmp_path, readings: list[bool | None], **settings) -> tuple[list[str | None], list[float]]:
    """The reported reasons, and the pauses between looks, when the battery gives ``readings`` in turn."""
    reported: list[str | None] = []
    now_s, slept = 0.0, list[float]()
    pause = OwnerPause(tmp_path, **({"pause_on_battery": True, "changed": reported.append} | settings))

    async def sleep(seconds: float) -> None:
        nonlocal now_s
        now_s += seconds
        slept.append(seconds)

    async def main() -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(owner.asyncio, "sleep", sleep)
            await pause.watch_battery(lambda: readings.pop(0), lambda: now_s)

    if settings or readings[0] is None:
        await main()
    else:
        with pytest.raises(IndexError):
            await main()
    return reported, slept


async def test_the_battery_is_followed(tmp_path):
    reported, slept = await watched(tmp_path, [True, True, False, False, True, True])
    assert reported == [ON_BATTERY, None]
    assert slept == [BATTERY_EVERY_S, SETTLED_S, BATTERY_EVERY_S, SETTLED_S, BATTERY_EVERY_S]


async def test_without_a_battery_nobody_looks_again(tmp_path):
    assert await watched(tmp_path, [None]) == ([], [])


async def test_where_the_battery_does_not_matter_nobody_looks(tmp_path):
    assert await watched(tmp_path, [], pause_on_battery=False) == ([], [])


@pytest.mark.parametrize("error", [OSError("x"), NotImplementedError("x"), RuntimeError("x")])
def test_a_battery_that_cannot_be_read_is_none(monkeypatch, error):
    def broken() -> None:
        raise error

    monkeypatch.setattr(psutil, "sensors_battery", broken, raising=False)
    assert owner.is_plugged() is None
    monkeypatch.delattr(psutil, "sensors_battery")
    assert owner.is_plugged() is None


# ---- yielding to other programs -------------------------------------------------------------------------------------


@pytest.fixture
def busy():
    """A process with a second thread, which waits until it is ended."""
    code = (
        "import threading, sys; threading.Thread(target=sys.stdin.read, daemon=True).start(); print(flush=True); "
        "threading.Event().wait(60)"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    process.stdout.readline()
    yield process
    process.kill()
    process.communicate()


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has classes")
def test_every_thread_stands_back_and_none_comes_forward_again(busy):
    threads = [thread.id for thread in psutil.Process(busy.pid).threads()]
    before = psutil.Process(busy.pid).nice()
    assert len(threads) == 2
    apply_nice(busy.pid, 0)
    assert psutil.Process(busy.pid).nice() == before
    apply_nice(busy.pid, 15)
    assert [os.getpriority(os.PRIO_PROCESS, thread) for thread in threads] == [15, 15]
    apply_nice(busy.pid, 12)
    assert psutil.Process(busy.pid).nice() == 15


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux groups sessions")
def test_a_session_of_a_processs_own_stands_back_as_a_whole_and_no_other_one(busy, tmp_path, monkeypatch):
    (tmp_path / str(busy.pid)).mkdir()
    monkeypatch.setattr(niceness, "PROC", tmp_path)
    apply_nice(busy.pid, 10)
    assert not [*(tmp_path / str(busy.pid)).iterdir()]
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, start_new_session=True) as alone:
        (tmp_path / str(alone.pid)).mkdir()
        apply_nice(alone.pid, 10)
        assert (tmp_path / str(alone.pid) / "autogroup").read_text() == "10"
        alone.kill()


def test_a_process_that_has_ended_costs_a_log_line(busy, caplog):
    busy.kill()
    busy.wait()
    apply_nice(busy.pid, 10)
    assert f"process {busy.pid} does not stand back" in caplog.text
