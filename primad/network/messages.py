"""Messages between head and worker on the control link; requests between devices are in ``layer_messages``.

Each message is one msgpack frame. The head starts with ``Probe``, which every admitted device may send, to find the
version and the address that works. ``Hello`` then makes the worker this head's; the worker replies ``Welcome`` or
``Refused``. From then on ``Ping`` and ``Pong`` pass several times a second, so that either side notices the other's
end.

A TCP connection that is reset, for example by a restarting router, reconnects silently and loses the messages in
flight. So a worker's stages are state, not events: ``StageStates`` has the state of all of them, and each change gives
it a new ``revision``. The worker sends it after each change. A ``Ping`` carries the revision that the head has, and a
worker with a newer one sends the states again before its ``Pong``. In the other direction the head sends everything it
wants of the worker once after each reconnection (``head/members/wanted.py``): the worker keeps what it has and
continues its work. ``KvHold`` may stay unanswered: the head then continues without a reply, or asks again. Drafts and
parts of pictures may be lost too: generation continues without the drafts, and the head encodes the picture itself.

Versions. A device speaks ``PROTOCOL`` and older ones down to ``OLDEST``; both sides use the newest common one. An added
field has a default, and an unknown field is skipped, so that neighbouring versions understand each other. An unknown
message is refused with a log line, so a message that may be ignored can be added. Any other change takes two versions.
Protocol 1 was not encrypted, protocol 2 sent each fact twice, a worker of protocol 4 does not read the inputs and
outputs of a window's graph in its metadata, and protocol 5 had other names for the same messages; none of them is
spoken any more.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Annotated, Final, Literal, TypeVar

import msgspec
from msgspec import Meta

from halda import DeviceProfile, LinkProfile, MessageTime, WindowAssignment
from primad.engine.pictures.messages import MAX_BYTES, MAX_CONTENT_BYTES
from primad.engine.protocol import KvType
from primad.engine.rope import Rope
from primad.errors import ProtocolError, printable
from primad.gguf.adapter import check_adapter
from primad.gguf.layers import LayerRef, check_ref
from primad.gguf.origins import MAX_FILES, LayerOrigin, RemoteFile, check_origins
from primad.gguf.splits import MAX_RANKS
from primad.gguf.windows import WindowPlan, WindowSpec
from primad.kv.cells import LAYER_NUMBERS, MAX_LAYERS, MAX_POSITIONS, is_block
from primad.kv.cells import is_key as is_block_key
from primad.kv.keys import KvBlock
from primad.network.contacts import Contact, DeviceName, TcpPort, check_contact, is_address
from primad.network.unreached import Unreached
from primad.ring.messages import (
    MAX_ROLLBACK,
    MAX_ROWS,
    MAX_SEQUENCES,
    MAX_STATES,
    GroupRank,
    RankAddress,
    Status,
)
from primad.ring.speculation.drafter import MAX_ROOM
from primad.ring.speculation.messages import MAX_TEXT_TOKENS, Drafted, TextTask
from primad.settings.config import NAME
from primad.settings.profiles import Implausible, check_profile
from primad.system.wire import decoded
from primad.trust.identity import is_key

PROTOCOL: Final = 7
OLDEST: Final = 7
MAX_MESSAGE_BYTES: Final = 16 << 20
Fault = Literal["fetch", "disk", "load", "ring", "next"]
MAX_STAGES: Final = 64
MAX_REVISION: Final = 1 << 62
MAX_DEVICES: Final = 1024
MAX_ECHO_BYTES: Final = 1 << 20
ECHO_BYTES: Final = (0, 8 << 10, 32 << 10, 256 << 10, MAX_ECHO_BYTES)
"""The sizes of replies to ``Echo``: fixed, so that they can be prepared and a flood of requests uses no memory."""
MAX_CONTACTS: Final = 1024
MAX_MESSAGE_TIMES: Final = 16
"""Limit of the message sizes in a link's measurements."""
MAX_ROUND_TRIP_S: Final = 3600.0
MAX_LINK_BYTES_PER_S: Final = 1e13
MAX_MEMORY_BYTES: Final = 1 << 50
MAX_FIGURE: Final = 1e18
"""Limit of the figures that a worker reports; none of them may be negative, infinite or NaN."""
MAX_BLOCKS: Final = 16_384
MAX_HOLD_S: Final = 600.0
MAX_TREE_BYTES: Final = 1 << 20
MAX_STEP_BYTES: Final = 1 << 30
"""Limit of the hidden states of a step."""
MAX_CELLS: Final = 1 << 27
"""Limit of the KV cache of all sequences in a layer."""
USUAL_BYTES: Final = MAX_ECHO_BYTES + (4 << 10)
"""An echo of the largest size. Bytes that are skipped cost up to 40 ns each."""
PICTURE_CHUNK_BYTES: Final = 512 << 10
"""Limit of the part of a picture, or of its embeddings, in one message: signs of life wait for no more than that."""
MAX_PICTURE_BYTES: Final = MAX_BYTES
MAX_ENCODED_BYTES: Final = MAX_CONTENT_BYTES + (4 << 20)
"""Limit of a picture's embeddings and the tokens around them."""
MAX_STATES_BYTES: Final = 2 << 20
"""Room for the trees of layers of 250 GB."""
LARGE_BYTES: Final = {
    "load": MAX_MESSAGE_BYTES,
    "load_draft": MAX_MESSAGE_BYTES,
    "load_mmproj": MAX_MESSAGE_BYTES,
    "draft_input": 8 << 20,
    "measure-links": 4 << 20,
    "kv-hold": 6 << 20,
    "stages": MAX_STATES_BYTES,
}
"""The size limit of each kind of message that may be larger than usual; the cost of reading grows with the size."""

