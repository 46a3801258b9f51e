"""Messages of the head's ring process other than tokens and figures, and which device is at fault."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import NoReturn

import pytest

from halda import Plan, Rank, Window
from primad.errors import (
    AlteredStepError,
    ClusterError,
    DiskError,
    LateStepError,
    LoadAgainError,
    NextDeviceError,
    NotFiniteError,
    RankError,
    RingError,
    SenderError,
)
from primad.head.members.core import (
    AGAIN,
    SENT,
    DeviceLostError,
    RankLostError,
    StageError,
    StuckStepError,
    attributed,
    workers_of,
)
from primad.head.members.stage import Stage
from primad.head.rings import ring as head_ring
from primad.head.rings import routes as head_ways
from primad.head.rings.ring import HeadRing
from primad.membership.types import RingFailed
from primad.network.messages import Loaded, StageState
from primad.ring.messages import (
    Drained,
    GroupRank,
    Opened,
    Overdue,
    ProcessMemoryLow,
    Report,
    RingCommand,
    RingEvent,
    Sampled,
    Serving,
    Status,
)
from primad.settings.timings import HeadTimings, Timings

PATIENCE_S = 180
EPOCH = 5
SINGLE_DEVICE = Plan(
    rounds=1,
    route=(Window(device="desk", first=0, last=5, gpu_layers=0),),
    output_on_gpu=False,
    streaming=(),
    left_out=(),
)


class AcceptingProcess:
    """A ring process that takes no command."""

    async def send(self, command: RingCommand) -> None:
        """Wait for ever."""
        await asyncio.Future()


def inputs_of(plan: Plan, **others: object) -> SimpleNamespace:
    """The inputs of a ring of epoch 5, as far as tests need them."""
    forecast = SimpleNamespace(plan=plan, prediction=None)
    return SimpleNamespace(forecast=forecast, epoch=EPOCH, **others)


async def test_a_head_process_short_of_memory_is_reported_and_continues():
    memory_low: list[int] = []
    delivered: list[tuple[int, RingEvent]] = []
    broken: list[object] = []
    token = Sampled(request=1, token=7, logprob=None, top=())
    listener = SimpleNamespace(
        deliver=lambda epoch, event: delivered.append((epoch, event)),
        memory_low=memory_low.append,
        broken=lambda *why: broken.append(why),
    )
    ring = HeadRing(inputs_of(SINGLE_DEVICE, listener=listener))
    for event in (ProcessMemoryLow(1 << 20), token):
        ring._hear(event, 1)
    assert (memory_low, delivered, broken) == ([1 << 20], [(5, token)], [])


async def test_an_event_that_nobody_awaits_any_more_is_ignored():
    """Forming was cancelled, but the process has not ended yet."""
    kv = SimpleNamespace(expect=lambda _, of: None)
    ring = HeadRing(SimpleNamespace(epoch=1, node=SimpleNamespace(workspace=SimpleNamespace(kv=kv))))
    for wanted in (ring._own, ring._serving, ring._drained):
        wanted.cancel()
    for event in (Opened("tcp://127.0.0.1:1", "key"), Serving(), Drained()):
        ring._hear(event, 1)


class ReplyingPart:
    """A stage, or the head's own process, whose ring process reports these step counts in turn."""

    def __init__(self, *steps: int) -> None:
        self._steps = list(steps)
        self.ring: HeadRing | None = None

    def status(self) -> Status:
        values = dict.fromkeys(Status.__struct_fields__, 0) | {"steps": self._steps.pop(0)}
        return Status(**values)

    async def wait_status(self) -> SimpleNamespace:
        if not self._steps:
            await asyncio.Future()
        return SimpleNamespace(status=self.status(), daemon_rss_bytes=0)

    async def send(self, command: RingCommand) -> None:
        assert isinstance(command, Report)
        if self._steps:
            self.ring._status.put_nowait(self.status())


