"""Devices that were never measured are visible and respond at once, and compute after measuring."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from primad.system.process_start import measuring
from tests.e2e.cluster import heading, joining, primad, wait_until
from tests.e2e.streams import ask

pytestmark = pytest.mark.slow


def states(home: Path, cluster: str) -> dict[str, str]:
    """Return the state of each device in ``primad devices``."""
    with primad("devices", "--home", home, "--cluster", cluster, "--seconds", 4, "--json") as run:
        assert run.wait_end() == 0, run.output
        return {device["device"]: device["state"] for device in json.loads(run.output)}


def test_a_first_start(quick_model, tmp_path, cluster, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))  # so this machine counts as never measured
    homes = {name: tmp_path / name for name in ("head", "worker")}
    for home in homes.values():
        home.mkdir()
    with (
        joining(homes["worker"], cluster) as worker,
        heading(quick_model, homes["head"], cluster, "--wait", 1, "--use-all") as head,
    ):
        with measuring():  # blocks other processes that want to measure
            worker.wait_for("waiting for a head")
            head.wait_health("measuring this device")
            assert head.health()[0] == 503
            wait_until(lambda: states(homes["head"], cluster).get("worker") == "measuring", "it is seen to be measured")
        head.wait_serving()
        assert {device["name"] for device in head.status()["devices"]} == {"head", "worker"}
        assert ask(head).text
