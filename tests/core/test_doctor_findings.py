"""The doctor's findings: the right level, and a command for each problem."""

from __future__ import annotations

import ipaddress
from dataclasses import replace
from pathlib import Path

import pytest

from primad.cli.doctor import lines
from primad.doctor.findings import Finding, finding
from primad.doctor.firewall import FirewallFacts, Needed, judge_firewall, needed
from primad.doctor.gpus import EngineFacts, Hardware, judge_engine
from primad.doctor.machine import (
    ClockFacts,
    MemoryFacts,
    judge_battery,
    judge_clock,
    judge_files,
    judge_memory,
    judge_platform,
)
from primad.doctor.network import MulticastAddress, Port, judge_places, judge_ports
from primad.doctor.peers import KnownTrust, judge_sight, judge_trust, judge_versions
from primad.doctor.pictures import PictureFacts, judge_pictures
from primad.doctor.reach import MAX_TARGETS, judge_reached, targets
from primad.doctor.storage import DiskFacts, FileFacts, judge_disk, judge_identity
from primad.layers.eviction import CachedLayer
from primad.library.library import LibraryModel
from primad.network.addresses import Interface
from primad.network.peer import Peer

KEY = "rq:rM>}U?@Lns47E1%kR.o@n%FcmmsL/@{H8]yf7"
GIB = 1 << 30


def levels(findings: list[Finding]) -> list[str]:
    return [found.level for found in findings]


def has_commands(findings: list[Finding]) -> bool:
    """Whether each problem comes with a command."""
    return all(found.next for found in findings if found.level in ("warning", "error"))


# -- pictures


def seeing(name: str, *sources: str, **more: object) -> LibraryModel:
    files = (Path(f"/models/{name}.gguf"),)
    return LibraryModel(names=(name,), sources=sources, files=files, size_bytes=1, **more)  # type: ignore[arg-type]


def test_encoders_of_models_are_reported_and_missing_ones_with_the_command():
    projector = Path("/models/mmproj-F16.gguf")
    models = (
        seeing("eye", "folder", projector=projector, sees=True, hears=True, encoder_bytes=GIB),
        seeing("odd", "folder", projector=projector, refused="it has the type 'odd'"),
        seeing("llama3.2-vision:11b", "Ollama", wants_encoder=True),
        seeing("hf:acme/Tiny:Q4_0", "primad", wants_encoder=True),
        seeing("org/repo:Q4_0", "LM Studio", wants_encoder=True),
    )
    found = judge_pictures(PictureFacts(has_mtmd=True, models=models), "python")
    assert levels(found) == ["ok", "warning", "note", "note", "note"]
    assert "eye: vision and audio (1.0 GiB)" in found[0].text
    assert f"odd accepts text only: {projector}: it has the type 'odd'" in found[1].text
    assert found[1].next == "primad serve --model 'odd' --mmproj none"
    assert found[2].next == "ollama pull llama3.2-vision:11b"
    assert found[3].next == "primad pull hf:acme/Tiny:Q4_0"
    assert "not next to /models/org/repo:Q4_0.gguf" in found[4].text
    assert found[4].next is not None
    assert "from https://huggingface.co/org/repo" in found[4].next


@pytest.mark.parametrize(("has_mtmd", "expected"), [(None, []), (False, ["warning"]), (True, ["ok"])])
def test_a_llama_cpp_without_its_encoders_is_reported(has_mtmd, expected):
    found = judge_pictures(PictureFacts(has_mtmd=has_mtmd, models=()), "python")
    assert levels(found) == expected
    assert has_commands(found)


# -- network


def place(name: str, problem: str = "", *, virtual: bool = False) -> MulticastAddress:
    return MulticastAddress(interface=name, address="192.168.1.20", virtual=virtual, problem=problem)


@pytest.mark.parametrize(
    ("places", "expected"),
    [
        ([], ["error"]),
        ([place("eth0")], ["ok"]),
        ([place("eth0"), place("wlan0", "No such device")], ["ok", "warning"]),
        ([place("eth0"), place("wg0", "Permission denied", virtual=True)], ["ok", "note"]),
        ([place("eth0", "what is sent does not come back")], ["error"]),
        ([place("eth0", "no"), place("docker0", virtual=True)], ["warning", "ok"]),
    ],
)
def test_multicast_must_work_somewhere(places, expected):
    found = judge_places(places)
    assert levels(found) == expected
    assert has_commands(found)


