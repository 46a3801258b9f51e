"""A worker on loopback: one head at a time leases it, its owner and trust come first, and it shuts down in order."""

from __future__ import annotations

import asyncio
import dataclasses
import socket
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from ipaddress import ip_interface
from pathlib import Path
from typing import TypeVar

import pytest
import zmq.asyncio

from halda import LinkProfile
from halda.assignment import in_memory
from primad.daemon import loading
from primad.daemon.layer_files import Workspace
from primad.daemon.node import Node
from primad.engine.protocol import WindowSource
from primad.errors import ClusterError
from primad.gguf.layers import LayerRef
from primad.head.members.core import StageError
from primad.head.members.stage import Stage
from primad.head.members.worker_link import Caller, WorkerLink, greet, probe
from primad.kv import keys
from primad.kv.cells import LayerCells
from primad.kv.keys import KvBlock
from primad.kv.store import KvStore
from primad.layers.cache import LayerCache
from primad.membership import types
from primad.network import messages
from primad.network.addresses import Interface
from primad.network.admin import BringCode, Describe, Done, Leave, Pause, Resume
from primad.network.contacts import Contact
from primad.network.control import HeadEnd
from primad.network.discovery import MulticastError
from primad.network.linkprobe import MeasuredLinks
from primad.network.messages import (
    OLDEST,
    PROTOCOL,
    Broken,
    Dismiss,
    HeadMessage,
    Hello,
    KvForget,
    KvHeld,
    KvHold,
    Leaving,
    Link,
    LinksMeasured,
    Load,
    Loaded,
    MeasureLinks,
    Ping,
    Pong,
    Probe,
    Probed,
    Refused,
    Release,
    Remeasured,
    StageState,
    StageStates,
    Welcome,
)
from primad.network.scopes import Scopes
from primad.network.versions import OURS, Versions
from primad.relay.place import FollowsHead, HeadPlace
from primad.ring.messages import Connect
from primad.settings.config import load_config, open_home
from primad.settings.timings import Timings, WorkerTimings
from primad.trust.identity import Identity, new_identity
from primad.trust.local_trust import LocalTrust
from primad.trust.pairing import Who
from primad.trust.pairing_links import PairingServer
from primad.trust.trust import BY_HAND, HEAD, TrustedDevice, TrustStore, trusted_now
from primad.trust.words import new_code
from primad.worker import daemon as worker_module
from primad.worker import stages as parts_module
from primad.worker.daemon import WorkerDaemon
from tests.fakes import manager
from tests.fakes.control import HOST
from tests.fakes.load import a_load
from tests.fakes.process import FakeProcesses
from tests.fakes.profile import PROFILE, KnownProfile
from tests.fakes.relay import Relay

PATIENCE_S = 180
SILENCE_S = 0.1
"""A head that sends nothing more is gone soon."""
DESK, TOWER, STRANGER = (new_identity() for _ in range(3))
FILES = WindowSource(window=0, metadata="window.gguf", layers=(), assignment=in_memory(0, 2), extra_buffers=False)
HERE, NOT_HERE = keys.block("root", None, [1, 2], [2]), keys.block("root", None, [3], [1])

Kind = TypeVar("Kind")


class FakeHead:
    """A scripted head."""

    def __init__(self, context: zmq.asyncio.Context, name: str, identity: Identity, worker: Lab) -> None:
        self.name, self.key = name, identity.public
        self._end = HeadEnd(context, HOST, worker.port, identity=identity, key=worker.identity.public)
        self._pinging: asyncio.Task[None] | None = None

    async def report_line(self, message: HeadMessage) -> None:
        await self._end.send(message)

    async def hear(self, kind: type[Kind]) -> Kind:
        """The next message of ``kind``; signs of life, progress and states are skipped, anything else fails."""
        while True:
            message = await self._end.receive()
            if isinstance(message, kind):
                return message
            passing = Pong | messages.Progress | StageStates
            assert isinstance(message, passing), f"{message}, not {kind.__name__}"

    async def next(self) -> object:
        """The next message."""
        return await self._end.receive()

    async def hello(self, session: int = 1, gone_after_s: float = 600.0) -> None:
        hello = Hello(
            protocol=PROTOCOL,
            version="0",
            device=self.name,
            session=session,
            build="a build",
            gone_after_s=gone_after_s,
        )
        await self.report_line(hello)

    async def takes(self, session: int = 1, gone_after_s: float = 600.0) -> Welcome:
        await self.hello(session, gone_after_s)
        return await self.hear(Welcome)

    async def stands(self, epoch: int, condition: Callable[[StageState], bool]) -> StageState:
        """Wait for a state of the stage in ``epoch`` for which ``condition`` holds."""
        while True:
            for state in (await self.hear(StageStates)).states:
                if state.epoch == epoch and condition(state):
                    return state

    async def loads(self, load: Load) -> Loaded:
        """Have ``load`` loaded. The stage starts again, whatever earlier states of its epoch were."""
        await self.report_line(load)
        await self.stands(load.epoch, lambda state: state.loaded is None and state.broken is None)
        loaded = (await self.stands(load.epoch, lambda state: state.loaded is not None)).loaded
        assert loaded is not None
        return loaded

    async def breaks(self, epoch: int) -> Broken:
        broken = (await self.stands(epoch, lambda state: state.broken is not None)).broken
        assert broken is not None
        return broken