Revision = Annotated[int, Meta(ge=0, le=MAX_REVISION)]
MemoryBytes = Annotated[int, Meta(ge=0, le=MAX_MEMORY_BYTES)]
Contacts = Annotated[list[Contact], Meta(max_length=MAX_CONTACTS)]
Layer = Annotated[int, Meta(ge=0, le=LAYER_NUMBERS)]


class Probe(msgspec.Struct, frozen=True, kw_only=True, tag="probe"):
    """Ask for the device's identity. The reply is ``Probed``; nothing else follows from it."""

    protocol: int
    oldest: int
    version: str
    device: DeviceName


class Hello(msgspec.Struct, frozen=True, kw_only=True, tag="hello"):
    """The head introduces itself; ``session`` tells its restarts apart, ``build`` names its llama.cpp.

    The worker may consider the head gone after a silence of ``gone_after_s``. It relays requests to TCP port
    ``relay_port`` (0: this head accepts none).
    """

    protocol: int
    version: str
    device: DeviceName
    session: int
    build: str
    gone_after_s: Annotated[float, Meta(ge=0.1, le=3600.0)]
    relay_port: Annotated[int, Meta(ge=0, le=65_535)] = 0


class Introduction(msgspec.Struct, frozen=True, array_like=True):
    """A device that the head trusts, and its public key."""

    device: DeviceName
    key: str


class Introduce(msgspec.Struct, frozen=True, kw_only=True, tag="introduce"):
    """The devices that this head trusts, so that they serve each other as a ring needs; the latest list replaces
    earlier ones. Keys among the ``revoked`` are no longer trusted, and not introduced."""

    devices: Annotated[list[Introduction], Meta(max_length=MAX_DEVICES)]
    revoked: Annotated[list[str], Meta(max_length=MAX_DEVICES)]


class Revoked(msgspec.Struct, frozen=True, tag="revoked"):
    """This head gives the worker no more work, because its owner revoked the worker. An older worker does not know this
    message and waits for work."""