def looking(*, own: tuple[int, ...] = (7, 7), plan: Plan | None = None, **workers: tuple[int, ...]) -> HeadRing:
    """The ring of ``PAIR``, whose devices report these numbers of ring passes in turn."""
    impatient = Timings(head=HeadTimings(overdue_timeout_s=0.1))
    service = SimpleNamespace(options=SimpleNamespace(step_timeout_s=120.0))
    ring = HeadRing(inputs_of(plan or PAIR, node=SimpleNamespace(timings=impatient), service=service))
    ring._process = ReplyingPart(*own)
    ring._process.ring = ring
    ring._workers = {name: ReplyingPart(*ring_passes) for name, ring_passes in workers.items()}
    return ring


def overdue(waited_s: float, *, is_first: bool = False) -> Overdue:
    """Four ring passes are complete; the fifth, step 12, is late."""
    return Overdue(step=12, waited_s=waited_s, ring_passes=4, is_first=is_first)


@pytest.mark.parametrize(
    ("own", "lap", "tab", "parties"),
    [
        ((7, 7), (4, 4), (4, 4), ("lap",)),  # the head sent the step, and is trusted
        ((7, 7), (5, 5), (4, 4), ("lap", "tab")),
        ((7, 7), (5, 5), (5, 5), ("tab",)),
        ((7, 7), (99, 99), (4, 4), ("lap", "tab")),  # claims an impossible count
        ((7, 7), (5, 4), (4, 4), ("lap",)),  # takes back what it reported
        ((7, 7), (4, 5), (4, 4), None),  # it advances
        ((7, 7), (5, 5), (4, 5), None),
        ((7,), (4, 4), (4, 4), None),  # the head computes and does not reply
    ],
)
async def test_a_stuck_step_is_attributed_to_the_devices_before_and_after_it(own, lap, tab, parties):
    ring = looking(own=own, lap=lap, tab=tab)
    await ring._find_fault(overdue(head_ring.LOST_S / 2))
    if parties is None:
        await ring._find_fault(overdue(head_ring.LOST_S))
        return
    with pytest.raises(StuckStepError, match=r"step 12 has been in flight for 4\.0 s: \w+ passed it on") as caught:
        await ring._find_fault(overdue(head_ring.LOST_S))
    assert attributed(caught.value, PAIR, EPOCH).parties == parties


async def test_a_process_at_its_first_step_may_be_silent_for_longer_than_one_that_has_computed():
    for is_first, waited_s, hangs in ((False, 1.0, True), (True, 5.0, False), (True, 40.0, True)):
        ring = looking(lap=(4,), tab=())
        command = ring._find_fault(overdue(waited_s, is_first=is_first))
        if hangs:
            with pytest.raises(StageError, match="tab: its ring process hangs") as caught:
                await command
            assert attributed(caught.value, PAIR, EPOCH).device == "tab"
        else:
            await command


async def test_the_first_rank_of_a_group_may_name_another_before_it_counts_as_hanging():
    shared = replace(PAIR, groups=((Rank(device="tab", weight=1), Rank(device="nas", weight=1)),))
    await looking(lap=(4,), tab=(), plan=shared)._find_fault(overdue(head_ring.LOST_S))
    with pytest.raises(StageError, match="tab: its ring process hangs"):
        await looking(lap=(4,), tab=(), plan=shared)._find_fault(overdue(head_ring.GROUP_LOST_S))
    failed = attributed(StageError("tab: nas of this group is late", "nas", "ring"), shared, EPOCH)
    assert (failed.device, failed.parties) == ("nas", ())


async def test_when_the_time_of_a_step_is_up_the_parties_are_those_of_the_last_look():
    class Late:
        async def listen(self, handle: Callable[[RingEvent], None]) -> NoReturn:
            raise LateStepError("step 12 did not come back within 120 s; a device hangs")

    ring = looking(lap=(5,), tab=(4,))
    await ring._find_fault(overdue(1.0))
    with pytest.raises(StuckStepError, match="step 12 did not come back") as caught:
        await ring._attend_own(Late(), SimpleNamespace(windows=[]))
    assert attributed(caught.value, PAIR, EPOCH).parties == ("lap", "tab")


