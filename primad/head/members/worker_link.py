"""The head's link to one worker: finds an address that works, greets the worker, receives its messages.

``WorkerLink`` receives all messages of the worker. Messages about an epoch go to that epoch's ``Stage``; messages about
the device itself (a sign of life, its leaving, a broken link) are posted as events to the membership core.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count, islice
from typing import Final, Protocol

import msgspec
import zmq.asyncio

from halda import DeviceProfile, LinkProfile
from primad.errors import ClusterError
from primad.head.members.core import DeviceLostError, StageError
from primad.head.members.stage import Stage
from primad.head.members.wanted import WantedState
from primad.membership import types
from primad.membership.memory_recovery import lowered
from primad.network.contacts import Contact
from primad.network.control import HeadEnd
from primad.network.linkprobe import MeasuredLinks
from primad.network.messages import (
    MAX_DEVICES,
    Dismiss,
    DraftModelState,
    DraftsMade,
    EncodedChunk,
    HeadMessage,
    Hello,
    Introduce,
    Introduction,
    KvHeld,
    KvHold,
    Leaving,
    LinksMeasured,
    MeasureLinks,
    MemoryLow,
    MemoryRecovered,
    MmprojState,
    Ping,
    Pong,
    Probe,
    Probed,
    Progress,
    Refused,
    Release,
    Remeasured,
    Revoked,
    StageState,
    StageStates,
    Welcome,
    WorkerMessage,
    WorkerStatus,
)
from primad.network.versions import OURS, Versions, version_gap
from primad.settings.config import Config, split_address
from primad.settings.profiles import with_speeds
from primad.settings.timings import NetworkTimings
from primad.system.tasks import resolve
from primad.trust.identity import Identity

logger = logging.getLogger(__name__)

RELEASED_S: Final = 10.0
"""The longest time to wait for the end of a released stage."""
HELD_S: Final = 2.0
"""How much longer a reply about KV cache may take than the worker's own search."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """The greeting head: its name, its keys, the number of this start, its llama.cpp build, the silence after which it
    counts as gone, and the port for relayed requests, if it accepts them."""

    context: zmq.asyncio.Context
    identity: Identity
    device: str
    session: int
    build: str
    gone_after_s: float
    ping_interval_s: float
    relay_port: int = 0
    timings: NetworkTimings = NetworkTimings()
    versions: Versions = OURS

    @classmethod
    def of(
        cls, config: Config, sockets: zmq.asyncio.Context, identity: Identity, build: str, timings: NetworkTimings
    ) -> Caller:
        """Return the caller for a head of this device that starts now."""
        return cls(
            context=sockets,
            identity=identity,
            device=config.name,
            session=random.getrandbits(62),
            build=build,
            gone_after_s=config.gone_after_s,
            ping_interval_s=config.heartbeat_interval_s,
            timings=timings,
        )


class HearsDrafts(Protocol):
    """Receives drafts of a worker."""

    @property
    def epoch(self) -> int:
        """The ring's epoch."""

    def hear(self, message: DraftModelState | DraftsMade) -> None:
        """Handle a message of the worker."""

    def lost(self, reason: str) -> None:
        """The worker is gone."""


class HearsEncoding(Protocol):
    """Receives the pictures that a worker encoded."""

    @property
    def number(self) -> int:
        """The number of the load."""

    def hear(self, message: MmprojState | EncodedChunk) -> None:
        """Handle a message of the worker."""

    def lost(self, reason: str) -> None:
        """The worker is gone, or may have lost its load."""


Post = Callable[[types.Event], None]
"""Receives a device's events, like the membership core."""


