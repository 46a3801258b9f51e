"""Measuring next to a daemon: in a child that ends with its task, and again when the machine is idle."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import sys
from itertools import count

import psutil
import pytest

from primad.daemon import measuring as module
from primad.daemon.measuring import OwnProfile
from primad.errors import ConfigError
from primad.profiler.device import is_profiled
from primad.profiler.effort import Effort
from primad.profiler.records import write
from primad.settings.config import Config, load_config, open_home
from primad.system.process_start import measuring
from tests.fakes.profile import home_record, machine_record


class Reports:
    """A reporter that keeps progress."""

    def __init__(self) -> None:
        self.steps: list[tuple[int, int]] = []
        self.settled = 0

    def report_line(self, line: str) -> None:
        assert "other programs ran while this device was measured" in line, "as they do during these tests"

    def progress(self, device: str, phase: str, done: int, total: int) -> None:
        assert (device, phase) == ("desk", "profile")
        self.steps.append((done, total))

    def wait(self, words: str) -> None:
        """Nothing is displayed."""

    def resolve(self) -> None:
        self.settled += 1


@pytest.fixture
def config(tmp_path, monkeypatch) -> Config:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))  # this machine was never measured
    config = load_config({"home": tmp_path / "home", "name": "desk"}, {})
    open_home(config)
    return config


def children() -> list[psutil.Process]:
    found = []
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.NoSuchProcess):  # it has just ended
            if "primad.profiler.process" in " ".join(child.cmdline()):
                found.append(child)
    return found


async def until_a_child_runs() -> None:
    while not children():  # noqa: ASYNC110  (nothing notifies)
        await asyncio.sleep(0.02)


async def test_stopping_ends_the_child(config):
    reported: list[str] = []
    with measuring():  # so that it waits for its turn
        task = asyncio.create_task(OwnProfile(config, Reports(), reported.append).measure())
        await until_a_child_runs()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert not children()
    assert reported == ["measuring this device"]
    assert not OwnProfile(config, Reports()).is_known


async def test_a_child_that_fails_is_one_clear_error(config, monkeypatch):
    monkeypatch.setattr(sys, "executable", "/bin/false")
    reports = Reports()
    with pytest.raises(ConfigError, match="measuring this device ended with code 1; run 'primad doctor'"):
        await OwnProfile(config, reports).measure()
    assert reports.settled == 1


async def test_a_failure_of_the_measuring_child_is_one_clear_error(config):
    shutil.rmtree(config.home)
    config.home.write_text("a file where the folder should be")
    with pytest.raises(ConfigError, match=r"--home .*: this device cannot be measured there: .*"):
        await OwnProfile(config, Reports()).measure()


async def test_better_figures_wait_for_an_idle_machine_and_yield_to_work(config, monkeypatch):
    starts = count()

    async def idle() -> None:
        if next(starts) == 1:  # another daemon of this machine has measured meanwhile
            write(machine_record(None), home_record(), config.home)

    computed_s = 0.0
    monkeypatch.setattr(module, "_idle", idle)
    monkeypatch.setattr(module, "ring_cpu_s", lambda: computed_s)
    with measuring():  # the first child waits for its turn until something is computed
        refining = asyncio.create_task(OwnProfile(config, Reports()).refine())
        await until_a_child_runs()
        computed_s = 0.5
        while children():  # noqa: ASYNC110  (nothing notifies)
            await asyncio.sleep(0.02)
    await refining
    assert is_profiled(config.home, None, Effort())
    assert next(starts) == 2


async def test_a_device_that_was_measured_with_full_effort_is_not_measured_again(config, monkeypatch):
    write(machine_record(None), home_record(), config.home)
    monkeypatch.setattr(sys, "executable", "/bin/false")
    own = OwnProfile(config, Reports())
    await own.measure()
    await own.refine()
    assert own.now("lap").device == "lap"
