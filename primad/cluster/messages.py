"""What head and worker say to each other on the control link, and what a device asks of another that has layers.

One msgpack frame a message; layer chunks carry their bytes in a second frame. The head opens the conversation with
``Hello``; the worker answers ``Welcome`` or ``Refused``. Between them at least a ``Ping`` and its ``Pong`` pass every
second, so that either side notices the other's end.
"""

from __future__ import annotations

import math
from ipaddress import ip_address
from typing import Final, TypeVar

import msgspec

from halda import DeviceProfile, LinkProfile
from primad.config import NAME
from primad.errors import ProtocolError, printable
from primad.gguf.layers import check_ref
from primad.gguf.windows import WindowSpec
from primad.profiles import Implausible, check_profile
from primad.ring.messages import Status

PROTOCOL: Final = 1
PING_INTERVAL_S: Final = 1.0
GONE_AFTER_S: Final = 4.0
MAX_MESSAGE_BYTES: Final = 64 << 20
CHUNK_BYTES: Final = 4 << 20
PHASES: Final = ("fetch", "probe", "load")
MAX_ECHO_BYTES: Final = 1 << 20
MAX_LINK_TARGETS: Final = 1024
MAX_ROUND_TRIP_S: Final = 3600.0
MAX_LINK_BYTES_PER_S: Final = 1e13
MAX_ADDRESSES: Final = 64


class Hello(msgspec.Struct, frozen=True, kw_only=True, tag="hello"):
    """The head introduces itself; ``session`` tells its restarts apart."""

    protocol: int
    version: str
    device: str
    session: int


class Load(msgspec.Struct, frozen=True, kw_only=True, tag="load"):
    """Take part in ring ``ring``, epoch ``epoch``: fetch the missing layers from ``sources``, load the windows, listen.

    ``probe`` is a one-layer window of the same layers to try extra buffers with, or None when they are not to be used.
    ``force_extra_buffers`` skips the probe. ``place`` tells devices of this ring that share a machine apart
    (see ``ring.spawn.environment``). The last ``gpu_layers[i]`` layers of ``windows[i]`` go to the GPU.
    """

    ring: int
    epoch: int
    route: int
    width: int
    windows: list[WindowSpec]
    gpu_layers: list[int]
    probe: WindowSpec | None
    force_extra_buffers: bool
    sources: list[str]
    context: int
    sequences: int
    rows: int
    step_timeout_s: float
    place: int


class Link(msgspec.Struct, frozen=True, kw_only=True, tag="link"):
    """Send steps of ``epoch`` to ``address``."""

    epoch: int
    address: str


class Release(msgspec.Struct, frozen=True, kw_only=True, tag="release"):
    """Give the windows of ``epoch`` back; the layer files stay."""

    epoch: int


class Ping(msgspec.Struct, frozen=True, tag="ping"):
    """Are you there? Also asks for a ``WorkerStatus`` when ``status`` is set."""

    status: bool


class LinkTarget(msgspec.Struct, frozen=True, kw_only=True):
    """A device to measure the link to: its addresses and control port."""

    device: str
    addresses: list[str]
    port: int


class MeasureLinks(msgspec.Struct, frozen=True, kw_only=True, tag="measure-links"):
    """Measure the links to ``targets``; answered by ``LinksMeasured``."""

    targets: list[LinkTarget]


class Echo(msgspec.Struct, frozen=True, kw_only=True, tag="echo"):
    """Answer with ``answer_bytes`` bytes. Any device may ask that knows the ``session`` of the head here.

    ``device`` is whom it is for: an address may lead to another device than its sender believes.
    """

    session: int
    device: str
    payload: bytes
    answer_bytes: int


HeadMessage = Hello | Load | Link | Release | Ping | MeasureLinks | Echo


class Welcome(msgspec.Struct, frozen=True, kw_only=True, tag="welcome"):
    """The worker is free and has this profile."""

    protocol: int
    version: str
    build: str
    profile: DeviceProfile


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    """The worker does not work for this head now; ``reason`` is one line."""

    reason: str


