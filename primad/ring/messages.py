"""Everything that crosses a process border on the ring's behalf, as tagged msgspec structs.

Three conversations use this file:

* **Along the route** (encrypted ZeroMQ PUSH/PULL, one hop a message): a ``Step`` header frame and one payload frame with
  the rows' hidden states. KV operations ride in the same ordered stream, so every window applies the same log. ``Skip``
  comes the same way, with an empty payload, and overtakes the steps that wait to be computed: a device takes all that has
  come before it computes, and sends a ``Skip`` on at once.
* **Between a daemon and its ring process** (a private socket pair): ``RingCommand`` down, ``RingEvent`` up.
* **Between the API and the head's scheduler**: ``Generate`` and ``Cancel`` down, ``Sampled`` and ``Finished`` up; they are
  ring commands and ring events themselves.

A header is checked against the ring's ``StepLimits`` before its payload is touched: nothing on the wire is trusted.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Annotated, Final, Literal

import msgspec
from msgspec import Meta

from halda import WindowAssignment
from primad.engine.protocol import GREEDY as GREEDY
from primad.engine.protocol import AdapterFile, EngineOptions, WindowSource, Wire
from primad.engine.protocol import Sampling as Sampling
from primad.errors import (
    AlteredStepError,
    LateStepError,
    NextDeviceError,
    NotFiniteError,
    PrimadError,
    ProtocolError,
    RankError,
    RingError,
    SenderError,
    WeightsError,
    printable,
)
from primad.gguf.splits import MAX_RANKS
from primad.kv.cells import CellShape, is_block, is_key
from primad.kv.keys import KvBlock
from primad.ring.chunks import ChunkSize, Pieces
from primad.ring.grouping import Batching
from primad.ring.pictures import PictureRows
from primad.ring.speculation.drafter import Drafting
from primad.ring.speculation.messages import Drafted, DraftModel, TextTask
from primad.system.wire import decoded

PROTOCOL: Final = 9
"""The version of every message in this file. It grows when an older peer could misread a newer one."""

HIDDEN_DTYPE: Final = "f32"
"""Hidden states travel as little-endian float32, so that a ring is bit-identical to one device."""

MAX_HEADER_BYTES: Final = 1 << 20
"""No header of a step of at most ``Limits.rows`` rows comes near it."""
MAX_ROWS: Final = 8192
MAX_PARTS: Final = 4
"""A picture's row is so many times as wide at most, with what deeper layers add to their outputs."""
MAX_SEQUENCES: Final = 256
MAX_OPS: Final = 8192
"""Of any step of any ring, so that a header is bounded before it is read."""
MAX_HOPS: Final = 4096
MAX_STATES: Final = 2 * MAX_SEQUENCES
"""Of all sequences that a ring keeps: each takes as much memory in every window as the state of a sequence does."""
GROUP_KEY_BYTES: Final = 32
MAX_ROLLBACK: Final = 16
"""Rows of one step that can be taken back where layers have a state: each takes as much, of every sequence."""


# ---- along the route ------------------------------------------------------------------------------------------------


class KvRemove(msgspec.Struct, frozen=True, tag="remove", array_like=True):
    """Forget positions ``start <= p < end`` of ``sequence``; ``end = -1`` means to the end."""

    sequence: int
    start: int
    end: int


class KvCopy(msgspec.Struct, frozen=True, tag="copy", array_like=True):
    """Forget ``target``, and let it have the cells that ``source`` has at positions before ``end``."""

    source: int
    target: int
    end: int


class KvKeep(msgspec.Struct, frozen=True, tag="keep", array_like=True):
    """Hand the cells of ``block`` of ``sequence``, or the state that it has there, to this device's store of KV cells."""

    sequence: int
    block: KvBlock


class KvLoad(msgspec.Struct, frozen=True, tag="load", array_like=True):
    """Forget ``sequence``, and fill its positions before ``end`` from the blocks whose chain ends with ``key``.

    That is the key of a state where layers have one.
    """

    sequence: int
    key: str
    end: int


class StateKeep(msgspec.Struct, frozen=True, tag="state-keep", array_like=True):
    """Keep what cannot be cut back of ``sequence``, behind its ``end`` positions, in memory as ``number``."""

    sequence: int
    number: int
    end: int