class Lab:
    """A running worker and heads that talk to it; a worker that ``is_new`` has no profile."""

    def __init__(
        self,
        home: Path,
        processes: FakeProcesses,
        context: zmq.asyncio.Context,
        *,
        timings: Timings = Timings(),
        versions: Versions = OURS,
        is_new: bool = False,
        relay: FollowsHead | None = None,
        **flags: object,
    ) -> None:
        self.processes = processes
        self.identity = new_identity()
        self.home = home
        self.printed: list[str] = []
        self.context = context
        self._news = asyncio.Condition()
        config = load_config({"home": home, "name": "lap", "host": HOST, "port": 0} | flags, {})
        open_home(config)
        self.trust = TrustStore(home, self.identity, LocalTrust(home / "local"))
        for name, identity in (("desk", DESK), ("tower", TOWER)):
            self.trust.add(trusted_now(name, identity.public, BY_HAND, HEAD))
        node = Node(
            config=config,
            workspace=Workspace(
                cache=LayerCache(config.layers),
                kv=KvStore(home / "cells"),
                run=config.run,
                usage=home / "v",
                build="a build",
            ),
            identity=self.identity,
            trust=self.trust,
            timings=timings,
        )
        self.profile = KnownProfile(lambda name: dataclasses.replace(PROFILE, device=name))
        if is_new:
            self.profile.measured.clear()
        self.daemon = WorkerDaemon(
            node,
            profile=self.profile,
            report_line=self._report_line,
            versions=versions,
            relay=relay,
        )
        self.port = self.daemon._end.port
        self.running = asyncio.create_task(self.daemon.run())

    def _report_line(self, line: str) -> None:
        self.printed.append(line)
        self._task = asyncio.create_task(self._notify())

    async def _notify(self) -> None:
        async with self._news:
            self._news.notify_all()

    async def emits(self, start: str) -> str:
        """Wait for the first line to the owner that begins with ``start``."""
        async with self._news:
            await self._news.wait_for(lambda: any(line.startswith(start) for line in self.printed))
        return next(line for line in self.printed if line.startswith(start))

    def loses_head(self) -> None:
        """From now on the silence of its head has lasted too long; however slow the machine, it had not before."""
        assert self.daemon._lease is not None
        self.daemon._lease.gone_after_s = 0.0

    def head(self, name: str = "desk", identity: Identity = DESK) -> FakeHead:
        return FakeHead(self.context, name, identity, self)

    async def admin(self, request: object) -> object:
        return await self.daemon._administer(request)


class NoDiscovery:
    """There is no multicast here."""

    def __init__(self, host: str, interface: str | None, **_: object) -> None:
        raise ClusterError("mDNS cannot be used")


