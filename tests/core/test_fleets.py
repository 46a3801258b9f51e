"""Fleets as data: built-in ones are complete and plausible, others are validated."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from halda import DeviceProfile
from primad.errors import ConfigError
from primad.gguf.shapes import profiles_directory
from primad.profiler.fleets import fleet_names, read_fleet

PAPER = json.loads((Path(__file__).parent.parent.parent / "profiles" / "paper.json").read_text())


def write(folder: Path, **change: Any) -> Path:
    content: dict[str, Any] = {
        "version": 1,
        "source": "a test",
        "devices": ["paper-d2", {"profile": "paper-d3", "name": "desk"}],
        "link": {"round_trip_s": 0.001, "bytes_per_s": 1e8},
    }
    path = folder / "mine.json"
    path.write_text(json.dumps(content | change))
    return path


@pytest.mark.parametrize("name", fleet_names())
def test_every_fleet_has_a_link_for_each_ordered_pair(name: str) -> None:
    fleet = read_fleet(name)
    names = [device.device for device in fleet.devices]
    assert sorted((link.source, link.target) for link in fleet.links) == sorted(
        (a, b) for a in names for b in names if a != b
    )
    assert len({device.host for device in fleet.devices}) == len(names)


def all_devices() -> list[DeviceProfile]:
    return [device for name in fleet_names() for device in read_fleet(name).devices]


@pytest.mark.parametrize("device", all_devices(), ids=lambda device: device.device)
def test_every_device_is_plausible(device: DeviceProfile) -> None:
    """No kernel outruns its memory; free memory is part of the total; shared memory is part of RAM."""
    assert device.ram_available_bytes <= device.ram_total_bytes
    assert all(speed.decode_bytes_per_s <= 1.2 * device.ram_read_bytes_per_s for speed in device.cpu.speeds)
    assert 0 < device.disk.random_bytes_per_s <= device.disk.fault_bytes_per_s <= device.disk.prefetch_bytes_per_s
    if device.gpu is not None:
        assert device.gpu.vram_available_bytes <= device.gpu.vram_total_bytes
        assert all(speed.decode_bytes_per_s <= 1.2 * device.gpu.vram_read_bytes_per_s for speed in device.gpu.speeds)
        assert not device.gpu.unified_memory or device.gpu.vram_total_bytes <= device.ram_total_bytes


def test_every_device_file_has_the_name_of_its_device() -> None:
    for path in (profiles_directory() / "devices").glob("*.json"):
        content = json.loads(path.read_text())
        assert content["device"]["device"] == path.stem
        assert content["how"]


def test_the_devices_of_the_paper_have_its_published_figures() -> None:
    devices = read_fleet("paper-d1-d6").devices
    for device, published in zip(devices, PAPER["devices"], strict=True):
        assert device.ram_available_bytes == round(published["ram_available_gib"] * (1 << 30))
        rate = device.disk.fault_bytes_per_s if device.system == "Darwin" else device.disk.prefetch_bytes_per_s
        assert rate == published["disk_read_gb_per_s"] * 1e9
        if published["vram_available_gib"] is not None:
            assert device.gpu is not None
            assert device.gpu.vram_available_bytes == published["vram_available_gib"] << 30


def test_a_fleet_of_ones_own(tmp_path: Path) -> None:
    own = {"source": "desk", "target": "paper-d2", "round_trip_s": 0.5, "bytes_per_s": 1e6}
    fleet = read_fleet(write(tmp_path, links=[own]))
    assert [device.device for device in fleet.devices] == ["paper-d2", "desk"]
    assert fleet.devices[1].host == "desk"
    assert {(link.source, link.round_trip_s) for link in fleet.links} == {("paper-d2", 0.001), ("desk", 0.5)}


def test_a_device_file_next_to_the_fleet_comes_first(tmp_path: Path) -> None:
    content = json.loads((profiles_directory() / "devices" / "paper-d2.json").read_text())
    content["device"]["ram_available_bytes"] = 12345
    (tmp_path / "paper-d2.json").write_text(json.dumps(content))
    assert read_fleet(str(write(tmp_path))).devices[0].ram_available_bytes == 12345


@pytest.mark.parametrize(
    ("change", "replies"),
    [
        ({"version": 9}, "version 9"),
        ({"devices": ["nobody"]}, "'nobody'"),
        ({"devices": []}, "none"),
        ({"devices": ["paper-d1", "paper-d1"]}, "different names"),
        ({"devices": [7]}, "devices"),
        ({"link": {"round_trip_s": 0.1, "bytes_per_s": 0}}, "above 0"),
        ({"link": {"round_trip_s": 0.1, "bytes_per_s": 1, "late_s": -1}}, "no negative time"),
        ({"links": [{"source": "x", "target": "desk", "round_trip_s": 1, "bytes_per_s": 1}]}, "names x"),
        ({"extra": 1}, "extra"),
    ],
)
def test_a_file_that_is_wrong_is_one_clear_error(tmp_path: Path, change: dict[str, Any], replies: str) -> None:
    path = write(tmp_path, **change)
    with pytest.raises(ConfigError, match=r"mine\.json") as caught:
        read_fleet(path)
    assert replies in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["nowhere", "../devices/paper-d1", "missing.json"])
def test_an_unknown_fleet_is_one_clear_error(name: str) -> None:
    with pytest.raises(ConfigError):
        read_fleet(name)