class StateRestore(msgspec.Struct, frozen=True, tag="state-restore", array_like=True):
    """Have ``sequence`` end behind ``end`` positions, where its state, or that of the one it is a copy of, was kept as
    ``number``."""

    sequence: int
    number: int
    end: int


KvOp = KvRemove | KvCopy | KvKeep | KvLoad | StateKeep | StateRestore


class Step(msgspec.Struct, frozen=True, tag="step", array_like=True):
    """One step's visit to one window: apply ``ops`` in order, then compute the rows.

    ``window`` is the route index of the window that must compute it. ``shape`` is ``(rows, width)`` of the payload frame;
    row ``i`` has ``positions[i]``, belongs to ``sequences[i]`` and wants logits when ``outputs[i]``. A step without rows
    carries KV operations alone and has an empty payload. So has one that is ``skipped``: a window before this one did not
    compute its rows, and none behind it does, though all apply its operations. Where it ``looks_ahead`` each row sees those
    behind it as well. Where ``rope`` is not empty it has four numbers for each row, by which its keys are turned instead of
    by its position.
    """

    protocol: int
    ring: int
    epoch: int
    step: int
    window: int
    dtype: str
    shape: tuple[int, int]
    positions: Annotated[list[int], Meta(max_length=MAX_ROWS)]
    sequences: Annotated[list[Annotated[list[int], Meta(max_length=MAX_SEQUENCES)]], Meta(max_length=MAX_ROWS)]
    outputs: Annotated[list[bool], Meta(max_length=MAX_ROWS)]
    ops: Annotated[list[KvOp], Meta(max_length=MAX_OPS)]
    skipped: bool = False
    looks_ahead: bool = False
    rope: Annotated[list[int], Meta(max_length=4 * MAX_ROWS)] = []

    @property
    def rows(self) -> int:
        """Number of rows that are to be computed."""
        return 0 if self.skipped else self.shape[0]

    @property
    def payload_shape(self) -> tuple[int, int]:
        """The shape of the payload frame."""
        return self.rows, self.shape[1]

    @property
    def payload_bytes(self) -> int:
        """Size that the payload frame must have."""
        return self.rows * self.shape[1] * 4


MAX_SKIPPED: Final = 64
"""Steps that one ``Skip`` names."""


class Skip(msgspec.Struct, frozen=True, tag="skip", array_like=True):
    """What ``steps`` compute is of no use: each window that has not computed one of them does not compute its rows.

    All of their rows are of drafts, in sequences of which the log has forgotten them before it has others.
    """

    protocol: int
    ring: int
    epoch: int
    steps: Annotated[list[int], Meta(max_length=MAX_SKIPPED)]


RouteMessage = Step | Skip


class StepLimits(msgspec.Struct, frozen=True):
    """What a ring process accepts: fixed when the ring opens, so a header can be judged by itself.

    What a device keeps takes no more memory than was planned: so many ``states``, and in a step each cell once.
    """

    ring: int
    epoch: int
    windows: frozenset[int]
    width: int
    rows: int
    context: int
    sequences: int
    states: int = 0


_route_decoder: Final[msgspec.msgpack.Decoder[RouteMessage]] = msgspec.msgpack.Decoder(RouteMessage)


