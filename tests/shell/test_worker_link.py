"""The head's conversation with a worker: addresses, keys, versions, and the end of a link."""

from __future__ import annotations

import asyncio
import dataclasses
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import get_args

import msgspec
import pytest
import zmq.asyncio

from halda import LinkProfile
from primad.errors import ClusterError
from primad.head.members.core import DeviceLostError, StageError
from primad.head.members.stage import Stage
from primad.head.members.worker_link import Caller, WorkerLink, greet, probe
from primad.membership import types
from primad.network.control import WorkerEnd
from primad.network.messages import (
    MAX_DEVICES,
    Broken,
    Dismiss,
    Fault,
    Introduce,
    Introduction,
    Leaving,
    Link,
    LinksMeasured,
    Load,
    Loaded,
    MeasureLinks,
    MemoryLow,
    MemoryRecovered,
    Ping,
    Pong,
    Progress,
    Refused,
    Release,
    Remeasured,
    StageState,
    StageStates,
    WorkerStatus,
)
from primad.network.versions import OURS, Versions
from primad.ring.messages import Status
from primad.settings.timings import NetworkTimings
from primad.trust.identity import new_identity
from tests.fakes.control import HEAD, HOST, FakeDevice, gated
from tests.fakes.load import a_load
from tests.fakes.profile import PROFILE
from tests.fakes.relay import Relay
from tests.ports import free_port

PATIENCE_S = 60
KEY, OTHER_KEY = new_identity().public, new_identity().public


class Observer:
    """What a head learns of its devices."""

    def __init__(self) -> None:
        self.signs = 0
        self.left: list[tuple[str, str]] = []
        self.gone: list[tuple[str, str]] = []
        self.short: list[str] = []
        self.roomy: list[str] = []
        self.better: list[str] = []
        self.news = asyncio.Event()

    def __call__(self, event: types.Event) -> None:
        match event:
            case types.Heard():
                self.signs += 1
            case types.Lost(device, reason):
                self.gone.append((device, reason))
            case types.DeviceLeaving(device, reason):
                self.left.append((device, reason))
            case types.DeviceMemoryRecovered(device):
                self.roomy.append(device)
            case types.DeviceMemoryLow(device):
                self.short.append(device)
            case types.DevicesCorrected(devices):
                self.better += devices
            case _:
                raise AssertionError(event)
        self.news.set()

    async def wait_lost(self) -> str:
        while not self.gone:
            self.news.clear()
            await self.news.wait()
        return self.gone[0][1]


def caller(context: zmq.asyncio.Context, *, versions: Versions = OURS, **timings: float) -> Caller:
    return Caller(
        context=context,
        identity=HEAD,
        device="desk",
        session=7,
        build="b",
        gone_after_s=4.0,
        ping_interval_s=0.02,
        timings=NetworkTimings(**timings),
        versions=versions,
    )


async def link_to(
    context: zmq.asyncio.Context, device: FakeDevice, observer: Observer, port: int | None = None, **timings: float
) -> WorkerLink:
    end, _ = await probe(caller(context, **timings), [(HOST, port or device.port)], [device.key])
    return await greet(caller(context, **timings), end, observer, device.name)


@asynccontextmanager
async def greeted() -> AsyncIterator[tuple[FakeDevice, Observer, WorkerLink]]:
    """A worker, what the head learns of it, and the link to it, which is closed after the block."""
    async with gated() as context:
        device, observer = FakeDevice(context, "nas"), Observer()
        link = await link_to(context, device, observer)
        yield device, observer, link
        link.close()
        await device.leave()


def state(
    epoch: int = 3, *, loaded: bool = False, linked: bool = False, broken: str | None = None, fault: str = "load"
) -> StageState:
    return StageState(
        epoch=epoch,
        loaded=Loaded(port=4000, key=KEY) if loaded else None,
        linked=linked,
        broken=None if broken is None else Broken(error=broken, fault=fault),
    )