class Load(msgspec.Struct, frozen=True, kw_only=True, tag="load"):
    """Take part in ring ``ring``, epoch ``epoch``: fetch the missing layers from ``sources``, load the windows, listen.

    ``place`` tells devices of this ring that share a machine apart (see ``ring.spawn.environment``). A worker may have
    stages in several epochs at a time: the next ring is loaded while the last one serves. ``read_ahead_bytes`` of
    streamed layers are read ahead. ``kv_type`` is the type of the KV cache; ``flash``: attention is flash attention;
    ``small_windows``, ``states`` and ``rollback`` are as in ``EngineOptions``; ``rope`` overrides RoPE. With ``keeps``
    the worker saves the KV blocks of the step log. Layers of ``origins`` may be fetched, by the names of their origins,
    from the hub that has ``files`` or from the head, the first of ``sources``. In a ``group`` the worker has a share of
    all layers, the only window of the route.
    """

    ring: int
    epoch: int
    route: Annotated[int, Meta(ge=1, le=100_000)]
    width: Annotated[int, Meta(ge=1, le=1 << 20)]
    windows: Annotated[list[WindowPlan], Meta(min_length=1, max_length=MAX_LAYERS)]
    read_ahead_bytes: MemoryBytes
    sources: Contacts
    context: Annotated[int, Meta(ge=1, le=1 << 26)]
    sequences: Annotated[int, Meta(ge=1, le=MAX_SEQUENCES)]
    rows: Annotated[int, Meta(ge=1, le=MAX_ROWS)]
    step_timeout_s: Annotated[float, Meta(gt=0, le=1e9)]
    place: Annotated[int, Meta(ge=0, lt=1 << 16)]
    kv_type: KvType
    flash: bool = True
    small_windows: bool = False
    states: Annotated[int, Meta(ge=0, le=MAX_STATES)] = 0
    rollback: Annotated[int, Meta(ge=0, le=MAX_ROLLBACK)] = 0
    keeps: bool = False
    rope: Rope = Rope()
    files: Annotated[list[RemoteFile], Meta(max_length=MAX_FILES)] = []
    origins: Annotated[list[LayerOrigin], Meta(max_length=MAX_LAYERS)] = []
    group: GroupRank | None = None


class Link(msgspec.Struct, frozen=True, kw_only=True, tag="link"):
    """Send steps of ``epoch`` to the ring process at ``address``, whose key is ``key``; accept them from ``sender``
    only."""

    epoch: int
    address: str
    key: str
    sender: str


class LinkGroup(msgspec.Struct, frozen=True, kw_only=True, tag="link-group"):
    """Connect the ring process of ``epoch`` to the ranks of its group below its own, at ``addresses``."""

    epoch: int
    addresses: Annotated[list[RankAddress], Meta(max_length=MAX_RANKS)]


class Release(msgspec.Struct, frozen=True, kw_only=True, tag="release"):
    """Release the windows of ``epoch``; the layer files stay. With ``unload`` no window stays loaded for later."""

    epoch: int
    unload: bool = False


class Ping(msgspec.Struct, frozen=True, tag="ping"):
    """A sign of life. Also asks for a ``WorkerStatus`` if ``status`` is set. ``Pong`` repeats ``number``.

    The head has the ``StageStates`` of ``revision``; 0 means none. ``why_idle`` tells the worker's owner why it has no
    layers; empty if it has some, or if unknown.
    """

    status: bool
    number: int = 0
    revision: int = 0
    why_idle: str = ""


class MeasureLinks(msgspec.Struct, frozen=True, kw_only=True, tag="measure-links"):
    """Measure the links to ``targets``; the reply is ``LinksMeasured``."""

    targets: Contacts


class Echo(msgspec.Struct, frozen=True, kw_only=True, tag="echo"):
    """Reply with ``answer_bytes`` bytes, one of ``ECHO_BYTES``. Any trusted device may send it."""

    payload: Annotated[bytes, Meta(max_length=MAX_ECHO_BYTES)]
    answer_bytes: int


class Dismiss(msgspec.Struct, frozen=True, tag="dismiss"):
    """Allow the worker, which asked to leave, to leave: other devices have taken over its work."""


class KvHold(msgspec.Struct, frozen=True, kw_only=True, tag="kv-hold"):
    """Hold ``layers`` (first, last + 1) of the KV blocks ``blocks`` from now on, and fetch missing ones from
    ``sources``.

    ``KvHeld`` with this ``number`` follows after ``timeout_s`` at the latest. With ``verify`` existing blocks are
    checked as well, since they may be damaged.
    """

    number: int
    blocks: Annotated[list[KvBlock], Meta(max_length=MAX_BLOCKS)]
    layers: Annotated[list[tuple[Layer, Layer]], Meta(max_length=MAX_LAYERS)]
    sources: Contacts
    timeout_s: Annotated[float, Meta(ge=0, le=MAX_HOLD_S)]
    verify: bool


class KvForget(msgspec.Struct, frozen=True, kw_only=True, tag="kv-forget"):
    """The blocks ``keys`` are not needed any more. ``lasting``: a device that has a cache keeps them, as they may be
    used again."""

    keys: Annotated[list[str], Meta(max_length=MAX_BLOCKS)]
    lasting: bool