def decode_route(header: bytes | memoryview, payload_bytes: int | None, limits: StepLimits) -> RouteMessage:
    """The header frame as a ``Step`` that is safe to compute, or as a ``Skip``, judged against ``limits``. ``payload_bytes``
    are those that came with it; None: they come later.

    Raises ``ProtocolError`` for anything that is not a valid step of this ring and epoch, naming the field.
    """
    if len(header) > MAX_HEADER_BYTES:
        raise ProtocolError(f"step header of {len(header)} bytes; at most {MAX_HEADER_BYTES} are allowed")
    step = decoded(_route_decoder, header, "a step header")
    if step.protocol != PROTOCOL:
        raise ProtocolError(f"step of protocol {step.protocol}; this device speaks {PROTOCOL}")
    if (step.ring, step.epoch) != (limits.ring, limits.epoch):
        raise ProtocolError(f"step of ring {step.ring:x} epoch {step.epoch}; serving {limits.ring:x} {limits.epoch}")
    if isinstance(step, Skip):
        if payload_bytes or not 0 < len(step.steps) <= MAX_SKIPPED or min(step.steps) < 0:
            raise ProtocolError(f"a message skips {len(step.steps)} steps, with a payload of {payload_bytes} bytes")
        return step
    _check_shape(step, payload_bytes, limits)
    _check_rows(step, limits)
    for op in step.ops:
        _check_op(op, limits)
    kept = sum(op.block.end - op.block.start for op in step.ops if isinstance(op, KvKeep))
    if kept > limits.sequences * limits.context:
        raise ProtocolError(f"step {step.step} keeps {kept} KV cells; there are {limits.sequences * limits.context}")
    kept = sum(isinstance(op, KvKeep) and op.block.is_state for op in step.ops)
    if kept > (limits.sequences if limits.states else 0):
        raise ProtocolError(
            f"step {step.step} keeps {kept} states with KV cells; there are {limits.sequences} sequences"
        )
    return step


def _check_shape(step: Step, payload_bytes: int | None, limits: StepLimits) -> None:
    rows, width = step.shape
    if step.step < 0:
        raise ProtocolError(f"step number {step.step} is negative")
    if step.window not in limits.windows:
        raise ProtocolError(f"step {step.step} is for window {step.window}, which this device does not hold")
    if step.dtype != HIDDEN_DTYPE:
        raise ProtocolError(f"step {step.step} has dtype {step.dtype[:20]!r}; expected {HIDDEN_DTYPE!r}")
    if not 0 <= rows <= limits.rows or width not in range(limits.width, MAX_PARTS * limits.width + 1, limits.width):
        raise ProtocolError(
            f"step {step.step} has shape ({rows}, {width}); expected at most {limits.rows} rows of {limits.width}"
        )
    if payload_bytes not in (None, step.payload_bytes):
        raise ProtocolError(f"step {step.step} has a payload of {payload_bytes} bytes; {step.payload_bytes} expected")


def _check_rows(step: Step, limits: StepLimits) -> None:
    counts = {len(step.positions), len(step.sequences), len(step.outputs)}
    if counts != {step.shape[0]}:
        raise ProtocolError(f"step {step.step} has {step.shape[0]} rows but lists of {sorted(counts)} entries")
    if any(not 0 <= position < limits.context for position in step.positions):
        raise ProtocolError(f"step {step.step} has a position outside the context of {limits.context}")
    if len(step.rope) not in (0, 4 * step.shape[0]) or any(not 0 <= each < limits.context for each in step.rope):
        raise ProtocolError(
            f"step {step.step} turns {step.shape[0]} rows by {len(step.rope)} numbers, or by wrong ones"
        )
    for sequences in step.sequences:
        if not 0 < len(sequences) <= limits.sequences or len(set(sequences)) != len(sequences):
            raise ProtocolError(f"step {step.step} has a row with {len(sequences)} sequences or with one twice")
        if any(not 0 <= sequence < limits.sequences for sequence in sequences):
            raise ProtocolError(f"step {step.step} has a sequence outside 0..{limits.sequences - 1}")


def _check_op(op: KvOp, limits: StepLimits) -> None:
    match op:
        case KvRemove(sequence, start, end):
            sequences, span = [sequence], (start, end)
        case KvKeep(sequence, block):
            sequences, span = [sequence], (block.start, block.end)
            if not is_block(block):
                raise ProtocolError(f"a KV operation keeps what is no block: {printable(str(block))}")
        case KvLoad(sequence, key, end):
            sequences, span = [sequence], (0, end)
            if not is_key(key) or end <= 0:
                raise ProtocolError(f"a KV operation loads what is no block: {printable(f'{key!r} up to {end}')}")
        case StateKeep(sequence, number, end) | StateRestore(sequence, number, end):
            sequences, span = [sequence], (0, end)
            if not 0 <= number < limits.states or end <= 0:
                raise ProtocolError(f"KV operation {op} names none of the {limits.states} states that are kept")
        case KvCopy(source, target, end):
            sequences, span = [source, target], (0, end)
            if source == target or end < 0:
                raise ProtocolError(f"KV operation {op} copies a sequence onto itself or up to a position before it")
    if any(not 0 <= sequence < limits.sequences for sequence in sequences):
        raise ProtocolError(f"KV operation {op} names a sequence outside 0..{limits.sequences - 1}")
    if not 0 <= span[0] <= limits.context or not -1 <= span[1] <= limits.context:
        raise ProtocolError(f"KV operation {op} names a position outside the context of {limits.context}")


