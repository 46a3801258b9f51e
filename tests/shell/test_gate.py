"""The gate: untrusted peers get nothing, and trusted ones do not notice them."""

from __future__ import annotations

import asyncio
import logging
import socket
import sys
import time

import pytest
import zmq
import zmq.asyncio

from primad.errors import ClusterError, ConfigError, ProtocolError
from primad.network.gate import Gate, sender_key
from primad.network.sockets import MAX_DESCRIPTORS, endpoint, listen, open_socket, raise_descriptor_limit
from tests.shell.gated import FRIEND, HOST, PATIENCE_S, SECOND, SERVER, STRANGER, GatedServer, gated_server


async def test_a_trusted_key_gets_in_and_every_message_has_its_senders_key():
    async with gated_server(SECOND) as here:
        for identity in (FRIEND, SECOND):
            client = here.client(identity)
            await client.send_multipart([b"a", b"b"])
            frames = await here.server.recv_multipart(copy=False)
            assert [sender_key(frame) for frame in frames[1:]] == [identity.public, identity.public]
            client.close()


async def test_a_key_that_is_not_trusted_gets_nothing():
    async with gated_server() as here:
        client = here.client(STRANGER)
        await client.send(b"secret?")
        await here.expect_silence()
        await here.serves_its_friend()


@pytest.mark.parametrize("mechanism", ["null", "plain"])
async def test_a_client_without_encryption_gets_nothing(mechanism: str):
    async with gated_server() as here:
        client = here.context.socket(zmq.DEALER)
        client.setsockopt(zmq.LINGER, 0)
        if mechanism == "plain":
            client.plain_username, client.plain_password = b"friend", b"friend"
        client.connect(endpoint(HOST, here.port))
        await client.send(b"secret?")
        await here.expect_silence()
        await here.serves_its_friend()
        client.close()


async def test_without_a_gate_nobody_gets_in():
    here = GatedServer(lambda key: True)
    client = here.client()
    await client.send(b"hello")
    await here.expect_silence()
    here.close()


async def test_a_closed_gate_lets_nobody_in_and_another_may_replace_it():
    here = GatedServer(lambda key: True)
    async with asyncio.timeout(PATIENCE_S):
        async with here.gate:
            await here.serves_its_friend()
        client = here.client()
        await client.send(b"hello")
        await here.expect_silence()
        client.close()  # the next gate would let it in
        async with Gate(here.context, lambda key: True):
            await here.serves_its_friend()
    here.close()


async def test_a_gate_may_open_as_soon_as_another_has_closed():
    here = GatedServer(lambda key: True)
    for _ in range(50):
        async with here.gate:
            pass
    here.close()


async def test_a_client_that_pins_another_server_key_sends_nothing_to_ours():
    async with gated_server() as here:
        client = here.client(server=STRANGER.public)
        await client.send(b"for the other one only")
        await here.expect_silence()
        await here.serves_its_friend()


async def test_a_revoked_key_cannot_reconnect_and_its_open_connection_can_be_recognised():
    trusted = {FRIEND.public, SECOND.public}
    async with gated_server(allows=trusted.__contains__) as here:
        client = here.client(SECOND)
        await client.send(b"before")
        assert await here.receive() == [b"before"]
        trusted.remove(SECOND.public)
        await client.send(b"after")
        frames = await here.server.recv_multipart(copy=False)
        assert sender_key(frames[1]) not in trusted
        again = here.client(SECOND)
        await again.send(b"again")
        await here.expect_silence()
        await here.serves_its_friend()


async def test_a_trusted_device_cannot_take_the_place_of_another():
    async with gated_server(SECOND) as here:
        first = here.client()
        await first.send(b"first")
        peer, _ = await here.server.recv_multipart()
        thief = open_socket(here.context, zmq.DEALER, identity=SECOND, server=SERVER.public)
        thief.setsockopt(zmq.ROUTING_ID, peer)
        thief.connect(endpoint(HOST, here.port))
        await thief.send(b"I am the first")
        await here.expect_silence()
        await here.server.send_multipart([peer, b"for the first"])
        assert await first.recv() == b"for the first"
        thief.close()
        await here.serves_its_friend()


async def test_a_message_that_came_through_no_gate_has_no_sender():
    context = zmq.asyncio.Context()
    left, right = context.socket(zmq.PAIR), context.socket(zmq.PAIR)
    left.bind("inproc://both")
    right.connect("inproc://both")
    await right.send(b"")
    frames = await left.recv_multipart(copy=False)
    with pytest.raises(ProtocolError, match="has proven no key"):
        sender_key(frames[0])
    context.destroy(linger=0)


# the gate's log lines, and what it survives


def printed(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "primad.network.gate"]


async def until_printed(caplog: pytest.LogCaptureFixture) -> None:
    """Wait for the first line: on a busy machine a handshake may take long."""
    while not printed(caplog):  # noqa: ASYNC110  (nothing notifies)
        await asyncio.sleep(0)


async def test_refusals_are_logged_once_a_second_and_name_no_secret(caplog):
    start = time.monotonic()
    with caplog.at_level(logging.WARNING):
        async with gated_server() as here:
            for _ in range(30):
                await here.client(STRANGER).send(b"secret?")
            await until_printed(caplog)
            await here.expect_silence()
    lines = printed(caplog)
    assert 1 <= len(lines) <= 2 + time.monotonic() - start, "and one at the end for those that were not named"
    assert "it is not trusted here" in lines[0]
    assert HOST in lines[0]
    for text in (STRANGER.secret, SERVER.secret, "secret?"):
        assert text not in caplog.text


async def test_a_key_is_refused_if_the_trust_store_cannot_be_read(caplog):
    def damaged(key: str) -> bool:
        raise ConfigError("trust.json: is damaged")

    async with gated_server(allows=damaged) as here:
        await here.client().send(b"hello")
        await until_printed(caplog)
        await here.expect_silence()
    assert "trust.json: is damaged" in printed(caplog)[0]


async def test_a_gate_that_is_cancelled_during_a_flood_leaves_nothing_open():
    async with gated_server() as here:
        for _ in range(50):
            await here.client(STRANGER).send(b"secret?")


def test_the_descriptor_limit_is_raised_to_the_users_maximum():
    limit = raise_descriptor_limit()
    assert raise_descriptor_limit() == limit
    if sys.platform != "win32":
        import resource

        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        assert limit == soft
        assert soft == resource.RLIM_INFINITY or soft >= min(MAX_DESCRIPTORS, hard if hard > 0 else 0)


async def test_a_taken_port_is_one_clear_line_unless_it_was_only_preferred():
    context = zmq.asyncio.Context()
    with socket.create_server((HOST, 0)) as occupied:
        port = occupied.getsockname()[1]
        with pytest.raises(ClusterError, match=f"--port {port}: cannot listen on {HOST}"):
            listen(context, zmq.ROUTER, HOST, port, identity=SERVER)
        other, found = listen(context, zmq.ROUTER, HOST, None, port, identity=SERVER)
        assert found != port
        other.close()
    context.destroy(linger=0)