class LoadDraft(msgspec.Struct, frozen=True, kw_only=True, tag="load_draft"):
    """Draft for ring ``epoch`` with the model ``window``, a whole model with ``vocabulary`` tokens: fetch the missing
    layers from ``sources`` and load it, for texts of at most ``context`` tokens, if ``memory_bytes`` are free. A draft
    has at most ``maximum`` tokens, the ``first`` ones of them before alternatives.

    The reply is a ``DraftModelState``. An older worker does not know this message and does not draft.
    """

    epoch: int
    window: WindowSpec
    vocabulary: Annotated[int, Meta(ge=1, le=1 << 24)]
    context: Annotated[int, Meta(ge=1, le=MAX_TEXT_TOKENS)]
    maximum: Annotated[int, Meta(ge=1, le=MAX_ROOM)]
    first: Annotated[int, Meta(ge=0, le=MAX_ROOM)]
    sources: Contacts
    memory_bytes: MemoryBytes = 0


class DraftInput(msgspec.Struct, frozen=True, kw_only=True, tag="draft_input"):
    """The text for the draft model of ring ``epoch``; the reply is ``DraftsMade``."""

    epoch: int
    task: TextTask


class ReleaseDraft(msgspec.Struct, frozen=True, kw_only=True, tag="release_draft"):
    """Drafts for ring ``epoch`` are not needed any more."""

    epoch: int


class LoadMmproj(msgspec.Struct, frozen=True, kw_only=True, tag="load_mmproj"):
    """Encode pictures for this head, as load ``number``: fetch the encoder ``file`` from ``sources`` and prepare it for
    the model whose file is ``metadata`` and ``hole_bytes`` of zeros in place of the weights.

    It runs on ``gpu``, by llama.cpp's name (empty: on the processor), if ``memory_bytes`` are free. A picture becomes
    ``min_tokens`` to ``max_tokens`` embeddings (0: as the file says). The reply is an ``MmprojState``. An older worker
    does not know this message and encodes nothing.
    """

    number: int
    file: LayerRef
    metadata: bytes
    hole_bytes: MemoryBytes
    gpu: Annotated[str, Meta(max_length=100)]
    memory_bytes: MemoryBytes
    sources: Contacts
    min_tokens: Annotated[int, Meta(ge=0, le=MAX_ROWS)] = 0
    max_tokens: Annotated[int, Meta(ge=0, le=MAX_ROWS)] = 0


class PictureChunk(msgspec.Struct, frozen=True, kw_only=True, tag="picture"):
    """The bytes at ``offset`` of a file of ``size`` bytes, ``picture`` of load ``number``. The picture is encoded when
    the last part has come. The reply to each part is an ``EncodedChunk``."""

    number: int
    picture: int
    size: Annotated[int, Meta(ge=1, le=MAX_PICTURE_BYTES)]
    offset: Annotated[int, Meta(ge=0, le=MAX_PICTURE_BYTES)]
    data: Annotated[bytes, Meta(min_length=1, max_length=PICTURE_CHUNK_BYTES)]


class EncodedWanted(msgspec.Struct, frozen=True, kw_only=True, tag="encoded_wanted"):
    """Ask for the bytes at ``offset`` of the encoded ``picture``. The reply is an ``EncodedChunk``."""

    number: int
    picture: int
    offset: Annotated[int, Meta(ge=0, le=MAX_ENCODED_BYTES)]


class ReleaseMmproj(msgspec.Struct, frozen=True, kw_only=True, tag="release_mmproj"):
    """The encoder of load ``number`` is not needed any more."""

    number: int


HeadMessage = (
    Probe
    | Hello
    | Introduce
    | Revoked
    | Load
    | Link
    | LinkGroup
    | Release
    | Ping
    | MeasureLinks
    | Echo
    | Dismiss
    | KvHold
    | KvForget
    | LoadDraft
    | DraftInput
    | ReleaseDraft
    | LoadMmproj
    | PictureChunk
    | EncodedWanted
    | ReleaseMmproj
)


class Probed(msgspec.Struct, frozen=True, kw_only=True, tag="probed"):
    """This device's identity and its protocol versions."""

    protocol: int
    oldest: int
    version: str
    device: DeviceName


