"""The latency model, one function per term.

A token visits every window of the route once, so its latency is the sum of the devices' computing times and of the hops
between them. Waits for a disk are added in ``streaming.py``. All times are seconds of one pass of ``rows`` tokens (1
for decode, a prompt chunk for prefill).

From the paper (prima.cpp, section 3): time per byte of weights of each quantisation type, KV reads, hops, copies
between CPU and GPU as a fixed cost of a window, the output matrix on the head. Added here: batch sizes from 1 to 512,
interpolated between measurements, mixtures of experts, of which a token reads only the selected ones, fixed costs of a
layer and of a window. The cost of a GPU layer is ``layer_s`` with a ``GpuProfile``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Final, TypeVar

from halda.profile import (
    BATCH_ROWS,
    OFFLOAD_FEW_ROWS,
    PREFILL_ROWS,
    RATE_WIDTH,
    CacheCost,
    CacheType,
    CpuProfile,
    GpuProfile,
    LayerProfile,
    LinkProfile,
    ModelProfile,
    OffloadSpeed,
    TypeSpeed,
    WidthCost,
    Workload,
)
from halda.quantisation import bytes_per_weight, family

HIDDEN_VALUE_BYTES: Final = 4
"""Hidden states travel as float32."""
LATE_SHARE: Final = 0.185
"""Weight of the 95th percentile in a mean. E. S. Pearson and J. W. Tukey (1965): the mean of a skewed distribution is
about 0.63 of its median and 0.185 of each of its 5th and 95th percentiles. The 5th percentile of a message is close to
its median, since no message is faster than the way: median + 0.185 (95th percentile - median)."""
RUNTIME_BYTES: Final = 40 << 20
"""Fixed memory of a ring process: Python, llama.cpp and, in the kernel, page tables and socket buffers. (Measured: 29
to 33 MB in the process, 5 to 10 outside it.)"""
RING_HEAD_BYTES: Final = 10 << 20
"""Additional memory of the head of a ring. (Measured: 7 MB.)"""
VOCABULARY_BYTES: Final = 300
"""llama.cpp's memory per entry of the vocabulary, on a device that computes alone. (Measured: 160 without merges, 440
for each of 49,000 with as many merges.)"""
WINDOW_BYTES: Final = 2 << 20
"""Additional memory of a window: graphs, and the part of its compute buffer that one token fills. (Measured: 1.1 to 1.6
MB.)"""
HIDDEN_COPIES: Final = 3
"""Copies of a prompt chunk's hidden states on their way into or out of a process."""
GPU_RUNTIME_BYTES: Final = 256 << 20
"""Memory that a GPU backend keeps for itself (context, kernels)."""
BUS_BYTES_PER_S: Final = 6e9
"""Assumed bus rate of a GPU where it was not measured: PCIe 3.0 with 8 lanes."""
OFFLOAD_ROWS: Final = 32
"""With fewer tokens llama.cpp copies no weights to a GPU: the CPU computes them."""
COPIED_SHARE: Final = 1 / 2
"""Upper bound of the largest matrix's share of a layer: 0.45 where two of feed-forward's matrices are stored as one
(Phi-3), 0.28 of an 8B; in a layer with experts the matrix of all of them is a third."""
ACTIVATION_BYTES: Final = 4
"""Bytes of a value of a compute buffer: float32."""
MASK_BYTES: Final = 2
"""Bytes of a value of flash attention's mask; without flash attention a mask value has ``ACTIVATION_BYTES``."""
TILE_ROWS: Final = 64
"""From this number of tokens on llama.cpp's flash attention computes several at once on a CPU."""
LOGIT_ROWS: Final = 64
"""Tokens of a step that may want logits."""
TWO_MASKS: Final = frozenset(
    (
        "afmoe",
        "cohere2",
        "cohere2moe",
        "exaone-moe",
        "gemma2",
        "gemma3",
        "gemma4",
        "gpt-oss",
        "granite_swa",
        "laguna",
        "llama4",
        "maple",
        "mellum",
        "mimo2",
        "muse-glimmer",
        "olmo2",
        "plamo3",
        "smallthinker",
        "spark2_5",
        "step35",
    )
)
"""Architectures with sliding-window layers, which have their own mask of the same size."""
PLAIN_READ: Final = 0.25
"""Without flash attention a GPU reads keys and values at this share of its speed: 0.16 with Metal and 0.23 with CUDA in
llama.cpp of 2024, 0.5 with Vulkan in 2026."""
WITHOUT_FLASH: Final = frozenset(("grok",))
"""Architectures for which llama.cpp has no flash attention, whatever its options."""
_CUDA_HEADS: Final = frozenset((40, 64, 72, 80, 96, 112, 128, 192, 256, 320, 512, 576))
FLASH_HEADS: Final[Mapping[str, frozenset[int]]] = {
    "CUDA": _CUDA_HEADS,
    "ROCm": _CUDA_HEADS,
    "Metal": _CUDA_HEADS | {32, 48},
}
"""Head widths for which llama.cpp has flash attention on these backends; a context with other widths does without it
there. (Vulkan supports all multiples of 8; attention of other widths is computed on the CPU.)"""
CELL_PADDING: Final = 256
"""llama.cpp rounds the number of cells of a small cache up to a multiple of this."""
CHECKPOINTS_BEYOND: Final = 3
"""Kept states of one user: before each of the last two chunks of a prompt and after the last; one more before these."""
STATE_PASSES: Final = 12
"""Number of times that a token's step reads or writes the state of a layer that has one. It is gathered, goes through
several operations (decay, what the key finds, update, what the query finds) and is put back; each reads or writes all
of it."""
KV_VALUE_BYTES: Final[Mapping[CacheType, Fraction]] = {
    "f16": Fraction(2),
    "q8_0": Fraction(34, 32),
    "q4_0": Fraction(18, 32),
}
"""Bytes per value in the KV cache: bytes of a block divided by its number of values."""