# ---- between the API and the head's scheduler -----------------------------------------------------------------------


class Generate(msgspec.Struct, frozen=True, kw_only=True, tag="generate"):
    """Continue ``prompt`` (token ids, at least one) by at most ``max_tokens`` tokens.

    ``sampled`` are those of its tokens that were sampled under an earlier epoch: they are computed again, count as if this
    ring had sampled them, and are not told again. ``logprobs`` is None, or how many of the most likely tokens each
    ``Sampled`` lists (0 to 20). It ``reuses`` what of its prompt was computed before; the answer is the same without. Of
    several owners each has the same share of the ring; of what waits for one of them the lowest ``priority`` is next.
    With ``reports_begin`` a ``PromptProgress`` of no tokens says that it waits no longer.

    Its cells are kept under ``root`` (empty: they are not), and those of ``blocks``, a chain from position 0 on, are held by
    every device of the ring, which says of each when it is forgotten, whether it was of use or not.
    ``replays_rows``: what of ``sampled`` is in no block is computed row by row, as it was before, and else in chunks.
    Its prompt is computed in ``chunks`` of the ring where it was begun, or of this one.
    It ``speculates``: where the ring computes drafts there are some of it as well, unless its prompt has ``pictures``; the
    answer is the same without.
    """

    request: int
    prompt: list[int]
    sampled: list[int]
    max_tokens: int
    sampling: Sampling
    logprobs: int | None
    reuses: bool = True
    owner: str = ""
    priority: int = 0
    reports_begin: bool = False
    root: str = ""
    blocks: list[KvBlock] = []
    replays_rows: bool = True
    speculates: bool = True
    chunks: ChunkSize | None = None
    pictures: list[PictureRows] = []


class AlsoGenerate(msgspec.Struct, frozen=True, array_like=True):
    """What is another generation's own; ``prompt`` None: that of the one before."""

    request: int
    seed: int
    prompt: list[int] | None
    blocks: list[KvBlock]


class Choices(msgspec.Struct, frozen=True, kw_only=True, tag="choices"):
    """Generations of one request: ``first``, and ``others`` that differ from it in a few things.

    What they share is sent and read once: 128 that have a bias for each token were 80 MB, for which all others waited.
    """

    first: Generate
    others: list[AlsoGenerate]

    def generates(self) -> Iterator[Generate]:
        """All of them."""
        yield self.first
        prompt, sampling = self.first.prompt, self.first.sampling
        for other in self.others:
            prompt = prompt if other.prompt is None else other.prompt
            yield msgspec.structs.replace(
                self.first,
                request=other.request,
                prompt=prompt,
                blocks=other.blocks,
                sampling=msgspec.structs.replace(sampling, seed=other.seed),
                reports_begin=False,
            )


class Cancel(msgspec.Struct, frozen=True, tag="cancel"):
    """Stop generating for ``request`` and free its sequence; no more of its answer will be sent."""

    request: int


class Sampled(msgspec.Struct, frozen=True, kw_only=True, tag="sampled"):
    """One new token. ``logprob`` and ``top`` (token, logprob; best first) are there when they were asked for.

    Log-probabilities are those of the model itself: before bias, penalties, temperature and truncation. ``mirostat_mu`` is
    what the next ring must be told in ``Sampling`` to go on behind this token; None without mirostat.
    """

    request: int
    token: int
    logprob: float | None
    top: tuple[tuple[int, float], ...]
    mirostat_mu: float | None = None


class PromptProgress(msgspec.Struct, frozen=True, kw_only=True, tag="progress"):
    """So many ``tokens`` of the prompt of ``request`` are computed; said behind each chunk but the last.

    Said before the first one, too, where ``reused`` tokens were computed for a prompt before.
    """

    request: int
    tokens: int
    reused: int = 0


