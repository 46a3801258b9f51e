"""The admin channel: the command line reaches the daemon of a home folder, and nobody else does."""

from __future__ import annotations

import asyncio
import json
import shutil
import socket
import stat
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import psutil
import pytest
import zmq
import zmq.asyncio

from primad.errors import ClusterError, ConfigError
from primad.network.admin import (
    AdminReply,
    AdminRequest,
    AdminServer,
    Describe,
    Described,
    Done,
    Leave,
    OpenPairing,
    PairingCode,
    Pause,
    Refusal,
    Resume,
    ask,
    is_running,
    note_path,
)
from primad.network.sockets import endpoint, open_socket
from primad.settings.config import LOOPBACK
from primad.trust.identity import load_identity, new_identity

PATIENCE_S = 180.0
REPLIES: dict[type, AdminReply] = {
    OpenPairing: PairingCode(code="7-lamp-river", expires_s=600.0, port=4711),
    Leave: Refusal(reason="not now"),
    Pause: Done(text="paused"),
    Resume: Done(text="computes again"),
    Describe: Described(status={"role": "worker", "devices": {"desk": "ready"}, "port": 7770}),
}


async def handle(request: AdminRequest) -> AdminReply:
    return REPLIES[type(request)]


@asynccontextmanager
async def serving(home: Path, handler=handle, **options: float) -> AsyncIterator[None]:
    """A daemon of ``home`` answers during the block."""
    server = asyncio.create_task(AdminServer(load_identity(home), home, handler, **options).run())
    try:
        await until_running(home, server)
        yield
    finally:
        server.cancel()
        await asyncio.wait([server])


