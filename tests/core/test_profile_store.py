"""A stored profile is accepted only if every field is present, known, of its type and plausible with the others."""

from __future__ import annotations

import json
import uuid
from dataclasses import replace
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from halda import DeviceProfile, OffloadSpeed, RoutingCost
from primad.errors import ConfigError
from primad.profiler import records
from primad.profiler.store import MAX_FILE_BYTES, load_profile, load_profiles, parse_profile, save_profile
from primad.settings.profiles import Implausible, check_profile, with_bounded_costs
from tests.fakes.profile import CPU, DISK, GPU, PROFILE, speeds

Raw = dict[str, Any]


@pytest.fixture
def raw(tmp_path: Path) -> Raw:
    path = tmp_path / "good.json"
    save_profile(path, PROFILE, "made up", "2026-01-02")
    content: Raw = json.loads(path.read_text())
    path.unlink()
    return content


def put(raw: Raw, path: str, value: Any) -> None:
    """Set the value at a dotted path; ``...`` deletes it."""
    *keys, last = [int(part) if part.isdigit() else part for part in path.split(".")]
    at: Any = raw
    for part in keys:
        at = at[part]
    if value is ...:
        del at[last]
    else:
        at[last] = value


def refusal(path: Path, content: Any) -> str:
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    with pytest.raises(ConfigError) as refused:
        load_profiles(path)
    text = str(refused.value)
    assert text.startswith(f"{path}: ")
    assert text.isprintable()
    assert "primad profile" in text
    return text


def test_a_saved_profile_is_loaded_as_it_was(tmp_path):
    path = tmp_path / "desk.json"
    save_profile(path, PROFILE, "made up")
    assert load_profiles(path) == [PROFILE]
    stored = load_profile(path)
    assert stored.how == "made up"
    assert stored.measured.endswith("Z")


OFFLOADED = OffloadSpeed(type="Q4_K", few_bytes_per_s=5e9, prefill_flop_per_s=2e12)


ROUTING = RoutingCost(layer_s=1e-5, row_s=1e-7, many_ratio=2.0)


def test_all_gpus_of_a_device_are_kept_and_a_file_from_before_has_one(tmp_path, raw):
    two = PROFILE.with_gpus([replace(GPU, context_bytes=1 << 29, pci="0000:01:00.0"), replace(GPU, id="CUDA1")])
    save_profile(tmp_path / "two.json", two, "by hand")
    assert load_profile(tmp_path / "two.json").device == two
    del raw["device"]["other_gpus"], raw["device"]["gpu"]["context_bytes"], raw["device"]["gpu"]["pci"]
    assert parse_profile(json.dumps(raw).encode()).device.gpus == (GPU,)


@pytest.mark.parametrize(
    ("gpus", "words"),
    [
        ((GPU, replace(GPU, step_s=7.0)), r"other_gpus\[0\].step_s is 7"),
        ((GPU,) * 18, "other_gpus is a list of 17; expected 16 at most"),
    ],
    ids=["figure", "many"],
)
def test_other_gpus_are_judged_like_the_first(gpus, words):
    with pytest.raises(Implausible, match=words):
        check_profile(PROFILE.with_gpus(gpus))


def test_prefill_offload_and_routing_are_kept_and_an_older_file_has_neither(tmp_path, raw):
    path = tmp_path / "desk.json"
    gpu = replace(GPU, prefill_offload=(OFFLOADED,), routing=ROUTING, attention_flop_per_s=1e12)
    offloading = replace(PROFILE, cpu=replace(PROFILE.cpu, routing=ROUTING), gpu=gpu)
    save_profile(path, offloading, "made up")
    assert load_profiles(path) == [offloading]
    for name in ("prefill_offload", "routing", "attention_flop_per_s"):
        del raw["device"]["gpu"][name]
    del raw["device"]["cpu"]["routing"], raw["device"]["cores"]
    path.write_text(json.dumps(raw))
    assert load_profiles(path) == [PROFILE]


