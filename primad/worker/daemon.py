"""``primad join``: announces this device, waits for a head, computes its windows, and waits again when it goes away.

One head at a time holds the lease, for as long as it sends signs of life. Whatever happens to a ring, the daemon
continues, and keeps what it has loaded for a head that comes back.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

import msgspec
import zmq.asyncio

from halda import DeviceProfile
from primad.daemon.kv_blocks import HeldBlocks
from primad.daemon.measuring import OwnProfile
from primad.daemon.memory_watch import MemoryWatch, ram_room
from primad.daemon.node import Node
from primad.daemon.owner import OwnerPause
from primad.daemon.pairing_service import PairingService
from primad.daemon.reporter import ReportLine
from primad.errors import ClusterError, printable
from primad.layers.server import LayerServer
from primad.network.admin import (
    AdminReply,
    AdminRequest,
    AdminServer,
    BringCode,
    Describe,
    Described,
    Done,
    Leave,
    OpenPairing,
    Pause,
    Resume,
)
from primad.network.contacts import Contact
from primad.network.control import WorkerEnd
from primad.network.discovery import Discovery, MulticastError
from primad.network.gate import Gate
from primad.network.linkprobe import measure_links
from primad.network.messages import (
    Dismiss,
    DraftInput,
    DraftModelState,
    Echo,
    EncodedWanted,
    HeadMessage,
    Hello,
    Introduce,
    KvForget,
    KvHeld,
    KvHold,
    Leaving,
    Link,
    LinkGroup,
    LinksMeasured,
    Load,
    LoadDraft,
    LoadMmproj,
    MeasureLinks,
    MemoryLow,
    MemoryRecovered,
    MmprojState,
    PictureChunk,
    Ping,
    Pong,
    Probe,
    Probed,
    Refused,
    Release,
    ReleaseDraft,
    ReleaseMmproj,
    Remeasured,
    Revoked,
    Welcome,
    WorkerMessage,
)
from primad.network.scopes import bare, unmapped
from primad.network.versions import OURS, Versions, build_gap, version_gap
from primad.relay.place import FollowsHead, HeadPlace
from primad.ring.messages import RankAddress
from primad.settings.config import DEFAULT_CONTROL_PORT, is_loopback
from primad.settings.profiles import with_speeds
from primad.system.notify import report
from primad.system.tasks import Tasks
from primad.trust.trust import HEAD
from primad.worker.drafting import DraftService
from primad.worker.encoding import EncodingService
from primad.worker.stages import Stages

_MAX_RETIRED: Final = 256
_MAX_HOLDS: Final = 4
"""Requests of a head for KV blocks that are processed at a time."""


@dataclass(slots=True)
class _Lease:
    """The lease of a head: its connection, key, name and session, and the profile that it was given.

    ``introduced`` are the keys of the devices that the head trusts. They may do here what a ring needs, as long as the
    head may lead.
    """

    peer: bytes
    key: str
    head: str
    session: int
    gone_after_s: float
    heard_s: float
    profile: DeviceProfile
    introduced: frozenset[str]
    why_idle: str = ""


class WorkerDaemon:
    """A worker. It is announced immediately; heads wait until its ``profile`` is measured."""

    def __init__(
        self,
        node: Node,
        *,
        profile: OwnProfile,
        report_line: ReportLine,
        versions: Versions = OURS,
        relay: FollowsHead | None = None,
    ) -> None:
        config, identity, trust = node.config, node.identity, node.trust
        self._config, self._identity, self._trust = config, identity, trust
        self._build, self._timings, self._versions = node.workspace.build, node.timings, versions
        self._profile, self._report_line, self._relay = profile, report_line, relay
        self._name = config.name
        self._is_measured = profile.is_known
        self._discovery: Discovery | None = None
        self._context = zmq.asyncio.Context()
        self._end = WorkerEnd(
            self._context, config.host, config.port, DEFAULT_CONTROL_PORT, identity=identity, leads=trust.is_head
        )
        self._layers = LayerServer(
            self._context,
            config.host,
            identity,
            node.workspace.cache.reader,
            cells=node.workspace.kv,
            bytes_per_s=config.transfer_limit_bytes_per_s,
            allows=self._admits,
        )
        self._held = HeldBlocks(node, self._context)
        self._memory_watch = MemoryWatch(
            partial(ram_room, config.limits), self._memory_recovered, look_every_s=node.timings.memory_look_every_s
        )
        self._stages = Stages(
            node,
            context=self._context,
            memory_watch=self._memory_watch,
            notify=self._notify_of_ring,
            report_line=report_line,
        )
        self._draft_service = DraftService(
            node, context=self._context, number=self._stages.next_number, notify=self._notify, report_line=report_line
        )
        self._encoding = EncodingService(
            node, context=self._context, number=self._stages.next_number, notify=self._notify, report_line=report_line
        )
        self._pause = OwnerPause(config.home, pause_on_battery=config.pause_on_battery, changed=self._on_pause)
        self._pairing = PairingService(node, report_line, HEAD)
        self._lease: _Lease | None = None
        self._revoked_by: dict[str, str] = {}
        """Names of the heads that revoked this device, by key. A head that says hello again trusts it again."""
        self._retired: deque[bytes] = deque(maxlen=_MAX_RETIRED)
        """Connections of replaced heads: messages that still arrive on them are ignored."""
        self._measuring: asyncio.Task[None] | None = None
        self._targets: list[Contact] = []
        """The devices to which it measures its links."""
        self._dismissed = asyncio.Event()
        self._stop = asyncio.Event()
        self._tasks, self._holding = Tasks(), Tasks()
        self._turns = asyncio.Semaphore(_MAX_HOLDS)
        self._gpu_care = node.gpu_care
        self._gpu_care.attend(
            lambda: profile.now(self._name),
            report_line=report_line,
            changed=self._on_gpu,
            recovered=self._gpu_recovered,
        )
        self._report_next_s: dict[str, float] = {}

    async def run(self) -> None:
        """Serve until cancelled or ``leave`` was requested. Raises ``ClusterError`` if a port cannot be used."""
        async with AsyncExitStack() as stack:
            stack.callback(self._context.destroy, linger=0)  # also sockets of tasks that had not begun
            await stack.enter_async_context(Gate(self._context, self._admits))
            stack.callback(self._end.close)
            stack.push_async_callback(self._stages.close)
            stack.push_async_callback(self._draft_service.end)
            stack.push_async_callback(self._encoding.end)
            stack.push_async_callback(self._tasks.close)
            stack.push_async_callback(self._pairing.close)
            sight = await stack.enter_async_context(AsyncExitStack())
            await self._announce(sight)
            stack.enter_context(self._trust.announce_locally(self._name))
            async with asyncio.TaskGroup() as group:
                tasks = [
                    group.create_task(self._hear(group)),
                    group.create_task(self._measure()),
                    group.create_task(self._watch_lease()),
                    group.create_task(self._layers.run()),
                    group.create_task(AdminServer(self._identity, self._config.home, self._administer).run()),
                    group.create_task(self._pause.watch_battery()),
                    group.create_task(self._memory_watch.run()),
                    group.create_task(self._gpu_care.run()),
                    group.create_task(report(self._state)),
                ]
                try:
                    await self._stop.wait()
                    await self._hand_over("its owner ended it")
                finally:
                    self._stop_measuring()
                    for task in tasks:
                        task.cancel()
                    # Concurrently: saying goodbye takes a while, and so does ending a ring process.
                    await asyncio.gather(sight.aclose(), self._end_stages())

    def leave(self) -> bool:
        """Hand over this device's layers, then end ``run``. False if that was requested before."""
        if self._stop.is_set():
            return False
        self._stop.set()
        return True

    async def _end_stages(self) -> None:
        await self._tasks.close()
        await self._end_holding()
        await self._draft_service.end()
        await self._encoding.end()
        await self._stages.close()

    async def _announce(self, stack: AsyncExitStack) -> None:
        try:
            discovery = self._new_discovery()
            stack.push_async_callback(discovery.close)
            self._name = await discovery.announce(
                self._config.name,
                cluster=self._config.cluster,
                role="worker",
                version=self._versions.primad,
                port=self._end.port,
                key=self._identity.public,
                is_measuring=not self._is_measured,
                api="" if self._relay is None else self._relay.listens_at,
            )
        except MulticastError as exc:
            self._report_line(f"{exc}; heads find this device by --device only")
        else:
            self._discovery = discovery
            self._pairing.use(discovery)
        self._pairing.name = self._name
        self._report_line(f"{self._name} is waiting for a head (cluster {self._config.cluster}, port {self._end.port})")
        if self._relay is not None:
            self._report_line(f"requests to {self._relay.url} are relayed to the head")
        if self._pause.paused is not None:
            self._report_line(f"{self._name} {self._pause.paused}")
        if not self._trust.entries() and not is_loopback(self._config.host):
            self._report_line("no device is trusted yet; 'primad join --code' takes the code that 'primad serve' shows")

    async def _measure(self) -> None:
        """Measure this device; heads greet it after that is announced."""
        if not self._is_measured:
            await self._profile.measure()
            self._is_measured = True
            if self._discovery is not None:
                await self._discovery.end_measuring()
        if await self._profile.refine() and self._lease is not None:
            better = await self._profile_now()
            lease = self._lease
            if lease is not None:  # the same one, or a new one, which has the speeds already
                lease.profile = with_speeds(lease.profile, better)
                await self._notify(Remeasured(lease.profile))

    async def _profile_now(self) -> DeviceProfile:
        """Return this device's current profile, with its GPU as far as it is trusted."""
        return self._gpu_care.now(await asyncio.to_thread(self._profile.now, self._name))

    def _on_gpu(self) -> None:
        self._tasks.start(self._notify_gpu())

    async def _gpu_recovered(self) -> None:
        """Update the profile: other programs took GPU memory, or freed it."""
        gpus = (await self._profile_now()).gpus
        if self._lease is not None:
            self._lease.profile = self._lease.profile.with_gpus(gpus)
            await self._notify_gpu()

    async def _notify_gpu(self) -> None:
        """Notify the head that its next plan is to use less of the GPU."""
        lease = self._lease
        if lease is not None:
            lease.profile = self._gpu_care.bounded(lease.profile)
            await self._notify(Remeasured(lease.profile))

    def _new_discovery(self) -> Discovery:
        try:
            return Discovery(self._config.host, self._config.interface, timings=self._timings.discovery)
        except ClusterError as exc:
            raise MulticastError(str(exc)) from exc

    def _admits(self, key: str) -> bool:
        """Whether the device with ``key`` is admitted: the owner or the current head trusts it."""
        if self._trust.trusts(key):
            return True
        lease = self._lease
        return (
            lease is not None
            and key in lease.introduced
            and key not in self._trust.revoked()
            and self._trust.is_head(lease.key)
        )

    async def _hear(self, group: asyncio.TaskGroup) -> None:
        while True:
            peer, key, message = await self._end.receive()
            lease = self._lease
            if not self._admits(key):
                await self._end.send(peer, Refused(f"{self._name} no longer trusts this device"))
            elif isinstance(message, Probe):
                await self._probed(peer, message)
            elif isinstance(message, Echo):
                await self._end.echo(peer, message.answer_bytes)
            elif not self._trust.is_head(key):
                await self._end.send(peer, Refused(self._not_led()))
            elif isinstance(message, Revoked):
                await self._on_revoked(key)
            elif isinstance(message, Hello):
                await self._greet(peer, key, message, self._end.heard_at)
            elif lease is None or lease.key != key:
                await self._end.send(peer, Refused("this device works for another head now; say hello first"))
            else:
                if peer != lease.peer:  # links break and come back
                    if peer in self._retired:
                        continue  # delayed by the network, e.g. until a cable was plugged in again
                    self._retired.append(lease.peer)
                lease.peer, lease.heard_s = peer, time.monotonic()
                await self._obey(message, lease, group)

    def _not_led(self) -> str:
        """Return why a trusted device that is no head may not give work here, and what its owner types to change
        that."""
        return (
            f"{self._name} does not take this device as a head; type 'primad pair' there and 'primad pair --code CODE' "
            "here, or there 'primad devices trust NAME --key KEY --head'"
        )

    async def _on_revoked(self, key: str) -> None:
        """Handle that the head with ``key`` no longer trusts this device."""
        head = self._revoked_by[key] = self._trust.name_of(key) or "a head"
        if self._may_report(f"revoked by {head}"):
            self._report_line(
                f"{head} revoked this device and gives it no more work; to pair again type 'primad pair' there and "
                "'primad pair --code CODE' here"
            )
        if self._lease is not None and self._lease.key == key:
            await self._end_lease()

    async def _probed(self, peer: bytes, probe: Probe) -> None:
        if self._versions.agreed(probe.protocol, probe.oldest) is None and self._may_report("probe"):
            gap = version_gap(self._name, probe.device, printable(probe.version, 40), probe.protocol, self._versions)
            self._report_line(f"refused: {gap}")
        own = self._versions
        answer = Probed(protocol=own.protocol, oldest=own.oldest, version=own.primad, device=self._name)
        await self._end.send(peer, answer)

    async def _greet(self, peer: bytes, key: str, hello: Hello, address: str) -> None:
        lease = self._lease
        if lease is not None and lease.key != key:
            await self._end.send(peer, Refused(f"{self._name} works for the head {lease.head}"))
            return
        if not self._is_measured:
            await self._end.send(peer, Refused(f"{self._name} is being measured, which takes some seconds"))
            return
        if self._pause.paused is not None:
            await self._end.send(peer, Refused(f"{self._name} {self._pause.paused}"))
            return
        if self._stop.is_set():
            await self._end.send(peer, Refused(f"{self._name} is shutting down"))
            return
        head = self._trust.name_of(key) or hello.device
        self._revoked_by.pop(key, None)
        self._stop_measuring()
        await self._draft_service.end()
        await self._encoding.end()
        await self._stages.release_all()  # also those of a broken link to the same head
        is_new = lease is None or lease.session != hello.session
        if is_new:
            await self._end_holding()
        if is_new and self._may_report("hello"):
            self._report_line(f"head {head} is here")
            if hello.build != self._build:
                self._report_line(build_gap(self._build, printable(hello.build, 200), head))
        if lease is not None and lease.peer != peer:
            self._retired.append(lease.peer)
        profile = await self._profile_now()
        self._dismissed.clear()
        self._stages.head = head
        self._memory_watch.begin(profile.ram_available_bytes)
        self._lease = _Lease(
            peer=peer,
            key=key,
            head=head,
            session=hello.session,
            gone_after_s=hello.gone_after_s,
            heard_s=time.monotonic(),
            profile=profile,
            introduced=lease.introduced if lease is not None else frozenset(),
        )
        if self._relay is not None:
            self._relay.follow(
                HeadPlace(
                    name=head,
                    key=key,
                    address=unmapped(address),
                    port=hello.relay_port,
                    session=hello.session,
                    gone_after_s=hello.gone_after_s,
                )
            )
        await self._notify(
            Welcome(
                protocol=self._versions.protocol,
                version=self._versions.primad,
                build=self._build,
                profile=profile,
                layer_port=self._layers.port,
                api="" if self._relay is None else self._relay.url,
            )
        )

    async def _obey(self, message: HeadMessage, lease: _Lease, group: asyncio.TaskGroup) -> None:
        scopes = self._end.scopes
        match message:
            case Load():
                load = msgspec.structs.replace(message, sources=scopes.of_contacts(message.sources))
                await self._stages.start(load, lease.profile)
            case Link(epoch=epoch, address=address, key=key, sender=sender):
                await self._stages.link(epoch, scopes.endpoints(address)[0], key, sender)
            case LinkGroup(epoch=epoch, addresses=addresses):
                ranks = [RankAddress(scopes.ways(each.host)[0], each.port) for each in addresses]
                await self._stages.join(epoch, ranks)
            case Release(epoch=epoch, unload=unload):
                if unload:
                    await self._stages.keep_nothing(epoch)
                await self._stages.release(epoch)
            case Ping(status=status, number=number, revision=revision, why_idle=why_idle):
                if why_idle != lease.why_idle and (not why_idle or self._may_report("idle")):
                    lease.why_idle = why_idle
                    if why_idle:
                        self._report_line(f"head {lease.head}: {printable(why_idle)}")
                await self._stages.remind(revision)
                await self._notify(Pong(number, self._stages.standing.revision))
                if status:
                    await self._stages.report()
            case Introduce(devices=devices, revoked=revoked):
                lease.introduced = frozenset(each.key for each in devices) - set(revoked)
            case MeasureLinks(targets=targets):
                if self._measuring is None or self._measuring.done() or targets != self._targets:
                    self._stop_measuring()
                    self._targets, self._measuring = targets, group.create_task(self._measure_links(targets))
            case KvHold():
                hold = msgspec.structs.replace(message, sources=scopes.of_contacts(message.sources))
                self._holding.start(self._hold(hold))
            case KvForget(keys=keys, lasting=lasting):
                await self._held.forget(keys, lasting=lasting)
            case LoadDraft() if self._pause.paused is None:
                draft_token = msgspec.structs.replace(message, sources=scopes.of_contacts(message.sources))
                threads = lease.profile.cpu.threads
                await self._draft_service.load(draft_token, max(1, threads // (1 + self._stages.is_serving)))
            case DraftInput(epoch=epoch, task=task):
                self._draft_service.notify(epoch, task)
            case ReleaseDraft(epoch=epoch):
                await self._draft_service.release(epoch)
            case LoadMmproj() if self._pause.paused is None:
                wanted = msgspec.structs.replace(message, sources=scopes.of_contacts(message.sources))
                await self._encoding.load(wanted, lease.profile.cpu.threads)
            case PictureChunk():
                await self._encoding.take(message)
            case EncodedWanted():
                await self._encoding.give(message)
            case ReleaseMmproj(number=number):
                await self._encoding.release(number)
            case LoadMmproj(number=number):
                await self._notify(MmprojState(number=number, ready=False, error="paused by its owner"))
            case Dismiss():
                self._dismissed.set()
            case LoadDraft(epoch=epoch):
                await self._notify(DraftModelState(epoch=epoch, ready=False, error="paused by its owner"))
            case Probe() | Hello() | Echo() | Revoked():
                raise AssertionError("answered before")

    async def _hold(self, hold: KvHold) -> None:
        async with self._turns:
            held = await self._held.hold(hold)
        await self._notify(KvHeld(number=hold.number, held=held))

    async def _measure_links(self, targets: list[Contact]) -> None:
        scopes = self._end.scopes
        found = await measure_links(
            self._context,
            self._identity,
            self._name,
            scopes.of_contacts(targets),
            timeout_s=self._timings.network.link_timeout_s,
        )
        for link in found.links:
            scopes.saw(link.address)
        links = [replace(link, address=bare(link.address)) for link in found.links]
        await self._notify(LinksMeasured(links=links, unreached=found.unreached))

    async def _watch_lease(self) -> None:
        """End the lease of a silent head, or of one that the owner no longer trusts as a head."""
        look_s = self._timings.worker.trust_look_every_s
        while True:
            lease = self._lease
            silent_s = lease.heard_s + lease.gone_after_s - time.monotonic() if lease is not None else look_s
            await asyncio.sleep(max(0.05, min(silent_s, look_s)))
            lease = self._lease
            if lease is None:
                continue
            leads = self._trust.is_head(lease.key)
            if leads and time.monotonic() - lease.heard_s < lease.gone_after_s:
                continue
            is_refused = not leads and (self._trust.trusts(lease.key) or lease.key in self._trust.revoked())
            how = "is no longer trusted as a head" if is_refused else "went away"
            await self._end_lease()
            self._report_line(f"head {lease.head} {how}; waiting for a head")

    async def _end_lease(self) -> None:
        if self._lease is not None:
            self._retired.append(self._lease.peer)
        self._lease = None
        if self._relay is not None:
            self._relay.follow(None)
        self._dismissed.set()  # there is no head to hand over to
        self._stop_measuring()
        await self._draft_service.end()
        await self._encoding.end()
        await self._stages.release_all()
        await self._end_holding()

    async def _end_holding(self) -> None:
        """Stop holding KV blocks for other devices."""
        await self._holding.close()
        await self._held.clear()

    def _stop_measuring(self) -> None:
        """Cancel the running link measurements."""
        if self._measuring is not None:
            self._measuring.cancel()
            self._measuring = None

    async def _memory_recovered(self, ram_available_bytes: int) -> None:
        await self._notify(MemoryRecovered(ram_available_bytes))

    async def _notify(self, message: WorkerMessage) -> None:
        if self._lease is not None:
            await self._end.send(self._lease.peer, message)

    async def _notify_of_ring(self, message: WorkerMessage) -> None:
        await self._notify(message)
        if isinstance(message, MemoryLow):
            await self._draft_service.stop("memory is short on this device")
            await self._encoding.stop("memory is short on this device")

    async def _hand_over(self, reason: str) -> None:
        """Ask the head to replace this device and wait until it does; a device without layers need not wait."""
        lease = self._lease
        if lease is None:
            return
        await self._notify(Leaving(reason))
        if not self._stages.is_serving:
            return
        timeout_s = self._timings.worker.hand_over_timeout_s
        at_once = "; Ctrl-C again ends at once" if self._stop.is_set() else ""
        self._report_line(f"handing over to the others for at most {timeout_s:g} s{at_once}")
        try:
            async with asyncio.timeout(timeout_s):
                await self._dismissed.wait()
        except TimeoutError:
            self._report_line(f"head {lease.head} found no replacement within {timeout_s:g} s")

    def _on_pause(self, paused: str | None) -> None:
        if paused is None:
            self._report_line(f"{self._name} computes again; waiting for a head")
            return
        self._report_line(f"{self._name} {paused}")
        self._tasks.start(self._stand_down(paused))

    async def _stand_down(self, reason: str) -> None:
        why = reason.partition(";")[0]
        await self._draft_service.stop(why)
        await self._encoding.stop(why)
        await self._hand_over(why)
        await self._notify(Refused(f"{self._name} {reason}"))
        await self._end_lease()
        await self._stages.unload()

    def _may_report(self, topic: str) -> bool:
        """Whether to report a line about ``topic``, which another device may cause as often as it likes."""
        now = time.monotonic()
        if now < self._report_next_s.get(topic, 0.0):
            return False
        self._report_next_s[topic] = now + self._timings.worker.report_every_s
        return True

    def _state(self) -> str:
        """Return the state of this device, for people."""
        if self._pause.paused is not None:
            return self._pause.paused
        if not self._is_measured:
            return "measuring"
        if self._lease is None:
            revoked = ", ".join(sorted(self._revoked_by.values()))
            return f"waiting for a head; revoked by {revoked}" if revoked else "waiting for a head"
        return f"{'computes' if self._stages.is_serving else 'ready'} for {self._lease.head}"

    async def _administer(self, request: AdminRequest) -> AdminReply:
        match request:
            case OpenPairing():
                return await self._pairing.open()
            case BringCode(code=code, at=at):
                return Done(text=f"{self._name} is paired with {(await self._pairing.bring(code, at)).device}")
            case Leave():
                first = self.leave()
                return Done(text=f"{self._name} hands over and ends" if first else f"{self._name} is ending already")
            case Pause():
                return Done(text=f"{self._name} {self._pause.pause()}")
            case Resume():
                return Done(text=f"{self._name} {self._pause.resume()}")
            case Describe():
                return Described(
                    status={
                        "device": self._name,
                        "role": "worker",
                        "devices": dict.fromkeys(self._revoked_by.values(), "revoked this device")
                        | {self._name: self._state()},
                        "head": None if self._lease is None else self._lease.head,
                        "serving": self._stages.is_serving,
                        "paused": self._pause.paused,
                        "port": self._end.port,
                        "api": None if self._relay is None else self._relay.url,
                        "revoked_by": sorted(self._revoked_by),
                        "introduced": [] if self._lease is None else sorted(self._lease.introduced),
                    }
                )