AnySpeed = TypeVar("AnySpeed", TypeSpeed, OffloadSpeed)


def speed_of(speeds: Sequence[AnySpeed], kind: str) -> AnySpeed:
    """Return the speed of type ``kind``, or one derived from the nearest measured type.

    With one token a byte of either type takes the same time. Further tokens add computing time, which is the same per
    weight; so it is higher for bytes with more weights.
    """
    found = nearest_speed(speeds, kind)
    return found if found.type == kind else _as_type(found, kind)


def nearest_speed(speeds: Sequence[AnySpeed], kind: str) -> AnySpeed:
    """Return the measured speed of type ``kind``, or of the type nearest in size, from the same family if possible."""
    size, its = bytes_per_weight(kind), family(kind)

    def distance(speed: AnySpeed) -> tuple[bool, bool, float]:
        return speed.type != kind, family(speed.type) != its, abs(math.log(bytes_per_weight(speed.type) / size))

    return min(speeds, key=distance)


def _as_type(speed: AnySpeed, kind: str) -> AnySpeed:
    """Convert ``speed`` to type ``kind``, whose weights take the same computing time each."""
    if isinstance(speed, OffloadSpeed):
        return replace(speed, type=kind)
    weights, one_s = bytes_per_weight(speed.type) / bytes_per_weight(kind), 1 / speed.decode_bytes_per_s

    def rate(bytes_per_s: float) -> float:
        return 1 / (one_s + weights * max(0.0, 1 / bytes_per_s - one_s))

    rows = tuple(replace(each, bytes_per_s=rate(each.bytes_per_s)) for each in speed.rows)
    return replace(speed, type=kind, batch_bytes_per_s=rate(speed.batch_bytes_per_s), rows=rows)


def seconds_per_byte(speed: TypeSpeed, rows: float, ratio: float = 1.0, many_ratio: float = 1.0) -> float:
    """Return seconds per byte of weights with ``rows`` tokens: linear between measurements, and never less than with
    fewer tokens. ``ratio`` corrects the cost with one token, ``many_ratio`` the cost with more."""
    many = many_ratio * 2 * PREFILL_ROWS / bytes_per_weight(speed.type) / speed.prefill_flop_per_s
    between = sorted([(BATCH_ROWS, 1 / speed.batch_bytes_per_s), *((at.rows, 1 / at.bytes_per_s) for at in speed.rows)])
    count, taken_s = 1, ratio / speed.decode_bytes_per_s
    for more, seconds in (*((more, many_ratio * each) for more, each in between), (PREFILL_ROWS, many)):
        seconds = max(taken_s, seconds)
        if rows <= more:
            return taken_s + (seconds - taken_s) * (rows - count) / (more - count)
        count, taken_s = more, seconds
    return max(taken_s, many * rows / PREFILL_ROWS)


