"""Measures the links between devices: empty messages for the round trip, and messages of a ring's sizes in each
direction.

The measuring device sends ``Echo`` to the other device's control port, which replies with the requested number of
bytes; so one device measures both directions. Every address of the other device is tried, and the fastest that works is
kept.

The hidden state of one token is a message of some kB, and each token waits for it, so such messages are sent one by
one, often enough for a 95th percentile. A prompt chunk is a message of some MB after a silence: TCP starts it slowly,
with some packets per round trip, and sends the rest at the link's rate. So the first large message of a connection is
timed, and then several in a row.

An echo passes through a program at each end. The time of a TCP connection, which the other device's system accepts by
itself, shows the round trip of the network alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import socket as tcp
import statistics
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import zmq
import zmq.asyncio
from zmq.utils.monitor import recv_monitor_message

from halda import LinkProfile, MessageTime
from primad.errors import ClusterError, ProtocolError
from primad.network.contacts import Contact
from primad.network.messages import MAX_ECHO_BYTES, USUAL_BYTES, Echo, Echoed, Refused, decode_from_worker
from primad.network.scopes import bare
from primad.network.sockets import bound_socket, endpoint, open_socket, refusals, unwatch
from primad.network.unreached import CLOSED, SILENT, SLOW, UNTRUSTED, Unreached
from primad.settings.config import join_address
from primad.settings.timings import NetworkTimings
from primad.system.wire import encode
from primad.trust.identity import Identity

UNREACHABLE_S: Final = 60.0
"""The round trip reported for a link that does not work, also by older devices."""
MAX_S: Final = 45.0
"""The longest time of measuring one device, whatever its delays. A link of 100 kB/s takes half of that."""
CONNECT_S: Final = 1.0
MAX_ADDRESSES: Final = 3
"""Limit of measured addresses of a device: the first ones to respond."""
_EMPTY_MESSAGES: Final = 15
_CONNECTIONS: Final = 20
_ROW_BYTES: Final = 8 << 10
"""The hidden state of one token of a model with 2,048 channels."""
_WIDE_ROW_BYTES: Final = 32 << 10
"""The hidden state of one token of a model with 8,192 channels."""
_LARGE_BYTES: Final = 256 << 10
"""TCP is at its full rate after this many bytes."""
_ROWS: Final = 100
_WIDE_ROWS: Final = 15
_LARGE_MESSAGES: Final = 3
_ROWS_S: Final = 0.25
"""After this time no more messages of a size are sent, except the ``_FEWEST`` required ones."""
_FEWEST: Final = 3
_LATE: Final = 0.95
_SLOW_START_ROUND_TRIPS: Final = 4
"""TCP sends 10 packets at first and twice as many each round trip: after four, 256 kB are on their way."""
_BULK_MESSAGES: Final = 4
_FAST_S: Final = 0.02
"""A link that carries ``_LARGE_BYTES`` in less time needs larger messages for a reliable figure."""

_SLOW_S: Final = 0.5
"""A link that takes longer for ``_LARGE_BYTES`` does not get several of them concurrently: its device would seem
silent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Way:
    """One direction of a link, as in ``LinkProfile``."""

    bytes_per_s: float
    late_s: float
    messages: tuple[MessageTime, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Measured:
    """Both directions of a link, through one address."""

    round_trip_s: float
    network_s: float | None
    there: _Way
    back: _Way

    @property
    def both_s(self) -> float:
        """Seconds per megabyte in each direction plus both delays: the measure for comparing addresses."""
        ways = (self.there, self.back)
        return self.round_trip_s + sum(way.late_s + MAX_ECHO_BYTES / way.bytes_per_s for way in ways)


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredLinks:
    """Both directions of links, and the targets that failed, with the reasons, one per device."""

    links: list[LinkProfile]
    unreached: list[Unreached]


class _NotReachedError(ClusterError):
    """An address that does not lead to the device, or not reliably; ``why`` as in ``Unreached``."""

    def __init__(self, why: str) -> None:
        super().__init__(why)
        self.why = why


_WHYS: Final = (UNTRUSTED, SLOW, CLOSED, SILENT)
"""Reasons by how informative they are: a response at one of several addresses says more than silence at another."""

Exchange = Callable[[int, int, int], Awaitable[float]]
"""Returns the seconds until ``count`` messages, of these sizes there and back, sent concurrently, are answered."""


async def measure_links(
    context: zmq.asyncio.Context,
    identity: Identity,
    source: str,
    targets: Sequence[Contact],
    *,
    timeout_s: float = NetworkTimings().link_timeout_s,
    max_s: float = MAX_S,
) -> MeasuredLinks:
    """Measure both directions of the links from this device, ``source``, to each of ``targets``, one target at a time.

    If no address reaches a target, or it delays many echoes beyond ``timeout_s``, its links count as not working.
    Measuring a target ends after ``max_s``.
    """
    measured = MeasuredLinks(links=[], unreached=[])
    for target in targets:
        best: tuple[_Measured, str] | None = None
        failed: dict[str, str] = {}
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(max_s):
                for address in await _quickest(target):
                    try:
                        found = await _measure(context, identity, address, target, timeout_s)
                    except _NotReachedError as exc:
                        failed.setdefault(exc.why, address)
                        continue
                    if best is None or found.both_s < best[0].both_s:
                        best = found, address
        if best is not None:
            found, address = best
            there, back = (source, target.device, address), (target.device, source, "")
            measured.links.append(_profile(*there, found.round_trip_s, found.there, found.network_s))
            measured.links.append(_profile(*back, found.round_trip_s, found.back, found.network_s))
            continue
        measured.links.extend([cut_link(source, target.device), cut_link(target.device, source)])
        why = next((each for each in _WHYS if each in failed), SILENT)
        place = join_address(bare(failed[why]), target.port) if why in failed else "any address"
        measured.unreached.append(Unreached(device=target.device, place=place[:80], why=why))
    return measured


def cut_link(source: str, target: str) -> LinkProfile:
    """A link that does not work."""
    return LinkProfile(
        source=source, target=target, address="", round_trip_s=UNREACHABLE_S, bytes_per_s=1.0, works=False
    )


async def _quickest(target: Contact) -> list[str]:
    """Return the addresses of ``target`` with a listener, the first to respond first; all of them if none was quick
    enough.

    A device announces every address it has, including bridges of containers and dead networks.
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
    return answered[:MAX_ADDRESSES] or target.addresses


def _profile(
    source: str, target: str, address: str, round_trip_s: float, way: _Way, network_s: float | None = None
) -> LinkProfile:
    return LinkProfile(
        source=source,
        target=target,
        address=address,
        round_trip_s=round_trip_s,
        bytes_per_s=way.bytes_per_s,
        late_s=way.late_s,
        messages=way.messages,
        network_s=network_s,
    )


async def _measure(
    context: zmq.asyncio.Context, identity: Identity, host: str, target: Contact, timeout_s: float
) -> _Measured:
    """The link to ``host``. Raises ``_NotReachedError`` if it does not respond in time."""
    try:
        socket = open_socket(context, zmq.DEALER, identity=identity, server=target.key)
    except zmq.ZMQError as exc:  # e.g. if no more sockets are available
        raise _NotReachedError(SILENT) from exc
    bound_socket(socket, USUAL_BYTES, 2 * _BULK_MESSAGES)

    async def exchange(count: int, send_bytes: int, answer_bytes: int) -> float:
        echo = Echo(payload=bytes(send_bytes), answer_bytes=answer_bytes)
        return await _exchange(socket, echo, count, timeout_s)

    try:
        await _meet(socket, host, target.port, exchange)
        round_trip_s = statistics.median([await exchange(1, 0, 0) for _ in range(_EMPTY_MESSAGES)])
        network_s = await asyncio.to_thread(_network_s, host, target.port)
        there, back = [await _way(exchange, round_trip_s, there=there) for there in (True, False)]
        return _Measured(
            round_trip_s=round_trip_s,
            network_s=None if network_s is None else min(network_s, round_trip_s),
            there=there,
            back=back,
        )
    finally:
        socket.close()


def _network_s(host: str, port: int) -> float | None:
    """Return the mean time, without the slowest, until the other device's system accepts a connection; None if it does
    not."""
    found, end = list[float](), time.perf_counter() + _ROWS_S
    try:
        family, kind, _, _, address = tcp.getaddrinfo(host, port, type=tcp.SOCK_STREAM)[0]
        while len(found) < _FEWEST or (len(found) < _CONNECTIONS and time.perf_counter() < end):
            with tcp.socket(family, kind) as connection:
                connection.settimeout(CONNECT_S)
                start = time.perf_counter()
                connection.connect(address)
                found.append(time.perf_counter() - start)
    except OSError:
        return None
    return statistics.mean(sorted(found)[:-1])


async def _way(exchange: Exchange, round_trip_s: float, *, there: bool) -> _Way:
    """Measure one direction: messages in the other direction are empty, so an empty exchange takes ``round_trip_s``."""

    async def times(size: int, maximum: int) -> list[float]:
        found, end = list[float](), time.perf_counter() + _ROWS_S
        while len(found) < _FEWEST or (len(found) < maximum and time.perf_counter() < end):
            found.append(await exchange(1, *_directed(size, there=there)))
        return found

    rows = await times(_ROW_BYTES, _ROWS)
    wide = await times(_WIDE_ROW_BYTES, _WIDE_ROWS)
    first, *others = await times(_LARGE_BYTES, _LARGE_MESSAGES)
    usual = statistics.median(others)
    size = MAX_ECHO_BYTES if usual < _FAST_S else _LARGE_BYTES
    count = _BULK_MESSAGES if usual < _SLOW_S else 1
    bulk_s = usual if count == 1 else await exchange(count, *_directed(size, there=there))
    # More than a slow start has another cause, such as a busy machine.
    large_s = min(first, usual + _SLOW_START_ROUND_TRIPS * round_trip_s)
    return _Way(
        bytes_per_s=count * size / max(1e-6, bulk_s - round_trip_s, bulk_s / 2),
        late_s=late_one_way_s(rows),
        messages=beyond_empty(
            round_trip_s,
            {_ROW_BYTES: statistics.median(rows), _WIDE_ROW_BYTES: statistics.median(wide), _LARGE_BYTES: large_s},
        ),
    )


def late_one_way_s(there_and_back_s: Sequence[float]) -> float:
    """Return how much later than the median the 95th percentile arrives, one way.

    This is half of the value for both ways: the delays add up, and so do their means, which this figure is used for.
    """
    ordered = sorted(there_and_back_s)
    return (ordered[math.ceil(_LATE * len(ordered)) - 1] - statistics.median(ordered)) / 2


def beyond_empty(round_trip_s: float, times: Mapping[int, float]) -> tuple[MessageTime, ...]:
    """The time of messages beyond an empty one, from the seconds by size until an empty reply.

    A larger message takes at least as long as a smaller one; other measurements are due to chance.
    """
    found, min_s = list[MessageTime](), 0.0
    for size, seconds in sorted(times.items()):
        min_s = max(min_s, seconds - round_trip_s)
        found.append(MessageTime(size_bytes=size, beyond_s=min_s))
    return tuple(found)


async def _meet(socket: zmq.asyncio.Socket, host: str, port: int, exchange: Exchange) -> None:
    """Connect, and wait for the first reply. Raises ``_NotReachedError`` with the reason for its absence."""
    try:
        monitor = refusals(socket)
    except zmq.ZMQError as exc:  # e.g. if no more sockets are available
        raise _NotReachedError(SILENT) from exc
    try:
        socket.connect(endpoint(host, port))
    except zmq.ZMQError as exc:  # e.g. an address of a network that this device does not have
        unwatch(socket, monitor)
        raise _NotReachedError(SILENT) from exc
    refused = asyncio.ensure_future(recv_monitor_message(monitor))
    answered = asyncio.ensure_future(exchange(1, 0, 0))
    try:
        await asyncio.wait([refused, answered], return_when=asyncio.FIRST_COMPLETED)
        if refused.done():
            raise _NotReachedError(UNTRUSTED)
        await answered
    except _NotReachedError as exc:
        raise _NotReachedError(exc.why if exc.why == UNTRUSTED else await _probe_port(host, port)) from exc
    finally:
        for task in (refused, answered):
            task.cancel()
        await asyncio.gather(refused, answered, return_exceptions=True)
        unwatch(socket, monitor)


async def _probe_port(host: str, port: int) -> str:
    """Why a port did not respond: no host, no listener, or a silent listener."""
    try:
        async with asyncio.timeout(CONNECT_S):
            _, writer = await asyncio.open_connection(host, port)
    except ConnectionRefusedError:
        return CLOSED
    except (OSError, TimeoutError):
        return SILENT
    writer.close()
    return SLOW


def _directed(size: int, *, there: bool) -> tuple[int, int]:
    return (size, 0) if there else (0, size)


async def _exchange(socket: zmq.asyncio.Socket, echo: Echo, count: int, timeout_s: float) -> float:
    """Return the seconds until ``echo``, sent ``count`` times concurrently, is answered ``count`` times."""
    message = encode(echo)
    start = time.perf_counter()
    try:
        async with asyncio.timeout(timeout_s):
            for _ in range(count):
                await socket.send(message)
            for _ in range(count):
                await _answer(socket, echo.answer_bytes)
    except TimeoutError as exc:
        raise _NotReachedError(SLOW) from exc
    return time.perf_counter() - start


async def _answer(socket: zmq.asyncio.Socket, answer_bytes: int) -> None:
    frames = await socket.recv_multipart()
    try:
        answer = decode_from_worker(frames[0]) if len(frames) == 1 else None
    except ProtocolError as exc:
        raise _NotReachedError(SLOW) from exc
    if isinstance(answer, Refused):
        raise _NotReachedError(UNTRUSTED)
    if not isinstance(answer, Echoed) or len(answer.payload) != answer_bytes:
        raise _NotReachedError(SLOW)
