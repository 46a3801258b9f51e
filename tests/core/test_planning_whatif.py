"""A what-if change makes a new question and leaves the first unchanged."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from primad.errors import ConfigError
from primad.planning.question import ask
from primad.planning.whatif import change
from tests.fakes.planning import GB, device, link, model, wishes

DESK = device("desk", ram=8 * GB, vram=8 * GB)
MAC = device("mac", ram=8 * GB, vram=6 * GB, unified=True)


def question(**changes):
    links = (link("desk", "mac", bytes_per_s=5e6), link("mac", "desk", bytes_per_s=5e6))
    return ask(wishes(**changes), (DESK, MAC), links, model())


def changed(*changes, read=lambda path: [device(path.stem)], **more):
    return change(question(**more), changes, read)


def of(asked, name):
    return next(found for found in asked.devices if found.device == name)


def test_a_device_comes_and_another_goes():
    asked = changed("add=profiles/pi.json", "drop=mac", max_ram=("mac=4GB",))
    assert [found.device for found in asked.devices] == ["desk", "pi"]
    assert not asked.limits
    assert {one.target for one in asked.all_links} == {"desk", "pi"}


def test_memory_and_disk_change():
    asked = changed("ram:desk=16GB", "vram:desk=12GB", "disk:desk=3GB/s")
    desk = of(asked, "desk")
    assert desk.ram_available_bytes == desk.ram_total_bytes == 16 * GB
    assert desk.gpu is not None
    assert desk.gpu.vram_available_bytes == 12 * GB
    assert desk.disk.prefetch_bytes_per_s == 3e9
    assert desk.disk.fault_bytes_per_s == pytest.approx(1.5e9)
    assert of(asked, "mac") == MAC


def test_vram_is_that_of_all_gpus_of_a_device():
    assert DESK.gpu is not None
    two = DESK.with_gpus([DESK.gpu, replace(DESK.gpu, id="CUDA1", vram_available_bytes=4 * GB)])
    asked = ask(wishes(), (two, MAC), (), model())
    found = of(change(asked, ["vram:desk=6GB"], lambda path: []), "desk")
    assert [gpu.vram_available_bytes for gpu in found.gpus] == [4 * GB, 2 * GB]


def test_less_memory_than_installed_leaves_the_total():
    assert of(changed("ram:desk=1GB"), "desk").ram_total_bytes == DESK.ram_total_bytes


def test_memory_that_is_shared_with_the_gpu_grows_for_both():
    mac = of(changed("ram:mac=16GB"), "mac")
    assert mac.gpu is not None
    assert mac.gpu.vram_available_bytes == 12 * GB


def test_all_links_or_one_change():
    assert {one.bytes_per_s for one in changed("link=1Gbit/s,1ms").all_links} == {125e6}
    asked = changed("add=pi.json", "link:desk:mac=2Gbit/s")
    both = {(one.source, one.target): one.bytes_per_s for one in asked.all_links}
    assert both["mac", "desk"] == 250e6
    assert both["mac", "pi"] == 100e6


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("more", "is not a change; give add=FILE"),
        ("ram=4GB", "is not a change"),
        ("drop:desk=4GB", "is not a change"),
        ("ram:desk=", "is not a change"),
        ("ram:pi=4GB", "no device is called 'pi'; there are desk, mac"),
        ("drop=pi", "no device is called 'pi'"),
        ("ram:desk=lots", "'lots' is not a size"),
        ("disk:desk=3G", "'3G' is not a rate"),
        ("link:desk=1Gbit/s", "no device is called ''"),
        ("link:desk:desk=1Gbit/s", "name two devices"),
        ("add=desk.json", "two devices are called desk"),
        ("link=1Gbit/s,soon", "'soon' is not a time"),
    ],
)
def test_a_change_that_cannot_be_is_refused(text, message):
    with pytest.raises(ConfigError) as caught:
        changed(text)
    assert message in str(caught.value)


def test_a_gpu_that_is_not_there_cannot_grow():
    with pytest.raises(ConfigError, match="pi has no GPU"):
        changed("add=pi.json", "vram:pi=4GB")


def test_the_head_and_the_last_device_stay():
    with pytest.raises(ConfigError, match="desk is the head"):
        changed("drop=desk", head="desk")
    with pytest.raises(ConfigError, match="mac is the only device"):
        changed("drop=desk", "drop=mac")


def test_a_file_that_cannot_be_read_is_refused_by_name():
    def read(path: Path):
        raise ConfigError(f"{path}: cannot be read")

    with pytest.raises(ConfigError, match=r"pi\.json: cannot be read"):
        changed("add=pi.json", read=read)