def width_ratio(widths: Sequence[WidthCost], weights: float) -> tuple[float, float]:
    """Return the time per byte of a layer of ``weights`` weights relative to the rates, with one token and with many.

    Linear in the logarithm between the measured sizes, constant beyond them; 1 without measurements.
    """
    if not widths or weights <= 0:
        return 1.0, 1.0
    ordered = sorted(widths, key=lambda each: each.weights)
    before = ordered[0]
    for after in ordered:
        if weights <= after.weights:
            share = 0.0
            if after is not before:
                share = math.log(weights / before.weights) / math.log(after.weights / before.weights)
            return (
                before.ratio + share * (after.ratio - before.ratio),
                before.many_ratio + share * (after.many_ratio - before.many_ratio),
            )
        before = after
    return before.ratio, before.many_ratio


def cached(cpu: CpuProfile, model: ModelProfile) -> CpuProfile:
    """Return ``cpu`` with the rates for one token of ``model``: faster where CPU caches hold some of the weights that a
    token reads.

    A machine may have all of the model to compute or only a part, which is known only with the plan; all of it is
    counted. The ratio is linear between the measured sizes; beyond them the rates hold.
    """
    ratio = _cache_ratio(cpu.caches, read_bytes(model)) if cpu.caches else 1.0
    if ratio == 1:
        return cpu
    speeds = (replace(each, decode_bytes_per_s=each.decode_bytes_per_s / ratio) for each in cpu.speeds)
    return replace(cpu, speeds=tuple(speeds))


def _cache_ratio(caches: Sequence[CacheCost], size_bytes: float) -> float:
    before: CacheCost | None = None
    for after in sorted(caches, key=lambda each: each.bytes):
        if size_bytes <= after.bytes:
            if before is None:
                return after.ratio
            share = (size_bytes - before.bytes) / (after.bytes - before.bytes)
            return before.ratio + share * (after.ratio - before.ratio)
        before = after
    return 1.0


def read_bytes(model: ModelProfile) -> float:
    """Return the bytes of weights that a token reads."""
    used = model.experts_used / model.experts if model.experts else 0.0
    layers = sum(layer.size_bytes - (1 - used) * layer.expert_bytes for layer in model.layers)
    return layers + model.output_bytes


def weights_s(
    speeds: Sequence[TypeSpeed],
    bytes_by_type: Mapping[str, int],
    rows: float,
    ratio: float = 1.0,
    many_ratio: float = 1.0,
) -> float:
    """Return the seconds of weights that every token uses; the ratios as in ``seconds_per_byte``."""
    return sum(
        size * seconds_per_byte(speed_of(speeds, kind), rows, ratio, many_ratio) for kind, size in bytes_by_type.items()
    )


def experts_s(processor: CpuProfile | GpuProfile, layer: LayerProfile, model: ModelProfile, rows: float) -> float:
    """Return the seconds of the routed experts that any token picked, each with the tokens that picked it, and of
    routing."""
    if not layer.expert_bytes_by_type:
        return 0.0
    touched, rows_each = _picked(model, rows)
    routing = processor.routing
    computed_s = weights_s(processor.speeds, layer.expert_bytes_by_type, rows_each, many_ratio=routing.many_ratio)
    return touched * computed_s + routing.layer_s + rows * routing.row_s


def _picked(model: ModelProfile, rows: float) -> tuple[float, float]:
    """Return the share of a layer's experts that any of ``rows`` tokens picks, and the tokens per picked expert."""
    picked = model.experts_used / model.experts
    touched: float = 1 - (1 - picked) ** rows
    return touched, max(1.0, rows * picked / touched)


