"""Control links on loopback, with keys and gates, and scripted devices at their far ends."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import TypeVar

import zmq.asyncio

from halda import DeviceProfile
from primad.network.contacts import Contact
from primad.network.control import HeadEnd, WorkerEnd
from primad.network.gate import Gate
from primad.network.linkprobe import measure_links
from primad.network.messages import (
    OLDEST,
    PROTOCOL,
    Echo,
    Echoed,
    HeadMessage,
    Hello,
    KvHeld,
    KvHold,
    LinksMeasured,
    MeasureLinks,
    Ping,
    Pong,
    Probe,
    Probed,
    Refused,
    StageState,
    StageStates,
    Welcome,
    WorkerMessage,
)
from primad.trust.identity import Identity, new_identity
from tests.fakes.profile import PROFILE

HOST = "127.0.0.1"
PATIENCE_S = 180
HEAD = new_identity()
"""The head's keys in all tests."""

Kind = TypeVar("Kind")


@asynccontextmanager
async def gated(
    allows: Callable[[str], bool] = lambda _: True, *, patience_s: float = PATIENCE_S
) -> AsyncIterator[zmq.asyncio.Context]:
    """A context whose servers admit keys that ``allows`` accepts, with a time limit for the test."""
    context = zmq.asyncio.Context()
    try:
        async with asyncio.timeout(patience_s), Gate(context, allows):
            yield context
    finally:
        context.destroy(linger=0)


class FakeDevice:
    """A worker that greets and answers pings, echoes and link measurements like the daemon; the test does the rest.

    Other messages go to ``heard``. If ``silent``, it answers nothing; ``refuses`` is its reply to a hello. Its link
    cannot be measured without ``echoes``, or with echoes that it ``garbles``. ``stand`` sets the state of its stages; a
    head whose ping shows an older one is notified, unless ``loses_states``. ``known`` is the revision in the head's
    last ping. ``held`` has the requests to hold KV blocks: it has all except those that it ``lacks``.
    """

    def __init__(
        self,
        context: zmq.asyncio.Context,
        name: str,
        *,
        identity: Identity | None = None,
        port: int | None = None,
        profile: DeviceProfile = PROFILE,
        protocol: int = PROTOCOL,
        oldest: int = OLDEST,
        build: str = "a build",
    ) -> None:
        self.name = name
        self.identity = identity or new_identity()
        self.end = WorkerEnd(context, HOST, port, 0, identity=self.identity)
        self.silent = False
        self.refuses: str | None = None
        self.measures = True
        self.echoes = True
        self.garbles = False
        self.loses_states = False
        self.known = 0
        self.revision = 0
        self.states: list[StageState] = []
        self.pings = 0
        self.hellos: list[Hello] = []
        self.knocks = 0
        self.asked: list[list[str]] = []
        self.lacks: set[str] = set()
        self.held: list[KvHold] = []
        self.heard: asyncio.Queue[HeadMessage] = asyncio.Queue()
        self._context = context
        self._profile = dataclasses.replace(profile, device=name, host=f"host-of-{name}"[:16])
        self._protocol, self._oldest, self._build = protocol, oldest, build
        self._peer: bytes | None = None
        self._news = asyncio.Condition()
        self._task = asyncio.create_task(self._run())

    @property
    def key(self) -> str:
        return self.identity.public

    @property
    def port(self) -> int:
        return self.end.port

    def target(self, *addresses: str) -> Contact:
        """Contact data for measuring the link to it."""
        return Contact(device=self.name, key=self.key, addresses=list(addresses) or [HOST], port=self.port)

    def stand(self, *states: StageState) -> None:
        """Set the states of its stages."""
        self.revision += 1
        self.states = list(states)

    async def notify(self, message: WorkerMessage) -> None:
        """Send a message to the head that contacted it last."""
        assert self._peer is not None, "no head was here"
        await self.end.send(self._peer, message)

    async def hear(self, kind: type[Kind]) -> Kind:
        """The next message of ``kind``; earlier ones are skipped."""
        while True:
            message = await self.heard.get()
            if isinstance(message, kind):
                return message

    async def wait(self, condition: Callable[[], bool]) -> None:
        """Wait until ``condition`` holds; checked after every message to this device."""
        async with self._news:
            await self._news.wait_for(condition)

    async def leave(self) -> None:
        """Disappear without a message."""
        self._task.cancel()
        await asyncio.wait([self._task])
        self.end.close()

    async def _run(self) -> None:
        while True:
            peer, _, message = await self.end.receive()
            if not self.silent:
                if not isinstance(message, Echo):  # echoes use their own connections
                    self._peer = peer
                await self._answer(peer, message)
            async with self._news:
                self._news.notify_all()

    async def _answer(self, peer: bytes, message: HeadMessage) -> None:
        match message:
            case Probe():
                self.knocks += 1
                answer = Probed(protocol=self._protocol, oldest=self._oldest, version="7", device=self.name)
                await self.end.send(peer, answer)
            case Hello():
                self.hellos.append(message)
                await self.end.send(peer, self._welcome() if self.refuses is None else Refused(self.refuses))
            case Echo(answer_bytes=size) if self.echoes:
                await self.end.send(peer, Echoed(bytes(size + self.garbles)))
            case Ping(status=False, number=number, revision=known):
                self.pings, self.known = self.pings + 1, known
                if known != self.revision and not self.loses_states:
                    await self.end.send(peer, StageStates(revision=self.revision, states=self.states))
                await self.end.send(peer, Pong(number, self.revision))
            case MeasureLinks(targets=targets) if self.measures:
                if targets:
                    self.asked.append([target.device for target in targets])
                found = await measure_links(self._context, self.identity, self.name, targets)
                await self.end.send(peer, LinksMeasured(links=found.links, unreached=found.unreached))
            case KvHold(number=number, blocks=blocks):
                self.held.append(message)
                held = [block.key not in self.lacks for block in blocks]
                await self.end.send(peer, KvHeld(number=number, held=held))
            case _:
                self.heard.put_nowait(message)

    def _welcome(self) -> Welcome:
        return Welcome(protocol=PROTOCOL, version="7", build=self._build, profile=self._profile, layer_port=7771)


def head_end(
    context: zmq.asyncio.Context, worker: WorkerEnd, key: str, identity: Identity = HEAD, **options: float
) -> HeadEnd:
    """A head's end of the link to ``worker``, whose key is ``key``."""
    return HeadEnd(context, HOST, worker.port, identity=identity, key=key, **options)