@pytest.fixture
def lab(monkeypatch, tmp_path) -> Callable[..., AbstractAsyncContextManager[Lab]]:
    processes = FakeProcesses()
    monkeypatch.setattr(worker_module, "Discovery", NoDiscovery)
    monkeypatch.setattr(loading, "RingProcess", processes)
    monkeypatch.setattr(loading, "place_windows", lambda place, specs, *_: [FILES] * len(specs))
    monkeypatch.setattr(loading, "read_header", lambda _: None)

    async def nothing_missing(*_: object) -> list[LayerRef]:
        return []

    async def nothing_changed(*_: object) -> None:
        return None

    monkeypatch.setattr(loading, "missing_layers", nothing_missing)
    monkeypatch.setattr(parts_module, "check_layers", nothing_changed)

    @asynccontextmanager
    async def make(**flags: object) -> AsyncIterator[Lab]:
        context = zmq.asyncio.Context()
        try:
            async with asyncio.timeout(PATIENCE_S):
                made = Lab(tmp_path, processes, context, **flags)
                try:
                    yield made
                finally:
                    made.running.cancel()
                    await asyncio.wait([made.running])
                if not made.running.cancelled():
                    made.running.result()
                assert not processes.alive, "a ring process was left behind"
        finally:
            context.destroy(linger=0)

    return make


# ---- a service manager ----------------------------------------------------------------------------------------------


@pytest.mark.skipif(sys.platform == "win32", reason="systemd is Linux's")
async def test_a_service_manager_is_notified_that_a_worker_is_ready_alive_and_stopping(lab, monkeypatch):
    async def once(ear: socket.socket) -> None:
        async with lab():
            assert await asyncio.to_thread(manager.hear, ear, "READY=1") == "READY=1\nSTATUS=waiting for a head"
            assert await asyncio.to_thread(manager.hear, ear, "WATCHDOG=1")
        assert await asyncio.to_thread(manager.hear, ear, "STOPPING=1")

    with manager.listening() as ear:
        monkeypatch.setenv("NOTIFY_SOCKET", ear.getsockname())
        monkeypatch.setenv("WATCHDOG_USEC", "200000")
        await once(ear)


# ---- pairing while it runs ------------------------------------------------------------------------------------------


async def test_a_code_from_its_owner_pairs_a_running_worker(lab):
    async with lab() as lap:
        code, paired = new_code(), list[TrustedDevice]()
        den = Who(device="den", key=STRANGER.public, cluster=lap.daemon._config.cluster, version="0.1.0")
        server = PairingServer(HOST, code, den, paired.append)
        shown = asyncio.create_task(server.run())
        answer = await lap.admin(BringCode(code=str(code), at=f"{HOST}:{server.port}"))
        await shown
        assert answer == Done(text="lap is paired with den")
        assert lap.trust.is_head(STRANGER.public), "a worker pairs with those for whom it is to work"
        assert [device.device for device in paired] == ["lap"]


# ---- one head -------------------------------------------------------------------------------------------------------


class Followed:
    """Stands in for a worker's relay; records the heads that it follows."""

    url, listens_at = "http://127.0.0.1:8080", "127.0.0.1:8080"

    def __init__(self) -> None:
        self.heads: list[tuple[str, int] | None] = []

    def follow(self, place: HeadPlace | None) -> None:
        assert place is None or (place.key, place.address) == (DESK.public, HOST)
        self.heads.append(None if place is None else (place.name, place.session))


async def test_a_relay_follows_the_head_of_the_lease_through_its_restart_until_it_goes(lab):
    relay = Followed()
    async with lab(relay=relay) as worker:
        await worker.emits("requests to http://127.0.0.1:8080 are relayed to the head")
        desk = worker.head()
        assert (await desk.takes()).api == relay.url
        await desk.takes(session=2, gone_after_s=SILENCE_S)
        await worker.emits("head desk went away")
        assert relay.heads == [("desk", 1), ("desk", 2), None]


async def test_a_head_probes_sends_hello_and_then_work(lab):
    async with lab() as lap:
        desk = lap.head()
        await desk.report_line(Probe(protocol=PROTOCOL, oldest=PROTOCOL, version="0", device="desk"))
        assert (await desk.hear(Probed)).device == "lap"
        welcome = await desk.takes()
        assert (welcome.profile.device, welcome.build) == ("lap", "a build")
        await desk.loads(a_load(1))
        await desk.report_line(Ping(status=False))
        await desk.hear(Pong)
        described = await lap.admin(Describe())
        assert described.status["devices"] == {"lap": "computes for desk"}
        await desk.report_line(Release(epoch=1))
        await desk.report_line(Ping(status=False))
        await desk.hear(Pong)
        assert (await lap.admin(Describe())).status["devices"] == {"lap": "ready for desk"}


