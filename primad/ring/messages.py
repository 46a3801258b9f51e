"""All messages that cross a process border for the ring, as tagged msgspec structs.

Three conversations use this file:

* **Along the route** (encrypted ZeroMQ PUSH/PULL, one hop a message): a ``Step`` header frame and one payload frame
  with the tokens' hidden states. KV operations are in the same ordered stream, so every window applies the same log.
  ``Skip`` comes the same way, with an empty payload, and overtakes the steps that wait to be computed: a device takes
  all that has come before it computes, and forwards a ``Skip`` immediately.
* **Between a daemon and its ring process** (a private socket pair): ``RingCommand`` down, ``RingEvent`` up.
* **Between the API and the head's scheduler**: ``Generate`` and ``Cancel`` down, ``Sampled`` and ``Finished`` up; they
  are themselves ring commands and ring events.

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
    UnreadableError,
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
"""More than any header of a step of at most ``StepLimits.rows`` rows needs."""
MAX_ROWS: Final = 8192
MAX_PARTS: Final = 4
"""A picture's row is at most this many times as wide as a hidden state, including its parts for deeper layers."""
MAX_SEQUENCES: Final = 256
MAX_OPS: Final = 8192
"""Limit for any step of any ring, so that a header is bounded before it is read."""
MAX_HOPS: Final = 4096
MAX_STATES: Final = 2 * MAX_SEQUENCES
"""Limit for all sequences of a ring: each kept state takes as much memory in every window as the state of a
sequence."""
GROUP_KEY_BYTES: Final = 32
MAX_ROLLBACK: Final = 16
"""Rows of one step that can be rolled back where layers have a state: each takes one state's memory for every
sequence."""


# ---- along the route ------------------------------------------------------------------------------------------------


class KvRemove(msgspec.Struct, frozen=True, tag="remove", array_like=True):
    """Forget positions ``start <= p < end`` of ``sequence``; ``end = -1`` means to the end."""

    sequence: int
    start: int
    end: int


class KvCopy(msgspec.Struct, frozen=True, tag="copy", array_like=True):
    """Forget ``target``, then give it the cells that ``source`` has at positions before ``end``."""

    source: int
    target: int
    end: int


class KvKeep(msgspec.Struct, frozen=True, tag="keep", array_like=True):
    """Hand the cells of ``block`` of ``sequence``, or its state there, to this device's store of KV cells."""

    sequence: int
    block: KvBlock


class KvLoad(msgspec.Struct, frozen=True, tag="load", array_like=True):
    """Forget ``sequence``, and fill its positions before ``end`` from the blocks whose chain ends with ``key``.

    Where layers have a state, ``key`` is the key of one.
    """

    sequence: int
    key: str
    end: int


class StateKeep(msgspec.Struct, frozen=True, tag="state-keep", array_like=True):
    """Keep the state of ``sequence``, which cannot be cut back, after its ``end`` positions, in memory as
    ``number``."""

    sequence: int
    number: int
    end: int


class StateRestore(msgspec.Struct, frozen=True, tag="state-restore", array_like=True):
    """Cut ``sequence`` back to ``end`` positions, where its state, or the state of the sequence it is a copy of, was
    kept as ``number``."""

    sequence: int
    number: int
    end: int


KvOp = KvRemove | KvCopy | KvKeep | KvLoad | StateKeep | StateRestore


