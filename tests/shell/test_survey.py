"""Devices for a plan: this one, named ones and those in sight; devices that refuse are left out."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from primad.api.page.admin_api import DeviceLimit
from primad.errors import ClusterError
from primad.head.members import survey as survey_module
from primad.head.members import worker_link as worker_link_module
from primad.head.members.survey import survey
from primad.head.model.limits import DeviceLimits
from primad.network.peer import Peer
from primad.planning.corrections import Corrections, DeviceFactors, stamp_of
from primad.settings.config import load_config
from primad.trust.identity import load_identity, new_identity
from primad.trust.trust import PAIRED, TrustStore, trusted_now
from tests.fakes.planning import device, link


class Lines:
    """A reporter that keeps its lines."""

    def __init__(self) -> None:
        self.printed: list[str] = []

    def report_line(self, line: str) -> None:
        self.printed.append(line)

    def progress(self, device: str, phase: str, done: int, total: int) -> None:
        raise AssertionError("nothing is measured here")

    def wait(self, words: str) -> None:
        """Nothing is displayed."""

    def resolve(self) -> None:
        raise AssertionError("nothing is measured here")


KEYS: dict[str, str] = {}


def key_of(name: str) -> str:
    return KEYS.setdefault(name, new_identity().public)


def peer(name: str, port: int, *, cluster: str = "test", role: str = "worker", key: str | None = None) -> Peer:
    return Peer(
        device=name,
        cluster=cluster,
        role=role,
        version="1",
        protocol=2,
        addresses=("127.0.0.1",),
        port=port,
        key=key_of(name) if key is None else key,
        pairing=None,
    )


class FakeWorker:
    """A worker after its greeting."""

    def __init__(self, name: str, closed: list[str], introduced: dict[str, set[str]]) -> None:
        self.name, self.key, self.profile = name, key_of(name), device(name)
        self._closed, self._introduced = closed, introduced

    async def introduce(self, devices, revoked) -> None:
        if self.name == "gone":
            raise ClusterError("the link to gone is closed")
        self._introduced[self.name] = {name for name, _ in devices}

    def close(self) -> None:
        self._closed.append(self.name)


@pytest.fixture
def around(monkeypatch):
    """Sets the devices in sight, and which answer on which port."""
    sight: list[Peer] = []
    closed: list[str] = []
    replies: dict[int, str] = {}
    probes: list[tuple[int, set[str]]] = []
    introduced: dict[str, set[str]] = {}

    async def look(host: str, seconds: float, interface: str | None) -> list[Peer]:
        return sight

    async def probe(caller, places, keys):
        ((_, port),) = places
        probes.append((port, set(keys)))
        if port not in replies:
            raise ClusterError("it works for another head now")
        return SimpleNamespace(port=port, key=key_of(replies[port])), None

    async def greet(caller, end, listener, name):
        assert caller.identity.secret
        assert name == replies[end.port]
        return FakeWorker(name, closed, introduced)

    class Book:
        def __init__(self, caller) -> None:
            self.head = caller.device

        async def measure(self, workers, addresses, reporter):
            if "silent" in replies.values():
                raise ClusterError("silent did not measure its links")
            return [link(self.head, worker.name) for worker in workers]

    monkeypatch.setattr(survey_module, "LinkBook", Book)
    monkeypatch.setattr(survey_module, "look", look)
    for module in (survey_module, worker_link_module):  # where devices in sight and named ones are greeted
        monkeypatch.setattr(module, "probe", probe)
        monkeypatch.setattr(module, "greet", greet)
    monkeypatch.setattr(survey_module, "profile", lambda config, reporter: device(config.name))
    return SimpleNamespace(sight=sight, replies=replies, closed=closed, probes=probes, introduced=introduced)


def config(tmp_path, **flags):
    """A configuration in which all devices of these tests are trusted but the stranger."""
    made = load_config({"home": tmp_path, "name": "me", "cluster": "test", **flags}, {})
    trust = TrustStore(tmp_path, load_identity(tmp_path))
    for name in ("a", "b", "x", "y", "busy", "silent", "gone"):
        trust.add(trusted_now(name, key_of(name), PAIRED))
    return made


def test_this_device_comes_first_and_the_others_are_released(around, tmp_path):
    around.sight += [peer("b", 2), peer("a", 1)]
    around.replies.update({1: "a", 2: "b"})
    lines = Lines()
    found = survey(config(tmp_path), 0.1, lines)
    assert [one.device for one in found.devices] == ["me", "a", "b"]
    assert [(one.source, one.target) for one in found.links] == [("me", "a"), ("me", "b")]
    assert sorted(around.closed) == ["a", "b"]
    assert around.probes == [(2, {key_of("b")}), (1, {key_of("a")})], "each by its own key"
    assert around.introduced == {"a": {"b"}, "b": {"a"}}
    assert not lines.printed


def test_learnt_corrections_of_a_local_head_are_used(around, tmp_path, monkeypatch):
    slow = DeviceFactors(stamp=stamp_of(device("a")), disk=2.0)
    known = Corrections(devices={"a": slow}, links={("me", "a"): 1.5})
    monkeypatch.setattr(survey_module, "read_corrections", {tmp_path: known}.__getitem__)
    around.sight += [peer("a", 1)]
    around.replies.update({1: "a"})
    found = survey(config(tmp_path), 0.1, Lines())
    assert found.devices == (device("me"), known.apply(device("a")))
    assert found.links == (known.apply_link(link("me", "a")),)
    assert found.links[0] != link("me", "a")
    assert found.devices[1] != device("a")


def test_paused_and_limited_devices_are_planned_as_such(around, tmp_path):
    device_limits = DeviceLimits(tmp_path)
    device_limits.put(DeviceLimit(device="a", is_paused=True))
    device_limits.put(DeviceLimit(device="b", ram_bytes=1 << 30))
    around.sight += [peer("a", 1), peer("b", 2)]
    around.replies.update({1: "a", 2: "b"})
    lines = Lines()
    found = survey(config(tmp_path), 0.1, lines)
    assert [(one.device, one.ram_available_bytes) for one in found.devices[1:]] == [("b", 1 << 30)]
    assert [(one.source, one.target) for one in found.links] == [("me", "b")]
    assert lines.printed == ["a is left out: this head does not use it while it is paused on the page"]


def test_an_unpaired_device_is_left_out_and_not_contacted(around, tmp_path):
    around.sight += [peer("stranger", 1), peer("old", 2, key="")]
    around.replies.update({1: "stranger", 2: "old"})
    lines = Lines()
    assert [one.device for one in survey(config(tmp_path), 0.1, lines).devices] == ["me"]
    assert around.probes == []
    assert [line.split(":")[0] for line in lines.printed] == ["stranger is left out", "old is left out"]
    assert all("primad join --code" in line for line in lines.printed)


def test_a_device_that_refuses_is_left_out_and_named(around, tmp_path):
    around.sight += [peer("busy", 1), peer("a", 2)]
    around.replies[2] = "a"
    lines = Lines()
    found = survey(config(tmp_path), 0.1, lines)
    assert [one.device for one in found.devices] == ["me", "a"]
    assert lines.printed == ["busy is left out: it works for another head now"]


def test_other_clusters_heads_and_this_device_again_do_not_count(around, tmp_path):
    own = load_identity(tmp_path).public
    around.sight += [peer("x", 1, cluster="other"), peer("y", 2, role="head"), peer("me", 3, key=own)]
    around.replies.update({1: "x", 2: "y", 3: "me"})
    assert [one.device for one in survey(config(tmp_path), 0.1, Lines()).devices] == ["me"]


def test_a_named_device_must_reply(around, tmp_path):
    named = config(tmp_path, devices=("127.0.0.1:7",))
    around.replies[7] = "a"
    assert [one.device for one in survey(named, 0, Lines()).devices] == ["me", "a"]
    around.replies.clear()
    with pytest.raises(ClusterError, match=r"--device 127\.0\.0\.1:7: it works for another head"):
        survey(named, 0, Lines())


def test_links_that_cannot_be_measured_are_left_to_the_default(around, tmp_path):
    around.replies[7] = "silent"
    lines = Lines()
    found = survey(config(tmp_path, devices=("127.0.0.1:7",)), 0, lines)
    assert [one.device for one in found.devices] == ["me", "silent"]
    assert not found.links
    assert lines.printed == ["links are not measured: silent did not measure its links"]
    assert around.closed == ["silent"]


def test_a_device_that_leaves_before_its_introduction_leaves_links_at_the_default(around, tmp_path):
    around.replies[7] = "gone"
    lines = Lines()
    found = survey(config(tmp_path, devices=("127.0.0.1:7",)), 0, lines)
    assert [one.device for one in found.devices] == ["me", "gone"]
    assert not found.links
    assert lines.printed == ["links are not measured: the link to gone is closed"]
    assert around.closed == ["gone"]