async def test_a_device_under_measurement_replies_at_once_and_accepts_a_head_afterwards(lab):
    async with lab(is_new=True) as lap:
        desk = lap.head()
        await desk.report_line(Probe(protocol=PROTOCOL, oldest=PROTOCOL, version="0", device="desk"))
        assert (await desk.hear(Probed)).device == "lap"
        await desk.hello()
        assert (await desk.hear(Refused)).reason == "lap is being measured, which takes some seconds"
        assert (await lap.admin(Describe())).status["devices"] == {"lap": "measuring"}
        lap.profile.measured.set()
        await lap.profile.used.wait()
        assert (await desk.takes()).profile.device == "lap"


async def test_a_device_with_corrected_figures_notifies_its_head(lab):
    async with lab() as lap:
        desk = lap.head()
        welcome = await desk.takes()
        better = dataclasses.replace(welcome.profile, ram_read_bytes_per_s=2e10, ram_available_bytes=1)
        lap.profile.of = lambda name: better
        lap.profile.refined.set()
        reported = (await desk.hear(Remeasured)).profile
        assert reported == dataclasses.replace(welcome.profile, ram_read_bytes_per_s=2e10)
        await desk.loads(a_load(1))


async def test_figures_corrected_without_a_head_are_kept_for_the_next_one(lab):
    async with lab() as lap:
        better = dataclasses.replace(PROFILE, device="lap", ram_read_bytes_per_s=2e10)
        lap.profile.of = lambda name: better
        lap.profile.refined.set()
        assert (await lap.head().takes()).profile == better


async def test_a_second_head_is_refused_with_the_name_of_the_first(lab):
    async with lab() as lap:
        await lap.head().takes()
        tower = lap.head("tower", TOWER)
        await tower.hello()
        assert (await tower.hear(Refused)).reason == "lap works for the head desk"
        await tower.report_line(a_load(1))
        assert "works for another head" in (await tower.hear(Refused)).reason
        assert lap.processes.all == []


async def test_work_without_a_hello_is_refused(lab):
    async with lab() as lap:
        desk = lap.head()
        for message in (a_load(1), Release(epoch=1), Ping(status=False), Dismiss()):
            await desk.report_line(message)
            assert (await desk.hear(Refused)).reason.endswith("say hello first")


async def test_a_returning_head_takes_over_and_finds_its_layers_loaded(lab):
    async with lab() as lap:
        desk = lap.head()
        await desk.takes(session=1)
        await desk.loads(a_load(7))
        again = lap.head()
        await again.takes(session=2)
        assert not lap.daemon._stages.is_serving
        await again.loads(a_load(1))
        (process,) = lap.processes.all
        assert len(process.keys) == 2, "opened, then reopened"


async def test_a_head_that_goes_silent_loses_the_worker_and_another_may_come(lab):
    async with lab() as lap:
        desk = lap.head()
        await desk.takes()
        await desk.loads(a_load(1))
        lap.loses_head()
        await lap.emits("head desk went away")
        assert not lap.daemon._stages.is_serving
        assert len(lap.processes.alive) == 1, "it may come back soon"
        await desk.report_line(Ping(status=False))
        assert (await desk.hear(Refused)).reason.endswith("say hello first")
        await lap.head("tower", TOWER).takes()


async def test_a_dead_ring_process_is_reported_and_the_daemon_continues(lab):
    async with lab() as lap:
        desk = lap.head()
        await desk.takes()
        await desk.loads(a_load(1))
        lap.processes.all[0].die("the ring process was ended by SIGABRT")
        assert (await desk.breaks(1)).fault == "ring"
        await desk.report_line(Release(epoch=1))
        await desk.loads(a_load(2))


# ---- reset connections ----------------------------------------------------------------------------------------------


@asynccontextmanager
async def linked_over(relay: Relay, lap: Lab, context: zmq.asyncio.Context) -> AsyncIterator[WorkerLink]:
    caller = Caller(
        context=context,
        identity=DESK,
        device="desk",
        session=1,
        build="a build",
        gone_after_s=600.0,
        ping_interval_s=0.02,
    )

    def alive(event: types.Event) -> None:
        assert isinstance(event, types.Heard), event

    end, _ = await probe(caller, [(HOST, relay.port)], [lap.identity.public])
    link = await greet(caller, end, alive, "lap")
    try:
        yield link
    finally:
        link.close()