# ---- addresses, keys and versions -----------------------------------------------------------------------------------


async def test_the_first_address_that_replies_is_used_and_others_are_dropped():
    """One refuses, one is invalid, one belongs to another device, one accepts and stays silent; one works."""
    async with gated() as context:
        right, wrong = FakeDevice(context, "right"), FakeDevice(context, "wrong")
        with socket.create_server((HOST, 0)) as mute:
            ports = [free_port(), wrong.port, mute.getsockname()[1], right.port]
            places = [("no address", 1), *((HOST, port) for port in ports)]
            end, probed = await probe(caller(context), places, [right.key])
        assert (probed.device, end.port, end.key) == ("right", right.port, right.key)
        assert wrong.knocks == 0, "it does not own the key, so nothing reaches it"
        end.close()


async def test_the_fastest_of_two_addresses_is_used():
    async with gated() as context:
        keys = new_identity()
        slow, fast = FakeDevice(context, "nas", identity=keys), FakeDevice(context, "nas", identity=keys)
        slow.silent = True
        for places in ([slow, fast], [fast, slow]):
            end, _ = await probe(caller(context), [(HOST, each.port) for each in places], [keys.public])
            assert end.port == fast.port
            end.close()


async def test_a_device_may_have_any_of_the_trusted_keys():
    async with gated() as context:
        device = FakeDevice(context, "nas")
        end, _ = await probe(caller(context), [(HOST, device.port)], [KEY, device.key, OTHER_KEY])
        assert end.key == device.key
        end.close()


async def test_a_refusal_of_our_key_is_reported_at_once_with_the_remedy():
    async with gated(lambda key: key != HEAD.public) as context:
        device = FakeDevice(context, "nas")
        printed = rf"^the device at 127\.0\.0\.1:{device.port} does not let this one in: .*'primad pair'"
        with pytest.raises(ClusterError, match=printed):
            await probe(caller(context, probe_timeout_s=PATIENCE_S), [(HOST, device.port)], [device.key])
        assert device.knocks == 0


async def test_the_same_reply_at_two_addresses_is_reported_once():
    async with gated(lambda key: key != HEAD.public) as context:
        keys = new_identity()
        ports = sorted(str(FakeDevice(context, "nas", identity=keys).port) for _ in range(2))
        places = [(HOST, int(port)) for port in ports]
        with pytest.raises(ClusterError) as refused:
            await probe(caller(context, probe_timeout_s=PATIENCE_S), places, [keys.public])
        refusal = (
            f"the device at {HOST}:{ports[0]} (and {HOST}:{ports[1]}) does not let this one in: it was revoked there"
        )
        assert str(refused.value).startswith(refusal)
        assert str(refused.value).count("pair the two again") == 1


async def test_a_device_that_sends_only_unrelated_messages_is_given_up():
    async def chatter(end: WorkerEnd) -> None:
        peer, _, _ = await end.receive()
        while True:
            await end.send(peer, Pong())
            await asyncio.sleep(0.05)

    async with gated() as context:
        keys = new_identity()
        end = WorkerEnd(context, HOST, None, 0, identity=keys)
        talking = asyncio.create_task(chatter(end))
        printed = "no response"
        while printed.startswith("no response"):  # on a busy machine, pauses between messages may be longer
            with pytest.raises(ClusterError) as refused:
                await probe(caller(context, probe_timeout_s=2.0), [(HOST, end.port)], [keys.public])
            printed = str(refused.value)
        assert "sends messages, but not its identity" in printed
        talking.cancel()
        await asyncio.wait([talking])
        end.close()


async def test_without_a_key_or_an_address_the_error_has_the_remedy():
    async with gated() as context:
        with pytest.raises(ClusterError, match="no device is trusted yet; pair it with 'primad join --code'"):
            await probe(caller(context), [(HOST, 1)], [])
        with pytest.raises(ClusterError, match="it has no address"):
            await probe(caller(context), [], [KEY])
        with pytest.raises(ClusterError, match="no address is not an address to connect to"):
            await probe(caller(context), [("no address", 1)], [KEY])