class Step(msgspec.Struct, frozen=True, tag="step", array_like=True):
    """One step's visit to one window: apply ``ops`` in order, then compute the rows.

    ``window`` is the route index of the window that must compute it. ``shape`` is ``(rows, width)`` of the payload
    frame; row ``i`` has ``positions[i]``, belongs to ``sequences[i]`` and needs logits when ``outputs[i]``. A step
    without rows carries only KV operations and has an empty payload. So has a ``skipped`` step: a window before this
    one did not compute its rows and no later one does, though all apply its operations. If it ``looks_ahead`` each row
    attends to the rows after it as well. ``rope``, if not empty, has four numbers for each row, by which its keys are
    rotated instead of by its position.
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
    """The results of ``steps`` are not needed: a window that has not computed one of them yet does not compute its
    rows.

    All of their rows are drafts, in sequences where the log forgets them before it adds other rows.
    """

    protocol: int
    ring: int
    epoch: int
    steps: Annotated[list[int], Meta(max_length=MAX_SKIPPED)]


RouteMessage = Step | Skip


class StepLimits(msgspec.Struct, frozen=True):
    """The limits of what a ring process accepts, fixed when the ring opens, so that a header can be checked by itself.

    A device keeps no more than was planned: ``states`` states, and in one step each cell once.
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
    """Decode the header frame as a ``Step`` that is safe to compute, or as a ``Skip``, checked against ``limits``.
    ``payload_bytes`` is the size of the payload that came with it; None: it comes later.

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
                raise ProtocolError(f"a KV operation keeps something that is not a block: {printable(str(block))}")
        case KvLoad(sequence, key, end):
            sequences, span = [sequence], (0, end)
            if not is_key(key) or end <= 0:
                raise ProtocolError(
                    f"a KV operation loads something that is not a block: {printable(f'{key!r} up to {end}')}"
                )
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

    ``sampled`` are its tokens that were sampled in an earlier epoch: they are computed again, count as if this ring had
    sampled them, and are not reported again. ``logprobs`` is None, or the number of most likely tokens that each
    ``Sampled`` lists (0 to 20). If it ``reuses``, prompt tokens that were computed before are not computed again;
    output is the same without. Each ``owner`` has the same share of the ring; of one owner's waiting requests the one
    with the lowest ``priority`` is next. With ``reports_begin`` a ``PromptProgress`` of no tokens reports that it no
    longer waits.

    Its cells are kept under ``root`` (empty: they are not). Every device of the ring holds the cells of ``blocks``, a
    chain from position 0, and the ring reports when each block is forgotten, whether it was used or not.
    ``replays_rows``: ``sampled`` tokens that are in no block are computed one at a time, as the first time; otherwise
    in chunks. Its prompt is computed in ``chunks`` of the ring where it was begun, or of this one. If it
    ``speculates``, its draft tokens are computed where the ring has drafts, unless its prompt has ``pictures``; output
    is the same without.
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
    """The fields of a further choice that differ from the first; ``prompt`` None: the prompt of the choice before."""

    request: int
    seed: int
    prompt: list[int] | None
    blocks: list[KvBlock]


class Choices(msgspec.Struct, frozen=True, kw_only=True, tag="choices"):
    """Generations of one request: ``first``, and ``others`` that differ from it in a few fields.

    Shared fields are sent and decoded once: 128 generations with a bias for each token were 80 MB, for which all others
    waited.
    """

    first: Generate
    others: list[AlsoGenerate]

    def generates(self) -> Iterator[Generate]:
        """Yield all generations."""
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
    """Stop generating for ``request`` and free its sequence; no more of its tokens are sent."""

    request: int


class Sampled(msgspec.Struct, frozen=True, kw_only=True, tag="sampled"):
    """One new token. ``logprob`` and ``top`` (token, logprob; best first) are set when they were asked for.

    Log-probabilities are the model's own: before bias, penalties, temperature and truncation. ``mirostat_mu`` is the
    value that the next ring needs in ``Sampling`` to continue after this token; None without mirostat.
    """

    request: int
    token: int
    logprob: float | None
    top: tuple[tuple[int, float], ...]
    mirostat_mu: float | None = None


class PromptProgress(msgspec.Struct, frozen=True, kw_only=True, tag="progress"):
    """The first ``tokens`` of the prompt of ``request`` are computed; sent after each chunk except the last.

    Also sent before the first chunk if ``reused`` tokens had been computed for an earlier prompt.
    """

    request: int
    tokens: int
    reused: int = 0


class Finished(msgspec.Struct, frozen=True, kw_only=True, tag="finished"):
    """The last message for ``request``.

    ``reason`` is ``stop`` (the model ended the completion; its end-of-generation token is not sent as ``Sampled``),
    ``length`` (``max_tokens`` or the context reached), or with a one-line ``error`` either ``error``, or ``refused`` if
    the request cannot be fulfilled (its grammar). ``completion_tokens`` counts the tokens of earlier epochs too.
    ``prompt_s`` is the time from the first prefill step to the first token that this ring sampled, ``decode_s`` the
    time from there to the last. This ring computed ``drafted`` draft tokens for it, of which ``accepted`` were
    accepted.
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


