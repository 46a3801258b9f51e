"""The result of ``primad plan`` as values: printed by ``--json`` (docs/plan.md), shown by table and plot.

Bytes and milliseconds, the unit last in every name. A change that removes a field or changes its meaning raises
``SCHEMA``; new fields do not.
"""

from __future__ import annotations

from typing import Final

import msgspec

from primad.settings.old_names import with_old_keys

SCHEMA: Final = 5


class WindowJson(msgspec.Struct, frozen=True, kw_only=True):
    """One window, the ``index``-th of the route: layers ``first <= layer < last``, the last ``gpu_layers`` on the GPU.

    The CPU computes the experts of the first ``cpu_experts`` of the GPU layers. ``other_gpus`` of them are on the
    device's second GPU, its third, and so on.
    """

    index: int
    first: int
    last: int
    layers: int
    gpu_layers: int
    cpu_experts: int
    streamed_bytes: int
    other_gpus: list[int] = []


class GpuJson(msgspec.Struct, frozen=True, kw_only=True):
    """One GPU of a device: layers on it, and bytes of its memory that the plan fills of ``vram_limit_bytes``.

    ``id`` is llama.cpp's name for it, empty where it is not known.
    """

    name: str
    id: str
    layers: int
    vram_bytes: int
    vram_limit_bytes: int


class DeviceJson(msgspec.Struct, frozen=True, kw_only=True):
    """What one device holds and does; milliseconds and disk bytes are per token in decode.

    ``ram_bytes`` and ``vram_bytes`` are weights, KV cache and buffers that the plan puts there, of ``ram_limit_bytes``
    and ``vram_limit_bytes`` that it may fill. ``resident_bytes`` and ``streamed_bytes`` are weights of layers only;
    ``shard_bytes`` is what the layer cache holds. The same share of each layer streams, so resident and streamed layers
    are counted in whole-layer equivalents. At most ``read_ahead_bytes`` of ``streamed_bytes`` are in memory.

    ``disk_bytes_per_token`` counts everything that streams, less what reused compute buffers hold, but for layers with
    experts at most the experts that a token uses. ``extra_buffers`` says in words why it has llama.cpp's repacked
    copies of weights or none; empty where they are not known to make anything faster. ``gpus`` has each GPU, the
    fastest first; figures of VRAM are totals. In a tensor-parallel group it has a ``share`` of the weights of its
    layers, and the windows of the group's first device, ``leader``.
    """

    name: str
    head: bool
    windows: list[WindowJson]
    layers: int
    gpu_layers: int
    cpu_experts: int
    prefill_offload: bool
    extra_buffers: str
    resident_layers: int
    streamed_layers: int
    read_ahead_bytes: int
    ram_bytes: int
    ram_limit_bytes: int
    vram_bytes: int
    vram_limit_bytes: int
    resident_bytes: int
    streamed_bytes: int
    shard_bytes: int
    disk_bytes_per_token: int
    compute_ms: float
    hop_ms: float
    stall_ms: float
    prefill_ms: float
    gpus: list[GpuJson] = []
    share: float = 1.0
    leader: str = ""


class Predicted(msgspec.Struct, frozen=True, kw_only=True):
    """The predicted times. ``tokens_per_s`` counts all sequences, ``exchange_ms`` a whole typical request.

    ``compute_ms``, ``hop_ms`` and ``stall_ms`` add up to ``tpot_ms``; ``disk_ms`` is what the slowest disk needs for a
    token, in parallel except for experts, which are read when they are picked. ``disk_bytes_per_token`` is what all
    disks read for a token.
    """

    tpot_ms: float
    ttft_ms: float
    tokens_per_s: float
    exchange_ms: float
    bottleneck: str
    compute_ms: float
    hop_ms: float
    stall_ms: float
    disk_ms: float
    disk_bytes_per_token: int


class LoadJson(msgspec.Struct, frozen=True, kw_only=True):
    """The prediction for ``sequences`` concurrent requests, as with ``primad serve --sequences``.

    All together generate ``tokens_per_s``; each waits ``tbt_ms`` between two tokens, and ``ttft_ms`` for the first
    token of a typical request that arrives while the others decode. A step computes the next tokens of ``rows``
    requests, and ``machines`` such steps are in the ring. If ``is_exact``, each response is the same as when it runs
    alone.
    """

    sequences: int
    tokens_per_s: float
    tbt_ms: float
    ttft_ms: float
    rows: int
    machines: int
    is_exact: bool


class KeptJson(msgspec.Struct, frozen=True, kw_only=True):
    """The KV cells of ``device``, ``bytes_per_token`` of a response, are replicated on ``replica`` while it is
    generated.

    They take ``bytes_per_s`` of the link. Where ``replica`` is null they are not replicated, and ``why``.
    """

    device: str
    replica: str | None
    bytes_per_token: int
    bytes_per_s: float
    why: str


class GainJson(msgspec.Struct, frozen=True, kw_only=True):
    """If the ``share`` of drafts is accepted, the throughput is multiplied by ``times``."""

    share: float
    times: float