def attention_s(
    processor: CpuProfile | GpuProfile,
    read_bytes_per_s: float,
    layer: LayerProfile,
    model: ModelProfile,
    rows: float,
    kv: float,
    kv_type: CacheType,
    *,
    flash: bool = True,
    chunk: bool = False,
) -> float:
    """Return seconds of attention over ``kv`` tokens: one read of the KV cache, and computing per token, cached token
    and channel.

    Computing is measured on a CPU for one token. llama.cpp computes tokens of several sequences this way, and with
    flash attention all steps below ``TILE_ROWS``. The cost of a ``chunk`` of one sequence is measured too; otherwise 4
    FLOP count. So a few more tokens may take less. A layer that does not attend has no such cost; one with a state
    reads and writes it several times.
    """
    if not layer.attends:
        return (1 if chunk else rows) * STATE_PASSES * layer.state_bytes / read_bytes_per_s
    read = kv * kv_bytes_per_token(layer, kv_type) / read_bytes_per_s
    computed = kv * query_width(layer, model)
    if not isinstance(processor, CpuProfile):
        if rows > BATCH_ROWS:
            return read + _products_s(processor, rows * computed)
        return read if flash else read / PLAIN_READ
    single_s = computed * (processor.attention_s if flash else processor.plain_attention_s)
    if rows < TILE_ROWS and (flash or not chunk or not processor.rows_attention_s):
        return read + rows * single_s
    if not processor.rows_attention_s:
        return read + _products_s(processor, rows * computed)
    return read + max(single_s, rows * computed * processor.rows_attention_s)


def query_width(layer: LayerProfile, model: ModelProfile) -> int:
    """Return the number of channels of a layer's queries."""
    return layer.query_width or model.attention_width


def _products_s(processor: CpuProfile | GpuProfile, computed: float) -> float:
    if isinstance(processor, GpuProfile) and processor.attention_flop_per_s:
        return 4 * computed / processor.attention_flop_per_s
    return 4 * computed / speed_of(processor.speeds, "F16").prefill_flop_per_s


def layer_s(
    processor: CpuProfile | GpuProfile,
    read_bytes_per_s: float,
    layer: LayerProfile,
    model: ModelProfile,
    rows: float,
    kv: float,
    kv_type: CacheType,
    *,
    flash: bool = True,
    chunk: bool = False,
) -> float:
    """Return the seconds of one layer on one processor (paper: alpha, of which beta is the difference between GPU and
    CPU).

    This is C(b), the cost of ``b`` tokens of as many sequences, or of a ``chunk`` of one: more tokens never take less.
    """
    widths = processor.widths if isinstance(processor, CpuProfile) else ()
    ratio, many_ratio = width_ratio(widths, _weights(layer.bytes_by_type))
    return (
        processor.layer_s
        + weights_s(processor.speeds, layer.bytes_by_type, rows, ratio, many_ratio)
        + weights_s(processor.speeds, layer.adapter_reads, rows)
        + experts_s(processor, layer, model, rows)
        + attention_s(processor, read_bytes_per_s, layer, model, rows, kv, kv_type, flash=flash, chunk=chunk)
    )


def experts_on_cpu_s(
    cpu: CpuProfile,
    gpu: GpuProfile,
    layer: LayerProfile,
    model: ModelProfile,
    rows: float,
    *,
    prefill_offload: GpuProfile | None = None,
) -> float:
    """Return the extra seconds of a GPU layer with its experts in RAM; negative where that is faster.

    The CPU computes them, or for a chunk the GPU ``prefill_offload``. The hidden states go to RAM and back, as in a
    window with GPU layers.
    """
    if not layer.expert_bytes:
        return 0.0
    if prefill_offload is not None:
        in_ram_s = offloaded_experts_s(prefill_offload, layer, model, rows)
    else:
        in_ram_s = experts_s(cpu, layer, model, rows)
    return gpu.step_s + in_ram_s - experts_s(gpu, layer, model, rows)


def offloaded_layer_s(
    gpu: GpuProfile, layer: LayerProfile, model: ModelProfile, rows: float, kv: float, kv_type: CacheType
) -> float:
    """Return the seconds of one layer in RAM for a chunk of ``rows`` tokens, at least ``OFFLOAD_ROWS``, computed by
    ``gpu``.

    The GPU computes all of it, including attention, for which keys and values are copied like weights. Only experts
    that a token of the chunk picked are copied.
    """
    total = gpu.layer_s + sum(
        size * _offloaded_s_per_byte(speed_of(gpu.prefill_offload, kind), rows)
        for kind, size in layer.bytes_by_type.items()
    )
    total += weights_s(gpu.speeds, layer.adapter_reads, rows) + offloaded_experts_s(gpu, layer, model, rows)
    copied_s = kv * kv_bytes_per_token(layer, kv_type) / speed_of(gpu.prefill_offload, "F16").few_bytes_per_s
    return total + copied_s + _products_s(gpu, rows * kv * query_width(layer, model) * layer.attends)


