"""The parts of a lab that need no root: fleet files, the detection of cgroups, the queues of the relay."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from tools.lab import DeviceSpec, Fleet, LabError, load_fleet
from tools.lab.cgroups import Cgroups, find
from tools.lab.fleet import parse_fleet
from tools.lab.relay import MAX_BYTES, Way

FLEETS = Path(__file__).parents[2] / "tools" / "homelab-fleets"
HEADER = bytes(10)


def test_sizes_defaults_and_addresses_are_read() -> None:
    fleet = parse_fleet(
        {
            "defaults": {"memory_bytes": "1.5GB", "cpus": 1},
            "device": [{"name": "a", "disk_bytes": "64MiB", "ip": "10.77.0.9"}, {"name": "b", "memory_bytes": 1 << 30}],
        },
        "here",
    )
    assert fleet.devices[0] == DeviceSpec(
        name="a", memory_bytes=1_500_000_000, cpus=1, disk_bytes=64 << 20, ip="10.77.0.9"
    )
    assert fleet.devices[1].memory_bytes == 1 << 30
    assert fleet.addresses() == ("10.77.0.9", "10.77.0.2")


@pytest.mark.parametrize("path", sorted(FLEETS.glob("*.toml")), ids=lambda path: path.stem)
def test_the_included_fleets_can_be_read(path: Path) -> None:
    assert load_fleet(path).devices


@pytest.mark.parametrize(
    ("document", "named"),
    [
        ({}, "from 1 to 64 devices"),
        ({"devices": []}, "`devices`"),
        ({"device": {"name": "a"}}, "`$.device`"),
        ({"device": [{}]}, "`name`"),
        ({"device": [{"name": "A!"}]}, "`$.name`"),
        ({"device": [{"name": "a" * 16}]}, "`$.name`"),
        ({"device": [{"name": 7}]}, "`$.name`"),
        ({"device": [{"name": "a"}, {"name": "a"}]}, "name a: two devices"),
        ({"device": [{"name": "a", "ip": "10.77.0.2"}, {"name": "b"}]}, "ip 10.77.0.2: two devices"),
        ({"device": [{"name": "a", "ip": "192.168.1.1"}]}, "10.77.0.0/24"),
        ({"device": [{"name": "a", "ip": "near"}]}, "'near'"),
        ({"device": [{"name": "a", "ip": 5}]}, "`$.ip`"),
        (
            {"device": [{"name": "a"}, {"name": "b", "memory": "1GB"}]},
            "device 2: Object contains unknown field `memory`",
        ),
        ({"device": [{"name": "a", "memory_bytes": "lots"}]}, "`$.memory_bytes`"),
        ({"device": [{"name": "a", "memory_bytes": 5}]}, "`$.memory_bytes`"),
        ({"device": [{"name": "a", "cpus": 0}]}, "`$.cpus`"),
        ({"device": [{"name": "a", "cpus": True}]}, "`$.cpus`"),
        ({"device": [{"name": "a", "latency_ms": -1}]}, "`$.latency_ms`"),
        ({"device": [{"name": "a", "latency_ms": 60_001}]}, "`$.latency_ms`"),
        ({"device": [{"name": "a", "multicast": 1}]}, "`$.multicast`"),
        ({"device": [{"name": "a", "latency_ms": float("nan")}]}, "`$.latency_ms`"),
        ({"device": [{"name": "a", "ipv4": "no"}]}, "`$.ipv4`"),
        ({"defaults": {"ip": "10.77.0.3"}, "device": [{"name": "a"}]}, "ip: unknown here"),
    ],
)
def test_a_wrong_fleet_is_one_error_line(document: dict[str, object], named: str) -> None:
    with pytest.raises(LabError) as caught:
        parse_fleet(document, "fleet.toml")
    assert named in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_unreadable_file_is_an_error_by_name(tmp_path: Path) -> None:
    (tmp_path / "bad.toml").write_text("[[device]\n")
    for name in ("bad.toml", "none.toml"):
        with pytest.raises(LabError, match=name):
            load_fleet(tmp_path / name)


def test_a_lab_needs_at_least_one_device() -> None:
    with pytest.raises(LabError, match="from 1 to"):
        Fleet(())


def test_cgroup_version_1_is_used_if_it_holds_the_controllers(tmp_path: Path) -> None:
    (tmp_path / "unified").mkdir()
    (tmp_path / "unified" / "cgroup.controllers").write_text("hugetlb\n")
    mounts = (
        "1 0 0:1 / /cpu rw - cgroup cgroup rw,cpu,cpuacct\n2 0 0:2 / /memory rw - cgroup cgroup rw,memory\n"
        "3 0 0:3 / /unified rw - cgroup2 cgroup2 rw\n"
    )
    found = find(mounts, tmp_path)
    assert found.version == 1
    assert found.folders == {"cpu": tmp_path / "cpu", "memory": tmp_path / "memory"}


def test_cgroup_version_2_gets_its_own_settings(tmp_path: Path) -> None:
    """Uses a plain folder; the real file system would create the files itself."""
    (tmp_path / "cgroup.controllers").write_text("cpuset cpu io memory pids\n")
    (tmp_path / "cgroup.subtree_control").write_text("memory pids\n")
    lab = tmp_path / "primad-lab-abcdef"
    lab.mkdir()
    (lab / "cgroup.subtree_control").write_text("")
    found = find("1 0 0:1 / / rw - cgroup2 cgroup2 rw\n", tmp_path)
    groups = Cgroups("abcdef", found)
    groups.create("a")
    groups.limit_memory("a", 1 << 30)
    groups.limit_cpu("a", 0.5)
    groups.limit_disk("a", "8:0", 1000, None)
    assert found.version == 2
    assert (tmp_path / "cgroup.subtree_control").read_text() == "+cpu +io"
    assert (lab / "cgroup.subtree_control").read_text() == "+cpu +io +memory"
    assert (lab / "a" / "memory.max").read_text() == str(1 << 30)
    assert (lab / "a" / "cpu.max").read_text() == "10000 20000"
    assert (lab / "a" / "io.max").read_text() == "8:0 rbps=1000"
    assert groups.procs("a") == [lab / "a" / "cgroup.procs"]


def test_a_machine_without_cgroups_is_an_error() -> None:
    with pytest.raises(LabError, match="cgroups"):
        find("1 0 0:1 / / rw - ext4 /dev/sda rw\n")


def test_the_relay_delays_frames_and_keeps_their_order() -> None:
    near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    with near, far:
        far.setblocking(False)
        way = Way(near, 0.5, multicast=True)
        way.accept(HEADER + b"first", 10.0)
        way.accept(HEADER + b"second", 10.2)
        way.release(10.49)
        with pytest.raises(BlockingIOError):
            far.recv(100)
        way.release(10.5)
        way.release(10.8)
        assert [far.recv(100)[10:], far.recv(100)[10:]] == [b"first", b"second"]
        assert way.held_bytes == 0


def test_the_relay_drops_frames_over_its_limit_and_multicast_if_off() -> None:
    near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    with near, far:
        way = Way(near, 1.0, multicast=False)
        for group in ("01005e0000fb", "3333000000fb"):
            way.accept(HEADER + bytes.fromhex(group), 0.0)
        assert not way.held
        for group in ("ffffffffffff", "3333ff000001", "027700000001"):
            way.accept(HEADER + bytes.fromhex(group), 0.0)
        assert len(way.held) == 3
        for _ in range(3 * MAX_BYTES // 60_000):
            way.accept(bytes(60_000), 0.0)
        assert way.held_bytes <= MAX_BYTES