class Progress(msgspec.Struct, frozen=True, kw_only=True, tag="progress"):
    """How far loading is: ``phase`` (one of ``PHASES``) is fetch (bytes), probe (runs) or load (windows)."""

    epoch: int
    phase: str
    done: int
    total: int


class Loaded(msgspec.Struct, frozen=True, kw_only=True, tag="loaded"):
    """All windows of ``epoch`` are loaded; steps are received on TCP port ``port``."""

    epoch: int
    port: int


class Linked(msgspec.Struct, frozen=True, tag="linked"):
    """Steps of ``epoch`` now go where ``Link`` said."""

    epoch: int


class Broken(msgspec.Struct, frozen=True, kw_only=True, tag="broken"):
    """The worker's part of ``epoch`` ended; ``error`` is one line."""

    epoch: int
    error: str


class Pong(msgspec.Struct, frozen=True, tag="pong"):
    """Here."""


class WorkerStatus(msgspec.Struct, frozen=True, kw_only=True, tag="status"):
    """What the worker's ring process did and holds; ``daemon_rss_bytes`` is the memory of the daemon beside it."""

    epoch: int
    status: Status
    daemon_rss_bytes: int


class LinksMeasured(msgspec.Struct, frozen=True, kw_only=True, tag="links"):
    """Both directions of the links that were asked for."""

    links: list[LinkProfile]


class Echoed(msgspec.Struct, frozen=True, tag="echoed"):
    """The answer to ``Echo``."""

    payload: bytes


WorkerMessage = Welcome | Refused | Progress | Loaded | Linked | Broken | Pong | WorkerStatus | LinksMeasured | Echoed


class FetchChunk(msgspec.Struct, frozen=True, kw_only=True, tag="fetch"):
    """Ask for ``size`` bytes of the weights of layer ``digest`` from ``offset``."""

    digest: str
    offset: int
    size: int


class Chunk(msgspec.Struct, frozen=True, kw_only=True, tag="chunk"):
    """The answer; the bytes are the frame behind it."""

    digest: str
    offset: int


class NoChunk(msgspec.Struct, frozen=True, kw_only=True, tag="no-chunk"):
    """The asked device cannot give it; ``reason`` is one line."""

    digest: str
    offset: int
    reason: str


TransferMessage = FetchChunk | Chunk | NoChunk

Message = TypeVar("Message")

_head_decoder = msgspec.msgpack.Decoder(HeadMessage)
_worker_decoder = msgspec.msgpack.Decoder(WorkerMessage)
_transfer_decoder = msgspec.msgpack.Decoder(TransferMessage)


def decode_from_head(data: bytes) -> HeadMessage:
    """A message of a head. Raises ``ProtocolError``."""
    message: HeadMessage = _decode(_head_decoder, data)
    match message:
        case Load():
            _check_load(message)
        case Hello(device=device) if not NAME.fullmatch(device):
            raise ProtocolError(f"hello of {printable(device, 70)!r}, which is no device name")
        case MeasureLinks(targets=targets):
            _check_targets(targets)
        case Echo(payload=payload, answer_bytes=size) if (
            len(payload) > MAX_ECHO_BYTES or not 0 <= size <= MAX_ECHO_BYTES
        ):
            raise ProtocolError(f"echo of {len(payload)} bytes for {size} bytes; at most {MAX_ECHO_BYTES} are allowed")
        case Echo(device=device) if not NAME.fullmatch(device):
            raise ProtocolError(f"echo for {printable(device, 70)!r}, which is no device name")
    return message


def decode_from_worker(data: bytes) -> WorkerMessage:
    """A message of a worker, its texts fit to be shown. Raises ``ProtocolError``."""
    message: WorkerMessage = _decode(_worker_decoder, data)
    match message:
        case Welcome(profile=profile):
            _check_profile(profile)
        case Loaded(port=port) if not 0 < port < 65_536:
            raise ProtocolError(f"windows loaded on the impossible port {port}")
        case Progress(phase=phase, done=done, total=total) if phase not in PHASES or not 0 <= done <= total:
            raise ProtocolError(f"impossible progress: {done} of {total} in phase {printable(phase, 20)!r}")
        case Refused(reason):
            return Refused(printable(reason))
        case Broken(epoch=epoch, error=error):
            return Broken(epoch=epoch, error=printable(error))
        case LinksMeasured(links=links):
            _check_links(links)
    return message


