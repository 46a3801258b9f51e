"""Measure the links between devices: small messages there and back for the round trip, large ones for the throughput.

The device that measures sends ``Echo`` to the control port of the other, which answers with as many bytes as it was asked
for; so one device measures both directions. Every address of the other is tried, the fastest that works is kept.
"""

from __future__ import annotations

import asyncio
import contextlib
import statistics
import time
from collections.abc import Sequence
from typing import Final

import zmq
import zmq.asyncio

from halda import LinkProfile
from primad.errors import ClusterError, ProtocolError
from primad.network.contacts import Contact
from primad.network.messages import MAX_ECHO_BYTES, Echo, Echoed, decode_from_worker
from primad.network.sockets import endpoint, open_socket
from primad.ring.messages import encode
from primad.settings.timings import NetworkTimings
from primad.trust.identity import Identity

UNREACHABLE_S: Final = 60.0
"""Round trip that a link is given which does not work: no plan takes it while there is another way."""
CONNECT_S: Final = 1.0
MOST_ADDRESSES: Final = 3
"""So many of a device's addresses are measured, of those that answer first."""
_ROUND_TRIPS: Final = 15
_SMALL_BYTES: Final = 8 << 10
"""About a row of hidden states."""
_WARM_BYTES: Final = 256 << 10
_BULK_MESSAGES: Final = 4
_FAST_S: Final = 0.02
"""A link that carries the warming message in less is worth more messages for a figure that holds."""


async def measure_links(
    context: zmq.asyncio.Context,
    identity: Identity,
    source: str,
    targets: Sequence[Contact],
    *,
    timeout_s: float = NetworkTimings().link_timeout_s,
) -> list[LinkProfile]:
    """Both directions of the links from this device, ``source``, to each of ``targets``, one after the other.

    A target that no address reaches gets links of ``UNREACHABLE_S``; so does one that lets a lot of echoes wait for longer
    than ``timeout_s``.
    """
    links = []
    for target in targets:
        best: tuple[float, float, float, str] | None = None
        for address in await _quickest(target):
            try:
                found = (*await _measure(context, identity, address, target, timeout_s), address)
            except ClusterError:
                continue
            if best is None or _there_and_back_s(*found) < _there_and_back_s(*best):
                best = found
        links += _profiles(source, target.device, best)
    return links


async def _quickest(target: Contact) -> list[str]:
    """The addresses of ``target`` where somebody listens, the first to answer first; all of them when nobody was so quick.

    A device announces every address it has: bridges of containers and dead networks among them.
    """
    if len(target.addresses) == 1:
        return target.addresses
    answered: list[str] = []

    async def probe(address: str) -> None:
        with contextlib.suppress(OSError, TimeoutError):
            async with asyncio.timeout(CONNECT_S):
                _, writer = await asyncio.open_connection(address, target.port)
            answered.append(address)
            writer.close()

    await asyncio.gather(*(probe(address) for address in target.addresses))
    return answered[:MOST_ADDRESSES] or target.addresses


def _there_and_back_s(round_trip_s: float, there: float, back: float, address: str) -> float:
    """Seconds of a megabyte each way: what addresses are compared by."""
    del address
    return round_trip_s + MAX_ECHO_BYTES / there + MAX_ECHO_BYTES / back


def _profiles(source: str, target: str, found: tuple[float, float, float, str] | None) -> list[LinkProfile]:
    round_trip_s, there, back, address = found if found is not None else (UNREACHABLE_S, 1.0, 1.0, "")
    return [
        LinkProfile(source=source, target=target, address=address, round_trip_s=round_trip_s, bytes_per_s=there),
        LinkProfile(source=target, target=source, address="", round_trip_s=round_trip_s, bytes_per_s=back),
    ]


async def _measure(
    context: zmq.asyncio.Context, identity: Identity, host: str, target: Contact, timeout_s: float
) -> tuple[float, float, float]:
    """Round trip in seconds, bytes per second there and back. Raises ``ClusterError`` when it does not answer in time."""
    try:
        socket = open_socket(context, zmq.DEALER, identity=identity, server=target.key)
    except zmq.ZMQError as exc:  # as where no more sockets can be had
        raise ClusterError(f"no connection can be made: {exc.strerror}") from exc

    async def exchange(count: int, send_bytes: int, answer_bytes: int) -> float:
        echo = Echo(payload=bytes(send_bytes), answer_bytes=answer_bytes)
        return await _exchange(socket, echo, count, timeout_s)

    try:
        _connect(socket, host, target.port)
        await exchange(1, _SMALL_BYTES, 0)
        round_trip_s = statistics.median([await exchange(1, _SMALL_BYTES, _SMALL_BYTES) for _ in range(_ROUND_TRIPS)])
        rates = []
        for there in (True, False):
            warm_s = await exchange(1, *_directed(_WARM_BYTES, there=there))
            size = MAX_ECHO_BYTES if warm_s < _FAST_S else _WARM_BYTES
            bulk_s = await exchange(_BULK_MESSAGES, *_directed(size, there=there))
            rates.append(_BULK_MESSAGES * size / max(1e-6, bulk_s - round_trip_s / 2))
        return round_trip_s, rates[0], rates[1]
    finally:
        socket.close()


def _connect(socket: zmq.asyncio.Socket, host: str, port: int) -> None:
    try:
        socket.connect(endpoint(host, port))
    except zmq.ZMQError as exc:  # as the address of a network that this device does not have
        raise ClusterError(f"{host} is no address to connect to: {exc.strerror}") from exc


def _directed(size: int, *, there: bool) -> tuple[int, int]:
    return (size, 0) if there else (0, size)


async def _exchange(socket: zmq.asyncio.Socket, echo: Echo, count: int, timeout_s: float) -> float:
    """Seconds until ``echo``, sent ``count`` times at once, is answered as often."""
    message = encode(echo)
    start = time.perf_counter()
    try:
        async with asyncio.timeout(timeout_s):
            for _ in range(count):
                await socket.send(message)
            for _ in range(count):
                await _answer(socket, echo.answer_bytes)
    except TimeoutError as exc:
        raise ClusterError(f"no answer to a message of {len(echo.payload)} bytes within {timeout_s:g} s") from exc
    return time.perf_counter() - start


async def _answer(socket: zmq.asyncio.Socket, answer_bytes: int) -> None:
    frames = await socket.recv_multipart()
    try:
        answer = decode_from_worker(frames[0]) if len(frames) == 1 else None
    except ProtocolError as exc:
        raise ClusterError(str(exc)) from exc
    if not isinstance(answer, Echoed) or len(answer.payload) != answer_bytes:
        raise ClusterError("the device answered something else")