async def test_a_cancelled_probe_leaves_no_socket():
    async with gated() as context:
        device = FakeDevice(context, "nas")
        device.silent = True
        task = asyncio.create_task(probe(caller(context), [(HOST, device.port)] * 3, [device.key]))
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled()  # an open socket would be a warning, which is an error


@pytest.mark.parametrize(
    ("ours", "theirs", "fits"),
    [((5, 4), (5, 4), True), ((5, 4), (4, 3), True), ((4, 3), (5, 4), True), ((5, 4), (3, 2), False)],
)
async def test_a_version_gap_is_named_with_both_versions(ours, theirs, fits):
    versions = Versions(primad="9", protocol=ours[0], oldest=ours[1])
    async with gated() as context:
        device = FakeDevice(context, "nas", protocol=theirs[0], oldest=theirs[1])
        places, keys = [(HOST, device.port)], [device.key]
        if fits:
            end, _ = await probe(caller(context, versions=versions), places, keys)
            end.close()
            return
        gap = r"^nas runs primad 7 \(protocol 3\), desk runs 9 \(protocol 5\), and they do not understand each other"
        with pytest.raises(ClusterError, match=gap):
            await probe(caller(context, versions=versions), places, keys)


# ---- greeting -------------------------------------------------------------------------------------------------------


async def test_a_greeting_introduces_the_head_and_is_answered_with_a_profile():
    async with greeted() as (device, _, link):
        assert (link.name, link.key, link.build, link.layer_port) == ("nas", device.key, "a build", 7771)
        (hello,) = device.hellos
        assert (hello.device, hello.session, hello.build, hello.gone_after_s) == ("desk", 7, "b", 4.0)


async def test_a_refusal_or_a_missing_reply_is_one_clear_error():
    async with gated() as context:
        device, observer = FakeDevice(context, "nas"), Observer()
        device.refuses = "nas works for the head tower"
        with pytest.raises(ClusterError, match=r"^nas works for the head tower$"):
            await link_to(context, device, observer)
        end, _ = await probe(caller(context), [(HOST, device.port)], [device.key])
        device.silent = True
        with pytest.raises(ClusterError, match=r"^no response from 127\.0\.0\.1:\d+ within 0\.3 s$"):
            await greet(caller(context, hello_timeout_s=0.3), end, observer, "nas")
        assert observer.gone == []


async def test_an_impossible_profile_is_refused_as_such_and_not_as_silence():
    async with gated() as context:
        device = FakeDevice(context, "nas", profile=dataclasses.replace(PROFILE, ram_read_bytes_per_s=-1.0))
        printed = "no response"
        while printed.startswith("no response"):  # on a busy machine the profile may arrive later
            end, _ = await probe(caller(context), [(HOST, device.port)], [device.key])
            with pytest.raises(ClusterError) as refused:
                await greet(caller(context, hello_timeout_s=0.3), end, Observer(), "nas")
            printed = str(refused.value)
        assert "was refused: profile of 'nas' is impossible: ram_read_bytes_per_s" in printed


async def test_messages_to_an_earlier_session_are_ignored():
    async with gated() as context:
        device, observer = FakeDevice(context, "nas"), Observer()
        end, _ = await probe(caller(context), [(HOST, device.port)], [device.key])
        await device.notify(StageStates(revision=9, states=[state(9, broken="of long ago")]))
        link = await greet(caller(context), end, observer, "nas")
        assert link.name == "nas"
        link.close()


# ---- the end of a link ----------------------------------------------------------------------------------------------


async def test_every_reply_is_a_sign_of_life():
    async with gated() as context:
        device, observer = FakeDevice(context, "nas"), Observer()
        link = await link_to(context, device, observer)
        while observer.signs < 5:
            observer.news.clear()
            await observer.news.wait()
        link.close()
        assert observer.gone == []