class Welcome(msgspec.Struct, frozen=True, kw_only=True, tag="welcome"):
    """The worker is free and has this profile. It serves layers on TCP port ``layer_port``, and the API at the URL
    ``api`` if it relays requests."""

    protocol: int
    version: str
    build: str
    profile: DeviceProfile
    layer_port: TcpPort
    api: Annotated[str, Meta(max_length=300)] = ""


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    """The worker does not work for this head now; ``reason`` is one line."""

    reason: str


class Progress(msgspec.Struct, frozen=True, kw_only=True, tag="progress"):
    """Progress of loading: ``phase`` is fetch (bytes) or load (windows)."""

    epoch: int
    phase: Literal["fetch", "load"]
    done: int
    total: int


class Leaving(msgspec.Struct, frozen=True, tag="leaving"):
    """The worker wants to leave, or its owner paused it: the head hands its work over and sends ``Dismiss``."""

    reason: str


class MemoryLow(msgspec.Struct, frozen=True, kw_only=True, tag="memory_low"):
    """The owner's programs need memory that the stage in ``epoch`` holds and cannot free: the next plan should use less
    here.

    The device lacks ``needed_bytes``. A plan may use ``ram_available_bytes`` of it in addition to that stage, which
    continues until the next one is loaded. An older head does not know this message and keeps its plan.
    """

    epoch: int
    needed_bytes: Annotated[int, Meta(ge=1, le=MAX_MEMORY_BYTES)]
    ram_available_bytes: MemoryBytes


class MemoryRecovered(msgspec.Struct, frozen=True, tag="memory_ok"):
    """After ``MemoryLow`` there has been room for a while: a plan may use ``ram_available_bytes`` of this device.

    An older head does not know this message and plans with the memory it knows of.
    """

    ram_available_bytes: MemoryBytes


class Remeasured(msgspec.Struct, frozen=True, tag="remeasured"):
    """The device was measured more precisely: later plans use the speeds and the free GPU memory of this profile.

    Free RAM and disk are reported as usual.

    An older head does not know this message and gets the profile when it next connects to the device.
    """

    profile: DeviceProfile


class DownloadedLayer(msgspec.Struct, frozen=True, array_like=True):
    """The fetched layer of origin ``name`` has this tree."""

    name: str
    tree: Annotated[bytes, Meta(max_length=MAX_TREE_BYTES)]


class Loaded(msgspec.Struct, frozen=True, kw_only=True):
    """All windows are loaded. A ring process with key ``key`` receives steps on TCP port ``port``; the key is empty if
    no steps come here: all ranks of a group but the first. A group's ranks connect to each other on ``group_port``, 0
    without a group.

    With ``keeps`` it saves the KV blocks that the step log names. ``downloaded`` are the layers that had no digest
    before.
    """

    port: TcpPort
    key: str
    keeps: bool = False
    downloaded: Annotated[list[DownloadedLayer], Meta(max_length=MAX_LAYERS)] = []
    group_port: Annotated[int, Meta(ge=0, le=65_535)] = 0


class Broken(msgspec.Struct, frozen=True, kw_only=True):
    """The stage ended; ``error`` is one line.

    ``fault`` is the activity that failed: fetch, disk, load, ring, or next if the next device in the ring accepts no
    steps. If ``again``, nothing is wrong: the device has to load again, since it has more or less room than it loaded
    for; an older head leaves it out for a while instead. If ``sender``, the device before it is at fault: it sent an
    invalid step, not all steps, or NaN; an older head leaves this device out all the same. In a group the fault may be
    that of the device ``rank``.
    """

    error: str
    fault: Fault
    again: bool = False
    sender: bool = False
    rank: Annotated[str, Meta(max_length=100)] = ""


class StageState(msgspec.Struct, frozen=True, kw_only=True):
    """The state of the worker's stage in ``epoch``; ``linked`` if its steps go to the target of ``Link``."""

    epoch: int
    loaded: Loaded | None
    linked: bool
    broken: Broken | None


class StageStates(msgspec.Struct, frozen=True, kw_only=True, tag="stages"):
    """The state of all stages of the worker since change ``revision``; before the first one there were none."""

    revision: Revision
    states: Annotated[list[StageState], Meta(max_length=MAX_STAGES)]


class Pong(msgspec.Struct, frozen=True, tag="pong"):
    """The reply to a ping; the stages were as in ``revision`` when ping ``number`` came."""

    number: int = 0
    revision: Revision = 0


class WorkerStatus(msgspec.Struct, frozen=True, kw_only=True, tag="status"):
    """State and counters of the worker's ring process; ``daemon_rss_bytes`` is the memory of the daemon."""

    epoch: int
    status: Status
    daemon_rss_bytes: int


