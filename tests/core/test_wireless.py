"""Detection of Wi-Fi on Linux."""

from __future__ import annotations

from pathlib import Path

import pytest

from primad.system.wireless import is_wireless


def interface(folder: Path, name: str, state: str, *entries: str) -> None:
    for entry in entries:
        (folder / name / entry).mkdir(parents=True)
    (folder / name).mkdir(exist_ok=True)
    (folder / name / "operstate").write_text(f"{state}\n")


@pytest.mark.parametrize(
    ("wifi", "cable", "expected"),
    [("up", "down", True), ("up", None, True), ("up", "up", False), ("down", "up", False), ("down", "down", False)],
)
@pytest.mark.parametrize("mark", ["wireless", "phy80211"])
def test_wifi_counts_as_the_link_where_no_cable_is_plugged_in(tmp_path, wifi, cable, expected, mark):
    interface(tmp_path, "lo", "unknown")
    interface(tmp_path, "docker0", "up", "bridge")
    interface(tmp_path, "wlan0", wifi, "device", mark)
    if cable is not None:
        interface(tmp_path, "eth0", cable, "device")
    assert is_wireless(tmp_path) is expected


def test_a_machine_without_that_information_counts_as_wired(tmp_path):
    assert not is_wireless(tmp_path / "nowhere")
    (tmp_path / "wlan0" / "device").mkdir(parents=True)  # without a state
    assert not is_wireless(tmp_path)
