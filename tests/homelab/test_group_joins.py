"""A device that joins a tensor-parallel group fails while it receives its share: the others keep serving."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.homelab.cluster import Cluster, home
from tests.homelab.faults import FAULTS
from tests.homelab.phases import is_caught_in_transfer
from tests.homelab.rig import DISK_BYTES, Rig
from tests.homelab.running import MakeLab
from tests.homelab.test_group_faults import SHARED, write_shared_model
from tools.lab import DeviceSpec

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("fault", "printed"),
    [
        ("disk full", "^b: .*(cannot be written|do not fit).*make room"),
        pytest.param("killed", "^b is gone: ", marks=pytest.mark.matrix),
        pytest.param("stopped", "^b is gone: ", marks=pytest.mark.matrix),
        pytest.param("cable cut", "^b is gone: ", marks=pytest.mark.matrix),
    ],
)
def test_the_others_serve_while_a_device_fails_to_take_its_share(
    fault: str, printed: str, make_lab: MakeLab, smollm2: Path, tmp_path: Path
) -> None:
    model = write_shared_model(tmp_path / "shared.gguf", smollm2)
    lab = make_lab(DeviceSpec(name="h"), DeviceSpec(name="a"), DeviceSpec(name="b", disk_bytes=DISK_BYTES))
    with Cluster(lab, model, serve=SHARED) as cluster:
        cluster.start()
        rig = Rig(cluster)
        rig.take_out("b")
        rig.undisturbed("Tell me a story.")
        while not is_caught_in_transfer(rig, "b"):
            rig.take_out("b")
        FAULTS[fault].do(cluster, "b")
        if fault != "stopped":
            lab.device("b").thaw()
        rig.check(rig.ask("Tell me a story."), "Tell me a story.")
        rig.wait_printed("h", printed)
        assert "b" not in {each["name"] for each in cluster.status()["devices"]}
        if (undo := FAULTS[fault].undo) is not None:
            undo(cluster, "b")
        (home(lab.device("b")) / "config.toml").unlink()
        if not lab.device("b").pids():
            cluster.start_worker("b")
        if fault == "disk full":
            rig.restart_head()
        rig.whole()
        rig.check_clean()
