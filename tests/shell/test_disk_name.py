"""The disk of a folder, from what Linux reports of block devices."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from primad.profiler.disk_name import disk_name

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="nothing is known elsewhere")
HOST = "1f2e3d4c"


class FakeSystem:
    """A ``/sys`` with block devices, and file systems by the numbers that ``stat`` returns."""

    def __init__(self, folder: Path) -> None:
        self.sys, self.mounts = folder / "sys", folder / "mountinfo"
        self._devices = folder / "devices"
        self._numbers: dict[str, tuple[int, int]] = {}
        self.sys.mkdir()
        self.mounts.write_text("")

    def look(self, path: str) -> SimpleNamespace:
        if path not in self._numbers:
            raise FileNotFoundError(path)
        number = os.makedev(*self._numbers[path])
        return SimpleNamespace(st_dev=number, st_rdev=number)

    def device(self, number: str, path: str, *, part: bool = False, made_from: tuple[str, ...] = ()) -> None:
        folder = self._devices / path
        (folder / "slaves").mkdir(parents=True)
        (folder / "dev").write_text(f"{number}\n")
        (self.sys / number).symlink_to(folder)
        if part:
            (folder / "partition").write_text("1\n")
        for name in made_from:
            (folder / "slaves" / Path(name).name).symlink_to(self._devices / name)

    def named(self, path: str, number: tuple[int, int]) -> str:
        self._numbers[path] = number
        return self.name(path)

    def name(self, path: str, host: str = HOST) -> str:
        return disk_name(Path(path), host, look=self.look, sys_folder=self.sys, mounts=self.mounts)

    def node(self, path: str, number: tuple[int, int]) -> None:
        self._numbers[path] = number


@pytest.fixture
def system(tmp_path) -> FakeSystem:
    made = FakeSystem(tmp_path)
    made.device("8:0", "sda")
    made.device("8:1", "sda/sda1", part=True)
    made.device("8:2", "sda/sda2", part=True)
    made.device("8:16", "sdb")
    made.device("253:0", "dm-0", made_from=("sda/sda2",))
    made.device("253:1", "dm-1", made_from=("dm-0",))
    made.device("9:0", "md0", made_from=("sda/sda1", "sdb"))
    return made


def test_partitions_and_volumes_of_a_disk_have_its_name(system):
    names = {system.named(f"/{i}", number) for i, number in enumerate([(8, 0), (8, 1), (8, 2), (253, 0), (253, 1)])}
    assert len(names) == 1
    assert len(names.pop()) == 8


def test_another_disk_has_another_name_and_an_array_is_one_of_its_own(system):
    names = [system.named(f"/{i}", number) for i, number in enumerate([(8, 1), (8, 16), (9, 0)])]
    assert len(set(names)) == 3
    assert system.name("/0", "another") not in names


def test_a_file_system_with_its_own_device_number_is_found_by_its_mount(system):
    system.node("/dev/sda1", (8, 1))
    system.mounts.write_text("36 35 0:40 /@home /home rw,relatime shared:1 - btrfs /dev/sda1 rw,subvol=/@home\n")
    assert system.named("/home", (0, 40)) == system.named("/", (8, 1))


def test_a_folder_on_no_local_disk_has_no_disk_name(system):
    system.mounts.write_text("36 35 0:41 / /nas rw - nfs4 nas:/models rw\n")
    assert system.named("/nas", (0, 41)) == system.named("/tmp", (0, 42)) == system.named("/gone", (7, 7)) == ""
    assert system.name("/nobody") == ""
    system.mounts.unlink()
    assert system.name("/nas") == ""