class Finished(msgspec.Struct, frozen=True, kw_only=True, tag="finished"):
    """The last message for ``request``.

    ``reason`` is ``stop`` (the model ended its answer; its end-of-generation token is not sent as ``Sampled``), ``length``
    (``max_tokens`` or the context reached), or with a one-line ``error`` either ``error``, or ``refused`` where what was
    asked for cannot be followed (its grammar). ``completion_tokens`` counts the tokens of earlier epochs too. ``prompt_s``
    is the time from the first prefill step to the first token that this ring drew, ``decode_s`` the time from there to the
    last. This ring computed ``drafted`` drafts of it, of which ``accepted`` held.
    """

    request: int
    reason: str
    error: str | None
    prompt_tokens: int
    completion_tokens: int
    prompt_s: float
    decode_s: float
    drafted: int = 0
    accepted: int = 0


class KvKept(msgspec.Struct, frozen=True, kw_only=True, tag="kept"):
    """Every window was told to keep ``blocks`` of ``request``, the next of its chain.

    The chain begins with ``Generate.blocks`` as far as they were loaded: where ``before`` of the first of ``blocks`` is not
    the last that is known, it goes on from there. Blocks of a prompt may be told behind ``Finished`` or ``Cancel``.
    """

    request: int
    blocks: list[KvBlock]


class KvForgotten(msgspec.Struct, frozen=True, kw_only=True, tag="forgotten"):
    """Nothing in the ring needs the blocks ``keys`` any more, which were kept, or came with a ``Generate``.

    What of a prompt its sequence remembers is needed. A ring that ends needs nothing, and does not say so.
    """

    keys: list[str]


SENDER: Final = "the device before this one"
"""How errors call the sender of what arrived, since only the head knows its name."""
RingFault = Literal["own", "next", "sender", "altered", "late", "values", "rank"]
FAULTS: Final[dict[RingFault, type[PrimadError]]] = {
    "own": RingError,
    "next": NextDeviceError,
    "sender": SenderError,
    "altered": AlteredStepError,
    "late": LateStepError,
    "values": NotFiniteError,
    "rank": RankError,
}


class RingBroken(msgspec.Struct, frozen=True, tag="broken"):
    """This ring process cannot go on; ``error`` is one line. It is the process's last event.

    ``weights`` is the file whose weights cannot be read or are not what they were, None where that is not what is wrong.
    ``fault`` says which error it was (``FAULTS``), and so who may be at fault: of a group the ``device``.
    """

    error: str
    weights: str | None
    fault: RingFault = "own"
    device: str = ""


def broken_by(error: PrimadError) -> RingBroken:
    """What a ring process says of ``error``, which ends it."""
    fault: RingFault = next((fault for fault, kind in FAULTS.items() if type(error) is kind), "own")
    device = error.device if isinstance(error, RankError) else ""
    return RingBroken(str(error), error.file if isinstance(error, WeightsError) else None, fault, device)


def cause_of(broken: RingBroken) -> PrimadError:
    """The error that ended a ring process."""
    if broken.fault == "rank":
        return RankError(broken.error, broken.device)
    return FAULTS[broken.fault](broken.error) if broken.weights is None else WeightsError(broken.error, broken.weights)


# ---- between a daemon and its ring process --------------------------------------------------------------------------


class HeadPart(msgspec.Struct, frozen=True, kw_only=True):
    """What only the head's ring process is told: the path of the ``model`` file, and how it runs generations.

    It keeps at most ``depth`` steps in flight, and so many ``chunks`` of prompts (None: as many; while nobody writes one
    more where that is several), and runs so many generations
    ``at_once``, whose next tokens are computed together as ``batching`` says. A chunk of a prompt has at most
    ``chunk_rows``, and ``min_rows`` or more before a message; beside other answers it is computed in ``pieces``. Of an
    answer the cells of every ``keep_rows`` rows are kept, or none. So many ``states`` of sequences are kept, where some
    layers have one; 0: they can be cut back. Where cells do not go on without a state, one is kept with every
    ``state_rows`` rows of an answer; None: they do. Drafts are computed as ``drafting`` says, or none; the model ``draft``
    drafts what they are, if there is one: here, unless another device ``drafts_elsewhere``. Or the model ``predicts``
    itself, with layers that its tail has.
    Where ``model`` has the vocabulary alone, the token embedding is in the layer file ``embedding``. Whole files of
    ``adapters`` are for the token embedding and for a model that is not cut. Of the ``vocabulary``'s tokens ``ends`` end
    a generation.
    """

    model: str
    vocabulary: int
    ends: tuple[int, ...]
    depth: int
    at_once: int
    chunk_rows: int
    min_rows: int
    chunks: int | None = None
    batching: Batching = Batching()
    pieces: Pieces | None = None
    keep_rows: int | None = None
    states: int = 0
    state_rows: int | None = None
    drafting: Drafting | None = None
    draft: DraftModel | None = None
    drafts_elsewhere: bool = False
    predicts: bool = False
    embedding: str | None = None
    adapters: tuple[AdapterFile, ...] = ()


