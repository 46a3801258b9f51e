"""What ``/status`` says, as the daemon writes it and ``/metrics`` and ``primad status`` read it.

A value that is not known is null: a device that did not answer in time has no figures, one that says nothing of its memory
has none of that, and a plan that was set by hand promises nothing. Before the first ring there is none of all this.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import msgspec

from primad.api.answering.backend import Health, ServedModel
from primad.errors import printable
from primad.settings.quantities import show_ms


class RingFigures(msgspec.Struct, frozen=True, kw_only=True):
    """What a ring process did and holds since it was opened last; ``steps`` counts every visit of a step to a window.

    ``compute_ms_per_token`` is of the latest tokens of answers, all windows of the device together. A hop is the time that
    its software takes for a message, on the way in and out.
    """

    steps: int
    rows: int
    compute_s: float | None
    hops: int
    hop_median_s: float | None
    hop_p99_s: float | None
    rss_bytes: int
    private_bytes: int
    refused_messages: int
    compute_ms_per_token: float | None = None


class MemoryFigures(msgspec.Struct, frozen=True, kw_only=True):
    """What of a device's weights is in memory, and what reading the rest costs.

    ``resident`` and ``streamed`` count layers' worth, ``read_ahead_bytes`` are read ahead of what streams: as planned,
    unless memory is short; then the output matrix may stream besides (``streams_output``). ``read_bytes`` and
    ``stall_s`` are sums since the ring process was opened last; the means of a token are those of the last ten seconds,
    or since somebody asked last where that is longer, over the passes through the device's windows. ``pressure`` is
    calm, some or high. Where experts stream, ``experts_picked`` counts those that steps picked, and ``experts_found``
    those of them that were in memory or on their way.
    """

    resident: int | None = None
    streamed: int | None = None
    streams_output: bool | None = None
    read_ahead_bytes: int | None = None
    resident_bytes: int | None = None
    streamed_bytes: int | None = None
    read_bytes: int | None = None
    stall_s: float | None = None
    bytes_read_per_token: float | None = None
    stall_ms_per_token: float | None = None
    pressure: str | None = None
    experts_picked: int | None = None
    experts_found: int | None = None


class PlannedFigures(msgspec.Struct, frozen=True, kw_only=True):
    """What the plan predicts for a device, named and counted as in ``MemoryFigures``.

    ``ram_bytes`` is all that it should need: weights, what is read ahead, KV cache and buffers. ``hop_ms`` is the time of
    a token on the links that it sends on.
    """

    resident: int | None = None
    streamed: int | None = None
    read_ahead_bytes: int | None = None
    ram_bytes: int | None = None
    bytes_read_per_token: float | None = None
    stall_ms_per_token: float | None = None
    compute_ms_per_token: float | None = None
    hop_ms: float | None = None


class DeviceStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One device of the ring; ``ring`` is null when its ring process did not answer in time.

    It ``computes`` then where requests are open: it answers between two steps, and a chunk of a prompt may be a long one.
    """

    name: str
    role: str
    windows: list[tuple[int, int]]
    layers: int
    gpu_layers: int
    daemon_rss_bytes: int
    ring: RingFigures | None
    memory: MemoryFigures
    predicted: PlannedFigures
    computes: bool = False


class RingForecast(msgspec.Struct, frozen=True, kw_only=True):
    """What the plan forecasts of an answer that is written alone, by the ring as a whole."""

    tokens_per_s: float
    tpot_ms: float
    ttft_ms: float


class WrongTerm(msgspec.Struct, frozen=True, kw_only=True):
    """The part of a token's time that is wrong by most: compute or disk (waiting for it) of a device, or all hops.

    ``is_beyond``: by more than plans may be corrected by, so something is amiss there.
    """

    term: str
    device: str | None
    predicted_ms: float
    measured_ms: float
    is_beyond: bool


class CompletionFigures(msgspec.Struct, frozen=True, kw_only=True):
    """What a token took in the latest answer that was long enough; ``wrong`` is there where the plan is off by over 25 %."""

    tpot_ms: float
    predicted_tpot_ms: float
    wrong: WrongTerm | None


class CopyStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The KV cells of ``device`` are kept by ``replica`` as well; by nobody where that is null, and ``why``."""

    device: str
    replica: str | None
    why: str


class KvStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The KV cells of answers. ``replicated_bytes`` are kept twice now, and ``lag_tokens`` of one device's are not yet.

    Since the head's start: so often a ring went on with answers of another one, ``restored_tokens`` of which had their cells
    within ``restore_s`` in all, and ``computed_again_tokens`` had not; ``found_tokens`` of prompts were found in the cache.
    """

    copies: list[CopyStatus]
    replicated_bytes: int
    lag_tokens: int
    restores: int
    restored_tokens: int
    restore_s: float
    computed_again_tokens: int
    found_tokens: int


