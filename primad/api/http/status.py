"""The contents of ``/status``, which the daemon writes, and ``/metrics`` and ``primad status`` read.

Unknown values are null: a device that did not reply in time has no figures, and a plan that was set by hand has no
forecast. Before the first ring all of these are missing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec

from primad.api.answering.backend import Health, ServedModel
from primad.api.answering.models import OfferedModel
from primad.errors import printable
from primad.settings.quantities import show_ms


class RingFigures(msgspec.Struct, frozen=True, kw_only=True):
    """State and counters of a ring process since it was last opened; ``steps`` counts every visit of a step to a
    window.

    ``compute_ms_per_token`` is for the latest generated tokens, all windows of the device together. A hop is the time
    that the device's software takes for a message, in and out.
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
    """A device's weights in memory, and the cost of reading the rest.

    ``resident`` and ``streamed`` count whole layers. ``read_ahead_bytes`` is the planned value, unless memory is short;
    then the output matrix may stream too (``streams_output``). ``read_bytes`` and ``stall_s`` are sums since the ring
    process was last opened. Means per token cover the passes through the device's windows in the last ten seconds, or
    since the last query if that is longer ago. ``pressure`` is calm, some or high. If experts stream,
    ``experts_picked`` counts the experts that steps picked, and ``experts_found`` those of them that were in memory or
    being read.
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
    """The plan's predictions for a device, in the terms of ``MemoryFigures``.

    ``ram_bytes`` is the total memory the device should need: weights, read-ahead, KV cache and buffers. ``hop_ms`` is
    the time of a token on its outgoing links.
    """

    resident: int | None = None
    streamed: int | None = None
    read_ahead_bytes: int | None = None
    ram_bytes: int | None = None
    bytes_read_per_token: float | None = None
    stall_ms_per_token: float | None = None
    compute_ms_per_token: float | None = None
    hop_ms: float | None = None


class GpuFigures(msgspec.Struct, frozen=True, kw_only=True):
    """One of a device's several GPUs: its planned layers and bytes of GPU memory. ``id`` is llama.cpp's name for it."""

    name: str
    id: str
    layers: int
    planned_bytes: int


class DeviceStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One device of the ring; ``ring`` is null if its ring process did not reply in time.

    ``computes`` is set if requests are open: the ring process replies between two steps, and a prompt chunk may take
    long. ``gpus`` lists the GPUs of a device that has several.
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
    gpus: list[GpuFigures] = []


class RingForecast(msgspec.Struct, frozen=True, kw_only=True):
    """The plan's forecast for a single request, for the ring as a whole."""

    tokens_per_s: float
    tpot_ms: float
    ttft_ms: float


class WrongTerm(msgspec.Struct, frozen=True, kw_only=True):
    """The part of a token's time with the largest error: a device's compute, a device's disk (waiting for it), or all
    hops.

    ``is_beyond``: the error exceeds what plans may correct, so something is wrong there.
    """

    term: str
    device: str | None
    predicted_ms: float
    measured_ms: float
    is_beyond: bool


class CompletionFigures(msgspec.Struct, frozen=True, kw_only=True):
    """The measured times of the latest response that was long enough; ``wrong`` is set if the plan is off by over 25 %."""

    tpot_ms: float
    predicted_tpot_ms: float
    wrong: WrongTerm | None


class CopyStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The KV cache of ``device`` is replicated by ``replica``. If that is null it is not replicated, and ``why``
    explains it."""

    device: str
    replica: str | None
    why: str


class KvStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The KV cache of requests: ``replicated_bytes`` are replicated now, and ``lag_tokens`` of one device are not yet.

    Since the head's start: ``restores`` counts rings that resumed requests of an earlier one; of those requests' tokens
    ``restored_tokens`` were restored within ``restore_s`` in all, and ``computed_again_tokens`` were recomputed.
    ``found_tokens`` of prompts were found in the prefix cache.
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
    """Outcome of draft tokens since the ring was formed: of ``drafted`` tokens ``accepted`` were right, ``missed`` were
    wrong after a right one, and ``skipped`` were not computed to the end.

    A request got ``tokens_per_pass`` tokens in the time of a ring pass. The draft model runs on device ``model_on``, if
    there is one.
    """

    drafted: int
    accepted: int
    skipped: int
    tokens_per_pass: float
    missed: int = 0
    model_on: str | None = None


class LinkStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One direction of a link. ``late_ms`` is the p95 of a message's extra delay."""

    source: str
    target: str
    round_trip_ms: float
    late_ms: float
    mbit_per_s: float


class ClusterMember(msgspec.Struct, frozen=True, kw_only=True):
    """A device that the head knows, in the ring or not; ``reason`` explains its state, "" for none. ``api`` is the
    address at which it relays requests to the head."""

    device: str
    phase: str
    reason: str
    api: str = ""


class LeftOutDevice(msgspec.Struct, frozen=True, kw_only=True):
    """A device to which the plan gives no layers, and the reason."""

    device: str
    reason: str


