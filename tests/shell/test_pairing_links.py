"""Pairing over real sockets: strangers cost nothing, the right code succeeds, each failure is one clear line."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from primad.errors import ClusterError, ConfigError
from primad.trust import pairing, pairing_links
from primad.trust.identity import new_identity
from primad.trust.pairing import MAX_BYTES, MAX_TRIES, CodeOutcome, Who
from primad.trust.pairing_links import MAX_PEERS_OF_ADDRESS, PairingServer, pair_with
from primad.trust.trust import PAIRED, TrustedDevice
from primad.trust.words import Code

HOST = "127.0.0.1"
TIMEOUT_S = 180
CODE = Code(7, "lamp", "river")
OTHER = Code(8, "lamp", "river")
DESK = Who(device="desk", key=new_identity().public, cluster="home", version="0.1")
PI = Who(device="pi", key=new_identity().public, cluster="home", version="0.1")


class Invited:
    """A running server, the devices that it paired with, and its end."""

    def __init__(self, **options: float) -> None:
        self.paired: list[TrustedDevice] = []
        self.server = PairingServer(HOST, CODE, DESK, self.paired.append, **options)
        self.port = self.server.port
        self.end = asyncio.create_task(self.server.run())


@asynccontextmanager
async def invited(**options: float) -> AsyncIterator[Invited]:
    """A running server and a limit on the test's time."""
    running = Invited(**options)
    try:
        async with asyncio.timeout(TIMEOUT_S):
            yield running
    finally:
        running.end.cancel()
        await asyncio.wait([running.end])


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replies are sent at once; their timing is not tested."""
    monkeypatch.setattr(pairing_links, "REPLY_S", 0.0)


async def brought(port: int, code: Code = CODE, **options: float) -> TrustedDevice:
    """Bring ``code`` to ``port``, with no limit on proofs."""
    return await pair_with(HOST, port, code, PI, lambda: None, **options)


async def stranger(port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection(HOST, port)


async def reads_end(reader: asyncio.StreamReader) -> bool:
    """Whether the other side has closed the connection."""
    try:
        return await reader.read() == b""
    except ConnectionError:
        return True


def run_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Advance the loop's clock by the longest time of a connection, so that all open ones are over."""
    loop = asyncio.get_running_loop()
    now = loop.time
    monkeypatch.setattr(loop, "time", lambda: now() + pairing_links.RUN_S)


async def test_a_device_with_the_code_is_paired_and_the_port_is_closed_then():
    async with invited() as desk:
        found = await brought(desk.port)
        assert (found.device, found.key, found.how) == ("desk", DESK.key, PAIRED)
        assert await desk.end is CodeOutcome.USED
        assert [(each.device, each.key, each.how) for each in desk.paired] == [("pi", PI.key, PAIRED)]
        with pytest.raises(ClusterError, match="no pairing there"):
            await brought(desk.port)


async def test_a_wrong_code_is_reported_and_the_right_one_waits_for_its_turn(caplog):
    with caplog.at_level(logging.DEBUG):
        async with invited() as desk:
            with pytest.raises(ClusterError, match=r"pairing with 127\.0\.0\.1:\d+: wrong code .*4 tries"):
                await brought(desk.port, OTHER)
            assert desk.paired == []
            await brought(desk.port)
    assert "lamp" not in caplog.text
    assert "river" not in caplog.text


@pytest.mark.slow
async def test_too_many_wrong_tries_burn_the_code():
    async with invited() as desk:
        for _ in range(MAX_TRIES - 1):
            with pytest.raises(ClusterError, match="tries are left"):
                await brought(desk.port, OTHER)
        with pytest.raises(ClusterError, match="the code is invalid"):
            await brought(desk.port, OTHER)
        assert await desk.end is CodeOutcome.BURNT
        assert desk.paired == []


@pytest.mark.parametrize("works_s", [0.01, 0.2])
async def test_the_time_of_a_reply_reveals_nothing_of_the_code(monkeypatch: pytest.MonkeyPatch, works_s: float):
    """This holds while computing takes less than ``REPLY_S``; here it takes ``works_s``."""
    passed_s, waits = 0.0, []

    def work(side: object, element: bytes) -> bytes:
        nonlocal passed_s
        passed_s += works_s
        return bytes(32)

    async def sleep(seconds: float) -> None:
        waits.append(seconds)

    monkeypatch.setattr(pairing_links, "REPLY_S", 0.25)
    monkeypatch.setattr(pairing, "_finish", work)
    monkeypatch.setattr(pairing_links.asyncio, "sleep", sleep)
    loop = asyncio.get_running_loop()
    now = loop.time()
    monkeypatch.setattr(loop, "time", lambda: now + passed_s)
    async with invited() as desk:
        await brought(desk.port)
    assert sorted(waits) == pytest.approx([0.25 - works_s, 0.25 - works_s, 0.25, 0.25, 0.25])