class LinksMeasured(msgspec.Struct, frozen=True, kw_only=True, tag="links"):
    """Both directions of the requested links, and why some do not work."""

    links: Annotated[list[LinkProfile], Meta(max_length=MAX_CONTACTS)]
    unreached: Annotated[list[Unreached], Meta(max_length=MAX_CONTACTS)] = []


class KvHeld(msgspec.Struct, frozen=True, kw_only=True, tag="kv-held"):
    """Which blocks of ``KvHold`` ``number`` are here, with all requested layers."""

    number: int
    held: Annotated[list[bool], Meta(max_length=MAX_BLOCKS)]


class DraftModelState(msgspec.Struct, frozen=True, kw_only=True, tag="draft_model_state"):
    """The draft model for ring ``epoch`` is ``ready``, or loading; with an ``error``, one line, it is gone."""

    epoch: int
    ready: bool
    error: str = ""


class DraftsMade(msgspec.Struct, frozen=True, kw_only=True, tag="drafts_made"):
    """The model's drafts for ring ``epoch``. The latest ones replace all earlier ones."""

    epoch: int
    drafted: Drafted


class MmprojState(msgspec.Struct, frozen=True, kw_only=True, tag="mmproj_state"):
    """The encoder of load ``number`` is ``ready``, or being fetched; with an ``error``, one line, it is gone."""

    number: int
    ready: bool
    error: str = ""


class EncodedChunk(msgspec.Struct, frozen=True, kw_only=True, tag="encoded"):
    """The bytes at ``offset`` of the ``size`` bytes of encoded ``picture`` of load ``number``, as the picture process
    replied. For a part of the file that is not the last, ``size`` is 0."""

    number: int
    picture: int
    size: Annotated[int, Meta(ge=0, le=MAX_ENCODED_BYTES)] = 0
    offset: Annotated[int, Meta(ge=0, le=MAX_ENCODED_BYTES)] = 0
    data: Annotated[bytes, Meta(max_length=PICTURE_CHUNK_BYTES)] = b""


class Echoed(msgspec.Struct, frozen=True, tag="echoed"):
    """The reply to ``Echo``."""

    payload: Annotated[bytes, Meta(max_length=MAX_ECHO_BYTES)]


WorkerMessage = (
    Probed
    | Welcome
    | Refused
    | Progress
    | StageStates
    | Leaving
    | MemoryLow
    | MemoryRecovered
    | Remeasured
    | Pong
    | WorkerStatus
    | LinksMeasured
    | Echoed
    | KvHeld
    | DraftModelState
    | DraftsMade
    | MmprojState
    | EncodedChunk
)


_Message = TypeVar("_Message")


class _Tag(msgspec.Struct):
    """The kind of a message; the rest is skipped."""

    type: str


_WHAT: Final = "a control message"
_tag_decoder = msgspec.msgpack.Decoder(_Tag)
_head_decoder = msgspec.msgpack.Decoder(HeadMessage)
_worker_decoder = msgspec.msgpack.Decoder(WorkerMessage)


def decode_from_head(data: bytes) -> HeadMessage:
    """Decode a message of a head. Raises ``ProtocolError``."""
    message: HeadMessage = _decode(_head_decoder, data)
    match message:
        case Load():
            _check_load(message)
        case LoadDraft():
            _check_load_draft(message)
        case LoadMmproj():
            for source in message.sources:
                check_contact(source)
            check_ref(message.file)
            if len(message.file.tensors) != 1:
                raise ProtocolError("an encoder in several pieces")
        case PictureChunk(size=size, offset=offset, data=data) if offset + len(data) > size:
            raise ProtocolError("a part beyond the end of an image")
        case Introduce(devices=devices, revoked=revoked):
            for key in (*(introduction.key for introduction in devices), *revoked):
                _check_key(key)
        case Link(key=key, sender=sender):
            _check_key(key)
            _check_key(sender)
        case MeasureLinks(targets=targets):
            for target in targets:
                check_contact(target)
        case KvHold():
            _check_hold(message)
        case KvForget(keys=keys):
            if not all(map(is_block_key, keys)):
                raise ProtocolError("an invalid KV block to drop")
        case Echo(answer_bytes=size) if size not in ECHO_BYTES:
            raise ProtocolError(f"echo for {size} bytes; there are replies of {', '.join(map(str, ECHO_BYTES))}")
    return message