def test_an_interface_that_fails_is_named():
    found = judge_places([place("wlan0", "Network is unreachable")])[0]
    assert "wlan0 (192.168.1.20)" in found.text
    assert "Network is unreachable" in found.text


CONTROL = Port(number=7770, purpose="control", flag="primad join --port", problem="", owner="", wanted=False)
HTTP = replace(CONTROL, number=8080, purpose="HTTP", flag="primad serve --model FILE.gguf --port")


@pytest.mark.parametrize(
    ("port", "level", "command"),
    [
        (CONTROL, "ok", None),
        (replace(CONTROL, problem="in use", owner="primad, process 7"), "ok", None),
        (replace(CONTROL, problem="in use", owner="nginx, process 7"), "note", "primad join --port 7771"),
        (
            replace(CONTROL, problem="in use", owner="nginx, process 7", wanted=True),
            "warning",
            "primad join --port 7771",
        ),
        (replace(HTTP, problem="in use"), "warning", "primad serve --model FILE.gguf --port 8081"),
        (replace(CONTROL, number=80, problem="Permission denied", wanted=True), "warning", "primad join --port 81"),
    ],
)
def test_a_port_is_free_ours_or_anothers(port, level, command):
    (found,) = judge_ports([port])
    assert (found.level, found.next) == (level, command)
    if port.owner:
        assert port.owner in found.text


# -- discovered devices


def peer(
    device: str = "desk", *, key: str = KEY, protocol: int = 2, version: str = "0.2.0", role: str = "worker"
) -> Peer:
    return Peer(
        device=device,
        cluster="home",
        role=role,
        version=version,
        protocol=protocol,
        addresses=("192.168.1.20",),
        port=7770,
        key=key,
        pairing=None,
    )


@pytest.mark.parametrize(
    ("other", "level", "where"),
    [
        (peer(), "ok", None),
        (peer(version="0.1.9"), "note", "(on desk)"),
        (peer(version="0.10.0"), "note", "(here)"),
        (peer(protocol=3, version="0.3"), "note", "(here)"),
        (peer(protocol=1, version="0.1"), "warning", "(on desk)"),
        (peer(protocol=4, version="1.0"), "warning", "(here)"),
    ],
)
def test_versions_that_differ_are_both_named_and_the_older_one_is_to_be_updated(other, level, where):
    (found,) = judge_versions([other], "home", "0.2.0", protocol=2, oldest=2)
    assert found.level == level
    if where is not None:
        assert found.next is not None
        assert found.next.endswith(where)
        assert other.version in found.text
        assert "0.2.0" in found.text


def test_devices_of_other_clusters_are_no_business_of_ours():
    foreign = replace(peer(protocol=9), cluster="theirs")
    assert levels(judge_versions([foreign], "home", "0.2.0", protocol=2, oldest=2)) == ["ok"]
    assert judge_trust([foreign], "home", "", STRANGERS) == []
    assert "theirs" in judge_sight([foreign], "home", "")[1].text


STRANGERS = KnownTrust(trusts=lambda key: False)


def test_trust_that_one_side_revoked_is_reported_on_both_with_the_command():
    friend, nas = KnownTrust(trusts=lambda key: True), peer()
    desk = replace(nas, device="desk", role="head")
    found = [
        judge_trust([each], "home", "", trust)[0]
        for each, trust in (
            (nas, replace(STRANGERS, revoked=frozenset({KEY}))),
            (desk, replace(STRANGERS, revoked=frozenset({KEY}))),
            (desk, replace(friend, revoked_by=frozenset({KEY}))),
            (nas, replace(friend, refused={KEY: "it does not let this one in"})),
            (nas, replace(STRANGERS, introduced=frozenset({KEY}))),
        )
    ]
    assert [(each.level, each.next) for each in found] == [
        ("note", "primad pair"),
        ("note", "primad pair --code CODE"),
        ("warning", "primad pair --code CODE"),
        ("warning", f"primad doctor    (on {nas.device})"),
        ("ok", None),
    ]
    assert "revoked here" in found[0].text
    assert "it revoked this device" in found[2].text
    assert "it does not let this one in" in found[3].text


