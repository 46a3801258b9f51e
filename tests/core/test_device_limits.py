"""Limits that a head's owner sets for other devices."""

from __future__ import annotations

from dataclasses import replace

import pytest

from primad.api.page.admin_api import DeviceLimit
from primad.errors import ConfigError
from primad.head.model.limits import FILE_NAME, DeviceLimits
from tests.fakes.planning import device

GB = 10**9


def test_device_limits_outlive_a_restart_and_can_be_removed(tmp_path):
    device_limits = DeviceLimits(tmp_path)
    assert device_limits.put(DeviceLimit(device="nas", is_paused=True))
    assert device_limits.put(DeviceLimit(device="lap", ram_bytes=2 * GB))
    again = DeviceLimits(tmp_path)
    assert again.unpaused(["desk", "lap", "nas"]) == {"desk", "lap"}
    assert again.of("lap").ram_bytes == 2 * GB
    assert not again.put(DeviceLimit(device="nas"))
    assert DeviceLimits(tmp_path).unpaused(["nas"]) == {"nas"}


def test_limits_of_the_earlier_file_name_are_kept(tmp_path):
    limit = DeviceLimit(device="mac", is_paused=True)
    DeviceLimits(tmp_path).put(limit)
    (tmp_path / FILE_NAME).rename(tmp_path / "lending.json")
    assert DeviceLimits(tmp_path).of("mac") == limit
    again = DeviceLimits(tmp_path)
    again.put(DeviceLimit(device="mac"))
    assert DeviceLimits(tmp_path).of("mac") == DeviceLimit(device="mac"), "the earlier file counts no longer"


def test_only_a_lower_limit_is_reported_as_lowered(tmp_path):
    device_limits = DeviceLimits(tmp_path)
    assert device_limits.put(DeviceLimit(device="lap", ram_bytes=4 * GB))
    assert device_limits.put(DeviceLimit(device="lap", ram_bytes=2 * GB))
    assert not device_limits.put(DeviceLimit(device="lap", ram_bytes=3 * GB))
    assert device_limits.put(DeviceLimit(device="lap", is_paused=True, ram_bytes=3 * GB))
    assert not device_limits.put(DeviceLimit(device="lap", ram_bytes=3 * GB))


def test_plans_have_no_more_memory_than_the_device_limit(tmp_path):
    device_limits = DeviceLimits(tmp_path)
    laptop = replace(device("lap"), ram_available_bytes=8 * GB)
    device_limits.put(DeviceLimit(device="lap", ram_bytes=2 * GB))
    assert device_limits.apply(laptop).ram_available_bytes == 2 * GB
    assert device_limits.apply(replace(laptop, ram_available_bytes=GB)).ram_available_bytes == GB
    assert device_limits.apply(device("desk")) == device("desk")


def test_so_little_that_nothing_fits_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="too few"):
        DeviceLimits(tmp_path).put(DeviceLimit(device="lap", ram_bytes=5))


@pytest.mark.parametrize(
    "content",
    [b"", b"{}", b"[1]", b"\xff", b'[{"device": "../x"}]'],
    ids=["empty", "object", "numbers", "bytes", "name"],
)
def test_a_damaged_file_is_as_none(tmp_path, content):
    (tmp_path / FILE_NAME).write_bytes(content)
    assert DeviceLimits(tmp_path).unpaused(["nas"]) == {"nas"}