class GroupRank(msgspec.Struct, frozen=True, kw_only=True):
    """A ring process is ``rank`` of a group of ``devices``, which have a share of each layer. The ``key`` is new for each
    epoch, and known to them alone. Sums are sent as ``wire`` says."""

    rank: Annotated[int, Meta(ge=0, lt=MAX_RANKS)]
    devices: Annotated[list[Annotated[str, Meta(max_length=100)]], Meta(min_length=2, max_length=MAX_RANKS)]
    key: Annotated[bytes, Meta(min_length=GROUP_KEY_BYTES, max_length=GROUP_KEY_BYTES)]
    wire: Wire = "f32"


class RankAddress(msgspec.Struct, frozen=True, array_like=True):
    """Where a rank of a group takes connections."""

    host: Annotated[str, Meta(max_length=255)]
    port: Annotated[int, Meta(ge=1, le=65_535)]


class Open(msgspec.Struct, frozen=True, kw_only=True, tag="open"):
    """The first command: load these windows of ring ``ring`` and epoch ``epoch`` and listen on ``host``.

    ``route`` is the number of windows in the route, ``width`` that of a row on its way; ``head`` is None on a worker. Of
    what streams ``read_ahead_bytes`` are read ahead. How often experts are used is kept in the folder ``usage``, or
    nowhere; KV cells are kept in the folder ``cells``, or nowhere. In a ``group`` windows have shares of their layers.
    """

    ring: int
    epoch: int
    windows: list[WindowSource]
    route: int
    width: int
    host: str
    head: HeadPart | None
    step_timeout_s: float
    options: EngineOptions
    read_ahead_bytes: int
    usage: str | None
    cells: str | None = None
    group: GroupRank | None = None


class Reopen(msgspec.Struct, frozen=True, kw_only=True, tag="reopen"):
    """To a worker's ring process: serve another ring or epoch with windows that are loaded already.

    ``windows`` are the new route indices of all windows that are loaded, in their order. Everything of the epoch before is
    dropped: KV cells, links and their keys, steps on their way. The answer is another ``Opened``, and
    a ``Connect`` must follow. ``assignments`` are those of ``windows`` under the new plan. The other fields are as in
    ``Open``; context, rows and threads stay as they were.
    """

    ring: int
    epoch: int
    windows: list[int]
    route: int
    host: str
    step_timeout_s: float
    assignments: list[WindowAssignment]
    read_ahead_bytes: int


class Connect(msgspec.Struct, frozen=True, tag="connect"):
    """The neighbours in the ring: send to the ring process at ``address`` (a ZeroMQ endpoint), whose public key is ``key``,
    and take steps from the one whose public key is ``sender`` and from nobody else. The head then runs a warm-up pass.
    """

    address: str
    key: str
    sender: str


class JoinGroup(msgspec.Struct, frozen=True, tag="join_group"):
    """To each ring process of a group: connect to the ranks below this one, at ``addresses``, and let those above connect.

    The head then runs a warm-up pass.
    """

    addresses: Annotated[list[RankAddress], Meta(max_length=MAX_RANKS)]


class Drain(msgspec.Struct, frozen=True, tag="drain"):
    """To the head's ring process: compute no further row; ``Drained`` is told once the steps on their way are back.

    One more step without rows keeps what of the answers is computed and in no block yet; that is told before ``Drained``.
    Generations that are not over stay with the daemon, which has seen every token of theirs by then. No ``Generate`` may
    follow.
    """