async def probe(caller: Caller, addresses: Iterable[tuple[str, int]], keys: Collection[str]) -> tuple[HeadEnd, Probed]:
    """Return the link to the first of ``addresses`` (host, port) where a device with one of ``keys`` responds.

    All are tried concurrently, so the fastest wins. Raises ``ClusterError`` if none responds, or without a common
    protocol.
    """
    ends: list[HeadEnd] = []
    refusals: list[tuple[str, str]] = []
    for host, port in addresses:
        for key in keys:
            try:
                ends.append(
                    HeadEnd(
                        caller.context,
                        host,
                        port,
                        identity=caller.identity,
                        key=key,
                        timeout_s=caller.timings.answer_timeout_s,
                    )
                )
            except ClusterError as exc:
                refusals.append((f"{host}:{port}", str(exc)))
    tasks = {asyncio.create_task(_probe(caller, end)): end for end in ends}
    winner: HeadEnd | None = None
    try:
        for done in asyncio.as_completed(tasks):
            try:
                winner, probed = await done
            except ClusterError:
                continue
            _check_version(caller, probed)
            return winner, probed
    except BaseException:
        winner = None
        raise
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for end in ends:
            if end is not winner:
                end.close()
    if not keys:
        raise ClusterError("no device is trusted yet; pair it with 'primad join --code' and the code of 'primad pair'")
    refusals += [(end.address, str(task.exception())) for task, end in tasks.items()]
    raise ClusterError(_each_once(refusals) or "it has no address")


def _each_once(refusals: Iterable[tuple[str, str]]) -> str:
    """Join the refusals into one line; of addresses with the same refusal all but the first are only named."""
    found: dict[str, list[str]] = {}
    for address, why in sorted(set(refusals)):
        found.setdefault(why.replace(address, "\0"), []).append(address)
    return "; ".join(
        why.replace("\0", first + (f" (and {', '.join(others)})" if others else ""))
        for why, (first, *others) in found.items()
    )


async def notify_revoked(caller: Caller, places: Iterable[tuple[str, int]], key: str) -> None:
    """Notify the device with ``key``, at the first of ``places`` that works, that it is no longer trusted, and wait
    until it has received that.

    Raises ``ClusterError`` if it does not respond.
    """
    end, _ = await probe(caller, places, [key])
    try:
        await end.send(Revoked())
        await _probe(caller, end)  # it replies in the order of messages
    finally:
        end.close()


async def _probe(caller: Caller, end: HeadEnd) -> tuple[HeadEnd, Probed]:
    """Find out which device is at ``end``. Raises ``ClusterError`` if none responds, or if it does not admit this
    head."""
    refused = asyncio.ensure_future(end.wait_refused())
    asked = asyncio.ensure_future(_ask_version(caller, end))
    try:
        await asyncio.wait([refused, asked], return_when=asyncio.FIRST_COMPLETED)
        if asked.done():
            return await asked
        raise ClusterError(
            f"the device at {end.address} does not let this one in: it was revoked there, or never paired; pair the "
            "two again ('primad pair')"
        )
    finally:
        for task in (refused, asked):
            task.cancel()
        await asyncio.gather(refused, asked, return_exceptions=True)


async def _ask_version(caller: Caller, end: HeadEnd) -> tuple[HeadEnd, Probed]:
    own = caller.versions
    await end.send(Probe(protocol=own.protocol, oldest=own.oldest, version=own.primad, device=caller.device))
    timeout_s = caller.timings.probe_timeout_s
    try:
        async with asyncio.timeout(timeout_s + 1):
            while True:
                message = await end.receive(timeout_s)
                if isinstance(message, Probed):
                    return end, message
    except TimeoutError as exc:
        raise ClusterError(f"{end.address} sends messages, but not its identity") from exc


def _check_version(caller: Caller, probed: Probed) -> None:
    if caller.versions.agreed(probed.protocol, probed.oldest) is None:
        raise ClusterError(version_gap(caller.device, probed.device, probed.version, probed.protocol, caller.versions))


async def greet_named(caller: Caller, address: str, labels: Mapping[str, str], post: Post) -> WorkerLink:
    """Greet the device at ``address`` (host:port), which the owner named; it must be one of ``labels`` (by key).

    Raises ``ClusterError``, which names the flag, if no device responds or accepts this head.
    """
    try:
        end, _ = await probe(caller, [split_address(address)], labels.keys())
        return await greet(caller, end, post, labels[end.key])
    except ClusterError as exc:
        raise ClusterError(f"--device {address}: {exc}") from exc


