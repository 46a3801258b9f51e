"""A real cluster on a lab: devices find each other on the network, pair, and serve."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.homelab.cluster import CODE, Cluster
from tests.homelab.running import MakeLab
from tests.homelab.stream import settled
from tools.lab import DeviceSpec

PROMPT = "Why is the sky blue?"


@pytest.mark.slow
def test_devices_that_trust_each_other_serve_together(make_lab: MakeLab, quick_model: Path) -> None:
    lab = make_lab(
        DeviceSpec(name="a", memory_bytes=2 << 30),
        DeviceSpec(name="b", memory_bytes=1 << 30, latency_ms=2),
        DeviceSpec(name="c", memory_bytes=1 << 30, disk_bytes=1 << 30, mbit_per_s=900),
    )
    with Cluster(lab, quick_model) as cluster:
        cluster.start()
        status, body = cluster.health()
        assert (status, body["detail"]) == (200, "serving with 3 devices")
        stream = cluster.stream(PROMPT, max_tokens=24)
        stream.wait_tokens(4)
        stream.wait_end()
        assert settled(stream), cluster.logs()
        assert stream.finish_reason == "length"
        assert len(stream.times) == 24
        roles = {device.name: set(device.processes.values()) for device in lab.status()}
        assert all({"daemon", "ring"} <= found for found in roles.values())


@pytest.mark.slow
def test_devices_with_only_link_local_addresses_serve_together(make_lab: MakeLab, quick_model: Path) -> None:
    """A link-local address is only valid with its interface, which differs between devices."""
    lab = make_lab(*(DeviceSpec(name=name, memory_bytes=1 << 30, ipv4=False) for name in "abc"))
    with Cluster(lab, quick_model) as cluster:
        cluster.start()
        assert cluster.health()[1]["detail"] == "serving with 3 devices"
        stream = cluster.stream(PROMPT, max_tokens=8)
        stream.wait_end()
        assert settled(stream), cluster.logs()
        assert len(stream.times) == 8


@pytest.mark.slow
def test_strangers_pair_by_a_code_and_serve(make_lab: MakeLab, quick_model: Path) -> None:
    lab = make_lab(DeviceSpec(name="a", memory_bytes=2 << 30), DeviceSpec(name="b", memory_bytes=1 << 30))
    with Cluster(lab, quick_model, trusting=False) as cluster:
        cluster.prepare()
        cluster.start_head("--wait", 1, "--use-all").wait_for(CODE)
        cluster.pair("b")
        cluster.wait_serving()
        assert cluster.health()[1]["detail"] == "serving with 2 devices"
        stream = cluster.stream(PROMPT, max_tokens=8)
        stream.wait_end()
        assert settled(stream), cluster.logs()


@pytest.mark.slow
def test_a_head_that_ends_is_not_waited_for(make_lab: MakeLab, tmp_path: Path) -> None:
    lab = make_lab(DeviceSpec(name="a"))
    with Cluster(lab, tmp_path / "none.gguf") as cluster:
        cluster.prepare()
        cluster.start_head()
        with pytest.raises(AssertionError, match=r"the head ended with code 2 and said at last:\n(.*\n)*.*none\.gguf"):
            cluster.wait_serving()