@pytest.mark.parametrize("way", ["there", "back"])
async def test_messages_lost_with_a_reset_connection_are_sent_again(lab, way):
    """``Load`` and ``Link`` on their way to the worker, their outcome on its way back."""
    async with lab() as lap, Relay(lap.port) as relay, linked_over(relay, lap, lap.context) as link:
        part = Stage(link, a_load(1), lambda *_: None)
        relay.swallow(way)
        await part.load()
        await relay.swallows(1000)
        assert not part.loaded.done()
        relay.reset()
        loaded = await part.loaded
        (process,) = lap.processes.all
        assert (loaded.port, [loaded.key]) == (4000 + process.number, process.keys), "loaded once"

        relay.swallow(way)
        await part.connect("tcp://127.0.0.1:5", TOWER.public, TOWER.public)
        await relay.swallows(1000)
        assert not part.linked.done()
        relay.reset()
        await part.linked
        assert await process.reported(Connect) == Connect("tcp://127.0.0.1:5", TOWER.public, TOWER.public)
        assert not part.broken.done()


async def test_a_break_lost_with_a_reset_connection_is_sent_again(lab):
    async with lab() as lap, Relay(lap.port) as relay, linked_over(relay, lap, lap.context) as link:
        part = Stage(link, a_load(1), lambda *_: None)
        await part.load()
        await part.loaded
        relay.swallow("back")
        lap.processes.all[0].die("the ring process was ended by SIGABRT")
        await relay.swallows(1000)
        assert not part.broken.done()
        relay.reset()
        error = await part.broken
        assert isinstance(error, StageError)
        assert (error.fault, str(error)) == ("ring", "lap: the ring process was ended by SIGABRT")


async def test_a_release_lost_with_a_reset_connection_is_sent_again(lab, monkeypatch):
    async with lab() as lap, Relay(lap.port) as relay, linked_over(relay, lap, lap.context) as link:
        part = Stage(link, a_load(1), lambda *_: None)
        await part.load()
        await part.loaded
        release, released = lap.daemon._stages.release, asyncio.Event()

        async def noted(epoch: int) -> None:
            await release(epoch)
            if epoch == 1:
                released.set()

        monkeypatch.setattr(lap.daemon._stages, "release", noted)
        relay.swallow("there")
        await part.release()
        await relay.swallows(200)
        assert lap.daemon._stages.is_serving
        relay.reset()
        following = Stage(link, a_load(2), lambda *_: None)
        await following.load()
        await following.loaded
        await released.wait()
        assert lap.daemon._stages.standing.epochs == [2]


async def test_a_ping_with_an_old_revision_gets_the_states_and_others_do_not(lab):
    async with lab() as lap:
        desk = lap.head()
        await desk.takes()
        loaded = await desk.loads(a_load(1))
        now = lap.daemon._stages.standing.revision
        for known in (0, now - 1, now + 1):
            await desk.report_line(Ping(status=False, number=9, revision=known))
            states = await desk.next()
            state = StageState(epoch=1, loaded=loaded, linked=False, broken=None)
            assert states == StageStates(revision=now, states=[state])
            assert await desk.next() == Pong(9, now)
        await desk.report_line(Ping(status=False, number=10, revision=now))
        assert await desk.next() == Pong(10, now)


async def test_a_head_that_sends_hello_again_gets_no_earlier_states(lab):
    async with lab() as lap:
        desk = lap.head()
        await desk.takes(session=1)
        await desk.loads(a_load(1))
        again = lap.head()
        await again.takes(session=2)
        await again.report_line(Ping(status=False, number=1))
        states = await again.next()
        assert isinstance(states, StageStates)
        assert states.states == []


# ---- trust ----------------------------------------------------------------------------------------------------------


async def test_a_stranger_gets_no_reply(lab):
    async with lab() as lap:
        stranger = lap.head("stranger", STRANGER)
        await stranger.report_line(Probe(protocol=PROTOCOL, oldest=PROTOCOL, version="0", device="stranger"))
        with pytest.raises(ClusterError, match="no response"):
            await stranger._end.receive(0.4)
        await lap.head().takes()