async def test_a_lost_device_is_reported_once_and_all_its_stages_end():
    async with greeted() as (device, observer, link):
        parts = [Stage(link, a_load(epoch), lambda *_: None) for epoch in (3, 4)]
        for _ in range(3):
            await device.notify(Refused("it works for another head"))
        assert await observer.wait_lost() == "it works for another head"
        for part in parts:
            error = await part.broken
            assert isinstance(error, DeviceLostError)
            assert (error.device, str(error)) == ("nas", "nas is gone: it works for another head")
        await device.leave()
        assert observer.gone == [("nas", "it works for another head")]


async def test_a_process_that_ends_is_lost_before_it_is_missed():
    """It need not be silent long enough: its system refuses connections to its port."""
    async with greeted() as (device, observer, _):
        await device.leave()
        assert await observer.wait_lost() == "its primad ended"


async def test_a_leaving_device_notifies_the_head():
    async with greeted() as (device, observer, link):
        await device.notify(Leaving("its owner ended it"))
        while not observer.left:
            observer.news.clear()
            await observer.news.wait()
        assert observer.left == [("nas", "its owner ended it")]
        await link.dismiss()
        await device.hear(Dismiss)


async def test_a_closed_link_reports_nothing_and_releases_silently():
    async with gated() as context:
        device, observer = FakeDevice(context, "nas"), Observer()
        link = await link_to(context, device, observer)
        part = Stage(link, a_load(), lambda *_: None)
        link.close()
        await part.release()
        await part.release()
        with pytest.raises(ClusterError, match="is closed"):
            await part.load()
        await device.leave()
        assert observer.gone == []
        assert not part.broken.done()


async def test_the_wait_for_a_device_that_accepts_nothing_is_short():
    async with gated() as context:
        device, observer = FakeDevice(context, "nas"), Observer()
        link = await link_to(context, device, observer, answer_timeout_s=0.2)
        part = Stage(link, a_load(), lambda *_: None)
        link._tasks[2].cancel()  # whether its process has ended is another question
        await device.leave()
        with pytest.raises(ClusterError, match="accepts no messages"):
            await introduce_without_end(link)
        await part.release()
        link.close()


async def test_devices_that_the_head_trusts_are_introduced():
    async with greeted() as (device, _, link):
        await link.introduce([("lap", KEY)], {OTHER_KEY})
        assert await device.hear(Introduce) == Introduce(devices=[Introduction("lap", KEY)], revoked=[OTHER_KEY])
        many = [new_identity().public for _ in range(MAX_DEVICES + 1)]
        await link.introduce([("lap", key) for key in many], many)
        introduced = await device.hear(Introduce)  # a longer message would be refused
        assert [each.key for each in introduced.devices] == many[:MAX_DEVICES]
        assert len(introduced.revoked) == MAX_DEVICES


# ---- a stage --------------------------------------------------------------------------------------------------------

STATUS = Status(steps=1, rows=1, compute_s=0.5, hop_s=[], rss_bytes=1, private_bytes=1, refused=0)


@pytest.mark.parametrize(
    ("needed", "available", "left"),
    [
        (1 << 30, 2 << 30, 2 << 30),
        (1 << 30, 20 << 30, 11 << 30),
        (15 << 30, 2 << 30, 0),
    ],
    ids=["what it says", "less than it had", "nothing"],
)
async def test_a_device_short_of_memory_has_less_for_the_next_plan(needed, available, left):
    async with greeted() as (device, observer, link):
        before = link.profile
        part = Stage(link, a_load(3), lambda *_: None)
        await device.notify(MemoryLow(epoch=2, needed_bytes=1, ram_available_bytes=1))  # from an earlier ring
        await device.notify(MemoryLow(epoch=3, needed_bytes=needed, ram_available_bytes=available))
        while not observer.short:
            observer.news.clear()
            await observer.news.wait()
        assert observer.short == ["nas"]
        assert link.profile == dataclasses.replace(before, ram_available_bytes=left)
        assert not part.broken.done()