class DraftJson(msgspec.Struct, frozen=True, kw_only=True):
    """The draft model, on ``device`` (empty: none has room): it takes ``memory_bytes`` of RAM, which the plan leaves
    free on the head if that has as much, and ``token_ms`` per draft.

    ``kind``: ``ahead``: ``rows`` tokens ahead of the next one are in the ring concurrently; ``together``: a step has at
    most ``rows`` tokens; ``none``: nothing is drafted, and ``why``. ``gains`` is then empty.
    """

    name: str
    path: str
    device: str
    bytes: int
    memory_bytes: int
    token_ms: float
    kind: str
    rows: int
    gains: list[GainJson]
    why: str


class ShortJson(msgspec.Struct, frozen=True, kw_only=True):
    """A limit that a plan exceeds: ``what`` is RAM, VRAM or disk."""

    what: str
    where: str
    needed_bytes: int
    limit_bytes: int
    short_bytes: int


class RingJson(msgspec.Struct, frozen=True, kw_only=True):
    """A plan and its costs; ``short`` is empty for a plan that fits.

    Prompts are computed ``chunk_rows`` tokens at a time. ``one_disk`` has the devices of each disk that several share.
    """

    head: str
    rounds: int
    output_on_gpu: bool
    chunk_rows: int
    devices: list[DeviceJson]
    predicted: Predicted
    short: list[ShortJson]
    one_disk: list[list[str]] = []


class LeftOutJson(msgspec.Struct, frozen=True, kw_only=True):
    """A device without layers. ``slower_ms`` is the additional time per token with it (negative: less); null: unknown.

    ``objective_ms`` is the same for the plan's objective.
    """

    name: str
    reason: str
    slower_ms: float | None
    objective_ms: float | None


class SingleDeviceJson(msgspec.Struct, frozen=True, kw_only=True):
    """One device without the others: ``predicted``, or the ``reason`` why it cannot."""

    name: str
    predicted: Predicted | None
    reason: str | None


class GivenUpJson(msgspec.Struct, frozen=True, kw_only=True):
    """``what`` a faster plan would have asked of devices; without it the objective is ``objective_ms`` longer."""

    what: str
    objective_ms: float


class Proof(msgspec.Struct, frozen=True, kw_only=True):
    """How close to optimal the plan is known to be: the objective, its value, and a lower bound of that.

    The plan may be ``given_up_ms`` slower than the fastest one found, because it fills the ring or asks less of
    devices. ``gap`` is the largest possible share by which that one misses the optimum, 0 when ``proven``. It and the
    bound are null for a plan by hand.
    """

    objective: str
    objective_ms: float | None
    bound_ms: float | None
    gap: float | None
    proven: bool
    given_up_ms: float = 0.0


class WhatIf(msgspec.Struct, frozen=True, kw_only=True):
    """The requested ``changes`` and the plan ``before`` them, with its context, or why there was none."""

    changes: list[str]
    before: RingJson | None
    reason: str | None
    context_tokens: int | None


class ModelJson(msgspec.Struct, frozen=True, kw_only=True):
    """The model. If it ``sees`` or ``hears``, its encoder takes ``encoder_bytes`` of the head's RAM.

    The encoder runs on ``encoder_device``, on its ``encoder_gpu`` if that is named; an image takes about
    ``picture_ms``, if known.
    """

    name: str
    architecture: str
    layers: int
    bytes: int
    sees: bool = False
    hears: bool = False
    encoder_bytes: int = 0
    encoder_device: str | None = None
    encoder_gpu: str = ""
    picture_ms: float | None = None


class WorkloadJson(msgspec.Struct, frozen=True, kw_only=True):
    """The workload of the plan; ``kv_type`` is the type of values in the KV cache.

    ``why_context`` says why the context is not larger where it was not asked for, ``too_small_for`` which clients'
    first request does not fit into it, ``why_sequences`` why there are not more where their number was not asked for;
    else they are empty. Attention is ``flash`` attention or not; with ``small_windows`` layers with a sliding window
    have few more cells than the window, and there are no drafts.
    """

    context_tokens: int
    why_context: str
    too_small_for: str
    kv_type: str
    sequences: int
    why_sequences: str
    flash: bool
    small_windows: bool
    prompt_tokens: int
    answer_tokens: int


class Explanation(RingJson, frozen=True, kw_only=True):
    """The whole result; ``schema`` is ``SCHEMA``, ``primad`` the version that made it.

    ``load`` is present for several sequences. ``checked`` says whether windows of the model were found to be exact;
    null for a shape, and where one device has it whole. ``draft`` is the draft model, null without one. ``tail`` says
    what the minimum number of layers in the last window costs, null where it costs nothing. ``given_up`` has what a
    faster plan would ask of devices, at most 5 % of the objective. ``parallel`` says why devices share layers or not,
    empty where that was not asked for.
    """

    schema: int
    primad: str
    model: ModelJson
    workload: WorkloadJson
    proof: Proof
    left_out: list[LeftOutJson]
    single_device: list[SingleDeviceJson]
    load: LoadJson | None
    kept: list[KeptJson]
    what_if: WhatIf | None
    checked: str | None = None
    draft: DraftJson | None = None
    tail: str | None = None
    given_up: list[GivenUpJson] = []
    parallel: str = ""


def encode(answer: Explanation) -> bytes:
    """Return ``answer`` as ``--json`` prints it, the version of the schema first."""
    content = with_old_keys(msgspec.to_builtins(answer))
    return msgspec.json.format(msgspec.json.encode({"schema": answer.schema, **content}), indent=2) + b"\n"
