"""The load time is forecast from missing layers, links and disks."""

from __future__ import annotations

import pytest

from primad.planning.load_times import START_S, DeviceLoad, LoadTimes

GB = 10**9


def load(window_gb: float, *, disk: float = 1.0, link: float | None = 0.1) -> DeviceLoad:
    rate = None if link is None else link * GB
    return DeviceLoad(window_bytes=int(window_gb * GB), disk_bytes_per_s=disk * GB, link_bytes_per_s=rate)


def test_layers_that_are_held_are_read_from_the_slowest_disk():
    times = LoadTimes({"desk": load(4, disk=2), "nas": load(3)}, 10.0)
    assert times.left_s(10.0) == 3 + START_S
    assert times.left_s(12.0) == 1 + START_S
    times.ready("nas")
    assert times.left_s(10.0) == 2 + START_S
    times.ready("desk")
    assert times.left_s(10.0) == 0
    assert not times.moves


def test_layers_that_are_lacked_come_over_the_link_and_are_not_read_from_the_disk():
    times = LoadTimes({"desk": load(0), "nas": load(3)}, 0.0)
    times.arrived("nas", 0, 2 * GB, 1.0)
    assert times.left_s(1.0) == 20 + 1 + START_S
    assert times.moves
    times.arrived("nas", 2 * GB, 2 * GB, 21.0)
    assert times.left_s(21.0) == 1 + START_S
    assert times.left_s(22.0) == START_S


def test_devices_share_the_uplink_of_the_head():
    times = LoadTimes({"nas": load(2), "pi": load(2), "tv": load(2, link=0.05)}, 0.0)
    for device in ("nas", "pi"):
        times.arrived(device, 0, 2 * GB, 0.0)
    assert times.left_s(0.0) == 40 + START_S
    times.arrived("tv", 0, 2 * GB, 0.0)
    assert times.left_s(0.0) == 60 + START_S


def test_after_a_while_the_measured_rate_gives_the_remaining_time():
    times = LoadTimes({"nas": load(2, link=None)}, 0.0)
    assert times.left_s(0.0) == 2 + START_S
    times.arrived("nas", GB // 2, 2 * GB, 1.0)  # already here from an aborted load
    assert times.left_s(1.0) is None, "nothing is known of a hub"
    times.arrived("nas", GB, 2 * GB, 11.0)
    assert times.left_s(11.0) == pytest.approx(20 + START_S)