class Report(msgspec.Struct, frozen=True, tag="report"):
    """Ask for a ``Status``."""


class Loading(msgspec.Struct, frozen=True, tag="loading"):
    """``windows`` of all windows are loaded."""

    windows: int


class Opened(msgspec.Struct, frozen=True, tag="opened"):
    """Every window is loaded; steps of the device before this one are received at ``endpoint``.

    ``key`` is the public key of this ring process (Z85, 40 characters), new with every ``Opened``. Both are empty where
    no steps come from a ring; other ranks of its group connect to ``group``. ``keeps``: all its windows can hand out KV
    cells and take them in, and there is a folder for them; ``cells`` says what those of each layer are made of.
    """

    endpoint: str
    key: str
    keeps: bool = False
    cells: list[CellShape] = []
    group: str = ""


class Serving(msgspec.Struct, frozen=True, tag="serving"):
    """The head's warm-up pass came back: the ring computes."""


class Drained(msgspec.Struct, frozen=True, tag="drained"):
    """The answer to ``Drain``: no step is under way and none will be."""


class Overdue(msgspec.Struct, frozen=True, kw_only=True, tag="overdue"):
    """Step ``step`` is late, and told to be so again at every doubling of ``waited_s``.

    From the head: it is out for much longer than such steps were before, or, if it ``is_first``, than the first of its kind
    may be; ``ring_passes`` ring passes came back before it. It may still come, since a slow device is not a dead one;
    ``Open.step_timeout_s`` is where the ring breaks. From a worker: its next device does not take the step.
    """

    step: int
    waited_s: float
    ring_passes: int = 0
    is_first: bool = False


class ProcessMemoryLow(msgspec.Struct, frozen=True, tag="memory_low"):
    """Nothing is left to stream instead of keeping it, and memory is short still, by ``needed_bytes`` (more than 0).

    Only another plan can ask less of this device. The ring goes on meanwhile.
    """

    needed_bytes: int


class GpuLoaded(msgspec.Struct, frozen=True, kw_only=True, tag="gpu"):
    """Of ``planned`` layers ``layers`` are on the GPU, which has ``held_bytes`` less free than before.

    Where these are fewer it had no room: the processor computes the others, and ``why`` is what llama.cpp said. If they are
    as many and there is a ``why``, it had none to help with prompts. ``others_held`` is what is held of other GPUs than the
    device's first, by llama.cpp's names for them.
    """

    layers: int
    planned: int
    held_bytes: int
    why: str
    others_held: dict[str, int] = {}


class GpuLow(msgspec.Struct, frozen=True, tag="gpu_low"):
    """Other programs took of a GPU's memory: ``free_bytes`` are left, ``needed_bytes`` (more than 0) too few.

    ``other`` is llama.cpp's name for it where it is not the device's first.
    """

    free_bytes: int
    needed_bytes: int
    other: str = ""


class MemoryStatus(msgspec.Struct, frozen=True, kw_only=True):
    """What of a ring process's weights is in memory, and what reading the rest cost since it was opened last.

    ``resident`` and ``streamed`` count layers' worth, since a share of each may stream: as assigned, or what memory
    pressure left of it, and so ``read_ahead_bytes``, which are read ahead of what streams. ``streams_output``: so does the
    output matrix, which is no layer. The other bytes are those of now: while tokens are drawn, more stays in the room of
    scratch memory. ``read_bytes`` were read from disk, and steps waited ``stall_s`` seconds for it. ``pressure`` is the
    level of memory pressure on this device: calm, some or high. Where experts stream, steps picked ``experts_picked``, each
    counted once a step and layer, and ``experts_found`` of them were in memory or on their way.
    """

    resident: int
    streamed: int
    streams_output: bool
    read_ahead_bytes: int
    resident_bytes: int
    streamed_bytes: int
    read_bytes: int
    stall_s: float
    pressure: str
    experts_picked: int = 0
    experts_found: int = 0