async def test_an_expired_code_closes_the_port():
    async with invited(lifetime_s=0.2) as desk:
        assert await desk.end is CodeOutcome.EXPIRED


async def test_a_key_that_cannot_be_saved_is_reported_on_both_sides(caplog):
    def full(device: TrustedDevice) -> None:
        raise ConfigError("trust.json: No space left on device")

    server = PairingServer(HOST, CODE, DESK, full)
    end = asyncio.create_task(server.run())
    with pytest.raises(ClusterError, match="cannot store the key"):
        await brought(server.port)
    await end
    assert "No space left" in caplog.text


async def test_an_unreachable_pairing_server_is_one_line():
    server = PairingServer(HOST, CODE, DESK, lambda _: None)
    server.close()
    with pytest.raises(ClusterError, match="no pairing there"):
        await brought(server.port)


def test_an_invalid_host_is_one_line():
    with pytest.raises(ClusterError, match="cannot listen on"):
        PairingServer("192.0.2.1", CODE, DESK, lambda _: None)


REPLIES = {
    "nothing": b"",
    "garbage": b"HTTP/1.1 400 Bad Request\r\n\r\n",
    "a message that is none": b"\x00\x03abc",
    "half a message": b"\x00\x30abc",
    "an empty one": b"\x00\x00",
}


@pytest.mark.parametrize("answer", REPLIES.values(), ids=REPLIES.keys())
async def test_something_else_on_the_port_is_one_line(answer: bytes):
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(100)
        writer.write(answer)
        writer.close()

    server = await asyncio.start_server(serve, HOST, 0)
    async with server:
        with pytest.raises(ClusterError) as error:
            await brought(server.sockets[0].getsockname()[1])
        assert "\n" not in str(error.value)


async def test_a_silent_peer_is_given_up():
    with socket.create_server((HOST, 0)) as silent, pytest.raises(ClusterError, match="no response within"):
        await brought(silent.getsockname()[1], timeout_s=0.2)


GARBAGE = {
    "a message that is none": b"\x00\x03abc",
    "an empty message": b"\x00\x00",
    "a message that is too long": (MAX_BYTES + 1).to_bytes(2, "big") + bytes(MAX_BYTES + 1),
    "HTTP": b"GET / HTTP/1.1\r\n\r\n",
    "a flood": b"\x00\x01\x00" * 10_000,
}


@pytest.mark.parametrize("data", GARBAGE.values(), ids=GARBAGE.keys())
async def test_garbage_ends_its_connection_and_nothing_else(data: bytes):
    async with invited() as desk:
        reader, writer = await stranger(desk.port)
        writer.write(data)
        assert await reads_end(reader)
        writer.close()
        await brought(desk.port)


async def test_a_peer_that_trickles_bytes_is_cut_off_at_its_deadline(monkeypatch: pytest.MonkeyPatch):
    async with invited() as desk:
        reader, writer = await stranger(desk.port)
        writer.write(b"\x00")
        with pytest.raises(ClusterError, match="wrong code"):  # the right one would end the server, and this peer
            await brought(desk.port, OTHER)
        assert not reader.at_eof()
        run_out(monkeypatch)
        assert await reads_end(reader)
        assert not desk.end.done()
        writer.close()


async def test_a_crowd_of_strangers_is_kept_out_and_leaves_room_again(monkeypatch: pytest.MonkeyPatch):
    async with invited() as desk:
        crowd = [await stranger(desk.port) for _ in range(300)]
        with pytest.raises(ClusterError, match="no pairing there"):
            await brought(desk.port)
        assert len(desk.server._peers) == MAX_PEERS_OF_ADDRESS
        run_out(monkeypatch)
        for reader, writer in crowd:
            assert await reads_end(reader)
            writer.close()
        await brought(desk.port)
        assert await desk.end is CodeOutcome.USED


@pytest.mark.parametrize("is_over", [False, True])
async def test_a_connection_accepted_as_the_server_is_cancelled_is_closed(is_over: bool):
    loop = asyncio.get_running_loop()
    async with invited() as desk:
        await asyncio.sleep(0)
        if is_over:
            desk.end.cancel()
            await asyncio.wait([desk.end])

        def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            desk.end.cancel()
            desk.server._accept(reader, writer)  # its task is cancelled before it starts

        ours, theirs = socket.socketpair()
        with ours:
            ours.setblocking(False)
            await loop.connect_accepted_socket(
                lambda: asyncio.StreamReaderProtocol(asyncio.StreamReader(), accept), theirs
            )
            assert await loop.sock_recv(ours, 1) == b""


async def test_a_server_that_is_cancelled_closes_everything():
    async with invited() as desk:
        reader, writer = await stranger(desk.port)
        await asyncio.sleep(0)
        desk.end.cancel()
        assert await reads_end(reader)
        writer.close()
        await asyncio.wait([desk.end])
        with pytest.raises(ClusterError):
            await brought(desk.port)
