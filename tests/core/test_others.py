"""Processor use of other programs during a measurement, from system counters."""

from __future__ import annotations

from collections import namedtuple

import pytest

from primad.system import processors as module
from primad.system.processors import Others

Times = namedtuple("Times", "user nice system idle iowait guest")


def test_this_program_its_children_and_io_wait_do_not_count_as_others(monkeypatch):
    system, own, now_s = Times(100.0, 1.0, 10.0, 500.0, 5.0, 50.0), (4.0, 1.0, 30.0, 2.0, 0.0), 1000.0
    monkeypatch.setattr(module.sys, "platform", "linux")
    monkeypatch.setattr(module.psutil, "cpu_times", lambda: system)
    monkeypatch.setattr(module.os, "times", lambda: own)
    monkeypatch.setattr(module.time, "monotonic", lambda: now_s)
    others = Others()
    assert others.cores() == 0
    system = Times(120.0, 2.0, 13.0, 510.0, 9.0, 60.0)  # 24 seconds of processor time
    own = (5.0, 2.0, 43.0, 3.0, 0.0)  # 16 of them
    now_s = 1010.0
    assert others.cores() == pytest.approx(0.8)