async def test_a_revoked_key_is_refused_at_once_on_an_open_connection(lab):
    async with lab() as lap:
        desk = lap.head()
        await desk.takes()
        await desk.loads(a_load(1))
        lap.trust.revoke("desk")
        for message in (
            Ping(status=True),
            a_load(2),
            Probe(protocol=PROTOCOL, oldest=PROTOCOL, version="0", device="desk"),
        ):
            await desk.report_line(message)
            assert (await desk.hear(Refused)).reason == "lap no longer trusts this device"
        await lap.emits("head desk is no longer trusted as a head")
        assert not lap.daemon._stages.is_serving, "its earlier requests end too"


# ---- versions -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("protocol", "oldest", "fits"), [(5, 4, True), (4, 3, True), (6, 5, True), (3, 2, False)])
async def test_a_head_of_another_version_gets_a_reply_and_the_owner_learns_of_a_gap(lab, protocol, oldest, fits):
    async with lab(versions=Versions(primad="1", protocol=5, oldest=4)) as lap:
        desk = lap.head()
        await desk.report_line(Probe(protocol=protocol, oldest=oldest, version="0.0.7", device="desk"))
        answer = await desk.hear(Probed)
        assert (answer.protocol, answer.oldest) == (5, 4)
        refused = [line for line in lap.printed if line.startswith("refused")]
        assert len(refused) == (0 if fits else 1)
        if not fits:
            assert "desk runs primad 0.0.7 (protocol 3), lap runs" in refused[0]


async def test_a_head_with_another_llama_cpp_is_reported_to_the_owner(lab):
    async with lab() as lap:
        desk = lap.head()
        hello = Hello(protocol=PROTOCOL, version="0", device="desk", session=1, build="another", gone_after_s=60)
        await desk.report_line(hello)
        await desk.hear(Welcome)
        assert "llama.cpp differs: a build here, another on desk" in await lap.emits("llama.cpp differs")


# ---- the owner ------------------------------------------------------------------------------------------------------


async def test_a_device_that_is_paused_refuses_with_the_reason(lab):
    async with lab() as lap:
        assert "paused until 'primad resume'" in (await lap.admin(Pause())).text
        desk = lap.head()
        await desk.hello()
        assert (await desk.hear(Refused)).reason == "lap paused by its owner; 'primad resume' ends that"
        await lap.admin(Resume())
        await desk.takes()


async def test_a_pause_hands_over_first_then_unloads(lab):
    async with lab() as lap:
        desk = lap.head()
        await desk.takes()
        await desk.loads(a_load(1))
        await lap.admin(Pause())
        assert (await desk.hear(Leaving)).reason == "paused by its owner"
        assert lap.daemon._stages.is_serving, "until others do its work"
        await desk.report_line(Dismiss())
        assert "paused by its owner" in (await desk.hear(Refused)).reason
        await lap.processes.all[0].ended()


async def test_a_leaving_worker_continues_until_it_is_dismissed(lab):
    async with lab() as lap:
        desk = lap.head()
        await desk.takes()
        await desk.loads(a_load(1))
        assert (await lap.admin(Leave())).text == "lap hands over and ends"
        assert (await lap.admin(Leave())).text == "lap is ending already"
        assert (await desk.hear(Leaving)).reason == "its owner ended it"
        await desk.report_line(Ping(status=False))
        await desk.hear(Pong)
        assert not lap.running.done()
        tower = lap.head("tower", TOWER)
        await tower.hello()
        assert (await tower.hear(Refused)).reason == "lap works for the head desk"
        await desk.report_line(Dismiss())
        await lap.running


async def test_a_worker_that_nobody_dismisses_ends_after_a_while(lab):
    async with lab(timings=Timings(worker=WorkerTimings(hand_over_timeout_s=0.2))) as lap:
        desk = lap.head()
        await desk.takes()
        await desk.loads(a_load(1))
        lap.daemon.leave()
        await lap.running
        assert "head desk found no replacement within 0.2 s" in lap.printed


@pytest.mark.parametrize("greeted", [False, True])
async def test_a_worker_that_computes_nothing_leaves_at_once(lab, greeted):
    async with lab() as lap:
        desk = lap.head()
        if greeted:
            await desk.takes()
        assert lap.daemon.leave()
        await lap.running
        if greeted:
            await desk.hear(Leaving)


async def test_a_worker_that_measures_a_silent_link_leaves_at_once(lab, monkeypatch):
    started = asyncio.Event()

    async def without_end(*_: object, **__: object) -> list[LinkProfile]:
        started.set()
        return await asyncio.Future()

    monkeypatch.setattr(worker_module, "measure_links", without_end)
    async with lab() as lap:
        desk = lap.head()
        await desk.takes()
        await desk.report_line(MeasureLinks(targets=[]))
        await started.wait()
        lap.daemon.leave()
        await lap.running


