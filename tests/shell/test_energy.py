"""Joules are those that counters of the machine count; where there are none, there is no figure."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.lab.energy import Reading, gauge


def write(folder: Path, **files: object) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, value in files.items():
        (folder / name).write_text(f"{value}\n")


def test_packages_are_added_up_and_a_counter_that_wrapped_goes_on(tmp_path):
    powercap = tmp_path / "powercap"
    write(powercap / "intel-rapl:0", name="package-0", energy_uj=900, max_energy_range_uj=1000)
    write(powercap / "intel-rapl:1", name="package-1", energy_uj=100, max_energy_range_uj=1000)
    write(powercap / "intel-rapl:0:0", name="core", energy_uj=5, max_energy_range_uj=1000)
    found = gauge(tmp_path)
    assert found is not None
    before = found.read()
    write(powercap / "intel-rapl:0", energy_uj=100)
    write(powercap / "intel-rapl:1", energy_uj=150)
    assert found.joules(before, found.read()) == pytest.approx((200 + 50) / 1e6)


def test_a_battery_that_is_being_emptied_gives_watts(tmp_path):
    battery = tmp_path / "power_supply" / "BAT0"
    write(battery, status="Discharging", power_now=10_000_000)
    found = gauge(tmp_path)
    assert found is not None
    before = found.read()
    write(battery, power_now=20_000_000)
    after = found.read()
    later = Reading(before.at_s + 2, after.energy_uj, after.watts)
    assert found.joules(before, later) == pytest.approx(30.0)


@pytest.mark.parametrize("status", ["Charging", "Full"])
def test_a_battery_on_mains_and_counters_that_cannot_be_read_say_nothing(tmp_path, status):
    write(tmp_path / "power_supply" / "BAT0", status=status, power_now=1)
    write(tmp_path / "powercap" / "intel-rapl:0", name="package-0", max_energy_range_uj=1000)
    assert gauge(tmp_path) is None
