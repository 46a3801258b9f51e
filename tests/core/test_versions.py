"""Devices of different versions: the advice for each, and the changelog's entries."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from primad import __version__
from primad.network import messages
from primad.network.versions import Versions, version_gap
from primad.ring import messages as ring_messages
from primad.system.installed import DEB_PREFIX, Installer, installer, upgrade
from primad.trust import pairing

CHANGELOG = (Path(__file__).parents[2] / "CHANGELOG.md").read_text(encoding="utf-8")
OWN = Versions(primad="0.2.0", protocol=4, oldest=4)


@pytest.mark.parametrize(
    ("marks", "how"),
    [("uv-receipt.toml", "uv"), ("pipx_metadata.json", "pipx")],
)
def test_the_installer_of_primad_is_recognised_by_its_files(tmp_path: Path, marks: str, how: Installer) -> None:
    (tmp_path / marks).touch()
    assert installer(tmp_path) == how
    assert installer(DEB_PREFIX) == "deb"


@pytest.mark.parametrize(
    ("how", "typed"),
    [
        ("uv", "uv tool install --force primad-0.3.0-py3-none-any.whl"),
        ("pipx", "pipx install --force primad-0.3.0-py3-none-any.whl"),
        ("deb", "sudo apt install ./primad_0.3.0-*.deb"),
        ("checkout", "git checkout v0.3.0 && ./tools/setup"),
    ],
)
def test_the_older_device_gets_the_command_to_update(how: Installer, typed: str) -> None:
    printed = version_gap("mini", "desk", "0.3.0", 5, OWN, how)
    assert printed.startswith("desk runs primad 0.3.0 (protocol 5), mini runs 0.2.0 (protocol 4), and ")
    assert printed.endswith(f"; on mini type: {typed}")


def test_where_the_other_one_is_older_it_is_named() -> None:
    printed = version_gap("desk", "mini", "0.1.0", 3, OWN, "uv")
    assert "on mini install 0.2.0; installed as on desk, that is: uv tool install --force primad-0.2.0-" in printed


def test_a_version_that_is_none_is_typed_nowhere() -> None:
    assert "reboot" not in upgrade("1; reboot", "pip")
    assert upgrade("`id`", "uv") == "uv tool install --force primad-VERSION-py3-none-any.whl"


def test_the_changelog_of_this_version_has_its_protocols() -> None:
    section = re.split(r"^## ", CHANGELOG, flags=re.MULTILINE)[1]
    assert section.startswith(__version__)
    numbers = (messages.PROTOCOL, ring_messages.PROTOCOL, pairing.PROTOCOL)
    assert "Protocols: control and layers {}, ring {}, pairing {}.".format(*numbers) in section