async def test_a_worker_that_ends_sends_goodbye_while_its_ring_process_ends(lab, monkeypatch):
    made: list[Lab] = []

    class Patient:
        def __init__(self, host: str, interface: str | None, **_: object) -> None:
            assert host == HOST

        async def announce(self, name: str, **_: object) -> str:
            return name

        async def close(self) -> None:
            await made[0].processes.all[0].ended()

    monkeypatch.setattr(worker_module, "Discovery", Patient)
    async with lab() as lap:
        made.append(lap)
        desk = lap.head()
        await desk.takes()
        await desk.loads(a_load(1))
        lap.running.cancel()
        await asyncio.wait([lap.running])


async def test_a_worker_that_ends_during_a_pause_leaves_no_task(lab):
    async with lab() as lap:
        desk = lap.head()
        await desk.takes()
        await desk.loads(a_load(1))
        await lap.admin(Pause())
        await desk.hear(Leaving)
        lap.running.cancel()
        await asyncio.wait([lap.running])
        assert not [task for task in asyncio.all_tasks() if "_stand_down" in str(task.get_coro())]


async def test_a_leaving_worker_does_not_wait_for_a_vanished_head(lab):
    async with lab() as lap:
        desk = lap.head()
        await desk.takes()
        await desk.loads(a_load(1))
        lap.daemon.leave()
        await desk.hear(Leaving)
        lap.loses_head()
        await lap.running


async def test_a_worker_that_cannot_announce_itself_ends_with_the_reason(lab, monkeypatch):
    """Parts that were made for it but not started do not keep it from ending."""

    class Crowded:
        def __init__(self, host: str, interface: str | None, **_: object) -> None:
            assert host == HOST

        async def announce(self, name: str, **_: object) -> str:
            raise ClusterError("--name lap: cannot be announced")

        async def close(self) -> None:
            """It announced nothing."""

    monkeypatch.setattr(worker_module, "Discovery", Crowded)
    async with lab() as lap:
        with pytest.raises(ClusterError, match="--name lap: cannot be announced"):
            await lap.running
        lap.running = asyncio.create_task(asyncio.sleep(0))


async def test_a_link_local_address_from_the_head_gets_the_local_scope_and_is_returned_without(lab, monkeypatch):
    measured: list[list[str]] = []

    async def measure(_: object, __: object, source: str, targets: list[Contact], **___: object) -> list[LinkProfile]:
        measured.extend(target.addresses for target in targets)
        link = LinkProfile(source=source, target="tower", address="fe80::9%5", round_trip_s=1.0, bytes_per_s=1.0)
        return MeasuredLinks(links=[link], unreached=[])

    monkeypatch.setattr(worker_module, "measure_links", measure)
    async with lab() as lap:
        interfaces = (
            Interface(name="eth0", index=3, up=True, addresses=(ip_interface("fe80::20/64"),)),
            Interface(name="eth1", index=5, up=True, addresses=(ip_interface("fe80::21/64"),)),
        )
        lap.daemon._end.scopes = Scopes(lambda: interfaces)
        desk = lap.head()
        await desk.takes()
        target = Contact(device="tower", key=TOWER.public, addresses=["fe80::9"], port=4711)
        await desk.report_line(MeasureLinks(targets=[target]))
        (link,) = (await desk.hear(LinksMeasured)).links
        assert (link.address, measured) == ("fe80::9", [["fe80::9%3", "fe80::9%5"]])
        await desk.loads(a_load(1))
        await desk.report_line(Link(epoch=1, address="tcp://[fe80::9]:5", key=TOWER.public, sender=TOWER.public))
        (process,) = lap.processes.alive
        way = "tcp://[fe80::9%5]:5"  # the address where it was reached
        assert await process.reported(Connect) == Connect(way, TOWER.public, TOWER.public)


async def test_messages_of_an_abandoned_connection_are_ignored(lab):
    async with lab() as lap:
        before, after = lap.head(), lap.head()
        await before.takes()
        await after.takes()
        await before.report_line(a_load(1))  # as after a cable was out
        await before.report_line(Probe(protocol=PROTOCOL, oldest=OLDEST, version="0", device="desk"))
        await before.hear(Probed)  # it has arrived
        await after.report_line(MeasureLinks(targets=[]))
        await after.hear(LinksMeasured)
        await after.report_line(Ping(status=False, number=1))
        assert (await after.hear(Pong)).revision == 0
        assert lap.processes.alive == []