class KvBegun(msgspec.Struct, frozen=True, kw_only=True, tag="keeping"):
    """From now on windows may keep the blocks ``keys``, of which each is reported as kept or forgotten later.

    Some devices may have them when the ring ends before that.
    """

    keys: list[str]


class KvKept(msgspec.Struct, frozen=True, kw_only=True, tag="kept"):
    """Every window was told to keep ``blocks`` of ``request``, the next of its chain.

    The chain begins with ``Generate.blocks`` as far as they were loaded: if the first of ``blocks`` has another
    ``before`` than the last known block, the chain continues from that one. Blocks of a prompt may be reported after
    ``Finished`` or ``Cancel``.
    """

    request: int
    blocks: list[KvBlock]


class KvForgotten(msgspec.Struct, frozen=True, kw_only=True, tag="forgotten"):
    """The ring no longer needs the blocks ``keys``, which were kept, or came with a ``Generate``.

    Blocks of a prompt that a sequence still holds are needed. A ring that ends needs no blocks, and does not report
    that.
    """

    keys: list[str]


SENDER: Final = "the device before this one"
"""The sender of a message in errors, since only the head knows its name."""
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
    """This ring process cannot continue; ``error`` is one line. It is the process's last event.

    ``weights`` is the file whose weights cannot be read or have changed; None if weights are not the fault. ``fault``
    names the kind of error (``FAULTS``), and so which device may be at fault: in a group ``device``.
    """

    error: str
    weights: str | None
    fault: RingFault = "own"
    device: str = ""


def broken_by(error: PrimadError) -> RingBroken:
    """The event with which a ring process reports ``error``, which ends it."""
    fault: RingFault = next((fault for fault, kind in FAULTS.items() if type(error) is kind), "own")
    device = error.device if isinstance(error, RankError) else ""
    weights = error.file if isinstance(error, WeightsError | UnreadableError) else None
    return RingBroken(str(error), weights, fault, device)


def cause_of(broken: RingBroken) -> PrimadError:
    """The error that ended a ring process."""
    if broken.fault == "rank":
        return RankError(broken.error, broken.device)
    return FAULTS[broken.fault](broken.error) if broken.weights is None else WeightsError(broken.error, broken.weights)


# ---- between a daemon and its ring process --------------------------------------------------------------------------