class ClusterEvent(msgspec.Struct, frozen=True, kw_only=True):
    """Something that happened at ``at_s`` (Unix time): a device ``joined`` or is ``gone``, a new ``ring`` serves, or
    another ``note`` for the owner."""

    at_s: float
    kind: str
    text: str


class TokenCounts(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens of all prompts and responses since the head's start, and the number of running and waiting requests."""

    prompt: int
    completion: int
    answers_open: int


class EmbeddingStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The ``model`` of ``--embedding``, and its counters since the head's start.

    It is ``alive`` while its process runs. ``rss_bytes`` is the memory of the process, including shared pages.
    ``starts`` counts its starts: a crash leads to another one. ``tokens`` counts the tokens of embedded texts,
    ``compute_s`` is the time spent on them.
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


class ModelStatus(msgspec.Struct, frozen=True, kw_only=True):
    """An offered model: its ``state`` is unloaded, loading, loaded, unloading or failed; texts are empty if unknown.

    While it loads, ``progress`` goes from 0 to 1. A loaded model that is not in use is unloaded at ``expires_at_s``
    (Unix time; null: never), and takes ``memory_bytes`` of each device. ``embeds``: it makes embeddings, not text.
    ``sees``: it accepts images. ``hears``: it accepts audio.
    """

    id: str
    state: str
    detail: str
    size_bytes: int
    progress: float | None
    expected_s: float | None
    expires_at_s: float | None
    pinned: bool
    embeds: bool
    memory_bytes: dict[str, int]
    sees: bool = False
    hears: bool = False


class PicturesStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The image encoder: it runs on another ``device`` or on the head (null), where its process is ``alive`` or
    not. It ``encoded`` this many images, ``encoded_elsewhere`` of them on another device."""

    device: str | None
    alive: bool
    encoded: int
    encoded_elsewhere: int


class StatusBody(msgspec.Struct, frozen=True, kw_only=True):
    """``GET /status``: ``serving``, ``detail`` and ``model`` as in the health check, then the serving ring.

    The ring runs ``sequences`` requests concurrently. ``checked`` says whether windows of the model were found to be
    exact; null if one device has the whole model. ``events`` are the latest ones, the oldest first. ``models`` are
    those that requests choose among; the ring shown is that of the model used last.
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
    pictures: PicturesStatus | None = None
    checked: str | None = None
    cluster: list[ClusterMember] = []
    left_out: list[LeftOutDevice] = []
    events: list[ClusterEvent] = []
    tokens: TokenCounts | None = None
    embedding: EmbeddingStatus | None = None
    models: list[ModelStatus] = []


def status_body(
    health: Health,
    served: ServedModel | None,
    ring: Mapping[str, Any],
    embedding: Mapping[str, Any] | None = None,
    tokens: TokenCounts | None = None,
    models: Sequence[ModelStatus] = (),
) -> StatusBody:
    """Return the whole status: ``ring`` is the backend's part, ``embedding`` is added if there is one, then ``tokens``
    and ``models``."""
    own = {"serving": health.serving, "detail": health.detail, "model": served.id if served is not None else None}
    more = {"embedding": embedding, "tokens": tokens, "models": list(models)}
    return msgspec.convert({**ring, **own, **more}, StatusBody)


def model_status(model: OfferedModel) -> ModelStatus:
    """Return the state of ``model`` now."""
    return ModelStatus(
        id=model.id,
        state=model.state,
        detail=model.detail,
        size_bytes=model.size_bytes,
        progress=model.progress,
        expected_s=model.expected_s,
        expires_at_s=model.expires_at_s,
        pinned=model.pinned,
        embeds=model.embeds,
        memory_bytes=dict(model.memory_bytes),
        sees=model.sees,
        hears=model.hears,
    )


_TERMS: Final = {"compute": "computing on {}", "disk": "waiting for the disk of {}", "hops": "the hops between devices"}


def wrong_line(measured: CompletionFigures) -> str:
    """Describe a plan's error and its worst term for people."""
    wrong = measured.wrong
    assert wrong is not None
    term = _TERMS.get(wrong.term, "{}").format(printable(wrong.device or "all devices"))
    remedy = (
        "check what else runs there"
        if wrong.measured_ms > wrong.predicted_ms
        else "measure: primad profile --remeasure"
    )
    beyond = f"; that is more than a profile's error, so {remedy}" if wrong.is_beyond else ""
    return (
        f"a token takes {show_ms(measured.tpot_ms)}, not {show_ms(measured.predicted_tpot_ms)} as planned; the worst "
        f"term is {term}: {show_ms(wrong.measured_ms)}, not {show_ms(wrong.predicted_ms)}{beyond}"
    )


decoder = msgspec.json.Decoder(StatusBody)
"""Parses the response of an endpoint. Raises ``msgspec.DecodeError`` for an invalid status."""