@pytest.mark.parametrize(
    ("available", "left"), [(3 << 30, 3 << 30), (1 << 40, None)], ids=["what it says", "more than there is"]
)
async def test_a_device_with_room_again_has_more_for_the_next_plan(available, left):
    async with greeted() as (device, observer, link):
        part, before = Stage(link, a_load(3), lambda *_: None), link.profile
        await device.notify(MemoryLow(epoch=3, needed_bytes=1 << 30, ram_available_bytes=2 << 30))
        await device.notify(MemoryRecovered(1 << 30))  # no more than it has
        await device.notify(MemoryRecovered(available))
        while not observer.roomy:
            observer.news.clear()
            await observer.news.wait()
        assert (observer.short, observer.roomy) == (["nas"], ["nas"])
        total = before.ram_total_bytes
        assert link.profile == dataclasses.replace(before, ram_available_bytes=left or total)
        assert not part.broken.done()


async def test_corrected_figures_of_a_device_are_used_from_then_on():
    async with greeted() as (device, observer, link):
        before = link.profile
        await device.notify(Remeasured(dataclasses.replace(before, ram_available_bytes=0)))  # the speeds are the same
        cpu = dataclasses.replace(before.cpu, step_s=2 * before.cpu.step_s)
        disk = dataclasses.replace(before.disk, random_bytes_per_s=before.disk.random_bytes_per_s / 2)
        better = dataclasses.replace(
            before,
            device="another",
            host="another",
            cpu=cpu,
            disk=dataclasses.replace(disk, free_bytes=0),
            ram_available_bytes=0,
            gpu=None if before.gpu is None else dataclasses.replace(before.gpu, vram_available_bytes=0),
        )
        await device.notify(Remeasured(better))
        while not observer.better:
            observer.news.clear()
            await observer.news.wait()
        assert observer.better == ["nas"]
        reported = dataclasses.replace(before, cpu=cpu, disk=disk, gpu=better.gpu)
        assert link.profile == reported, "free RAM and disk are still reported"


async def test_a_stage_gets_only_states_of_its_own_epoch():
    async with greeted() as (device, _, link):
        progress: list[tuple[str, int]] = []
        part = Stage(link, a_load(3), lambda name, each: progress.append((name, each.done)))
        await part.load()
        assert (await device.hear(Load)).epoch == 3
        await device.notify(Progress(epoch=2, phase="fetch", done=8, total=9))
        await device.notify(Progress(epoch=3, phase="fetch", done=1, total=2))
        device.stand(state(2, broken="old"), state(3, loaded=True))
        loaded = await part.loaded
        assert (loaded.port, loaded.key) == (4000, KEY)
        await part.connect("tcp://127.0.0.1:5", KEY, OTHER_KEY)
        expected = Link(epoch=3, address="tcp://127.0.0.1:5", key=KEY, sender=OTHER_KEY)
        assert await device.hear(Link) == expected
        elsewhere = msgspec.structs.replace(state(linked=True), loaded=Loaded(port=4001, key=OTHER_KEY))
        device.stand(state(2, broken="old"), elsewhere)
        await part.linked
        assert part.loaded.result() == loaded, "once it is loaded it stays where it is"
        assert progress == [("nas", 1)]
        assert not part.broken.done()
        await part.release()
        assert await device.hear(Release) == Release(epoch=3)


@pytest.mark.parametrize("fault", get_args(Fault))
async def test_a_broken_stage_reports_the_kind_of_fault(fault):
    async with greeted() as (device, observer, link):
        part = Stage(link, a_load(3), lambda *_: None)
        device.stand(state(3, broken="it went wrong", fault=fault))
        error = await part.broken
        assert isinstance(error, StageError)
        assert (error.device, error.fault, str(error)) == ("nas", fault, "nas: it went wrong")
        assert observer.gone == [], "the device itself is fine"