class HeadPart(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of the head's ring process alone: the path of the ``model`` file, and how it runs generations.

    It keeps at most ``depth`` steps in flight, of which at most ``chunks`` are chunks of prompts (None: ``depth``;
    where that is more than one, one more while no generation decodes). It runs ``at_once`` generations concurrently,
    whose next tokens are computed together as ``batching`` says. A chunk of a prompt has at most ``chunk_rows`` tokens,
    and ``min_rows`` or more before a message; alongside other generations it is computed in ``pieces``. The cells of
    every ``keep_rows`` tokens of a completion are kept, or none. Where some layers have a state, ``states`` states of
    sequences are kept; 0: sequences can be cut back anywhere. Where cells are of no use without a state, one is kept
    with every ``state_rows`` tokens of a completion; None: cells suffice. Drafts are computed as ``drafting`` says, or
    not at all. The model ``draft`` computes them, if there is one: here, unless another device ``drafts_elsewhere``. Or
    the model ``predicts`` them itself, with layers in its tail. If ``model`` has only the vocabulary, the token
    embedding is in the layer file ``embedding``. Whole files of ``adapters`` are for the token embedding and for a
    model that is not cut. Of the ``vocabulary``'s tokens ``ends`` end a generation.
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
    """The ring process is ``rank`` of a group of ``devices``, each with a share of every layer. The ``key`` is new for
    each epoch and known only to them. ``wire`` is the number format in which sums are sent."""

    rank: Annotated[int, Meta(ge=0, lt=MAX_RANKS)]
    devices: Annotated[list[Annotated[str, Meta(max_length=100)]], Meta(min_length=2, max_length=MAX_RANKS)]
    key: Annotated[bytes, Meta(min_length=GROUP_KEY_BYTES, max_length=GROUP_KEY_BYTES)]
    wire: Wire = "f32"


class RankAddress(msgspec.Struct, frozen=True, array_like=True):
    """The address where a rank of a group accepts connections."""

    host: Annotated[str, Meta(max_length=255)]
    port: Annotated[int, Meta(ge=1, le=65_535)]


class Open(msgspec.Struct, frozen=True, kw_only=True, tag="open"):
    """The first command: load these windows of ring ``ring`` and epoch ``epoch`` and listen on ``host``.

    ``route`` is the number of windows in the route, ``width`` the width of a hidden state; ``head`` is None on a
    worker. ``read_ahead_bytes`` of streamed weights are read ahead. Counts of expert use are kept in the folder
    ``usage``, or not at all; KV cells in the folder ``cells``, or not at all. In a ``group`` windows have shares of
    their layers.
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

    ``windows`` are the new route indices of all windows that are loaded, in their order. Everything of the previous
    epoch is dropped: KV cells, links and their keys, steps in flight. The reply is another ``Opened``, and a
    ``Connect`` must follow. ``assignments`` are the assignments of ``windows`` under the new plan. The other fields are
    as in ``Open``; context, rows and threads stay as they were.
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
    """The neighbours in the ring: send to the ring process at ``address`` (a ZeroMQ endpoint), whose public key is
    ``key``, and accept steps only from the one whose public key is ``sender``. The head then runs a warm-up pass."""

    address: str
    key: str
    sender: str


class JoinGroup(msgspec.Struct, frozen=True, tag="join_group"):
    """To each ring process of a group: connect to the ranks below it, at ``addresses``, and accept those above.

    The head then runs a warm-up pass.
    """

    addresses: Annotated[list[RankAddress], Meta(max_length=MAX_RANKS)]


class Drain(msgspec.Struct, frozen=True, tag="drain"):
    """To the head's ring process: compute no further rows; ``Drained`` is reported once the steps in flight are back.

    One more step without rows keeps computed tokens of completions that are in no block yet; these blocks are reported
    before ``Drained``. Unfinished generations stay with the daemon, which has all of their tokens by then. No
    ``Generate`` may follow.
    """


class Report(msgspec.Struct, frozen=True, tag="report"):
    """Ask for a ``Status``."""


class Loading(msgspec.Struct, frozen=True, tag="loading"):
    """The number of windows that are loaded so far."""

    windows: int


class Opened(msgspec.Struct, frozen=True, tag="opened"):
    """Every window is loaded; steps of the previous device are received at ``endpoint``.

    ``key`` is the public key of this ring process (Z85, 40 characters), new with every ``Opened``. Both are empty where
    no steps come from a ring; other ranks of its group connect to ``group``. ``keeps``: all its windows can export and
    import KV cells, and there is a folder for them; ``cells`` is the shape of the cells of each layer.
    """

    endpoint: str
    key: str
    keeps: bool = False
    cells: list[CellShape] = []
    group: str = ""


class Serving(msgspec.Struct, frozen=True, tag="serving"):
    """The head's warm-up pass came back: the ring computes."""


class Drained(msgspec.Struct, frozen=True, tag="drained"):
    """The reply to ``Drain``: no step is in flight and none will be."""


class Overdue(msgspec.Struct, frozen=True, kw_only=True, tag="overdue"):
    """Step ``step`` is late; reported again at every doubling of ``waited_s``.

    From the head: it has been out for much longer than earlier steps of its kind, or, if it ``is_first``, than the
    first of its kind may be; ``ring_passes`` ring passes came back before it. It may still come, since a slow device is
    not a dead one; the ring breaks at ``Open.step_timeout_s``. From a worker: its next device does not take the step.
    """

    step: int
    waited_s: float
    ring_passes: int = 0
    is_first: bool = False


class ProcessMemoryLow(msgspec.Struct, frozen=True, tag="memory_low"):
    """Nothing is left that could stream instead of staying in memory, and memory is still short by ``needed_bytes``
    (more than 0).

    Only another plan can ask less of this device. The ring continues meanwhile.
    """

    needed_bytes: int


class GpuLoaded(msgspec.Struct, frozen=True, kw_only=True, tag="gpu"):
    """``layers`` of the ``planned`` layers are on the GPU, which has ``held_bytes`` less free than before.

    If these are fewer the GPU had no room: the CPU computes the others, and ``why`` is llama.cpp's message. If all are
    there and there is a ``why``, the GPU had no room to offload prefill. ``others_held`` are the bytes held on other
    GPUs than the device's first, by llama.cpp's names for them.
    """

    layers: int
    planned: int
    held_bytes: int
    why: str
    others_held: dict[str, int] = {}


class GpuLow(msgspec.Struct, frozen=True, tag="gpu_low"):
    """Other programs took memory of a GPU: ``free_bytes`` are left, ``needed_bytes`` (more than 0) too few.

    ``other`` is llama.cpp's name for the GPU if it is not the device's first.
    """

    free_bytes: int
    needed_bytes: int
    other: str = ""


class MemoryStatus(msgspec.Struct, frozen=True, kw_only=True):
    """How much of a ring process's weights is in memory, and what reading the rest cost since it was last opened.

    ``resident`` and ``streamed`` count layers, in fractions, since a share of each may stream: as assigned, or as
    reduced by memory pressure. ``read_ahead_bytes`` of the streamed weights are read ahead, reduced likewise.
    ``streams_output``: the output matrix, which is not a layer, streams too. The other bytes are current: while tokens
    are sampled, more weights stay in scratch memory. ``read_bytes`` were read from disk, and steps waited ``stall_s``
    seconds for it. ``pressure`` is the level of memory pressure on this device: calm, some or high. Where experts
    stream, steps picked ``experts_picked``, each counted once a step and layer, and ``experts_found`` of them were in
    memory or being read.
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
    """What a token costs this device: over the latest ``tokens`` steps of one row, without prompts.

    ``compute_s`` is the median, ``stall_s`` (waiting for the disk) and ``read_bytes`` are means, over all windows.
    ``token_s`` is the median time from one token of a completion to the next, which only the head knows.
    """

    tokens: int
    token_s: float | None
    compute_s: float
    stall_s: float
    read_bytes: float


class PromptStatus(msgspec.Struct, frozen=True, kw_only=True):
    """What a prompt token costs this device, in the fastest of the latest large chunks of each window.

    ``rows`` is their mean number of tokens, ``row_s`` the compute time per token, over all windows.
    """

    rows: float
    row_s: float


DraftPlaceName = Literal["here", "elsewhere", "nowhere"]


class DraftPlaceChanged(msgspec.Struct, frozen=True, tag="draft_place"):
    """The draft model now runs on this device, is ready ``elsewhere``, or drafts nothing for now."""

    place: DraftPlaceName


class RequestDrafts(msgspec.Struct, frozen=True, tag="request_drafts"):
    """A task for the draft model on another device; it may be answered by ``DraftsHeard``."""

    task: TextTask


class DraftsHeard(msgspec.Struct, frozen=True, tag="drafts_heard"):
    """Drafts of the model on another device."""

    drafted: Drafted


class DraftStatus(msgspec.Struct, frozen=True, kw_only=True):
    """Counts of draft tokens: of ``drafted`` tokens ``accepted`` were the next token, ``missed`` were wrong after
    accepted ones, and ``skipped`` were not computed to the end. ``tokens_per_pass`` is the number of tokens of a
    completion per ring pass of one token: 1 without drafts."""

    drafted: int
    accepted: int
    skipped: int
    tokens_per_pass: float
    missed: int = 0


class Status(msgspec.Struct, frozen=True, kw_only=True, tag="status"):
    """What this ring process did and holds since it was last opened or reopened.

    ``hop_s`` are the software times of its latest hops in seconds: from received to compute started plus from compute
    ended to sent. ``rss_bytes`` is its resident memory, including shared file pages; ``private_bytes`` excludes them.
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
KvNews = KvBegun | KvKept | KvForgotten
RingEvent = (
    Loading
    | Opened
    | Serving
    | GenerationEvent
    | KvNews
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
    """Merge generations of one request in ``commands`` into one command."""
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
    """Whether ``generate`` is one of ``first``'s ``Choices``."""
    sampling = msgspec.structs.replace(generate.sampling, seed=first.sampling.seed)
    own = {"request": first.request, "prompt": first.prompt, "blocks": first.blocks, "sampling": sampling}
    return not generate.reports_begin and first == msgspec.structs.replace(
        generate, **own, reports_begin=first.reports_begin
    )


command_decoder = msgspec.msgpack.Decoder(RingCommand)
event_decoder = msgspec.msgpack.Decoder(RingEvent)
