"""Devices are known by their keys: neither strangers' announcements nor devices' names keep anyone out."""

from __future__ import annotations

from dataclasses import replace

import pytest

from primad.api.page.admin_api import DeviceLimit
from primad.head.admin_api import MAX_SHOWN, known_devices
from primad.head.members import devices as devices_module
from primad.head.members.devices import MAX_REPORTED
from primad.head.model.limits import DeviceLimits
from primad.network.messages import Introduce
from primad.network.peer import Peer
from primad.trust.identity import key_hex, new_identity
from primad.trust.local_trust import LocalTrust
from primad.trust.trust import BY_HAND, PAIRED, TrustStore, trusted_now
from tests.fakes.control import HEAD, FakeDevice
from tests.shell.test_head_daemon import header, lab

__all__ = ["header", "lab"]

KEY = new_identity().public
A_PEER = Peer(
    device="worker",
    cluster="test",
    role="worker",
    version="7",
    protocol=5,
    addresses=("127.0.0.1",),
    port=9,
    key=KEY,
    pairing=None,
)


async def test_strangers_without_end_are_not_named_without_end(lab):
    async with lab() as here:
        for number in range(MAX_REPORTED + 3):
            here.device(f"stranger-{number}", trusted=False)
        here.device("nas")
        here.start()
        await here.serves("nas")
        assert sum("was discovered, but is not paired" in line for line in here.printed) == MAX_REPORTED
        assert sum("more untrusted devices" in line for line in here.printed) == 1


async def test_a_stranger_that_takes_a_name_first_keeps_no_device_of_that_name_out(lab):
    async with lab() as here:
        here.solver.value = lambda count: 10.0 / count
        impostor = FakeDevice(here.context, "nas", identity=new_identity())
        here.discovery.sees(impostor)
        nas = here.device("nas", seen=False)
        here.discovery.sees(nas, at="nas-2", device="nas-2")  # the next free name, assigned by mDNS
        here.start()
        ring = await here.serves("nas")
        assert "an untrusted device announces itself as nas" in await here.emits("an untrusted device")
        here.discovery.sees(impostor, at="nas-2", device="nas-2")
        here.discovery.sees(nas, at="elsewhere", addresses=("127.0.0.66",), port=9)
        here.device("lap")
        await here.serves("nas", "lap", after=ring.epoch)
        assert impostor.knocks == 0


async def test_a_device_that_claims_to_be_another_gets_its_own_name_and_links(lab):
    async with lab() as here:
        nas, liar = here.device("nas"), FakeDevice(here.context, "nas", identity=new_identity())
        here.trust.add(trusted_now("desk", liar.key, PAIRED))  # the head's name
        here.discovery.sees(liar, at="liar")
        here.start()
        await here.serves("nas", "desk-2")
        assert here.daemon.admin_api._devices.workers["nas"].key == nas.key
        reported = {each.device: each.key for each in (await liar.hear(Introduce)).devices}
        assert reported == {"nas": nas.key}
        links = here.daemon._devices.book.between(["desk", "nas", "desk-2"])
        assert len({(link.source, link.target) for link in links}) == 6


def test_strangers_fill_no_list_of_devices_that_the_owner_is_shown(tmp_path):
    trust, device_limits = TrustStore(tmp_path, HEAD, LocalTrust(tmp_path / "local")), DeviceLimits(tmp_path)
    trust.add(trusted_now("nas", KEY, PAIRED))
    device_limits.put(DeviceLimit(device="nas", is_paused=True))
    strangers = [replace(A_PEER, device="nas", key=new_identity().public) for _ in range(MAX_SHOWN)]
    shown = known_devices(trust, {KEY: "nas"}, [*strangers, replace(A_PEER, key=KEY)], device_limits)
    assert len({each.device for each in shown}) == MAX_SHOWN
    assert [(each.device, each.key) for each in shown if each.trusted == "yes"] == [("nas", key_hex(KEY))]
    assert [each.device for each in shown if each.is_paused] == ["nas"]


@pytest.mark.parametrize("how", [None, PAIRED, BY_HAND])
async def test_a_head_opens_pairing_by_itself_only_while_it_trusts_nobody(lab, monkeypatch, how):
    async with lab() as here:
        monkeypatch.setattr(devices_module, "is_loopback", lambda _: False)
        if how is not None:
            here.trust.add(trusted_now("nas", new_identity().public, how))
        here.start()
        await here.serves()
        assert any(line.startswith("to add a device, run there: primad join --code") for line in here.printed) == (
            not how
        )