def decode_from_worker(data: bytes) -> WorkerMessage:
    """Decode a message of a worker, its texts made printable. Raises ``ProtocolError``."""
    message: WorkerMessage = _decode(_worker_decoder, data)
    match message:
        case Welcome(profile=profile):
            _check_profile(profile)
            version, build = printable(message.version, 40), printable(message.build, 200)
            return msgspec.structs.replace(message, version=version, build=build)
        case Remeasured(profile=profile):
            _check_profile(profile)
        case Probed():
            return msgspec.structs.replace(message, version=printable(message.version, 40))
        case StageStates():
            return _checked_states(message)
        case Progress(done=done, total=total) if not 0 <= done <= total:
            raise ProtocolError(f"impossible progress: {done} of {total}")
        case Refused(reason):
            return Refused(printable(reason))
        case Leaving(reason):
            return Leaving(printable(reason, 100))
        case LinksMeasured(links=links, unreached=unreached):
            _check_links(links)
            places = [msgspec.structs.replace(each, place=printable(each.place, 80)) for each in unreached]
            return msgspec.structs.replace(message, unreached=places)
        case WorkerStatus():
            _check_figures(message)
        case DraftModelState(error=error) | MmprojState(error=error):
            return msgspec.structs.replace(message, error=printable(error))
        case EncodedChunk(size=size, offset=offset, data=data) if offset + len(data) > size:
            raise ProtocolError("a part beyond the end of an image's embeddings")
    return message


def _decode(decoder: msgspec.msgpack.Decoder[_Message], data: bytes) -> _Message:
    if len(data) > USUAL_BYTES:
        tag = decoded(_tag_decoder, data, _WHAT).type
        if len(data) > LARGE_BYTES.get(tag, USUAL_BYTES):
            raise ProtocolError(
                f"a control message {printable(tag, 20)!r} of {len(data)} bytes, which is too large for one"
            )
    return decoded(decoder, data, _WHAT)


def _check_key(key: str) -> None:
    if not is_key(key):
        raise ProtocolError(f"{printable(key, 50)!r} is not a public key")


def _check_load_draft(load: LoadDraft) -> None:
    for source in load.sources:
        check_contact(source)
    if load.window.first or not 0 < load.window.last < len(load.window.layers) or load.window.adapters:
        raise ProtocolError("a draft model that is not whole")
    for ref in load.window.layers:
        check_ref(ref)


def _check_hold(hold: KvHold) -> None:
    for source in hold.sources:
        check_contact(source)
    if any(first >= last for first, last in hold.layers):
        raise ProtocolError("KV blocks of no layers")
    for block in hold.blocks:
        if not is_block(block) or block.start < 0 or block.end > MAX_POSITIONS:
            raise ProtocolError(f"an invalid KV block: {printable(str(block))}")


def _checked_states(message: StageStates) -> StageStates:
    if len({state.epoch for state in message.states}) < len(message.states):
        raise ProtocolError("a worker that participates twice in one epoch")
    return msgspec.structs.replace(message, states=[_checked_state(state) for state in message.states])


def _checked_state(state: StageState) -> StageState:
    if state.loaded is not None and state.loaded.key:
        _check_key(state.loaded.key)
    if state.broken is None:
        return state
    broken = msgspec.structs.replace(state.broken, error=printable(state.broken.error))
    return msgspec.structs.replace(state, broken=broken)


def _check_links(links: list[LinkProfile]) -> None:
    for link in links:
        for name in (link.source, link.target):
            if not NAME.fullmatch(name):
                raise ProtocolError(f"link of {printable(name, 70)!r}, which is not a device name")
        if not 0 < link.round_trip_s < MAX_ROUND_TRIP_S or not 0 < link.bytes_per_s < MAX_LINK_BYTES_PER_S:
            raise ProtocolError(
                f"link from {link.source} to {link.target} of {link.round_trip_s} s and {link.bytes_per_s} bytes/s"
            )
        if not 0 <= (link.network_s or 0.0) <= link.round_trip_s:
            raise ProtocolError(
                f"link from {link.source} to {link.target} of which the network takes {link.network_s} s"
            )
        if not 0 <= link.late_s < MAX_ROUND_TRIP_S or not _are_times(link.messages):
            raise ProtocolError(f"link from {link.source} to {link.target} with impossible times of messages")
        if link.address and not is_address(link.address):
            raise ProtocolError(f"link to {link.target} at {printable(link.address, 50)!r}, which is not an address")