@pytest.mark.parametrize(
    ("speed", "reported"),
    [
        (replace(OFFLOADED, few_bytes_per_s=0.0), r"gpu\.prefill_offload\[0\]\.few_bytes_per_s is 0\.0; expected"),
        (
            replace(OFFLOADED, prefill_flop_per_s=1e20),
            r"gpu\.prefill_offload\[0\]\.prefill_flop_per_s is 1e\+20; expected",
        ),
        (replace(OFFLOADED, type="Q4K"), r"gpu\.prefill_offload\[0\]\.type is 'Q4K'; no quantisation type"),
    ],
)
def test_an_impossible_prefill_offload_is_refused(speed, reported):
    with pytest.raises(Implausible, match=reported):
        check_profile(replace(PROFILE, gpu=replace(GPU, prefill_offload=(speed,))))


def test_the_costs_measured_on_a_busy_machine_are_no_unit_error():
    busy = replace(PROFILE, cpu=replace(CPU, step_s=0.061, layer_s=0.02), gpu=replace(GPU, step_s=0.2))
    with pytest.raises(Implausible, match=r"step_s is 0\.061"):
        check_profile(busy)
    check_profile(replace(busy, cpu=with_bounded_costs(busy.cpu), gpu=with_bounded_costs(busy.gpu)))
    assert with_bounded_costs(CPU) == CPU


def test_a_folder_gives_its_devices_in_the_order_of_their_names(tmp_path):
    for name in ("b", "a"):
        save_profile(tmp_path / f"{name}.json", replace(PROFILE, device=name), "made up")
    (tmp_path / "README.md").write_text("not a profile")
    assert [profile.device for profile in load_profiles(tmp_path)] == ["a", "b"]


def test_two_files_of_one_device_are_refused(tmp_path):
    save_profile(tmp_path / "a.json", PROFILE, "made up")
    save_profile(tmp_path / "b.json", PROFILE, "made up")
    with pytest.raises(ConfigError, match=r"b\.json: device\.device is 'desk', as in .*a\.json; give each"):
        load_profiles(tmp_path)


def test_a_folder_without_profiles_and_a_missing_file_are_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"holds no \.json file"):
        load_profiles(tmp_path)
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        load_profiles(tmp_path / "none.json")


@pytest.mark.parametrize("content", ["", "{", "[1, 2", "\x00", "null", "7", "[]", '"text"', "[" * 100_000])
def test_a_file_that_is_no_json_object_is_refused(tmp_path, content):
    assert "the file is" in refusal(tmp_path / "bad.json", content)


def test_a_file_of_other_bytes_or_too_many_is_refused(tmp_path):
    path = tmp_path / "bad.json"
    path.write_bytes(b"\xff\xfe{}")
    with pytest.raises(ConfigError, match="not JSON"):
        load_profiles(path)
    path.write_bytes(b" " * (MAX_FILE_BYTES + 1))
    with pytest.raises(ConfigError, match="too large"):
        load_profiles(path)