def offloaded_experts_s(gpu: GpuProfile, layer: LayerProfile, model: ModelProfile, rows: float) -> float:
    """Return the seconds of the experts of a layer in RAM that the GPU computes for a chunk of ``rows`` tokens."""
    if not layer.expert_bytes_by_type:
        return 0.0
    touched, rows_each = _picked(model, rows)
    computed_s = sum(
        size * _offloaded_s_per_byte(speed_of(gpu.prefill_offload, kind), rows_each)
        for kind, size in layer.expert_bytes_by_type.items()
    )
    return touched * computed_s + gpu.routing.layer_s + rows * gpu.routing.row_s


def _offloaded_s_per_byte(speed: OffloadSpeed, rows: float) -> float:
    """Return seconds per byte. Copying and computing add up, so time is linear in tokens; fewer count as
    ``OFFLOAD_FEW_ROWS``.

    Computing alone is no faster with fewer tokens than in proportion.
    """
    many_s = 2 * PREFILL_ROWS / bytes_per_weight(speed.type) / speed.prefill_flop_per_s
    few_s = max(1 / speed.few_bytes_per_s, many_s * OFFLOAD_FEW_ROWS / PREFILL_ROWS)
    many_s = max(few_s, many_s)
    return few_s + (many_s - few_s) * max(0.0, rows - OFFLOAD_FEW_ROWS) / (PREFILL_ROWS - OFFLOAD_FEW_ROWS)


def between_gpus_s(gpu: GpuProfile, rows: float, width: int) -> float:
    """Return the seconds in which hidden states go from ``gpu`` to the next GPU of its device, through RAM.

    ``step_s`` already includes this for one token. The rate of the bus follows from the copying of weights for prompts.
    """
    rate = max((speed.few_bytes_per_s for speed in gpu.prefill_offload), default=BUS_BYTES_PER_S)
    return 2 * rows * width * HIDDEN_VALUE_BYTES / rate


def copied_bytes(model: ModelProfile, workload: Workload) -> int:
    """Return the VRAM that a window with prefill offload needs for copies.

    llama.cpp's scheduler starts a new part of its graph at each matrix that it copies and frees the copy after that
    part. So there is one at a time: the largest matrix of a layer, or the keys and values of one layer.
    """
    return max(max(math.ceil(COPIED_SHARE * layer.size_bytes), kv_bytes(layer, workload)) for layer in model.layers)


def output_s(cpu: CpuProfile, processor: CpuProfile | GpuProfile, model: ModelProfile, rows: int = 1) -> float:
    """Return the seconds from ``rows`` final hidden states to tokens; prefill wants the logits of one token only
    (paper: part of kappa).

    ``processor`` has the output matrix, whose rows cost more than their bytes where they are short; the ``cpu`` samples
    the token and reports it.
    """
    matrix_s = weights_s(processor.speeds, model.output_bytes_by_type, rows)
    if isinstance(processor, CpuProfile):
        matrix_s += short_rows_s(processor, model.vocabulary, model.width)
    return matrix_s + rows * (cpu.value_s * model.vocabulary + cpu.token_s)


def short_rows_s(cpu: CpuProfile, rows: float, width: int) -> float:
    """Return the seconds of ``rows`` matrix rows of ``width`` values beyond what the rates give for their bytes."""
    return cpu.row_s * rows * max(0.0, 1 - width / RATE_WIDTH)


def hop_s(link: LinkProfile, rows: float, width: int) -> float:
    """Return the average seconds from one device to the next (paper: t_comm).

    A token makes rounds times devices hops, whose times add up. The mean of the sum is the sum of the means, while all
    hops are hardly ever as late as the 95th percentile. So a hop counts with its mean, in which the 95th percentile has
    the weight ``LATE_SHARE``: next to nothing on a wire, often most of a hop on Wi-Fi.
    """
    return message_s(link, rows * width * HIDDEN_VALUE_BYTES) + LATE_SHARE * link.late_s


def message_s(link: LinkProfile, size_bytes: float) -> float:
    """Return the median seconds of a message one way: linear between measured sizes, at the link's rate beyond the
    largest, and never less than its bytes at that rate."""
    size, taken_s = 0, 0.0
    for point in link.messages:
        if size_bytes < point.size_bytes:
            taken_s += (point.beyond_s - taken_s) * (size_bytes - size) / (point.size_bytes - size)
            break
        size, taken_s = point.size_bytes, point.beyond_s
    else:
        taken_s += (size_bytes - size) / link.bytes_per_s
    return link.round_trip_s / 2 + max(taken_s, size_bytes / link.bytes_per_s)


