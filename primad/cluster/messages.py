"""What head and worker say to each other on the control link, and what a device asks of another that has layers.

One msgpack frame a message; layer chunks carry their bytes in a second frame. The head opens the conversation with
``Hello``; the worker answers ``Welcome`` or ``Refused``. Between them at least a ``Ping`` and its ``Pong`` pass every
second, so that either side notices the other's end.
"""

from __future__ import annotations

import math
from typing import Final, TypeVar

import msgspec

from halda import DeviceProfile
from primad.config import NAME
from primad.errors import ProtocolError, printable
from primad.gguf.layers import check_ref
from primad.gguf.windows import WindowSpec
from primad.ring.messages import Status

PROTOCOL: Final = 1
PING_INTERVAL_S: Final = 1.0
GONE_AFTER_S: Final = 4.0
MAX_MESSAGE_BYTES: Final = 64 << 20
CHUNK_BYTES: Final = 4 << 20
PHASES: Final = ("fetch", "probe", "load")


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
    (see ``ring.spawn.environment``).
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


HeadMessage = Hello | Load | Link | Release | Ping


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


WorkerMessage = Welcome | Refused | Progress | Loaded | Linked | Broken | Pong | WorkerStatus


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


def _check_profile(profile: DeviceProfile) -> None:
    if not NAME.fullmatch(profile.device):
        raise ProtocolError(f"profile of {printable(profile.device, 70)!r}, which is no device name")
    for name, least in (
        ("cores", 1),
        ("ram_total_bytes", 1),
        ("ram_available_bytes", 0),
        ("ram_read_bytes_per_s", 0.0),
        ("disk_read_bytes_per_s", 0.0),
        ("disk_free_bytes", 0),
    ):
        value = getattr(profile, name)
        if not least <= value < 1 << 60:
            raise ProtocolError(f"profile of {profile.device} has the impossible {name} {value}")


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
    if any(not 0 <= count <= len(spec.layers) for count, spec in zip(load.gpu_layers, load.windows, strict=True)):
        raise ProtocolError("plan with more layers on the GPU than a window has")
    for spec in [*load.windows, *([load.probe] if load.probe else [])]:
        if not 0 <= spec.first < spec.last or len(spec.layers) < spec.last - spec.first:
            raise ProtocolError(f"window {spec.window} of layers {spec.first} to {spec.last} is impossible")
        for ref in spec.layers:
            check_ref(ref)
    if any(not 0 < spec.window < load.route - 1 for spec in load.windows):
        raise ProtocolError("plan gives a worker the head's first or last window")