def test_a_device_that_is_not_trusted_is_reported_with_the_command_to_pair():
    def command(other: Peer) -> str | None:
        (found,) = judge_trust([other], "home", "", STRANGERS)
        assert found.level == "warning"
        return found.next

    assert command(peer(role="head")) == "primad join --code CODE"
    assert command(replace(peer(role="head"), pairing=(7, 49152))) == "primad join --code 7-WORD-WORD"
    assert command(peer()) == "primad pair"


def test_trust_is_asked_by_key_and_not_of_ourselves():
    assert levels(judge_trust([peer()], "home", "", KnownTrust(trusts=lambda key: key == KEY))) == ["ok"]
    assert judge_trust([peer()], "home", KEY, STRANGERS) == []


def test_nobody_in_sight_is_worth_a_note():
    assert levels(judge_sight([], "home", "")) == ["note"]
    assert levels(judge_sight([peer()], "home", KEY)) == ["note"]
    assert levels(judge_sight([peer()], "home", "")) == ["ok"]


# -- reach


def test_a_device_is_reached_when_one_of_its_addresses_answers():
    near, padding = targets([replace(peer(), addresses=("192.168.1.20", "172.17.0.1"))], "home", ())
    (found,) = judge_reached({near: "", padding: "no response within 2 s"})
    assert (found.level, found.text) == ("ok", "desk responds on 192.168.1.20 port 7770")


def test_a_device_in_sight_that_does_not_answer_may_have_a_firewall():
    (near,) = targets([peer()], "home", ())
    (found,) = judge_reached({near: "no response within 2 s"})
    assert (found.level, found.next) == ("warning", "primad doctor    (on desk)")
    assert "192.168.1.20 port 7770: no response within 2 s" in found.text


def test_a_named_device_that_does_not_answer_is_to_be_started():
    (far,) = targets((), "home", ["[fd00::5]:7771"])
    assert (far.address, far.port) == ("fd00::5", 7771)
    (found,) = judge_reached({far: "Connection refused"})
    assert (found.level, found.next) == ("warning", "primad join --port 7771    (over there)")


def test_heads_and_other_clusters_are_not_tried_and_nobody_makes_us_try_without_end():
    many = [replace(peer(f"d{i}"), addresses=tuple(f"10.0.{i}.{j}" for j in range(30))) for i in range(30)]
    assert targets([peer(role="head"), replace(peer(), cluster="theirs")], "home", ()) == []
    assert len(targets(many, "home", ())) == MAX_TARGETS


# -- firewall

NOTHING = FirewallFacts(
    system="Linux",
    root=False,
    ufw=None,
    ufw_rules=None,
    firewalld_open=None,
    nft=None,
    iptables=None,
    present=(),
    profile=None,
)
NEED = Needed(control=7770, others=(32768, 60999), subnets=("192.168.1.0/24",))
OPEN = "Status: active\n7770,32768:60999/tcp       ALLOW       192.168.1.0/24\n"
DROPPING = "table inet filter {\n chain input {\n  type filter hook input priority filter; policy drop;\n }\n}"


@pytest.mark.parametrize(
    ("facts", "level", "words"),
    [
        (NOTHING, "ok", "no firewall"),
        (replace(NOTHING, ufw=False), "ok", "no firewall"),
        (replace(NOTHING, ufw=True), "note", "cannot be read without root"),
        (replace(NOTHING, ufw=True, ufw_rules=OPEN), "ok", "allows port 7770"),
        (replace(NOTHING, ufw=True, ufw_rules="Status: active\n22/tcp ALLOW Anywhere"), "warning", "blocks port"),
        (replace(NOTHING, firewalld_open=("1025-65535/tcp", "mdns")), "ok", "allows primad"),
        (replace(NOTHING, firewalld_open=("7770/tcp", "ssh")), "warning", "the links' TCP ports, mDNS"),
        (replace(NOTHING, present=("nft",)), "note", "cannot be read without root"),
        (replace(NOTHING, present=("nft",), nft=DROPPING, root=True), "warning", "nftables"),
        (replace(NOTHING, present=("nft",), nft="table inet filter {}", root=True), "ok", "no firewall"),
        (replace(NOTHING, present=("iptables",), iptables="-P INPUT DROP\n", root=True), "warning", "iptables"),
        (replace(NOTHING, present=("iptables",), iptables="-P INPUT ACCEPT\n", root=True), "ok", "no firewall"),
        (replace(NOTHING, system="Windows", profile="State      ON"), "note", "Windows"),
        (replace(NOTHING, system="Windows", profile="State      OFF"), "ok", "off"),
        (replace(NOTHING, system="Windows"), "note", "cannot be queried"),
        (replace(NOTHING, system="Darwin", profile="Firewall is enabled. (State = 1)"), "note", "macOS"),
        (replace(NOTHING, system="Darwin", profile="Firewall is disabled. (State = 0)"), "ok", "off"),
    ],
)
def test_a_firewall_is_judged_by_what_it_lets_in(facts, level, words):
    (found,) = judge_firewall(facts, NEED)
    assert found.level == level
    assert words in found.text
    assert has_commands([found])