@pytest.mark.parametrize(
    ("path", "value", "reported"),
    [
        ("version", 1, "version is 1; this primad reads version 2"),
        ("version", True, "version is True"),
        ("version", ..., "version is None"),
        ("measured", "yesterday", "measured is 'yesterday'"),
        ("how", " ", "how is ' '"),
        ("how", ..., "how is missing"),
        ("note", 1, "note is unknown"),
        ("device.cpu.step_s", ..., "device.cpu.step_s is missing"),
        ("device.cpu.speeds.0.type", ..., "device.cpu.speeds[0].type is missing"),
        ("device.cpu.ghz", 4, "device.cpu.ghz is unknown; the fields there are name, cores"),
        ("device.cpu.speeds.1.speed", 4, "device.cpu.speeds[1].speed is unknown"),
        ("device.gpu.speeds.1.speed", 4, "device.gpu.speeds[1].speed is unknown"),
        ("device.gpu", ..., "device.gpu is missing"),
        ("device.cpu", [], "device.cpu is list of 0; expected object, got array"),
        ("device.cpu.cores", "2", "device.cpu.cores is '2'; expected int, got str"),
        ("device.cpu.cores", 2.5, "device.cpu.cores is 2.5; expected int, got float"),
        ("device.cpu.speeds.2.type", 4, "device.cpu.speeds[2].type is 4; expected str, got int"),
        ("device.cpu.speeds.0.extra_buffers", 1, "device.cpu.speeds[0].extra_buffers is 1; expected bool"),
        ("device.cpu.speeds.0.type", "Q4K", "device.cpu.speeds[0].type is 'Q4K'; no quantisation type"),
        ("device.cpu.speeds.1.type", "Q4_K", "device.cpu.speeds[1].type is 'Q4_K'; this type is listed twice"),
        ("device.cpu.speeds", [], "device.cpu.speeds is empty"),
        ("device.device", "a b", "device.device is 'a b'; no device name"),
        ("device.system", "Li\nnux", "device.system is 'Li\\nnux'; expected one line"),
        ("device.ram_read_bytes_per_s", float("nan"), "device.ram_read_bytes_per_s is nan"),
        ("device.ram_read_bytes_per_s", float("inf"), "device.ram_read_bytes_per_s is inf"),
        ("device.ram_read_bytes_per_s", 0, "device.ram_read_bytes_per_s is 0"),
        ("device.disk.free_bytes", -1, "device.disk.free_bytes is -1"),
        ("device.disk.random_bytes_per_s", -5.0, "device.disk.random_bytes_per_s is -5.0"),
        ("device.ram_available_bytes", 17 << 30, "more than ram_total_bytes, which is 17179869184"),
        ("device.gpu.vram_available_bytes", 25 << 30, "more than gpu.vram_total_bytes"),
        ("device.cpu.threads", 0, "device.cpu.threads is 0"),
        ("device.cpu.layer_s", 10**400, "device.cpu.layer_s is 1000"),
    ],
)
def test_a_field_that_cannot_be_is_named_with_its_value(tmp_path, raw, path, value, reported):
    put(raw, path, value)
    assert reported in refusal(tmp_path / "bad.json", raw)


def test_a_field_that_stands_twice_is_refused(tmp_path, raw):
    text = json.dumps(raw).replace('"version": 2', '"version": 2, "version": 2')
    assert "'version' stands twice" in refusal(tmp_path / "bad.json", text)


RATES = (
    "ram_total_bytes",
    "ram_read_bytes_per_s",
    "cpu.step_s",
    "cpu.layer_s",
    "cpu.speeds.0.decode_bytes_per_s",
    "cpu.speeds.0.batch_bytes_per_s",
    "cpu.speeds.0.prefill_flop_per_s",
    "disk.fault_bytes_per_s",
    "gpu.vram_read_bytes_per_s",
    "gpu.speeds.0.decode_bytes_per_s",
    "gpu.speeds.0.batch_bytes_per_s",
    "gpu.speeds.0.prefill_flop_per_s",
    "gpu.step_s",
)


@pytest.mark.parametrize("factor", [1000, 0.001])
@pytest.mark.parametrize("path", RATES)
def test_a_slip_of_the_unit_by_1000_is_noticed(tmp_path, raw, path, factor):
    at: Any = raw["device"]
    for part in path.split("."):
        at = at[int(part) if part.isdigit() else part]
    put(raw, f"device.{path}", int(at * factor) if isinstance(at, int) else at * factor)
    assert "device." in refusal(tmp_path / "bad.json", raw)


@pytest.mark.parametrize("factor", [1000, 1 / 100_000])
@pytest.mark.parametrize("field", ["prefetch_bytes_per_s", "random_bytes_per_s"])
def test_a_unit_error_in_a_disk_is_noticed_by_its_other_rates(field, factor):
    disk = replace(DISK, **{field: getattr(DISK, field) * factor})
    with pytest.raises(Implausible, match="disk"):
        check_profile(replace(PROFILE, disk=disk))


SD_CARD = replace(DISK, prefetch_bytes_per_s=2e7, fault_bytes_per_s=1.2e7, random_bytes_per_s=2e6)
HARD_DISK = replace(DISK, prefetch_bytes_per_s=1.6e8, fault_bytes_per_s=4e7, random_bytes_per_s=3e5)
RAM_DISK = replace(DISK, prefetch_bytes_per_s=9e9, fault_bytes_per_s=6e9, random_bytes_per_s=5e9)


