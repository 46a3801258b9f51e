"""A trusted but malicious device: its messages on the control link and on the layer link."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import zmq
import zmq.asyncio

from primad.gguf.layers import LayerRef, LayerTensor
from primad.network.contacts import Contact
from primad.network.layer_messages import CHUNK_BYTES, MAX_ASKED, AskPresent, FetchChunk, FetchDigests
from primad.network.messages import (
    MAX_DEVICES,
    MAX_ECHO_BYTES,
    MAX_MESSAGE_BYTES,
    OLDEST,
    PROTOCOL,
    Echo,
    HeadMessage,
    Hello,
    Introduce,
    Introduction,
    Link,
    MeasureLinks,
    Probe,
    Release,
    WorkerMessage,
    decode_from_worker,
)
from primad.network.sockets import endpoint, open_socket
from primad.system.wire import encode
from primad.trust.identity import new_identity
from tests.e2e.attacked_cluster import ROGUE, AttackedCluster, admin_port, listening, listening_of
from tests.e2e.attacks_wire import Door
from tests.e2e.cluster import PATIENCE_S, ring_process
from tests.fakes.load import a_load
from tests.shell.gated import HOST, NOTHING_S

PROBE = Probe(protocol=PROTOCOL, oldest=OLDEST, version="9", device="rogue")
HELLO = Hello(protocol=PROTOCOL, version="9", device="rogue", session=1, build="none", gone_after_s=4.0)
SMALL = LayerRef("cd" * 32, 256, (LayerTensor("attn.weight", 0, (64,), 0, 256),))
LOAD = a_load(1, first=0, last=1, layers=(SMALL,), metadata=b"GGUF", width=576, context=512, rows=32)
FLOOD = 400


class Rogue:
    """A connection of the rogue device to a port of the device with ``key``; it buffers few replies."""

    def __init__(self, context: zmq.asyncio.Context, port: int, key: str) -> None:
        self.socket = open_socket(context, zmq.DEALER, identity=ROGUE, server=key)
        self.socket.set_hwm(1)
        self.socket.setsockopt(zmq.RCVBUF, 4096)
        self.socket.connect(endpoint(HOST, port))

    async def send_frames(self, *frames: bytes) -> None:
        """Send one message."""
        async with asyncio.timeout(PATIENCE_S):
            await self.socket.send_multipart(frames)

    async def send_all(self, messages: Sequence[HeadMessage | bytes]) -> None:
        """Send messages of the control link, or other bytes."""
        for message in messages:
            await self.send_frames(message if isinstance(message, bytes) else encode(message))

    async def receive(self) -> WorkerMessage:
        """Return the next reply."""
        async with asyncio.timeout(PATIENCE_S):
            return decode_from_worker((await self.socket.recv_multipart())[0])

    async def wait_for(self, kind: type[Any]) -> Any:
        """Return the next reply of this kind."""
        while not isinstance(message := await self.receive(), kind):
            continue
        return message

    async def answered(self) -> bytes:
        """Return the next reply undecoded."""
        async with asyncio.timeout(PATIENCE_S):
            return (await self.socket.recv_multipart())[0]

    async def is_answered(self) -> bool:
        """Whether a reply comes within the time that ten usually take."""
        try:
            async with asyncio.timeout(NOTHING_S):
                await self.socket.recv_multipart()
        except TimeoutError:
            return False
        return True


@asynccontextmanager
async def rogues(port: int, key: str, count: int = 1) -> AsyncIterator[list[Rogue]]:
    """Open ``count`` connections of the rogue device."""
    context = zmq.asyncio.Context()
    try:
        yield [Rogue(context, port, key) for _ in range(count)]
    finally:
        context.destroy(linger=0)


async def layer_doors(attacked: AttackedCluster) -> list[Door]:
    """Return the layer ports of the head and the worker, which only the control link reports."""
    found = []
    pairing = (await attacked.open_pairing()).port
    for owner in ("head", "w1"):
        ports = listening(attacked.daemons[owner]) - listening_of(ring_process(attacked.daemons[owner]))
        ports -= {attacked.head.port, attacked.port("w1"), pairing, admin_port(attacked.homes[owner])}
        asking = [asyncio.create_task(_layers_at(attacked, owner, port)) for port in ports]
        found.append(await next(asyncio.as_completed(asking)))  # the head's port for relayed requests does not reply
        for each in asking:
            each.cancel()
        await asyncio.wait(asking)
    return found


async def _layers_at(attacked: AttackedCluster, owner: str, port: int) -> Door:
    async with rogues(port, attacked.key(owner)) as (rogue,):
        await rogue.send_frames(encode(AskPresent(digests=[attacked.layer()])))
        await rogue.answered()
    return Door(owner, port, "zmq", attacked.key(owner))


def nonsense() -> list[bytes]:
    """Return invalid messages, and ones that no device can execute."""
    load = msgspec.to_builtins(LOAD)
    absurd: list[dict[str, object]] = [
        {"rows": 1 << 40},
        {"rows": -1},
        {"context": 1 << 62},
        {"sequences": 10**9},
        {"width": 1 << 50},
        {"route": 1 << 60},
        {"windows": []},
        {"windows": load["windows"] * 100_000, "gpu_layers": [0] * 100_000},
        {"gpu_layers": [1 << 30]},
        {"step_timeout_s": float("nan")},
        {"sources": [{"device": "x", "key": "y", "addresses": ["*"], "port": 1}]},
        {"place": -5},
        {"epoch": "one"},
    ]
    return [
        b"",
        b"\xc1",
        os.urandom(1000),
        b"\x91" * 100_000,
        bytes(MAX_MESSAGE_BYTES - 100),
        msgspec.msgpack.encode({"type": "format-the-disk"}),
        msgspec.msgpack.encode({"type": ["load"]}),
        encode(Echo(payload=b"", answer_bytes=MAX_ECHO_BYTES + 1)),
        encode(HELLO)[:-3],
        encode(msgspec.structs.replace(HELLO, device="../../etc")),
        encode(msgspec.structs.replace(HELLO, gone_after_s=1e18)),
        encode(Introduce(devices=introductions() + introductions(1), revoked=[])),
        encode(Introduce(devices=[Introduction("a b", ROGUE.public)], revoked=["x"])),
        *(msgspec.msgpack.encode(load | each) for each in absurd),
    ]


def introductions(count: int = MAX_DEVICES) -> list[Introduction]:
    """Return introductions of unknown devices."""
    return [Introduction(f"device-{number}", new_identity().public) for number in range(count)]


def keys(count: int) -> list[str]:
    """Return public keys of no device."""
    return [new_identity().public for _ in range(count)]


def not_its_business() -> list[HeadMessage]:
    """Return messages that a worker accepts only from its own head."""
    return [
        LOAD,
        Release(epoch=1),
        Link(epoch=1, address="tcp://127.0.0.1:1", key=ROGUE.public, sender=ROGUE.public),
        Introduce(devices=introductions(3), revoked=[]),
        MeasureLinks(targets=[Contact(device="x", key=ROGUE.public, addresses=["127.0.0.1"], port=1)]),
    ]


def loads(count: int) -> list[HeadMessage]:
    """Return stages of ``count`` rings, as large as validation allows, of layers that no device has."""
    nobody = Contact(device="nobody", key=new_identity().public, addresses=["127.0.0.1"], port=1)
    large = LayerRef("ab" * 32, 1 << 40, (LayerTensor("attn.weight", 0, (1 << 38,), 0, 1 << 40),))
    windows = a_load(1, first=0, last=1, layers=(large,), metadata=b"GGUF").windows
    absurd = {"rows": 8192, "context": 1 << 20, "sequences": 128, "width": 1 << 15, "windows": windows}
    return [msgspec.structs.replace(LOAD, epoch=number, sources=[nobody], **absurd) for number in range(1, count + 1)]


def echoes() -> list[HeadMessage]:
    """Return requests for 400 MB of replies."""
    return [Echo(payload=b"", answer_bytes=MAX_ECHO_BYTES)] * FLOOD


def requests(digest: str) -> list[bytes]:
    """Return requests for layers, valid and invalid ones."""
    wanted = [encode(FetchChunk(digest=digest, offset=0, size=CHUNK_BYTES))] * (FLOOD // 2)
    return [
        *wanted,
        encode(FetchChunk(digest=digest, offset=-1, size=CHUNK_BYTES)),
        encode(FetchChunk(digest=digest, offset=0, size=1 << 60)),
        encode(FetchChunk(digest="../../../etc/passwd", offset=0, size=100)),
        encode(FetchDigests(digest="/" * 1000)),
        encode(AskPresent(digests=["x"] * (MAX_ASKED + 1))),
        *([encode(AskPresent(digests=[digest] * MAX_ASKED))] * 20),
        os.urandom(5000),
        *wanted,
    ]