async def test_a_released_stage_gets_no_more_states():
    async with greeted() as (device, _, link):
        part, following = (Stage(link, a_load(epoch), lambda *_: None) for epoch in (3, 4))
        await part.release()
        device.stand(state(3, broken="late"), state(4, loaded=True))
        await following.loaded
        assert not part.broken.done()


async def test_a_status_request_gets_a_fresh_reply():
    async with greeted() as (device, _, link):
        part = Stage(link, a_load(3), lambda *_: None)
        for size in (1, 2):
            task = asyncio.create_task(part.wait_status())
            assert (await device.hear(Ping)).status
            answer = WorkerStatus(epoch=3, status=STATUS, daemon_rss_bytes=size)
            await device.notify(answer)
            assert await task == answer


# ---- lost messages --------------------------------------------------------------------------------------------------


async def some_pings(device: FakeDevice, count: int = 10) -> None:
    """Time for the head's reaction to wrong states."""
    enough = device.pings + count
    await device.wait(lambda: device.pings >= enough)


async def test_everything_that_a_reset_connection_lost_arrives_once_when_it_is_made_again():
    async with gated() as context:
        device, observer = FakeDevice(context, "nas"), Observer()
        device.measures = False
        device.stand(state(4, loaded=True), state(5, loaded=True))
        async with Relay(device.port) as relay:
            link = await link_to(context, device, observer, relay.port)
            loading, linking, over = (Stage(link, a_load(epoch), lambda *_: None) for epoch in (3, 4, 5))
            for part in (linking, over):
                await part.load()
                assert (await device.hear(Load)).epoch == part.epoch
                await part.loaded
            await some_pings(device)
            assert device.heard.empty(), "nothing is sent twice on a connection that stands"

            relay.swallow("there")
            await link.introduce([("tab", OTHER_KEY)], [])
            await over.release()
            await linking.connect("tcp://127.0.0.1:5", KEY, OTHER_KEY)
            await loading.load()
            measuring = asyncio.create_task(link.measure_links([device.target()], 600))
            await relay.swallows(10_000)
            assert device.heard.empty()
            relay.reset()
            arrived = [await device.heard.get() for _ in range(5)]
            assert {type(message) for message in arrived} == {Introduce, Release, Link, Load, MeasureLinks}
            device.stand(state(3), state(4, loaded=True, linked=True))
            await linking.linked
            await device.notify(LinksMeasured(links=[]))
            await measuring
            await some_pings(device)
            assert device.heard.empty(), "and nothing is sent twice after it"
            assert not loading.broken.done()
        link.close()
        await device.leave()


async def test_a_worker_that_ignores_a_load_ends_the_stage_and_is_sent_one_load():
    async with greeted() as (device, _, link):
        part = Stage(link, a_load(3), lambda *_: None)
        await part.load()
        error = await part.broken
        assert isinstance(error, StageError)
        assert (error.device, str(error)) == ("nas", "nas: it does not take part in the ring")
        assert device.heard.qsize() == 1


async def test_a_lost_break_arrives_with_the_next_ping():
    async with gated() as context:
        device, observer = FakeDevice(context, "nas"), Observer()
        device.loses_states = True
        link = await link_to(context, device, observer)
        part = Stage(link, a_load(3), lambda *_: None)
        device.stand(state(broken="no memory"))
        await some_pings(device)
        assert (device.known, part.broken.done()) == (0, False), "each ping has the head's revision: none yet"
        device.loses_states = False
        error = await part.broken
        assert isinstance(error, StageError)
        assert (error.device, error.fault, str(error)) == ("nas", "load", "nas: no memory")
        await device.wait(lambda: device.known == device.revision)
        link.close()


async def test_a_request_of_the_head_is_not_considered_lost_by_states_already_on_their_way():
    async with gated() as context:
        device, observer = FakeDevice(context, "nas"), Observer()
        device.loses_states = True
        link = await link_to(context, device, observer)
        part = Stage(link, a_load(3), lambda *_: None)
        device.stand(state())
        await part.load()
        await device.hear(Load)
        await some_pings(device)
        assert device.heard.empty(), "the head does not know yet whether the worker received it"
        device.loses_states = False
        await device.wait(lambda: device.known == device.revision)
        await some_pings(device)
        assert device.heard.empty()
        assert not part.broken.done()
        link.close()


