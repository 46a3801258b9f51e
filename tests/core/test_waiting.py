"""The head's messages about the devices that ``--wait`` waits for."""

from __future__ import annotations

import math
from dataclasses import replace

from primad.membership import types as m
from primad.membership.due import waiting_line
from primad.membership.step import wake_at
from tests.fakes.membership import SETTINGS, Shell


def head(wanted: int) -> Shell:
    return Shell.start(replace(SETTINGS, wanted=wanted, look_s=math.inf))


def line(shell: Shell, *measuring: str) -> str | None:
    return waiting_line(shell.state, measuring, 6.0, shell.now)


def test_without_an_end_it_waits_on_however_long_it_takes():
    shell = head(2)
    assert wake_at(shell.state, shell.now) is None or shell.wake(shell.now + 1e6) == []
    assert not shell.ended
    assert line(shell) == "waiting for 2 of 2 devices: start 'primad join' on the others"


def test_each_device_is_named_with_what_it_waits_for():
    shell = head(3)
    shell.notify(m.Seen("bo", False))
    assert line(shell, "mini") == (
        "waiting for 3 of 3 devices: bo was discovered, but is not paired ('primad pair' shows a code for it); "
        "mini is paired and is measuring itself, about 6 s more; start 'primad join' on the others"
    )


def test_many_strangers_are_not_named_and_one_more_is_no_news():
    shell = head(1)
    shell.notify(m.Seen("ada", True))
    for number in range(5):
        shell.notify(m.Seen(f"stranger-{number}", False))
    shown = line(shell)
    assert shown == (
        "waiting for 1 of 1 devices: ada is paired, and is being asked for its profile; "
        "many untrusted devices were discovered"
    )
    shell.notify(m.Seen("another", False))
    assert line(shell) == shown


def test_a_device_that_refused_is_shown_with_its_reason():
    shell = head(1)
    shell.notify(m.Seen("ada", True))
    assert line(shell) == "waiting for 1 of 1 devices: ada is paired, and is being asked for its profile"
    shell.notify(m.DeviceRefused("ada", "it works for another head"))
    assert line(shell) == "waiting for 1 of 1 devices: ada is paired, but it works for another head"


def test_no_line_is_shown_once_they_are_there():
    shell = head(1)
    shell.notify(m.Seen("ada", True))
    shell.notify(m.Welcomed("ada"))
    assert "its links are being measured" in str(line(shell))
    shell.notify(m.Measured(frozenset({"ada"})))
    assert line(shell) is None
    assert shell.candidates == {"ada"}


def test_a_head_without_wanted_devices_waits_for_nobody():
    assert waiting_line(Shell.start().state, (), 6.0, 0.0) is None