async def test_a_command_to_a_breaking_ring_does_not_block_its_sender():
    """The process reads nothing, as if it were stopped; the handover to the next ring must not wait for it."""
    ring = HeadRing(inputs_of(SINGLE_DEVICE, listener=SimpleNamespace(broken=lambda *_: None)))
    ring._process = AcceptingProcess()
    sending = asyncio.create_task(ring.send(Report()))
    await asyncio.sleep(0)
    assert not sending.done()
    ring._break(RingError("the head's ring process was stopped"))
    async with asyncio.timeout(PATIENCE_S):
        await sending


PAIR = Plan(
    rounds=1,
    route=tuple(
        Window(device=name, first=first, last=first + 1, gpu_layers=0)
        for first, name in enumerate(("desk", "lap", "tab", "desk"))
    ),
    output_on_gpu=False,
    streaming=(),
    left_out=(),
)
"""desk sends steps to lap, lap to tab, and tab to desk."""


class Home:
    """A ring with workers at ``hosts``, by name; ``measured`` has the addresses in the link book."""

    def __init__(self, measured: dict[tuple[str, str], str] | None = None, **hosts: str) -> None:
        known = measured or {}
        self.links = {
            name: SimpleNamespace(
                name=name, key="key", layer_port=7, end=SimpleNamespace(host=host, port=9, address=f"{host}:9")
            )
            for name, host in hosts.items()
        }
        self.ring = HeadRing(
            inputs_of(
                PAIR,
                node=SimpleNamespace(config=SimpleNamespace(host="::"), identity=SimpleNamespace(public="own key")),
                layer_port=5,
                devices=SimpleNamespace(
                    workers=self.links,
                    holders=self.links,
                    links=SimpleNamespace(address=lambda *pair: known.get(pair)),
                ),
            )
        )


@pytest.fixture
def leaving(monkeypatch) -> dict[str, str]:
    """The local address towards each host; any other host is unreachable."""
    found: dict[str, str] = {}

    async def own_address(host: str, port: int) -> str:
        if host not in found:
            raise OSError(22, "Invalid argument")
        return found[host]

    monkeypatch.setattr(head_ways, "own_address", own_address)
    return found


async def test_no_ipv6_scope_of_the_head_is_sent_to_a_worker(leaving):
    home = Home(lap="fe80::2%4", tab="fe80::3%4")
    leaving["fe80::2%4"] = "fe80::1"
    sources = await home.ring._ring_addresses.sources(home.links["lap"])
    assert [(source.addresses, source.port) for source in sources] == [(["fe80::1"], 5), (["fe80::3"], 7)]
    assert home.ring._ring_addresses.host_for("lap", "tab") == "fe80::3"
    assert home.ring._ring_addresses.host_for("desk", "lap") == "fe80::2%4", "it is the head's own"


async def test_a_worker_that_cannot_be_reached_at_one_address_is_reached_at_the_next(leaving):
    home = Home({("desk", "lap"): "192.168.1.7"}, lap="fe80::2%4")
    leaving["192.168.1.7"] = "192.168.1.2"
    assert await home.ring._ring_addresses.to_head(home.links["lap"]) == "192.168.1.2"


async def test_a_worker_without_a_route_is_at_fault_for_good(leaving):
    home = Home({("desk", "lap"): "192.168.1.7"}, lap="fe80::2%4")
    reason = r"no route to lap at fe80::2%4:9: Invalid argument; no route to lap at 192\.168\.1\.7:9: Invalid"
    with pytest.raises(StageError, match=reason) as caught:
        await home.ring._ring_addresses.to_head(home.links["lap"])
    assert attributed(caught.value, PAIR, EPOCH) == RingFailed(EPOCH, "lap", str(caught.value), lasting=True)