async def test_states_overtaken_by_later_ones_are_ignored():
    async with greeted() as (device, _, link):
        part = Stage(link, a_load(3), lambda *_: None)
        device.stand(state())
        device.stand(state(loaded=True))
        await part.loaded
        await device.notify(StageStates(revision=1, states=[state(broken="of another time")]))
        await some_pings(device)
        assert device.known == 2
        assert not part.broken.done()


async def test_a_stage_that_vanishes_after_loading_is_over():
    async with gated() as context:
        device, observer = FakeDevice(context, "nas"), Observer()
        device.stand(state(loaded=True))
        link = await link_to(context, device, observer)
        part = Stage(link, a_load(3), lambda *_: None)
        await part.load()
        await part.loaded
        device.stand()
        error = await part.broken
        assert isinstance(error, StageError)
        assert str(error) == "nas: its stage ended without a message"
        link.close()


async def test_a_stage_that_nobody_wants_is_released_once():
    async with gated() as context:
        device, observer = FakeDevice(context, "nas"), Observer()
        device.stand(state(3), state(4))
        link = await link_to(context, device, observer)
        part = Stage(link, a_load(4), lambda *_: None)
        await part.load()
        assert await device.hear(Release) == Release(epoch=3)
        device.stand(state(3), state(4, loaded=True))
        await part.loaded
        await some_pings(device)
        assert device.heard.empty(), "it is on its way"
        assert not part.broken.done()
        link.close()


# ---- measuring ------------------------------------------------------------------------------------------------------


async def test_a_worker_that_measures_nothing_in_time_is_lost():
    async with gated() as context:
        device, observer = FakeDevice(context, "nas"), Observer()
        device.measures = False
        link = await link_to(context, device, observer)
        with pytest.raises(DeviceLostError, match=r"nas did not measure its links within 0\.1 s"):
            await link.measure_links([], 0.1)
        assert (await device.hear(MeasureLinks)).targets == []
        link.close()


async def test_closing_a_link_ends_a_measurement():
    async with gated() as context:
        device, observer = FakeDevice(context, "nas"), Observer()
        device.measures = False
        link = await link_to(context, device, observer)
        measuring = asyncio.create_task(link.measure_links([], 30))
        await device.hear(MeasureLinks)
        link.close()
        with pytest.raises(DeviceLostError, match="nas went away"):
            await measuring


async def test_a_measurement_may_be_cancelled():
    async with gated() as context:
        device, observer = FakeDevice(context, "nas"), Observer()
        device.measures = False
        link = await link_to(context, device, observer)
        measuring = asyncio.create_task(link.measure_links([], 30))
        await device.hear(MeasureLinks)
        measuring.cancel()
        await asyncio.wait([measuring])
        assert measuring.cancelled()
        link.close()


async def test_a_device_cannot_choose_the_address_at_which_others_reach_it():
    async with greeted() as (device, _, link):
        device.measures = False
        reported_links = [
            LinkProfile(source=source, target=target, address="10.9.9.9", round_trip_s=0.001, bytes_per_s=1e8)
            for source, target in [("nas", "tab"), ("tab", "nas")]
        ]
        target = msgspec.structs.replace(device.target(), device="tab")
        measuring = asyncio.create_task(link.measure_links([target], 600))
        await device.hear(MeasureLinks)
        await device.notify(LinksMeasured(links=reported_links))
        found = await measuring
        assert [(each.source, each.address) for each in found.links] == [("nas", "10.9.9.9"), ("tab", "")]


async def introduce_without_end(link: WorkerLink) -> None:
    while True:
        await link.introduce([("x", KEY)] * 500, [])