@pytest.mark.parametrize(
    "device",
    [
        replace(PROFILE, gpu=None),
        replace(
            PROFILE,
            ram_total_bytes=2 << 30,
            ram_available_bytes=0,
            ram_read_bytes_per_s=2.5e9,
            cpu=replace(CPU, cores=4, threads=4, step_s=2e-3, layer_s=4e-4, speeds=speeds(2.5e9, 5e9)),
            disk=SD_CARD,
            gpu=None,
        ),
        replace(PROFILE, disk=HARD_DISK),
        replace(PROFILE, disk=RAM_DISK),
        replace(
            PROFILE,
            ram_total_bytes=4 << 40,
            ram_available_bytes=3 << 40,
            ram_read_bytes_per_s=9e11,
            cpu=replace(CPU, cores=192, threads=96, batch_threads=192, speeds=speeds(9e11, 4e13)),
            gpu=replace(GPU, vram_total_bytes=141 << 30, vram_read_bytes_per_s=4.8e12, speeds=speeds(4.8e12, 4e14)),
        ),
    ],
    ids=["no gpu", "a phone", "a hard disk", "a RAM disk", "a server with H200"],
)
def test_real_devices_of_all_sizes_are_believed(tmp_path, device):
    path = tmp_path / "device.json"
    save_profile(path, device, "made up")
    assert load_profiles(path) == [device]


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)


def places(value: Any, path: str = "") -> list[str]:
    """The dotted paths of all values in ``value``."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [place for key, inner in items for place in (f"{path}{key}", *places(inner, f"{path}{key}."))]


@given(data=st.data())
def test_whatever_stands_at_any_place_is_believed_or_refused_in_one_line(tmp_path_factory, data):
    path = tmp_path_factory.getbasetemp() / "any.json"
    save_profile(path, PROFILE, "made up")
    content = json.loads(path.read_text())
    place = data.draw(st.sampled_from(places(content)))
    put(content, place, data.draw(JSON_VALUES | st.just(...)))
    path.write_text(json.dumps(content))
    found = outcome(path)
    if isinstance(found, str):
        assert found.isprintable()
        assert found.startswith(str(path))
        assert len(found) < 600
    else:
        check_profile(found[0])


def outcome(path: Path) -> str | list[DeviceProfile]:
    """The profiles in ``path``, or the text of the refusal; other exceptions propagate."""
    try:
        return load_profiles(path)
    except ConfigError as exc:
        return str(exc)


def test_a_profile_that_cannot_be_written_is_one_clear_error(tmp_path):
    with pytest.raises(ConfigError, match="cannot be written"):
        save_profile(tmp_path / "none" / "desk.json", PROFILE, "made up")


def links(**macs: str) -> dict[str, list[SimpleNamespace]]:
    """Interfaces as psutil returns them."""
    return {
        name: [SimpleNamespace(family=psutil.AF_LINK, address=mac), SimpleNamespace(family=2, address="10.0.0.1")]
        for name, mac in macs.items()
    }


def test_a_machine_without_ipv4_is_the_same_in_every_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """``uuid.getnode`` considers only interfaces with IPv4, and returns a random address if there is none."""
    made_up = count(0x0100_0000_0000, 77)
    monkeypatch.setattr(uuid, "getnode", lambda: next(made_up))
    here = links(
        lo="00:00:00:00:00:00", br0="02:00:00:00:00:01", eth0="d8:00:00:00:00:02", odd="?", wlan0="D8-00-00-00-00-09"
    )
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: here)
    first = records.host_id()
    assert records.host_id() == first
    del here["br0"], here["wlan0"]  # containers come and go
    assert records.host_id() == first
    monkeypatch.setattr(uuid, "getnode", lambda: 0xD800_0000_0002)
    assert records.host_id() == first, "it is what it is with IPv4"
    monkeypatch.setattr(psutil, "net_if_addrs", dict)
    monkeypatch.setattr(uuid, "getnode", lambda: next(made_up))
    assert records.host_id() == records.host_id() != first