async def greet(caller: Caller, end: HeadEnd, post: Post, name: str) -> WorkerLink:
    """Greet the device on ``end``, which ``probe`` found; from then on the device, named ``name`` here, works for this
    head.

    Raises ``ClusterError`` if it does not respond or is busy; then ``end`` is closed.
    """
    hello = Hello(
        protocol=caller.versions.protocol,
        version=caller.versions.primad,
        device=caller.device,
        session=caller.session,
        build=caller.build,
        gone_after_s=caller.gone_after_s,
        relay_port=caller.relay_port,
    )
    timeout_s = caller.timings.hello_timeout_s
    try:
        await end.send(hello)
        async with asyncio.timeout(timeout_s):
            while True:
                match await end.receive(timeout_s):
                    case Welcome() as welcome:
                        return WorkerLink(end, welcome, caller.ping_interval_s, post, name)
                    case Refused(reason=reason):
                        raise ClusterError(reason)
                    case _:
                        continue  # messages for this head's last session
    except TimeoutError as exc:
        end.close()
        raise end.unanswered(timeout_s) from exc
    except BaseException:
        end.close()
        raise


class WorkerLink:
    """A welcomed worker. It is pinged and read until ``close``; every message is a sign of life.

    This head calls it ``name``, whatever it announces.
    """

    def __init__(self, end: HeadEnd, welcome: Welcome, ping_interval_s: float, post: Post, name: str) -> None:
        self.end = end
        self.name = name
        self._calls_itself = welcome.profile.device
        self.profile: DeviceProfile = replace(welcome.profile, device=name)
        self.build = welcome.build
        self.layer_port, self.api = welcome.layer_port, welcome.api
        self._post = post
        self._stages: dict[int, Stage] = {}
        self._drafts: dict[int, HearsDrafts] = {}
        self._encodings: dict[int, HearsEncoding] = {}
        self._links: asyncio.Future[LinksMeasured] | None = None
        self._holds: dict[int, asyncio.Future[list[bool]]] = {}
        self._hold_numbers = count(1)
        self._lost = False
        self._released = asyncio.Event()
        """Set when stages, or all of them, may have ended."""
        self._revision = 0
        self._states: dict[int, StageState] = {}
        self._wanted = WantedState()
        self._next_ping = 1
        self.why_idle = ""
        """Why it has no layers, for its owner."""
        self._tasks = [
            asyncio.create_task(self._ping(ping_interval_s)),
            asyncio.create_task(self._read()),
            asyncio.create_task(self._watch()),
        ]

    @property
    def key(self) -> str:
        """The device's public key."""
        return self.end.key

    def close(self) -> None:
        """Stop reading and close the link; nothing is reported afterwards."""
        self._lost = True
        self._released.set()
        for task in self._tasks:
            task.cancel()
        if self._links is not None and not self._links.done():
            self._links.cancel()
        self._end_holds()
        self._lose_listeners("it was released")
        self.end.close()

    async def send(self, message: HeadMessage) -> None:
        """Send the worker a message. Raises ``ClusterError`` if it accepts none."""
        self._wanted.ask(message, self._next_ping)
        await self.end.send(message)

    async def introduce(self, devices: Iterable[tuple[str, str]], revoked: Iterable[str]) -> None:
        """Send the worker the devices that this head trusts and those that it no longer trusts, up to ``MAX_DEVICES``
        each."""
        known = [Introduction(device, key) for device, key in islice(devices, MAX_DEVICES)]
        await self.send(Introduce(devices=known, revoked=sorted(revoked)[:MAX_DEVICES]))

    async def dismiss(self) -> None:
        """Let the worker leave, which asked for it."""
        await self.send(Dismiss())

    async def measure_links(self, targets: Sequence[Contact], timeout_s: float) -> MeasuredLinks:
        """Have the worker measure its links to ``targets``; without targets it only confirms its presence.

        One measurement at a time. Raises ``DeviceLostError`` if the worker goes silent.
        """
        asked = {target.device for target in targets}
        self._links = asyncio.get_running_loop().create_future()
        try:
            renamed = [msgspec.structs.replace(target, device=self._swapped(target.device)) for target in targets]
            await self.send(MeasureLinks(targets=renamed))
            async with asyncio.timeout(timeout_s):
                found = await self._links
        except TimeoutError as exc:
            raise DeviceLostError(f"{self.name} did not measure its links within {timeout_s:g} s", self.name) from exc
        except asyncio.CancelledError:
            if self._lost and self._links.cancelled():
                raise DeviceLostError(f"{self.name} went away", self.name) from None
            raise
        except ClusterError as exc:
            raise DeviceLostError(f"{self.name} went away: {exc}", self.name) from exc
        finally:
            self._wanted.measured()
        links = [
            replace(link, source=self._swapped(link.source), target=self._swapped(link.target)) for link in found.links
        ]
        why = [msgspec.structs.replace(each, device=self._swapped(each.device)) for each in found.unreached]
        links = [link if link.source == self.name else replace(link, address="") for link in links]
        return MeasuredLinks(
            links=[link for link in links if self._is_of(link, asked)],
            unreached=[each for each in why if each.device in asked],
        )

    def _swapped(self, device: str) -> str:
        """Translate ``device`` to the name that this worker knows, or back: its announced name may be another device's
        here."""
        return {self.name: self._calls_itself, self._calls_itself: self.name}.get(device, device)

    def _is_of(self, link: LinkProfile, asked: set[str]) -> bool:
        return (link.source == self.name and link.target in asked) or (
            link.target == self.name and link.source in asked
        )

    async def hold_blocks(self, hold: KvHold) -> list[bool]:
        """Have the worker hold the blocks of ``hold``, whose number is chosen here; return which of them it has, after
        ``timeout_s`` at the latest. Raises ``ClusterError`` if it does not reply."""
        number = next(self._hold_numbers)
        reply: asyncio.Future[list[bool]] = asyncio.get_running_loop().create_future()
        self._holds[number] = reply
        try:
            async with asyncio.timeout(hold.timeout_s + HELD_S):
                await self.end.send(msgspec.structs.replace(hold, number=number))
                held = await reply
        except TimeoutError as exc:
            raise ClusterError(f"{self.name} does not report which KV cache it holds") from exc
        finally:
            del self._holds[number]
        if len(held) != len(hold.blocks):
            raise ClusterError(f"{self.name} {'went away' if self._lost else 'reports other KV cache'}")
        return held

    def drafts_for(self, drafts: HearsDrafts) -> None:
        """Pass this worker's drafts for the epoch of ``drafts`` to it from now on."""
        self._drafts[drafts.epoch] = drafts
        if self._lost:
            drafts.lost(f"{self.name} is gone")

    def forget_drafts(self, drafts: HearsDrafts) -> None:
        """Stop passing drafts to ``drafts``, which has ended."""
        self._drafts.pop(drafts.epoch, None)

    def encodes_for(self, encoding: HearsEncoding) -> None:
        """Pass the encoded pictures of its load to ``encoding`` from now on."""
        self._encodings[encoding.number] = encoding
        if self._lost:
            encoding.lost(f"{self.name} is gone")

    def forget_encoding(self, encoding: HearsEncoding) -> None:
        """Stop passing pictures to ``encoding``, which has ended."""
        self._encodings.pop(encoding.number, None)

    def _lose_listeners(self, reason: str) -> None:
        for drafts in self._drafts.values():
            drafts.lost(reason)
        for encoding in self._encodings.values():
            encoding.lost(reason)

    def _end_holds(self) -> None:
        for reply in self._holds.values():
            resolve(reply, [])

    def attend(self, stage: Stage) -> None:
        """Pass messages about its epoch to ``stage``."""
        self._stages[stage.epoch] = stage

    def forget(self, stage: Stage) -> None:
        """Stop passing messages to ``stage``, which has ended."""
        if self._stages.get(stage.epoch) is stage:
            del self._stages[stage.epoch]

    async def unload(self, epoch: int) -> None:
        """Have the worker release ``epoch`` and whatever it keeps loaded for later; a worker that is gone has done
        so."""
        with contextlib.suppress(ClusterError):
            await self.send(Release(epoch=epoch, unload=True))

    async def until_released(self, epoch: int) -> None:
        """As in ``Participant``."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(RELEASED_S):
                while epoch in self._states and not self._lost:
                    self._released.clear()
                    await self._released.wait()

    async def _ping(self, interval_s: float) -> None:
        while True:
            with contextlib.suppress(ClusterError):  # missing pongs will show that it accepts nothing
                number, self._next_ping = self._next_ping, self._next_ping + 1
                await self.end.send(Ping(status=False, number=number, revision=self._revision, why_idle=self.why_idle))
            await asyncio.sleep(interval_s)

    async def ask_status(self) -> None:
        """Have the worker report its ring processes. Raises ``ClusterError`` like ``send``."""
        await self.end.send(Ping(status=True, revision=self._revision, why_idle=self.why_idle))

    async def _watch(self) -> None:
        async for _ in self.end.reconnections():
            logger.info("the connection to %s was made again", self.name)
            for encoding in self._encodings.values():
                encoding.lost("the connection to it was made again")
            with contextlib.suppress(ClusterError):
                for message in self._wanted.ask_again(self._next_ping):
                    await self.end.send(message)
        self._report_lost("its primad ended")

    async def _read(self) -> None:
        while True:
            message = await self.end.receive(None)
            if self._lost:
                return
            self._post(types.Heard(self.name))
            await self._hear(message)

    async def _hear(self, message: WorkerMessage) -> None:
        match message:
            case Refused(reason=reason):
                self._report_lost(reason)
            case Leaving(reason):
                self._post(types.DeviceLeaving(self.name, reason))
            case MemoryLow():
                if message.epoch in self._stages:
                    self._lower(message)
                    self._post(types.DeviceMemoryLow(self.name))
            case MemoryRecovered(available):
                if available > self.profile.ram_available_bytes:
                    available = min(available, self.profile.ram_total_bytes)
                    self.profile = replace(self.profile, ram_available_bytes=available)
                    self._post(types.DeviceMemoryRecovered(self.name))
            case Remeasured(profile=profile) if with_speeds(self.profile, profile) != self.profile:
                self.profile = with_speeds(self.profile, profile)
                self._post(types.DevicesCorrected(frozenset({self.name})))
            case LinksMeasured():
                if self._links is not None and not self._links.done():
                    self._links.set_result(message)
            case KvHeld(number=number, held=held) if number in self._holds:
                resolve(self._holds[number], held)
            case DraftModelState(epoch=epoch) | DraftsMade(epoch=epoch) if epoch in self._drafts:
                self._drafts[epoch].hear(message)
            case MmprojState(number=number) | EncodedChunk(number=number) if number in self._encodings:
                self._encodings[number].hear(message)
            case Progress() | WorkerStatus():
                self._give(message)
            case StageStates(revision=revision, states=states) if revision > self._revision:
                self._revision = revision
                await self._compare({state.epoch: state for state in states})
            case Pong(number=number, revision=revision) if number and revision == self._revision:
                for epoch in self._wanted.ignored(number, self._next_ping):
                    if epoch in self._stages:
                        error = StageError(f"{self.name}: it does not take part in the ring", self.name, "load")
                        self._stages[epoch].fail(error)
            case _:
                return  # only a sign of life

    def _give(self, news: Progress | WorkerStatus) -> None:
        stage = self._stages.get(news.epoch)
        if stage is not None:
            stage.hear(news)

    async def _compare(self, states: dict[int, StageState]) -> None:
        """The worker's stages are now in ``states``: pass them on, and release those that are not wanted."""
        before, self._states = self._states, states
        self._released.set()
        for epoch, stage in list(self._stages.items()):
            if epoch in states:
                stage.hear(states[epoch])
            elif epoch in before:
                stage.fail(StageError(f"{self.name}: its stage ended without a message", self.name, "ring"))
        for release in self._wanted.compare(states):
            with contextlib.suppress(ClusterError):
                await self.send(release)

    def _lower(self, memory_low: MemoryLow) -> None:
        """From now on plans use less memory of this device: the reported amount, and less than before."""
        left = lowered(
            self.profile.ram_available_bytes,
            available_bytes=memory_low.ram_available_bytes,
            needed_bytes=memory_low.needed_bytes,
        )
        self.profile = replace(self.profile, ram_available_bytes=left)

    def _report_lost(self, reason: str) -> None:
        if not self._lost:
            self._lost = True
            self._released.set()
            self._end_holds()
            self._lose_listeners(reason)
            for stage in list(self._stages.values()):
                stage.fail(DeviceLostError(f"{self.name} is gone: {reason}", self.name))
            self._post(types.Lost(self.name, reason))