def _are_times(messages: Sequence[MessageTime]) -> bool:
    """Whether larger messages take at least as long, as the cost of a hop assumes."""
    sizes = [0, *(message.size_bytes for message in messages), MAX_MESSAGE_BYTES]
    times = [0.0, *(message.beyond_s for message in messages), MAX_ROUND_TRIP_S]
    grows = all(a < b for a, b in pairwise(sizes)) and all(a <= b for a, b in pairwise(times))
    return grows and len(messages) <= MAX_MESSAGE_TIMES


def _check_figures(message: WorkerStatus) -> None:
    """Check that the figures used for planning and display are plausible numbers."""
    parts = [msgspec.to_builtins(message)]
    while parts:
        part = parts.pop()
        if isinstance(part, dict | list):
            parts += part.values() if isinstance(part, dict) else part
        elif (isinstance(part, int | float) and not 0 <= part <= MAX_FIGURE) or (
            isinstance(part, str) and len(part) > 40
        ):
            raise ProtocolError(f"a status with the impossible figure {printable(part, 40)!r}")


def _check_profile(profile: DeviceProfile) -> None:
    try:
        check_profile(profile)
    except Implausible as exc:
        raise ProtocolError(f"profile of {printable(profile.device, 70)!r} is impossible: {exc}") from exc


def _check_load(load: Load) -> None:
    if load.rows * load.width * 4 > MAX_STEP_BYTES or load.context * load.sequences > MAX_CELLS:
        raise ProtocolError(
            f"plan with steps of {load.rows} tokens of width {load.width}, or {load.sequences} sequences of {load.context} "
            "tokens, for which no device has memory"
        )
    specs = [plan.spec for plan in load.windows]
    if len({spec.window for spec in specs}) != len(specs):
        raise ProtocolError("plan with two windows at one place of the route")
    for plan in load.windows:
        # Other devices of the head's group have a share of the head's windows.
        has_output = load.group is not None and plan.spec.window == load.route - 1
        _check_assignment(plan.spec, plan.assignment, has_output=has_output)
    for source in load.sources:
        check_contact(source)
    for spec in specs:
        if not 0 <= spec.first < spec.last or len(spec.layers) < spec.last - spec.first:
            raise ProtocolError(f"window {spec.window} of layers {spec.first} to {spec.last} is impossible")
        for ref in spec.files:
            check_ref(ref)
        for adapter in spec.adapters:
            check_adapter(adapter, spec.last - spec.first)
    check_origins(load.files, load.origins, [ref for spec in specs for ref in spec.layers])
    group, ends = load.group, [spec.window for spec in specs if not 0 < spec.window < load.route - 1]
    if group is not None and not group.rank < len(group.devices):
        raise ProtocolError("plan with an impossible group")
    follows = group is not None and group.rank > 0
    if any(window >= load.route for window in ends) or (ends and not follows):
        raise ProtocolError("plan gives a worker the head's first or last window")


def _check_assignment(spec: WindowSpec, assignment: WindowAssignment, *, has_output: bool) -> None:
    outputs = ("cpu", "gpu") if has_output else ("none",)
    if (assignment.first, assignment.last) != (spec.first, spec.last) or assignment.output not in outputs:
        raise ProtocolError(f"window {spec.window} with the assignment of another one")
    if not 0 <= assignment.gpu_layers <= assignment.layers:
        raise ProtocolError("plan with more layers on the GPU than a window has")
    if min(assignment.on_each_gpu) < 0:
        raise ProtocolError("plan with more layers on other GPUs than a window has on all")
    if not 0 <= assignment.cpu_experts <= assignment.gpu_layers:
        raise ProtocolError("plan with the experts of more layers in RAM than are on the GPU")
    size = assignment.layer_bytes + assignment.output_bytes
    has_sizes = 0 <= assignment.output_bytes <= has_output * MAX_MEMORY_BYTES and assignment.layer_bytes >= 0
    if not (has_sizes and 0 <= assignment.resident_bytes <= size <= MAX_MEMORY_BYTES):
        raise ProtocolError(f"window {spec.window} of which {assignment.resident_bytes} bytes are to stay in memory")