def test_the_command_for_ufw_lets_in_what_primad_needs_and_only_from_home():
    (found,) = judge_firewall(replace(NOTHING, ufw=True), NEED)
    assert found.next == (
        "sudo ufw allow from 192.168.1.0/24 to any port 7770,32768:60999 proto tcp && "
        "sudo ufw allow from 192.168.1.0/24 to any port 5353 proto udp"
    )


def test_the_needed_subnets_are_those_of_ordinary_interfaces():
    def interface(name: str, address: str) -> Interface:
        return Interface(name=name, index=1, up=True, addresses=(ipaddress.ip_interface(address),))

    own = [
        interface("lo", "127.0.0.1/8"),
        interface("eth0", "192.168.1.20/24"),
        interface("docker0", "172.17.0.1/16"),
        interface("eth0", "fd00::1/64"),
    ]
    assert needed(7771, own).subnets == ("192.168.1.0/24",)
    assert needed(7771, own).control == 7771


# -- the machine

MEMORY = MemoryFacts(
    machine_bytes=16 * GIB,
    total_bytes=16 * GIB,
    available_bytes=8 * GIB,
    own_bytes=0,
    swap_total_bytes=GIB,
    swap_used_bytes=0,
)


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        (MEMORY, ["ok"]),
        (replace(MEMORY, available_bytes=GIB), ["warning"]),
        (replace(MEMORY, available_bytes=GIB, own_bytes=12 * GIB), ["ok"]),
        (replace(MEMORY, machine_bytes=2 * GIB, total_bytes=2 * GIB, available_bytes=GIB // 2), ["ok"]),
        (replace(MEMORY, total_bytes=4 * GIB, available_bytes=2 * GIB), ["ok", "note"]),
        (replace(MEMORY, swap_used_bytes=GIB // 2), ["ok", "note"]),
        (replace(MEMORY, swap_total_bytes=0), ["ok"]),
    ],
)
def test_memory_that_is_short_limited_or_swapped_is_reported(facts, expected):
    found = judge_memory(facts, "Linux")
    assert levels(found) == expected
    assert has_commands(found)


def test_a_battery_is_of_note_while_it_is_used():
    assert judge_battery(None) == []
    assert levels(judge_battery((80.0, True))) == ["ok"]
    (found,) = judge_battery((80.0, False))
    assert (found.level, found.next) == ("note", "primad join --pause-on-battery")


def test_few_files_are_too_few():
    assert judge_files(None) == []
    assert levels(judge_files(1024)) == ["ok"]
    (found,) = judge_files(256)
    assert (found.level, found.next) == ("warning", "ulimit -n 4096")


@pytest.mark.parametrize(
    ("facts", "level"),
    [
        (ClockFacts(synchronized=True, behind_s=-100.0), "ok"),
        (ClockFacts(synchronized=None, behind_s=-100.0), "ok"),
        (ClockFacts(synchronized=False, behind_s=-100.0), "note"),
        (ClockFacts(synchronized=True, behind_s=1e9), "warning"),
    ],
)
@pytest.mark.parametrize("system", ["Linux", "Darwin", "Windows"])
def test_a_clock_that_is_wrong_is_reported(facts, level, system):
    (found,) = judge_clock(facts, system)
    assert found.level == level
    assert (found.next is None) == (level == "ok")


@pytest.mark.parametrize(
    ("system", "python", "wide", "level"),
    [
        ("Linux", (3, 11, 0), True, "ok"),
        ("Windows", (3, 13, 1), True, "ok"),
        ("Linux", (3, 10, 9), True, "error"),
        ("Windows", (3, 12, 0), False, "error"),
        ("Plan 9", (3, 12, 0), True, "note"),
    ],
)
def test_platforms_that_primad_does_not_support_are_reported(system, python, wide, level):
    found = judge_platform(system, "x86_64", python, wide)
    assert levels(found) == [level]
    assert has_commands(found)


# -- the home folder

DISK = DiskFacts(
    home="/h",
    writable=True,
    kind="ext4",
    free_bytes=100 * GIB,
    total_bytes=200 * GIB,
    layers=(),
    memory_bytes=8 * GIB,
    read_bytes_per_s=1e9,
)
SERVED = tuple(CachedLayer(digest=f"{number:064}", size_bytes=GIB // 16, used_s=0.0, held=True) for number in range(27))


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        (DISK, ["ok", "ok"]),
        (replace(DISK, read_bytes_per_s=None), ["ok", "note"]),
        (replace(DISK, read_bytes_per_s=8e7), ["ok", "note"]),
        (replace(DISK, free_bytes=5 * GIB), ["note", "ok"]),
        (replace(DISK, free_bytes=5 * GIB, memory_bytes=2 * GIB), ["ok", "ok"]),
        (replace(DISK, free_bytes=GIB // 2), ["error", "ok"]),
        (replace(DISK, free_bytes=GIB // 2, total_bytes=4 * GIB, memory_bytes=GIB // 4), ["ok", "ok"]),
        (replace(DISK, free_bytes=GIB // 2, layers=SERVED), ["note", "ok"]),
        (replace(DISK, kind="nfs4"), ["ok", "warning", "ok"]),
        (replace(DISK, kind="tmpfs"), ["ok", "warning", "ok"]),
        (replace(DISK, writable=False), ["error", "ok", "ok"]),
    ],
)
def test_a_disk_must_take_layers_and_give_them_back_fast(facts, expected):
    found = judge_disk(facts)
    assert levels(found) == expected
    assert has_commands(found)


def test_a_disk_with_layers_in_use_is_full_and_one_with_idle_layers_is_not():
    full, *_ = judge_disk(replace(DISK, free_bytes=GIB // 2, layers=SERVED))
    assert "27 layers" in full.text
    assert "no further layer" in full.text
    idle = tuple(replace(layer, held=False) for layer in SERVED)
    assert "no further" not in judge_disk(replace(DISK, free_bytes=GIB // 2, layers=idle))[0].text


@pytest.mark.parametrize(
    ("facts", "level", "command"),
    [
        (None, "ok", None),
        (FileFacts(path="/h/identity.json", mode=0o600, foreign=False), "ok", None),
        (FileFacts(path="/h/identity.json", mode=0o400, foreign=False), "ok", None),
        (FileFacts(path="/h/identity.json", mode=0o644, foreign=False), "error", "chmod 600 '/h/identity.json'"),
        (FileFacts(path="/h/identity.json", mode=0o600, foreign=True), "error", "sudo chown $USER '/h/identity.json'"),
    ],
)
def test_the_identity_is_for_its_owner_alone(facts, level, command):
    (found,) = judge_identity(facts)
    assert (found.level, found.next) == (level, command)


# -- llama.cpp

ENGINE = EngineFacts(package="0.3.36", backends=(), devices=(), runs=True, hardware=(), left_out=(), has_rocm=False)
NVIDIA = Hardware(vendor="NVIDIA", name="NVIDIA GeForce RTX 3060", usable=True)
BUILD = "--no-cache-dir --no-deps --no-binary llama-cpp-python llama-cpp-python==0.3.36"


def judged(facts: EngineFacts, system: str = "Linux") -> list[Finding]:
    return judge_engine(facts, system, "python")


def test_a_gpu_that_llama_cpp_was_not_built_for_is_worth_a_build():
    found = judged(replace(ENGINE, hardware=(NVIDIA,)))
    assert levels(found) == ["ok", "warning"]
    assert "NVIDIA GeForce RTX 3060 stays unused" in found[1].text
    assert found[1].next == f'CMAKE_ARGS="-DGGML_CUDA=on" python -m pip install --force-reinstall {BUILD}'


def test_the_command_to_build_is_that_of_the_system():
    found = judged(replace(ENGINE, hardware=(NVIDIA,)), "Windows")
    assert found[1].next == f"$env:CMAKE_ARGS='-DGGML_CUDA=on'; python -m pip install --force-reinstall {BUILD}"


@pytest.mark.parametrize(
    ("vendor", "backend", "level"),
    [("AMD", "VULKAN", "warning"), ("Intel", "VULKAN", "note"), ("Apple", "METAL", "warning")],
)
def test_each_vendor_has_its_backend(vendor, backend, level):
    found = judged(replace(ENGINE, hardware=(Hardware(vendor=vendor, name="it", usable=True),)))
    assert found[1].level == level
    assert found[1].next is not None
    assert f"-DGGML_{backend}=on" in found[1].next


@pytest.mark.parametrize(
    ("vendor", "backend"),
    [
        ("NVIDIA", "CUDA"),
        ("NVIDIA", "Vulkan"),
        ("AMD", "ROCm"),
        ("AMD", "Vulkan"),
        ("Intel", "SYCL"),
        ("Apple", "Metal"),
    ],
)
def test_a_gpu_that_is_used_is_fine(vendor, backend):
    hardware = (Hardware(vendor=vendor, name="it", usable=True),)
    facts = replace(ENGINE, backends=(backend,), devices=((backend, "it"),), hardware=hardware)
    assert levels(judged(facts)) == ["ok", "ok"]


def test_a_backend_that_sees_no_device_and_a_driver_that_is_silent_are_distinguished():
    blind = judged(replace(ENGINE, backends=("CUDA",), hardware=(NVIDIA,)))[1]
    silent = judged(replace(ENGINE, hardware=(replace(NVIDIA, usable=False),)))[1]
    assert "sees no device" in blind.text
    assert "driver does not respond" in silent.text
    assert (blind.next, silent.next) == ("nvidia-smi", "nvidia-smi")


def test_llama_cpp_that_is_missing_or_does_not_run_is_an_error():
    assert levels(judged(replace(ENGINE, package=""))) == ["error"]
    (found,) = judged(replace(ENGINE, devices="it ended with code -4", runs=False))
    assert found.level == "error"
    assert "code -4" in found.text
    assert has_commands([found])


def test_a_driver_that_ends_llama_cpp_costs_the_gpu_alone():
    found = judged(replace(ENGINE, backends=("Vulkan",), devices="a trial was ended by SIGABRT", hardware=(NVIDIA,)))
    assert levels(found) == ["ok", "warning"]
    assert "SIGABRT; the CPU computes" in found[1].text
    assert found[1].next == "vulkaninfo --summary"


def test_a_gpu_that_was_left_out_is_reported_with_the_reason():
    found = judged(replace(ENGINE, backends=("CUDA",), left_out=(("RTX 3060 (CUDA0)", "it hangs"),)))
    assert [(it.level, it.next) for it in found[1:]] == [("warning", "primad profile --remeasure")]
    assert found[1].text == "RTX 3060 (CUDA0) could not be used: it hangs"


def test_amds_own_backend_is_built_where_its_toolkit_is():
    hardware = (Hardware(vendor="AMD", name="it", usable=True),)
    found = judged(replace(ENGINE, hardware=hardware, has_rocm=True))
    assert "-DGGML_HIP=on" in (found[1].next or "")


def test_a_machine_without_a_gpu_is_no_problem():
    assert levels(judged(ENGINE)) == ["ok", "ok"]


# -- the report


def test_the_report_has_a_mark_a_finding_and_below_a_problem_the_next_command():
    found = [
        finding("disk", "ok", "much is free"),
        finding("disk", "note", "never measured", "primad profile"),
        finding("ports", "warning", "taken [red]x[/red]", "primad join --port 7771"),
        finding("identity", "error", "read by others", "chmod 600 it"),
    ]
    assert [line.plain for line in lines(found)] == [
        "disk",
        "    ok  much is free",
        "    -   never measured",
        "        next: primad profile",
        "ports",
        "    !   taken [red]x[/red]",
        "        next: primad join --port 7771",
        "identity",
        "    x   read by others",
        "        next: chmod 600 it",
        "1 error, 1 warning",
    ]