@pytest.mark.parametrize(
    ("device", "fault", "attribution", "reason"),
    [
        ("desk", "next", ("lap", ()), "it: what is wrong"),
        ("lap", "next", (None, ("tab", "lap")), "it: what is wrong"),
        ("tab", "next", (None, ("tab",)), "it: what is wrong"),
        ("lap", SENT, (None, ("lap",)), "desk sent NaN, as lap says"),
        ("tab", SENT, (None, ("lap", "tab")), "lap sent NaN, as tab says"),
        ("lap", "ring", ("lap", ()), "it: what is wrong"),
        ("tab", "ring", ("tab", ("tab", "lap")), "it: what is wrong"),
        ("tab", "load", ("tab", ()), "it: what is wrong"),
        ("gone", "ring", ("gone", ()), "it: what is wrong"),
    ],
)
def test_an_accuser_is_a_party_to_the_fault_and_the_head_is_trusted(device, fault, attribution, reason):
    """desk, the head, sends steps to lap, lap to tab, and tab to desk."""
    text = f"{device}: the device before this one sent NaN" if fault == SENT else "it: what is wrong"
    found = attributed(StageError(text, device, fault), PAIR, EPOCH)
    assert ((found.device, found.parties), found.reason) == (attribution, reason)


def test_the_heads_process_is_trusted_about_faults_of_the_ring():
    found = attributed(SenderError("the device before this one sent what is no step"), PAIR, EPOCH)
    assert (found.device, found.parties, found.reason) == (None, ("tab",), "tab sent what is no step")
    assert attributed(AlteredStepError("step 1 came back with other rows"), PAIR, EPOCH).parties == ("lap", "tab")
    assert attributed(NotFiniteError("layers 0 to 2 gave NaN"), PAIR, EPOCH) == RingFailed(
        EPOCH, None, "layers 0 to 2 gave NaN"
    )
    assert attributed(RingError("ended"), SINGLE_DEVICE, EPOCH) == RingFailed(EPOCH, None, "ended")
    assert attributed(DiskError("full"), PAIR, EPOCH) == RingFailed(EPOCH, None, "full", lasting=True)


def test_layers_loaded_again_are_nobodys_fault_but_the_reporter_is_remembered():
    error = StageError("lap: other programs need memory of the GPU", "lap", AGAIN)
    assert attributed(error, PAIR, EPOCH) == RingFailed(EPOCH, None, str(error), parties=("lap",), again=True)
    assert attributed(LoadAgainError("as above"), PAIR, EPOCH) == RingFailed(EPOCH, None, "as above", again=True)


async def test_an_error_of_an_abandoned_ring_is_not_left_for_the_log():
    async def fails() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            raise RingError("as it ends")

    unheard: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: unheard.append(context))
    ring = Home(lap="192.168.1.7", tab="192.168.1.8").ring
    ring._form = fails
    forming = asyncio.create_task(ring.form())
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    forming.cancel()
    await asyncio.wait([forming])
    assert forming.cancelled()
    del forming
    gc.collect()
    assert unheard == []


async def test_a_first_worker_that_the_heads_process_cannot_reach_is_at_fault():
    class Blocked:
        async def listen(self, handle: Callable[[RingEvent], None]) -> NoReturn:
            raise NextDeviceError("the next device accepted no step for 30 s; it is gone or hangs")

    ring = Home(lap="192.168.1.7", tab="192.168.1.8").ring
    with pytest.raises(StageError, match="desk: the next device accepted no step") as caught:
        await ring._attend_own(Blocked(), SimpleNamespace(route=4, windows=[]))
    assert attributed(caught.value, PAIR, EPOCH) == RingFailed(EPOCH, "lap", str(caught.value))


async def test_a_worker_that_accepts_no_messages_is_lost():
    async def send(_: object) -> None:
        raise ClusterError("the device at lap:1 takes no messages")

    deaf = SimpleNamespace(name="lap", send=send, attend=lambda _: None)
    part = Stage(deaf, SimpleNamespace(epoch=1), lambda *_: None)
    for command in (part.load(), part.connect("tcp://127.0.0.1:1", "key", "key")):
        with pytest.raises(DeviceLostError, match="lap is gone: the device at lap:1 takes no messages") as caught:
            await command
        assert attributed(caught.value, PAIR, EPOCH) == RingFailed(EPOCH, "lap", str(caught.value))


