"""Heads leave their address for local clients as long as they live."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
import pytest

from primad.errors import ClusterError
from primad.network.local_heads import (
    LocalHead,
    announced_head,
    chosen_head,
    home_note,
    local_heads,
    names,
    shared_folder,
)
from primad.trust.local_trust import VARIABLE


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, str(tmp_path / "local"))


def head(device: str, port: int, pid: int = 1) -> LocalHead:
    url = f"http://127.0.0.1:{port}"
    return LocalHead(device=device, url=url, port=port, pid=pid, created=0.0, since_boot=0.0)


def test_a_head_is_found_by_its_home_and_by_all_while_it_lives(tmp_path: Path):
    home = tmp_path / "home"
    with announced_head(home, "desk", "http://127.0.0.1:8081", 8081):
        for folder in (home, tmp_path / "another"):
            assert [found.url for found in local_heads(folder)] == ["http://127.0.0.1:8081"]
    assert local_heads(home) == []
    assert not home_note(home).exists()


def test_the_note_of_a_killed_head_is_ignored(tmp_path: Path):
    with announced_head(tmp_path, "desk", "http://127.0.0.1:8081", 8081):
        note = home_note(tmp_path).read_bytes()
    dead = msgspec.structs.replace(msgspec.json.decode(note, type=LocalHead), created=1.0, since_boot=1.0)
    home_note(tmp_path).write_bytes(msgspec.json.encode(dead))
    assert local_heads(tmp_path) == []


@pytest.mark.parametrize("content", [b"", b"{}", b"\xff", b'{"device": 1}'])
def test_a_damaged_head_note_is_ignored(tmp_path: Path, content: bytes):
    home_note(tmp_path).parent.mkdir()
    home_note(tmp_path).write_bytes(content)
    assert local_heads(tmp_path) == []


@pytest.mark.skipif(os.name == "nt", reason="access lists")
def test_a_note_that_others_could_have_written_is_ignored(tmp_path: Path):
    with announced_head(tmp_path, "desk", "http://127.0.0.1:8081", 8081):
        home_note(tmp_path).chmod(0o666)
        (shared_folder() / f"{os.getpid()}.json").chmod(0o666)
        assert local_heads(tmp_path) == []
        home_note(tmp_path).chmod(0o600)
        assert len(local_heads(tmp_path)) == 1


def test_the_only_head_needs_no_name_and_several_are_named():
    desk, lab, second = head("desk", 8080), head("lab", 9000), head("desk", 8081)
    assert chosen_head([], None) is None
    assert chosen_head([desk], None) is desk
    assert names([desk, lab, second]) == ["desk:8080", "lab", "desk:8081"]
    with pytest.raises(ClusterError, match=r"3 heads run .*--head desk:8080, --head lab, --head desk:8081"):
        chosen_head([desk, lab, second], None)
    assert chosen_head([desk, lab, second], "lab") is lab
    assert chosen_head([desk, lab, second], "desk:8081") is chosen_head([desk, lab, second], "8081") is second
    with pytest.raises(ClusterError, match=r"--head desk: 2 heads have this name; .*desk:8080.*desk:8081"):
        chosen_head([desk, lab, second], "desk")
    with pytest.raises(
        ClusterError, match=r"--head x: no head of this name runs on this device; choose one: --head lab"
    ):
        chosen_head([lab], "x")
    with pytest.raises(ClusterError, match=r"--head x: no head runs on this device"):
        chosen_head([], "x")
