"""The socket of a daemon's HTTP server."""

from __future__ import annotations

import asyncio
import socket

import pytest

from primad.api.http.listener import Listener
from primad.api.http.patience import Patience
from primad.api.http.server import bind_http
from primad.errors import ConfigError


def test_responses_are_sent_without_delay():
    async def scenario() -> int:
        connected = asyncio.get_running_loop().create_future()

        class Connection(asyncio.Protocol):
            def connection_made(self, transport: asyncio.BaseTransport) -> None:
                served = transport.get_extra_info("socket")
                connected.set_result(served.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
                transport.close()

        listener = Listener(bind_http("127.0.0.1", 0), Patience(10, 10))
        async with await asyncio.get_running_loop().create_server(Connection, sock=listener):
            _, writer = await asyncio.open_connection(*listener.getsockname())
            found = await connected
            writer.close()
            return found

    assert asyncio.run(scenario()) != 0


def test_a_taken_port_is_refused_by_the_name_of_its_option():
    with bind_http("127.0.0.1", 0) as listener, pytest.raises(ConfigError, match=r"^--api-port \d+: .* --api-port$"):
        bind_http("127.0.0.1", listener.getsockname()[1], "--api-port")