async def test_a_worker_that_never_links_ends_the_ring(monkeypatch):
    """A ``Link`` that was lost with its connection is sent again; one that the worker ignores is not."""

    async def done(*_: object) -> str:
        return "10.0.0.1"

    monkeypatch.setattr(head_ring, "LINK_TIMEOUT_S", 0.0)
    ring = HeadRing(inputs_of(PAIR, devices=SimpleNamespace(workers=dict.fromkeys(workers_of(PAIR)))))
    ring._process = SimpleNamespace(send=done)
    ring._ring_addresses = SimpleNamespace(to_head=done, to_first=done, host_for=lambda *_: "10.0.0.2")
    never = asyncio.get_running_loop().create_future()
    ring._workers = {name: SimpleNamespace(connect=done, linked=never) for name in workers_of(PAIR)}
    first = workers_of(PAIR)[0]
    with pytest.raises(StageError, match=f"{first}: it does not connect to the next device"):
        await ring._link(Opened("tcp://10.0.0.1:1", "key"), dict.fromkeys(workers_of(PAIR), Loaded(port=2, key="key")))


GROUP = replace(SINGLE_DEVICE, groups=(tuple(Rank(device=name, weight=1) for name in ("desk", "lap", "tab")),))
CLOSED = "of this group closed its connection"


def in_group(monkeypatch, **errors: ClusterError) -> HeadRing:
    """The ring of ``GROUP``, whose workers reported ``errors`` and nothing else in time."""
    monkeypatch.setattr(head_ring, "REASON_S", 0.0)
    ring = HeadRing(inputs_of(GROUP))
    for name in ("lap", "tab"):
        broken = asyncio.get_running_loop().create_future()
        if name in errors:
            broken.set_result(errors[name])
        ring._workers[name] = SimpleNamespace(broken=broken)
    return ring


def accuses(device: str, other: str) -> RankLostError:
    return RankLostError(StageError(f"{device}: {other} {CLOSED}", device, "ring"), other)


@pytest.mark.parametrize(
    ("errors", "device", "reason", "between"),
    [
        ({}, "lap", f"lap {CLOSED}", ("lap", "desk")),
        ({"lap": StageError("lap: llama.cpp failed", "lap", "ring")}, "lap", "lap: llama.cpp failed", ()),
        ({"lap": accuses("lap", "tab")}, "tab", f"lap: tab {CLOSED}", ("tab", "lap")),
        ({"lap": accuses("lap", "tab"), "tab": DeviceLostError("tab is gone", "tab")}, "tab", "tab is gone", ()),
        ({"lap": accuses("lap", "desk")}, "lap", f"lap: desk {CLOSED}", ("lap", "desk")),
        ({"lap": accuses("lap", "tab"), "tab": accuses("tab", "lap")}, "tab", f"tab: lap {CLOSED}", ("tab", "lap")),
    ],
)
async def test_the_first_failed_device_of_a_group_or_its_link_is_at_fault(monkeypatch, errors, device, reason, between):
    ring = in_group(monkeypatch, **errors)
    found = await ring._cause("lap", RankError(f"lap {CLOSED}", "lap"), "desk")
    assert attributed(found, GROUP, EPOCH) == RingFailed(EPOCH, device, reason, between=between)


async def test_a_device_listens_for_a_group_only_if_it_is_in_one():
    deaf = SimpleNamespace(name="lap", attend=lambda _: None)
    first, other = (GroupRank(rank=rank, devices=["desk", "lap"], key=bytes(32)) for rank in (0, 1))
    for group, key, port in ((None, "", 0), (None, "key", 1), (first, "", 1), (first, "key", 0), (other, "key", 1)):
        part = Stage(deaf, SimpleNamespace(epoch=1, group=group), lambda *_: None)
        loaded = Loaded(port=1, key=key, group_port=port)
        part.hear(StageState(epoch=1, loaded=loaded, linked=False, broken=None))
        assert "listens in another role than its own" in str(part.broken.result())
        assert not part.loaded.done()