class DecodeStatus(msgspec.Struct, frozen=True, kw_only=True):
    """What a token costs this device: of the latest ``tokens`` steps of one row, prompts left out.

    ``compute_s`` is the median, ``stall_s`` (waiting for the disk) and ``read_bytes`` are means, over all windows.
    ``token_s`` is the median time from one token of an answer to the next, which the head alone knows.
    """

    tokens: int
    token_s: float | None
    compute_s: float
    stall_s: float
    read_bytes: float


class PromptStatus(msgspec.Struct, frozen=True, kw_only=True):
    """What a row of a prompt costs this device: of the latest large chunks, with ``rows`` rows on average, the quickest.

    ``row_s`` is what it computes for a row, over all windows.
    """

    rows: float
    row_s: float


DraftPlaceName = Literal["here", "elsewhere", "nowhere"]


class DraftPlaceChanged(msgspec.Struct, frozen=True, tag="draft_place"):
    """The draft model does so on this device from now on, is ready ``elsewhere``, or drafts nothing for now."""

    place: DraftPlaceName


class RequestDrafts(msgspec.Struct, frozen=True, tag="request_drafts"):
    """The draft model on another device is to know this; answered by ``DraftsHeard``, or not."""

    task: TextTask


class DraftsHeard(msgspec.Struct, frozen=True, tag="drafts_heard"):
    """The model on another device drafts so."""

    drafted: Drafted


class DraftStatus(msgspec.Struct, frozen=True, kw_only=True):
    """What became of drafts: of so many ``drafted`` rows ``accepted`` were the next token, ``missed`` were wrong behind
    right ones, and ``skipped`` were not computed to the end. An answer had ``tokens_per_pass`` tokens in the time in which a
    row goes round once: one without drafts.
    """

    drafted: int
    accepted: int
    skipped: int
    tokens_per_pass: float
    missed: int = 0


class Status(msgspec.Struct, frozen=True, kw_only=True, tag="status"):
    """What this ring process did and holds since it was opened, or reopened, last.

    ``hop_s`` are the software times of its latest hops in seconds: received to compute started plus compute ended to
    sent. ``rss_bytes`` is its resident memory, shared file pages included; ``private_bytes`` leaves those out.
    """

    steps: int
    rows: int
    compute_s: float
    hop_s: Annotated[list[float], Meta(max_length=MAX_HOPS)]
    rss_bytes: int
    private_bytes: int
    refused: int
    memory: MemoryStatus | None = None
    decode: DecodeStatus | None = None
    prompt: PromptStatus | None = None
    drafts: DraftStatus | None = None


RingCommand = (
    Open | Reopen | Connect | JoinGroup | Generate | Choices | Cancel | Drain | Report | DraftPlaceChanged | DraftsHeard
)
GenerationEvent = Sampled | PromptProgress | Finished
RingEvent = (
    Loading
    | Opened
    | Serving
    | GenerationEvent
    | KvKept
    | KvForgotten
    | Overdue
    | Drained
    | ProcessMemoryLow
    | GpuLoaded
    | GpuLow
    | RequestDrafts
    | Status
    | RingBroken
)


def in_few(commands: Iterable[RingCommand]) -> list[RingCommand]:
    """``commands``, generations of one request as one of them."""
    few: list[RingCommand] = []
    first = before = None
    for command in commands:
        if not isinstance(command, Generate):
            first = None
        elif first is not None and before is not None and _is_choice(command, first):
            own = None if command.prompt is before.prompt else command.prompt
            also = AlsoGenerate(command.request, command.sampling.seed, own, command.blocks)
            choices = few[-1] if isinstance(few[-1], Choices) else Choices(first=first, others=[])
            choices.others.append(also)
            few[-1], before = choices, command
            continue
        else:
            first = before = command
        few.append(command)
    return few


def _is_choice(generate: Generate, first: Generate) -> bool:
    """Whether it is one of ``first``'s ``Choices``."""
    sampling = msgspec.structs.replace(generate.sampling, seed=first.sampling.seed)
    own = {"request": first.request, "prompt": first.prompt, "blocks": first.blocks, "sampling": sampling}
    return not generate.reports_begin and first == msgspec.structs.replace(
        generate, **own, reports_begin=first.reports_begin
    )


command_decoder = msgspec.msgpack.Decoder(RingCommand)
event_decoder = msgspec.msgpack.Decoder(RingEvent)