class DraftFigures(msgspec.Struct, frozen=True, kw_only=True):
    """What became of tokens that were drafted since the ring was formed: of ``drafted`` rows that were computed ahead
    ``accepted`` were the next token, and ``skipped`` were not computed to the end. An answer had ``tokens_per_pass``
    tokens in the time in which a row goes round the ring once. A model drafts on device ``model_on``, or none does.
    """

    drafted: int
    accepted: int
    skipped: int
    tokens_per_pass: float
    model_on: str | None = None


class LinkStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One direction of a link. One message of twenty comes ``late_ms`` later than usual, or more."""

    source: str
    target: str
    round_trip_ms: float
    late_ms: float
    mbit_per_s: float


class ClusterMember(msgspec.Struct, frozen=True, kw_only=True):
    """One device that the head knows, in the ring or not; ``reason`` says why it stands where it does, "" for none."""

    device: str
    phase: str
    reason: str


class LeftOutDevice(msgspec.Struct, frozen=True, kw_only=True):
    """A device that the plan gives no layers, and why."""

    device: str
    reason: str


class ClusterEvent(msgspec.Struct, frozen=True, kw_only=True):
    """Something that happened at ``at_s`` (Unix time): a device ``joined`` or is ``gone``, another ``ring`` serves, or what
    else the head told its owner (``note``)."""

    at_s: float
    kind: str
    text: str


class TokenCounts(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens of all prompts and answers since the head's start, and how many answers are being written or wait."""

    prompt: int
    completion: int
    answers_open: int


class EmbeddingStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The ``model`` of ``--embedding``, and what was done with it since the head's start.

    It is ``alive`` while its process is there, which has memory of ``rss_bytes``, shared pages included; a crash is
    another of its ``starts``. ``tokens`` are those of texts that were embedded, ``compute_s`` is the time spent on them.
    """

    model: str
    alive: bool
    rss_bytes: int | None
    starts: int
    requests: int
    errors: int
    tokens: int
    waiting: int
    compute_s: float


class StatusBody(msgspec.Struct, frozen=True, kw_only=True):
    """``GET /status``: ``serving``, ``detail`` and ``model`` as in the health check, then the ring that serves.

    It writes ``sequences`` answers at once. ``checked`` says whether windows of the model were found to be exact; null where
    one device has it whole. ``events`` are the latest ones, the oldest first.
    """

    serving: bool
    detail: str
    model: str | None
    epoch: int | None = None
    rounds: int | None = None
    sequences: int | None = None
    predicted: RingForecast | None = None
    measured: CompletionFigures | None = None
    devices: list[DeviceStatus] = []
    links: list[LinkStatus] = []
    kv: KvStatus | None = None
    drafts: DraftFigures | None = None
    checked: str | None = None
    cluster: list[ClusterMember] = []
    left_out: list[LeftOutDevice] = []
    events: list[ClusterEvent] = []
    tokens: TokenCounts | None = None
    embedding: EmbeddingStatus | None = None


def status_body(
    health: Health,
    served: ServedModel | None,
    ring: Mapping[str, Any],
    embedding: Mapping[str, Any] | None = None,
    tokens: TokenCounts | None = None,
) -> StatusBody:
    """The whole status out of ``ring``, the backend's part of it, of ``embedding``, if there is one, and ``tokens``."""
    own = {"serving": health.serving, "detail": health.detail, "model": served.id if served is not None else None}
    return msgspec.convert({**ring, **own, "embedding": embedding, "tokens": tokens}, StatusBody)


_TERMS: Final = {"compute": "computing on {}", "disk": "waiting for the disk of {}", "hops": "the hops between devices"}


def wrong_line(measured: CompletionFigures) -> str:
    """For people: by how much a plan is off, and which of its terms is wrong."""
    wrong = measured.wrong
    assert wrong is not None
    term = _TERMS.get(wrong.term, "{}").format(printable(wrong.device or "all devices"))
    remedy = (
        "look what else runs there" if wrong.measured_ms > wrong.predicted_ms else "measure: primad profile --remeasure"
    )
    beyond = f"; that is more than a profile is wrong by, so {remedy}" if wrong.is_beyond else ""
    return (
        f"a token takes {show_ms(measured.tpot_ms)}, not {show_ms(measured.predicted_tpot_ms)} as the plan says; most wrong "
        f"is {term}: {show_ms(wrong.measured_ms)}, not {show_ms(wrong.predicted_ms)}{beyond}"
    )


decoder = msgspec.json.Decoder(StatusBody)
"""Reads the answer of an endpoint. Raises ``msgspec.DecodeError`` when it is no such status."""