async def test_the_latest_connection_of_a_session_counts(lab):
    async with lab() as lap:
        before, after = lap.head(), lap.head()
        await before.takes()
        await after.report_line(Ping(status=False, number=1))
        await after.hear(Pong)
        await before.report_line(MeasureLinks(targets=[]))
        await before.report_line(Probe(protocol=PROTOCOL, oldest=OLDEST, version="0", device="desk"))
        await before.hear(Probed)
        await after.report_line(Ping(status=False, number=2))
        assert await after.hear(Pong) == Pong(2, 0)


async def test_a_repeated_measurement_request_continues_and_one_of_other_links_replaces_it(lab, monkeypatch):
    started = []

    async def without_end(*arguments: object, **_: object) -> list[LinkProfile]:
        started.append(arguments)
        await asyncio.Event().wait()
        return []

    monkeypatch.setattr(worker_module, "measure_links", without_end)
    async with lab() as lap:
        desk = lap.head()
        await desk.takes()
        other = Contact(device="tower", key=TOWER.public, addresses=[HOST], port=7)
        for number, (targets, count) in enumerate([([], 1), ([], 1), ([other], 2)], 1):
            await desk.report_line(MeasureLinks(targets=targets))
            await desk.report_line(Ping(status=False, number=number))
            await desk.hear(Pong)
            assert len(started) == count


async def test_a_worker_that_cannot_announce_itself_still_waits_for_heads(lab, monkeypatch):
    class Mute:
        def __init__(self, *_: object, **__: object) -> None:
            """mDNS works at first."""

        async def announce(self, *_: object, **__: object) -> str:
            raise MulticastError("mDNS did not start")

        async def close(self) -> None:
            closed.append(self)

    closed: list[Mute] = []
    monkeypatch.setattr(worker_module, "Discovery", Mute)
    async with lab() as lap:
        await lap.emits("lap is waiting for a head")
        assert "mDNS did not start; heads find this device by --device only" in lap.printed
        await lap.head().takes()
    assert len(closed) == 1


# ---- KV cache --------------------------------------------------------------------------------------------------------


def cells_of(block: KvBlock) -> list[LayerCells]:
    rows = block.end - block.start
    return [
        LayerCells(
            layer=layer, start=0, end=rows, key_type=1, value_type=1, keys=b"k" * 8 * rows, values=b"v" * 8 * rows
        )
        for layer in (2, 3)
    ]


def hold(number: int, *blocks: KvBlock, sources: list[Contact] | None = None) -> KvHold:
    return KvHold(
        number=number, blocks=list(blocks), layers=[(2, 4)], sources=sources or [], timeout_s=0.5, verify=False
    )


async def test_kv_blocks_are_held_for_a_head_until_it_forgets_them(lab):
    async with lab() as lap:
        desk = lap.head()
        await desk.takes()
        store = lap.daemon._held.store
        store.put(HERE, cells_of(HERE))
        await desk.report_line(hold(1, HERE, NOT_HERE))
        assert await desk.hear(KvHeld) == KvHeld(number=1, held=[True, False])
        store.clear()
        assert store.layers(HERE.key), "it is held"
        await desk.report_line(KvForget(keys=[HERE.key], lasting=True))
        await desk.report_line(hold(2, HERE))
        assert await desk.hear(KvHeld) == KvHeld(number=2, held=[False])


@pytest.mark.parametrize("has_cache", [True, False])
async def test_without_its_head_only_a_cache_keeps_kv_blocks(lab, tmp_path, has_cache):
    async with lab() as lap:
        if has_cache:
            lap.daemon._held.store.limit_bytes = 1 << 20
        desk = lap.head()
        await desk.takes()
        store = lap.daemon._held.store
        store.put(HERE, cells_of(HERE))
        await desk.report_line(hold(1, HERE))
        assert (await desk.hear(KvHeld)).held == [True]
        lap.loses_head()
        await lap.emits("head desk went away")
        await lap.head("tower", TOWER).takes()
        assert bool(store.layers(HERE.key)) == has_cache
