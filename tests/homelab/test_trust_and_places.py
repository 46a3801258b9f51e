"""Devices on a real network are revoked, paired again and renamed, and a head is queried by its address."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.homelab.cluster import HTTP_PORT, PRIMAD, Cluster
from tests.homelab.rig import wait_until
from tests.homelab.running import PATIENCE_S, MakeLab
from tools.lab import DeviceSpec
from tools.synth import write_model

ASK = "import sys, urllib.request as u; print(u.urlopen(u.Request(sys.argv[1], headers={'Host': sys.argv[2]})).status)"


def tiny(folder: Path) -> Path:
    """Write a model of 6 layers, under 1 MB."""
    write_model(folder / "tiny.gguf")
    return folder / "tiny.gguf"


def run(cluster: Cluster, device: str, *words: object, fails: bool = False) -> str:
    """Run ``primad`` on a device; return its output. An error is only allowed with ``fails``."""
    argv = [PRIMAD, *map(str, words)]
    done = cluster.lab.device(device).run(argv, env=cluster._env(), timeout_s=PATIENCE_S)
    assert fails or done.returncode == 0, f"{done.stdout}{done.stderr}\n{cluster.logs()}"
    return done.stdout


def rows(cluster: Cluster, device: str) -> dict[str, dict[str, Any]]:
    """Return the rows of ``primad devices`` on a device by key, which are unique."""
    found = json.loads(run(cluster, device, "devices", "--json"))
    assert len({row["key"] for row in found}) == len(found)
    return {row["key"]: row for row in found}


def trust_findings(cluster: Cluster, device: str) -> list[str]:
    """Return the findings of ``primad doctor`` about trust; others depend on the lab."""
    found = json.loads(run(cluster, device, "doctor", "--json", "--cluster", f"lab-{cluster.lab.id}", fails=True))
    return [each["text"] for each in found if each["check"] == "trust"]


@pytest.mark.slow
def test_a_revoked_device_is_notified_and_serves_with_all_others_once_paired_again(
    make_lab: MakeLab, tmp_path: Path
) -> None:
    lab = make_lab(*(DeviceSpec(name=name, memory_bytes=1 << 30) for name in "abc"))
    with Cluster(lab, tiny(tmp_path), trusting=False) as cluster:
        cluster.prepare()
        cluster.start_head("--wait", 2, "--use-all")
        cluster.daemons["a"].wait_for("looking for|waiting for|to add a device")
        for name in "bc":
            cluster.pair(name)
        cluster.wait_serving(detail="serving with 3 devices")
        assert "b is no longer trusted here" in run(cluster, "a", "devices", "revoke", "b")
        cluster.daemons["b"].wait_for(
            "a revoked this device and gives it no more work; to pair again type 'primad pair'"
        )
        cluster.wait_serving(detail="serving with 2 devices")
        wait_until(lambda: any("it revoked this device" in text for text in trust_findings(cluster, "b")), "b sees it")
        assert any(text.startswith("b was revoked here") for text in trust_findings(cluster, "a"))
        wait_until(
            lambda: "revoked this device" in [row["state"] for row in rows(cluster, "b").values()], "devices shows it"
        )
        run(cluster, "b", "pair", "--code", cluster.code()[0])
        cluster.wait_serving(detail="serving with 3 devices")
        assert "does not reach" not in cluster.logs(), cluster.logs()
        assert not any("revoked" in text for name in "ab" for text in trust_findings(cluster, name))


@pytest.mark.slow
def test_a_renamed_device_has_one_line_and_is_found_by_both_names(make_lab: MakeLab, tmp_path: Path) -> None:
    lab = make_lab(DeviceSpec(name="a"), DeviceSpec(name="b"))
    with Cluster(lab, tmp_path / "none.gguf") as cluster:
        cluster.prepare()
        cluster.start_worker("b")
        lab.device("b").kill()  # without a goodbye, so it stays announced under its old name for a while
        cluster.start_worker("b", "--name", "attic")

        def shown() -> list[tuple[str, str]]:
            return [(row["device"], row["calls_itself"]) for row in rows(cluster, "a").values() if row["role"]]

        wait_until(lambda: shown() == [("b", "attic")], "it is in sight")
        assert "b is no longer trusted here" in run(cluster, "a", "devices", "revoke", "attic")


@pytest.mark.slow
def test_a_head_is_reached_from_elsewhere_at_its_listed_address_and_pairs_there(
    make_lab: MakeLab, tmp_path: Path
) -> None:
    lab = make_lab(DeviceSpec(name="a", memory_bytes=1 << 30), DeviceSpec(name="b", memory_bytes=1 << 30))
    with Cluster(lab, tiny(tmp_path), trusting=False) as cluster:
        cluster.prepare()
        cluster.start_head("--wait", 0, "--host", "0.0.0.0", "--no-auth")
        cluster.wait_serving()
        at = f"{lab.device('a').ip}:{HTTP_PORT}"
        wait_until(lambda: any(row["places"] == [at] for row in rows(cluster, "b").values()), "the head is in sight")
        for head in ("a", at):
            assert "serving with 1 device" in run(cluster, "b", "status", "--head", head)
        for host in ("a", "a.local", f"a.local:{HTTP_PORT}"):
            asked = lab.device("b").run([sys.executable, "-c", ASK, f"http://{at}/health", host])
            assert asked.stdout == "200\n", f"{host}: {asked.stderr}"
        assert f"--device {lab.device('a').ip}:7770" in run(cluster, "a", "pair")
        code, _ = cluster.code()
        joined = cluster._start(lab.device("b"), "join", "--code", code, "--device", lab.device("a").ip)
        joined.wait_for("paired with a")