def decode_transfer(data: bytes) -> TransferMessage:
    """A message about layer chunks. Raises ``ProtocolError``."""
    message: TransferMessage = _decode(_transfer_decoder, data)
    if isinstance(message, NoChunk):
        return NoChunk(digest=message.digest, offset=message.offset, reason=printable(message.reason))
    return message


def _decode(decoder: msgspec.msgpack.Decoder[Message], data: bytes) -> Message:
    try:
        return decoder.decode(data)
    except (msgspec.DecodeError, ValueError, RecursionError) as exc:
        raise ProtocolError(f"not a control message: {printable(exc)}") from exc


def _check_targets(targets: list[LinkTarget]) -> None:
    if len(targets) > MAX_LINK_TARGETS:
        raise ProtocolError(f"links to {len(targets)} devices asked for; at most {MAX_LINK_TARGETS} are allowed")
    for target in targets:
        if not NAME.fullmatch(target.device):
            raise ProtocolError(f"link to {printable(target.device, 70)!r}, which is no device name")
        if len(target.addresses) > MAX_ADDRESSES or not 0 < target.port < 65_536:
            raise ProtocolError(f"link to {target.device} at {len(target.addresses)} addresses, port {target.port}")
        for address in target.addresses:
            try:
                ip_address(address.partition("%")[0])
            except ValueError as exc:
                raise ProtocolError(
                    f"link to {target.device} at {printable(address, 50)!r}, which is no address"
                ) from exc


def _check_links(links: list[LinkProfile]) -> None:
    for link in links:
        for name in (link.source, link.target):
            if not NAME.fullmatch(name):
                raise ProtocolError(f"link of {printable(name, 70)!r}, which is no device name")
        if not 0 < link.round_trip_s < MAX_ROUND_TRIP_S or not 0 < link.bytes_per_s < MAX_LINK_BYTES_PER_S:
            raise ProtocolError(
                f"link from {link.source} to {link.target} of {link.round_trip_s} s and {link.bytes_per_s} bytes/s"
            )
        if link.address:
            _check_targets([LinkTarget(device=link.target, addresses=[link.address], port=1)])


def _check_profile(profile: DeviceProfile) -> None:
    try:
        check_profile(profile)
    except Implausible as exc:
        raise ProtocolError(f"profile of {printable(profile.device, 70)!r} is impossible: {exc}") from exc


def _check_load(load: Load) -> None:
    if not 2 <= load.route <= 100_000 or not 0 < load.width <= 1 << 20:
        raise ProtocolError(f"plan with a route of {load.route} windows and a width of {load.width}")
    if not 0 < load.rows <= 8192 or not 0 < load.context <= 1 << 26 or not 0 < load.sequences <= 256:
        raise ProtocolError(f"plan with {load.rows} rows, {load.sequences} sequences, a context of {load.context}")
    if not 0 <= load.place < 1 << 16:
        raise ProtocolError(f"plan with the impossible place {load.place}")
    if not 0 < load.step_timeout_s < math.inf:
        raise ProtocolError(f"plan with a step timeout of {load.step_timeout_s} s")
    if not load.windows or len(load.gpu_layers) != len(load.windows):
        raise ProtocolError("plan without windows for this device")
    if len({spec.window for spec in load.windows}) != len(load.windows):
        raise ProtocolError("plan with two windows at one place of the route")
    if any(not 0 <= count <= spec.last - spec.first for count, spec in zip(load.gpu_layers, load.windows, strict=True)):
        raise ProtocolError("plan with more layers on the GPU than a window has")
    for spec in [*load.windows, *([load.probe] if load.probe else [])]:
        if not 0 <= spec.first < spec.last or len(spec.layers) < spec.last - spec.first:
            raise ProtocolError(f"window {spec.window} of layers {spec.first} to {spec.last} is impossible")
        for ref in spec.layers:
            check_ref(ref)
    if any(not 0 < spec.window < load.route - 1 for spec in load.windows):
        raise ProtocolError("plan gives a worker the head's first or last window")