async def until_running(home: Path, daemon: asyncio.Task[None]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not is_running(home):
            assert not daemon.done(), daemon.result()
            await asyncio.sleep(0)


def port_of(home: Path) -> int:
    return int(json.loads(note_path(home).read_text())["port"])


async def reply_to(home: Path, request: AdminRequest, timeout_s: float = PATIENCE_S) -> AdminReply:
    return await asyncio.to_thread(ask, home, request, timeout_s)


async def test_every_request_gets_its_reply(tmp_path):
    async with serving(tmp_path):
        for request in (OpenPairing(), Leave(), Pause(), Resume(), Describe()):
            assert await reply_to(tmp_path, request) == REPLIES[type(request)]
    assert not is_running(tmp_path)
    assert not note_path(tmp_path).exists()


async def test_a_failure_of_the_daemon_is_a_refusal_and_the_daemon_continues(tmp_path):
    async def handler(request: AdminRequest) -> AdminReply:
        if isinstance(request, Pause):
            raise ConfigError("paused.json: cannot be written")
        return await handle(request)

    async with serving(tmp_path, handler):
        assert await reply_to(tmp_path, Pause()) == Refusal(reason="paused.json: cannot be written")
        assert await reply_to(tmp_path, Resume()) == REPLIES[Resume]


async def test_a_request_that_takes_too_long_is_a_refusal(tmp_path):
    async def handler(request: AdminRequest) -> AdminReply:
        return await asyncio.get_running_loop().create_future()

    async with serving(tmp_path, handler, timeout_s=0.01):
        answer = await reply_to(tmp_path, Leave())
        assert isinstance(answer, Refusal)
        assert "timed out after 0.01 s" in answer.reason


async def test_the_last_reply_of_an_ending_daemon_arrives(tmp_path):
    ended: list[bool] = []
    stop = asyncio.Event()

    async def handler(_: AdminRequest) -> AdminReply:
        asyncio.get_running_loop().call_soon(stop.set)
        return Done(text="leaves")

    async def daemon() -> None:
        server = asyncio.create_task(AdminServer(load_identity(tmp_path), tmp_path, handler).run())
        await stop.wait()
        server.cancel()
        await asyncio.wait([server])
        ended.append(True)

    running = asyncio.create_task(daemon())
    await until_running(tmp_path, running)
    assert await reply_to(tmp_path, Leave()) == Done(text="leaves")
    await running
    assert ended


def test_without_a_daemon_the_error_names_the_commands_that_start_one(tmp_path):
    with pytest.raises(ClusterError, match=r"^--home .*: no primad runs with this folder; start 'primad join' or"):
        ask(tmp_path, Describe())
    assert not list(tmp_path.iterdir()), "a request leaves no files"


def note(home: Path, **changes: object) -> None:
    own = psutil.Process()
    since_boot = own.create_time() - psutil.boot_time()
    content = {"port": 9, "pid": own.pid, "started": own.create_time(), "since_boot": since_boot} | changes
    note_path(home).parent.mkdir(exist_ok=True)
    note_path(home).write_text(json.dumps(content))


def test_a_clock_that_was_set_makes_no_daemon_stale(tmp_path):
    note(tmp_path)
    assert is_running(tmp_path)
    note(tmp_path, started=1.0)
    assert is_running(tmp_path)
    note(tmp_path, since_boot=-1e9)
    assert is_running(tmp_path)


@pytest.mark.parametrize(
    "changes",
    [
        {"pid": 2**30},
        {"pid": -1},
        {"pid": 0},
        {"pid": 1e9},
        {"pid": 2**62},
        {"started": 1.0, "since_boot": -1e9},
        {"port": 0},
        {"port": 65_536},
        {"more": 1},
        {"port": "x"},
    ],
)
def test_a_note_of_a_dead_daemon_is_ignored(tmp_path, changes):
    note(tmp_path, **changes)
    assert not is_running(tmp_path)


@pytest.mark.parametrize("content", [b"", b"{", b"\xff", b"[]", b"{}", b"0" * (2 << 20)])
def test_a_damaged_note_is_ignored(tmp_path, content):
    (tmp_path / "run").mkdir()
    note_path(tmp_path).write_bytes(content)
    assert not is_running(tmp_path)


def test_an_unresponsive_daemon_is_one_clear_error(tmp_path):
    load_identity(tmp_path)
    with socket.socket() as silent:
        silent.bind((LOOPBACK, 0))
        silent.listen()
        note(tmp_path, port=silent.getsockname()[1])
        with pytest.raises(ClusterError, match=r"has not responded for 0.2 s; look at its terminal"):
            ask(tmp_path, Describe(), 0.2)


@pytest.mark.skipif(sys.platform == "win32", reason="no mode bits")
async def test_only_the_owner_can_read_the_note(tmp_path):
    async with serving(tmp_path):
        assert stat.S_IMODE(note_path(tmp_path).stat().st_mode) == 0o600
        assert load_identity(tmp_path).secret not in note_path(tmp_path).read_text()


async def test_another_identity_gets_nothing(tmp_path):
    """It is refused although it knows where the daemon listens, and even with the daemon's public key."""
    home, other = tmp_path / "home", tmp_path / "other"
    for folder in (home, other):
        folder.mkdir()
    handled: list[AdminRequest] = []

    async def handler(request: AdminRequest) -> AdminReply:
        handled.append(request)
        return await handle(request)

    async with serving(home, handler):
        load_identity(other)
        (other / "run").mkdir()
        shutil.copy(note_path(home), note_path(other))
        with pytest.raises(ClusterError, match="has not responded"):
            await reply_to(other, Pause(), 0.3)
        assert await sent_by_stranger(home, load_identity(home).public) is None
        assert handled == []
        assert await reply_to(home, Resume()) == REPLIES[Resume]


async def sent_by_stranger(home: Path, key: str) -> list[bytes] | None:
    """The reply to a well-formed request from another key."""
    context = zmq.asyncio.Context()
    try:
        with open_socket(context, zmq.DEALER, identity=new_identity(), server=key) as stranger:
            stranger.connect(endpoint(LOOPBACK, port_of(home)))
            await stranger.send(msgspec.msgpack.encode(Pause()))
            if await stranger.poll(300):
                return await stranger.recv_multipart()
            return None
    finally:
        context.destroy(linger=0)


@pytest.mark.parametrize("frames", [[b""], [b"\xc1"], [b"\x81\xa4type\xa5Dance"], [b"a", b"b"], [bytes(100_000)]])
async def test_garbage_is_refused_and_the_daemon_continues(tmp_path, frames):
    async with serving(tmp_path):
        identity = load_identity(tmp_path)
        context = zmq.asyncio.Context()
        try:
            with open_socket(context, zmq.DEALER, identity=identity, server=identity.public) as client:
                client.connect(endpoint(LOOPBACK, port_of(tmp_path)))
                await client.send_multipart(frames)
                async with asyncio.timeout(PATIENCE_S):
                    (answer,) = await client.recv_multipart()
        finally:
            context.destroy(linger=0)
        assert isinstance(msgspec.msgpack.decode(answer, type=AdminReply), Refusal)
        assert await reply_to(tmp_path, Pause()) == REPLIES[Pause]