def transfer_s(link: LinkProfile, rows: float, width: int) -> float:
    """Return the seconds that a hop occupies the link, or the air."""
    return rows * width * HIDDEN_VALUE_BYTES / link.bytes_per_s


def prefill_chunks(workload: Workload) -> tuple[int, float]:
    """Return the number of chunks of a typical prompt, and the tokens of each, taken as equal."""
    chunks = max(1, math.ceil(workload.prompt_tokens / workload.chunk_rows))
    return chunks, max(1.0, workload.prompt_tokens / chunks)


def decode_kv_tokens(workload: Workload) -> float:
    """Return the tokens in the KV cache in the middle of a typical response."""
    return min(workload.context_tokens, workload.prompt_tokens + workload.answer_tokens / 2)


def kv_bytes_per_token(layer: LayerProfile, kv_type: CacheType) -> int:
    """Return the KV cache of one layer for one token of context."""
    return math.ceil(layer.kv_bytes_per_token * KV_VALUE_BYTES[kv_type] / KV_VALUE_BYTES["f16"])


def kv_cells(layer: LayerProfile, workload: Workload, tokens: float | None = None) -> int:
    """Return the KV cells of one layer that ``tokens`` of a sequence use, or that a full context uses (None)."""
    maximum = workload.context_tokens if tokens is None else tokens
    if workload.small_windows and layer.window_tokens:
        window = layer.window_tokens + workload.step_rows
        maximum = min(maximum, -(-window // CELL_PADDING) * CELL_PADDING)
    return math.ceil(maximum)


def kv_bytes(layer: LayerProfile, workload: Workload) -> int:
    """Return the KV cache of one layer, or its state, for all sequences, and its adapters, which are in memory too."""
    states = (1 + workload.rollback) * layer.state_bytes
    each = kv_bytes_per_token(layer, workload.kv_type) * kv_cells(layer, workload) + states
    return each * workload.sequences + layer.adapter_bytes


def checkpoints(sequences: int) -> int:
    """Return the number of kept states in a ring, in addition to those of its sequences, to which sequences can go
    back."""
    return sequences + CHECKPOINTS_BEYOND


def checkpoint_bytes(layer: LayerProfile, workload: Workload) -> int:
    """Return the RAM of one layer for kept states, and for one being written to disk, wherever the layer is."""
    size, kept = layer.state_bytes, checkpoints(workload.sequences)
    if workload.small_windows and layer.window_tokens:
        size += kv_bytes_per_token(layer, workload.kv_type) * min(layer.window_tokens, workload.context_tokens)
    return kept * size + layer.state_bytes


def compute_buffer_bytes(model: ModelProfile, workload: Workload) -> int:
    """Return the activations of a prompt chunk in one window, with the attention mask (paper: part of c^cpu and c^gpu).

    Measured as what llama.cpp allocates: a token of a dense layer with gates takes 4 bytes for three feed-forward
    widths and four widths, and 2 bytes for each cell of the KV cache. Profiles of files say how many values a token
    has; where only the bytes of a layer are known, this estimate is 1 to 5 % above it for Llama of 135M to 8B, Qwen2,
    Gemma 3, Mixtral and Qwen3 MoE, 5 to 30 % for other mixtures of experts, and 25 to 50 % where feed-forward has no
    gate or there are as many keys as queries (StarCoder2, Phi-3). Without flash attention a token has a score for each
    head and cell, its queries twice, keys and values, at another time than feed-forward's values (0 to 2 % above for
    Llama, Qwen3 MoE, Gemma 3, gpt-oss, 5 % for Grok). The states of a recurrent layer are in the buffer once more.
    """
    cells, values = workload.context_tokens, max(_values_a_row(layer, model) for layer in model.layers)
    masks = cells
    if model.architecture in TWO_MASKS:
        masks += min(kv_cells(layer, workload) for layer in model.layers)
    flash = workload.flash and model.architecture not in WITHOUT_FLASH
    mask_bytes = MASK_BYTES if flash else ACTIVATION_BYTES
    if not flash:
        keys = max(layer.kv_bytes_per_token for layer in model.layers)  # and values, twice
        scores = model.attention_heads * cells
        values = max(values, scores + 3 * model.width + 2 * model.attention_width + keys)
    states = workload.sequences * (1 + workload.rollback) * max(layer.state_bytes for layer in model.layers)
    cell_bytes = masks * mask_bytes + cells * model.cell_bytes
    return math.ceil(_largest_rows(workload) * (values * ACTIVATION_BYTES + cell_bytes)) + states


def lacks_flash(backend: str, model: ModelProfile) -> bool:
    """Whether llama.cpp's ``backend`` has no flash attention for the heads of ``model``; False if unknown."""
    known, width = FLASH_HEADS.get(backend), model.attention_width / model.attention_heads
    return known is not None and bool(model.heads and model.query_width) and width not in known


def _largest_rows(workload: Workload) -> int:
    """Return the tokens of the largest step: of a chunk, or all that the context holds."""
    return min(workload.step_rows, workload.context_tokens * workload.sequences)


def hidden_bytes(model: ModelProfile, workload: Workload) -> int:
    """Return the bytes of a chunk's hidden states on their way through a process."""
    return HIDDEN_COPIES * _largest_rows(workload) * model.hop_values * HIDDEN_VALUE_BYTES


def window_bytes(model: ModelProfile, workload: Workload) -> int:
    """Return the RAM of a window besides weights, KV cache and compute buffer, once it has computed a prompt chunk.

    llama.cpp keeps the rows in which it converts the inputs of a matrix multiplication to the type that suits the
    weights. The widest of a layer is feed-forward's. (Measured as its size: 4.2 MB for 256 tokens of an 8B.)
    """
    widest = max(_converted_bytes_a_row(layer, model) for layer in model.layers)
    stand_in = 0
    if model.stand_in is not None:  # the pages of its weights are given back
        stand_in = kv_bytes(model.stand_in, workload) + checkpoint_bytes(model.stand_in, workload)
    return WINDOW_BYTES + math.ceil(_largest_rows(workload) * widest) + stand_in


def stand_in_vram_bytes(model: ModelProfile, workload: Workload) -> int:
    """Return the VRAM of the layer after those of a window, including its weights."""
    return 0 if model.stand_in is None else kv_bytes(model.stand_in, workload) + model.stand_in.size_bytes


def _converted_bytes_a_row(layer: LayerProfile, model: ModelProfile) -> float:
    """Return the bytes of the widest row: feed-forward's (attention counts as next to nothing), or those of all used
    experts."""
    value_bytes = 2 if {"F16", "BF16"} & {*layer.bytes_by_type, *layer.expert_bytes_by_type} else 292 / 256  # Q8_K
    always = max(model.width, _weights(layer.bytes_by_type) / (3 * model.width) - 5 / 6 * model.width)
    experts = 0.0
    if layer.expert_bytes:
        experts = _weights(layer.expert_bytes_by_type) * model.experts_used / model.experts / (3 * model.width)
    return value_bytes * max(always, experts)


def _values_a_row(layer: LayerProfile, model: ModelProfile) -> float:
    """Return the maximum values per token in the compute buffer, as given by the layer.

    Without a figure, or where the layer keeps a state, they are estimated from the weights that it uses. Attention
    counts as feed-forward, which is a width and a third more than there is. Experts have a row for each that is used,
    and their outputs are kept separately until they are added up.
    """
    if layer.row_values and not layer.state_bytes:
        return layer.row_values
    always = _weights(layer.bytes_by_type) / (3 * model.width)
    if not layer.expert_bytes:
        return max(layer.row_values, 3 * always + 2 * model.width)
    experts = _weights(layer.expert_bytes_by_type) * model.experts_used / model.experts / (3 * model.width)
    return max(
        layer.row_values,
        3 * (always + experts) + 2 * model.width,
        2 * experts + (2 * model.experts_used + 1) * model.width,
    )


def _weights(bytes_by_type: Mapping[str, int]) -> float:
    return sum(size / bytes_per_weight(kind) for kind, size in bytes_by_type.items())


def logits_bytes(model: ModelProfile, workload: Workload) -> int:
    """Return the compute buffer of the window with the output matrix after its layers: logits of a few tokens and their
    inputs. Single rows of the embedding, which is mapped, are read."""
    return min(LOGIT_ROWS, workload.step_rows) * (model.vocabulary + 4 * model.width) * ACTIVATION_BYTES
