"""Inputs of the solver: measured devices and links, the model, the workload. Required fields, SI units.

Speeds are per quantisation type, as kernels differ more between types than the types' sizes do. Weights are counted in
bytes as stored, so ``bytes / rate`` is a time for any type.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, Literal, get_args

BATCH_ROWS: Final = 8
"""Tokens of the middle measurement of a ``TypeSpeed``."""
PREFILL_ROWS: Final = 512
"""Tokens of the largest measurement of a ``TypeSpeed``."""
CacheType = Literal["f16", "q8_0", "q4_0"]
"""Type of the values in the KV cache."""
KV_TYPES: Final[tuple[CacheType, ...]] = get_args(CacheType)
"""KV cache types, largest first."""
OFFLOAD_FEW_ROWS: Final = 64
"""Tokens of the smaller measurement of an ``OffloadSpeed``."""
RATE_WIDTH: Final = 2048
"""Row length of the matrices with which ``TypeSpeed`` is measured."""
MIN_HEAD_WIDTH: Final = 64
"""Channels of an attention head, as few as in most models."""
ATTENTION_SHARE: Final = 1 / 3
"""Attention's share of the weights of layers in most models."""
KV_BLOCK: Final = 32
"""Values of a block of a quantised KV cache. Head widths must be multiples of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowSpeed:
    """Bytes of weights per second with ``rows`` tokens, between one and ``PREFILL_ROWS``."""

    rows: int
    bytes_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class WidthCost:
    """Time per byte of a layer of ``weights`` weights relative to the rates, which hold for big layers: ``ratio`` with
    one token.

    ``many_ratio`` is the same with several tokens.
    """

    weights: int
    ratio: float
    many_ratio: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheCost:
    """Time per byte relative to the rates, with one token, when a token reads at most ``bytes``: CPU caches keep some
    of them from token to token."""

    bytes: int
    ratio: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TypeSpeed:
    """Speed at which weights of one quantisation type are computed, measured on windows of llama.cpp layers.

    ``decode_bytes_per_s``: bytes of weights per second with 1 token; ``batch_bytes_per_s``: with ``BATCH_ROWS`` tokens;
    ``prefill_flop_per_s``: 2 FLOP per weight and token, with ``PREFILL_ROWS`` tokens. ``extra_buffers``: whether these
    figures hold with llama.cpp's repacked or AMX copies. The spreads are (largest - smallest) / median of the runs, 0
    where nothing was measured. ``rows`` are measurements with further token counts; between measured counts costs are
    linear. ``plain`` is the speed without extra buffers, if the other figures are with them.
    """

    type: str
    decode_bytes_per_s: float
    batch_bytes_per_s: float
    prefill_flop_per_s: float
    extra_buffers: bool
    decode_spread: float
    prefill_spread: float
    rows: tuple[RowSpeed, ...] = ()
    plain: TypeSpeed | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class OffloadSpeed:
    """Speed of prefill offload, where the weights stay in RAM and are copied to the GPU for each chunk.

    ``few_bytes_per_s``: bytes of weights per second with ``OFFLOAD_FEW_ROWS`` tokens, mostly copying;
    ``prefill_flop_per_s``: 2 FLOP per weight and token, with ``PREFILL_ROWS`` tokens. Both include fixed costs.
    """

    type: str
    few_bytes_per_s: float
    prefill_flop_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TypeRows:
    """Batch sizes up to which layers of one quantisation type give bit-identical results.

    In a step of up to ``rows`` tokens, each of another sequence, every token is computed exactly as in a batch of one;
    so it is in a step of up to ``replay_rows`` tokens of one sequence with flash attention. Without flash attention a
    prompt chunk may be cut at multiples of ``piece_rows`` if its last piece is no smaller; 0: at no known place.
    """

    type: str
    rows: int
    piece_rows: int = 0
    replay_rows: int = 1


StateKind = Literal["delta", "scan", "convolution"]
"""How the compared layers with a state compute it: by a gated delta rule, a scan as in Mamba 2, or a short convolution
alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingCost:
    """Cost of a layer with experts besides their bytes: the router, picking, and collecting tokens for each expert.

    ``layer_s`` is per step, ``row_s`` per further token. ``many_ratio`` is the time per byte of an expert with several
    tokens relative to the rates: each expert has tokens of its own, too few to fill a kernel.
    """

    layer_s: float = 0.0
    row_s: float = 0.0
    many_ratio: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuProfile:
    """The CPU. ``threads`` and ``batch_threads`` are the thread counts at which the speeds were measured (decode,
    prefill).

    ``step_s`` is the cost of a window per step besides its layers, ``layer_s`` the cost of a layer per step besides its
    bytes. ``token_s`` is the head's work per token besides computing it (plan the step, sample, notify the daemon),
    ``value_s`` the addition to it per entry of the vocabulary. ``wake_s`` is the cost when the cores computed for
    another process immediately before; it matters only where devices share a machine. ``widths`` corrects the rates for
    layers of other sizes, ``caches`` for models so small that CPU caches hold some of them. ``row_s`` is the cost of
    each matrix row besides its bytes; the rates hold for rows of ``RATE_WIDTH`` values. ``attention_s`` is the cost per
    token in the KV cache and channel of the queries, for one token of the batch; ``plain_attention_s`` is the same
    without flash attention, ``rows_attention_s`` where several tokens of a sequence are computed as a matrix (0: as its
    products are). ``exact_rows`` are of the compared types, with extra buffers and without; ``exact_states`` are of
    layers with a state, by its kind. ``routing`` is the further cost of layers with experts.
    """

    name: str
    cores: int
    threads: int
    batch_threads: int
    step_s: float
    layer_s: float
    speeds: tuple[TypeSpeed, ...]
    token_s: float = 0.00025
    value_s: float = 1.2e-9
    wake_s: float = 0.0004
    widths: tuple[WidthCost, ...] = ()
    row_s: float = 0.0
    attention_s: float = 0.0
    plain_attention_s: float = 0.0
    rows_attention_s: float = 0.0
    exact_rows: tuple[TypeRows, ...] = ()
    exact_states: tuple[TypeRows, ...] = ()
    caches: tuple[CacheCost, ...] = ()
    routing: RoutingCost = RoutingCost()

    def with_extra_buffers(self, types: Collection[str]) -> CpuProfile:
        """Return the CPU with extra buffers at most for weights of ``types``; other weights are computed as stored in
        files."""
        return replace(self, speeds=tuple(at if at.type in types else at.plain or at for at in self.speeds))


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuProfile:
    """One GPU as its backend reports it. ``unified_memory``: its memory is the RAM of the device.

    ``step_s`` is the cost per step of a window with layers on this GPU besides these layers (including copies in both
    directions). ``id`` is llama.cpp's name for it ("CUDA0"), the only name in which two GPUs of one model differ.
    ``prefill_offload`` is its speed at prompts through layers that stay in RAM, by type; empty where it is not known to
    gain. ``attention_flop_per_s`` is its speed at attention of many tokens (0: as products of F16), ``routing`` the
    further cost of layers with experts. ``context_bytes`` is the GPU memory of a process besides its buffers (context,
    kernels; 0: not measured). ``pci`` is its address, empty if it has none; two daemons of a machine recognise a shared
    GPU by it.
    """

    name: str
    backend: str
    vram_total_bytes: int
    vram_available_bytes: int
    unified_memory: bool
    vram_read_bytes_per_s: float
    step_s: float
    layer_s: float
    speeds: tuple[TypeSpeed, ...]
    id: str = ""
    prefill_offload: tuple[OffloadSpeed, ...] = ()
    attention_flop_per_s: float = 0.0
    routing: RoutingCost = RoutingCost()
    context_bytes: int = 0
    pci: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskProfile:
    """The file system that holds the layer cache, measured without the page cache.

    ``prefetch_bytes_per_s``: large ranges, read with the engine's prefetch call; ``fault_bytes_per_s``: the same ranges
    by page faults; ``random_bytes_per_s``: 4 kB reads at random places. ``slows_s_per_byte``: computing time added per
    byte that is read meanwhile, as memory and cores serve both. ``disk_id`` is equal for devices of one machine whose
    layer caches are on one disk; if unknown (empty), the disk counts as the machine's.
    """

    prefetch_bytes_per_s: float
    fault_bytes_per_s: float
    random_bytes_per_s: float
    free_bytes: int
    slows_s_per_byte: float = 0.0
    disk_id: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceProfile:
    """One device. Every figure was measured on it; which device is the head is up to the plan.

    ``host`` is equal for devices that are processes on one machine: they share its memory and its cores, and its disk
    unless ``disk.disk_id`` differs.
    ``ram_available_bytes`` respects cgroup limits; ``ram_read_bytes_per_s`` is the read rate of all cores together.
    ``cores`` are the machine's cores that the device is bound to; empty: it may use all.
    ``wireless`` devices of a cluster share the air: a cluster is one subnet, and so usually one access point.
    ``gpu`` is the fastest GPU, ``other_gpus`` are the others, fastest first.
    """

    device: str
    host: str
    system: str
    machine: str
    cpu: CpuProfile
    ram_total_bytes: int
    ram_available_bytes: int
    ram_read_bytes_per_s: float
    disk: DiskProfile
    gpu: GpuProfile | None
    wireless: bool = False
    cores: tuple[int, ...] = ()
    other_gpus: tuple[GpuProfile, ...] = ()

    def shares_cores(self, other: DeviceProfile) -> bool:
        """Whether both compute on the same cores."""
        bound = bool(self.cores and other.cores)
        return self.host == other.host and not (bound and set(self.cores).isdisjoint(other.cores))

    @property
    def gpus(self) -> tuple[GpuProfile, ...]:
        """All its GPUs."""
        return () if self.gpu is None else (self.gpu, *self.other_gpus)

    def with_gpus(self, gpus: Sequence[GpuProfile]) -> DeviceProfile:
        """Return the device with these GPUs instead."""
        return replace(self, gpu=gpus[0] if gpus else None, other_gpus=tuple(gpus[1:]))

    def with_extra_buffers(self, types: Collection[str]) -> DeviceProfile:
        """Return the device whose CPU has extra buffers at most for weights of ``types``."""
        return replace(self, cpu=self.cpu.with_extra_buffers(types))

    def without_extra_buffers(self) -> DeviceProfile:
        """Return the device whose CPU has no extra buffers, as with streamed weights."""
        return self.with_extra_buffers(())


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageTime:
    """Median one-way time of a message of ``size_bytes`` beyond that of an empty one."""

    size_bytes: int
    beyond_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkProfile:
    """The link from ``source`` to ``target``; the opposite direction has its own figures.

    ``address`` is the address of ``target`` that works best from ``source``; empty where nothing was measured.
    ``round_trip_s`` is the median round trip of an empty message. ``bytes_per_s`` is the rate of large messages in a
    row, and so determines how long a byte occupies the link. ``late_s`` is the distance from the median to the 95th
    percentile. ``messages`` were measured, by size; without them a message takes its bytes at ``bytes_per_s`` beyond an
    empty one. If ``work`` is false the figures are not measured: they lead the search away from the link, and no result
    sends over it. ``network_s`` is the network's average part of ``round_trip_s``, without the programs at both ends;
    None if not measured.
    """

    source: str
    target: str
    address: str
    round_trip_s: float
    bytes_per_s: float
    late_s: float = 0.0
    messages: tuple[MessageTime, ...] = ()
    works: bool = True
    network_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits set by a device's owner; None: no limit besides what is free."""

    ram_bytes: int | None = None
    vram_bytes: int | None = None
    disk_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerProfile:
    """One layer: bytes of weights by quantisation type, and bytes of KV cache (F16) per token of context.

    A recurrent layer has ``state_bytes`` per sequence instead, whatever its length, and does not attend. (One without a
    KV cache of its own may attend to the cache of another layer.) ``query_width`` is the number of channels of its
    queries, 0 for the model's. ``row_values`` is the number of values per token in the compute buffer, a lower bound if
    the layer is recurrent; 0 where they are estimated from the weights.
    ``adapter_bytes`` is the size of adapters and of what makes their inputs, which stay in memory even if the layer
    streams; ``adapter_reads`` is what a token reads of them, by type.
    With ``window_tokens`` it attends to that number of the last tokens only; 0: to all.
    ``bytes_by_type`` are the weights that every token uses, ``expert_bytes_by_type`` those of all experts, of which a
    token uses ``experts_used`` of ``experts``.
    """

    bytes_by_type: Mapping[str, int]
    expert_bytes_by_type: Mapping[str, int]
    kv_bytes_per_token: int
    state_bytes: int = 0
    row_values: int = 0
    adapter_bytes: int = 0
    adapter_reads: Mapping[str, int] = field(default_factory=dict)
    attends: bool = True
    query_width: int = 0
    window_tokens: int = 0

    @property
    def size_bytes(self) -> int:
        """Bytes of all weights."""
        return sum(self.bytes_by_type.values()) + self.expert_bytes

    @property
    def expert_bytes(self) -> int:
        """Bytes of all routed experts; 0 for a dense layer."""
        return sum(self.expert_bytes_by_type.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelProfile:
    """Facts about a model that matter to the plan.

    ``embedding_bytes`` is the size of the token embedding table; ``output_bytes_by_type`` is the matrix that gives
    logits (the same bytes again where the two are tied). ``width`` is that of the hidden state, ``context_tokens`` the
    context the model was trained for, ``experts`` 0 for a dense model. ``query_width`` is the number of channels of the
    queries of all heads of a layer, 0 for as many as the hidden state has; ``heads`` is the number of these heads, 0 if
    unknown. ``cell_bytes`` is the compute buffer per token and KV cell besides masks. ``kv_head_width`` divides the
    widths of all heads in the KV cache. Windows after the first may begin only at a multiple of ``cut_multiple`` layers
    plus ``cut_offset``, which is smaller than ``cut_multiple``; the last of several windows has at least
    ``tail_layers``. ``beside_values`` travel from window to window with each hidden state. ``expert_use`` gives, for
    equally large groups of experts, the probability that a token picks an expert of the group; without it all are
    alike. A window's layers may be followed by one that is not computed, whose size is ``stand_in``.
    ``attention_share`` is attention's share of the weights of layers, 0 if unknown.
    """

    name: str
    architecture: str
    layers: tuple[LayerProfile, ...]
    embedding_bytes: int
    output_bytes_by_type: Mapping[str, int]
    tied: bool
    width: int
    vocabulary: int
    context_tokens: int
    experts: int
    experts_used: int
    kv_head_width: int
    cut_multiple: int
    cut_offset: int = 0
    query_width: int = 0
    heads: int = 0
    cell_bytes: int = 0
    expert_use: tuple[float, ...] = ()
    tail_layers: int = 1
    beside_values: int = 0
    stand_in: LayerProfile | None = None
    attention_share: float = 0.0

    @property
    def last_cut(self) -> int:
        """Last layer at which a window may begin, apart from ``cut_multiple`` and ``cut_offset``."""
        return max(len(self.layers) - self.tail_layers, 0)

    @property
    def hop_values(self) -> int:
        """Values per token that travel from window to window."""
        return self.width + self.beside_values

    @property
    def attention_part(self) -> float:
        """``attention_share``, or its value in most models."""
        return self.attention_share or ATTENTION_SHARE

    @property
    def attention_width(self) -> int:
        """Channels of all heads' queries; by default the width of the hidden state."""
        return self.query_width or self.width

    @property
    def attention_heads(self) -> int:
        """Number of query heads; by default ``MIN_HEAD_WIDTH`` channels each."""
        return self.heads or -(-self.attention_width // MIN_HEAD_WIDTH)

    @property
    def cut_points(self) -> range:
        """Layers at which windows after the first may begin."""
        return range(self.cut_offset or self.cut_multiple, self.last_cut + 1, self.cut_multiple)

    @property
    def cut_missing(self) -> int:
        """Layers by which the first window falls short of a multiple of ``cut_multiple``."""
        return -self.cut_offset % self.cut_multiple

    @property
    def max_rounds(self) -> int:
        """Maximum rounds that the cut points allow. With an offset those of a second round would be at twice the
        offset."""
        return min(len(self.cut_points), 1) if self.cut_offset else len(self.cut_points)

    @property
    def uncut(self) -> ModelProfile:
        """The same model with no cut points."""
        return replace(self, cut_multiple=max(len(self.layers), 1), cut_offset=0)

    @property
    def is_recurrent(self) -> bool:
        """Whether some layers keep a state, which carries over from token to token and cannot be truncated."""
        return any(layer.state_bytes for layer in self.layers)

    @property
    def has_windows(self) -> bool:
        """Whether some layers attend to a sliding window only."""
        return any(layer.window_tokens for layer in self.layers)

    @property
    def kept_on_cpu(self) -> int:
        """Minimum number of CPU layers of a window after the first."""
        return int(self.beside_values > 0)

    def openable(self, layers: range, on_gpu: int) -> int:
        """Return how many of ``layers`` a GPU can have: the last ones, at most ``on_gpu``.

        llama.cpp does not open an empty KV cache where some layers of a window are. (In recurrent models only attending
        layers count.) Where values travel with hidden states, the CPU takes them in, in a window's first layer.
        """
        if layers.start:
            on_gpu = min(on_gpu, len(layers) - self.kept_on_cpu)
        attends = [self.layers[layer].kv_bytes_per_token > 0 for layer in layers]
        if self.is_recurrent or all(attends):
            return on_gpu
        while on_gpu and not (any(attends[-on_gpu:]) and (on_gpu == len(attends) or any(attends[:-on_gpu]))):
            on_gpu -= 1
        return on_gpu

    @property
    def largest_layer_bytes(self) -> int:
        """Bytes of the largest layer."""
        return max(layer.size_bytes for layer in self.layers)

    @property
    def output_bytes(self) -> int:
        """Bytes of the output matrix."""
        return sum(self.output_bytes_by_type.values())

    @property
    def size_bytes(self) -> int:
        """Bytes of all weights."""
        outside = self.embedding_bytes + (0 if self.tied else self.output_bytes)
        return outside + sum(layer.size_bytes for layer in self.layers)


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """What the plan is for: ``sequences`` concurrent requests, each with ``context_tokens`` of KV cache of type
    ``kv_type``.

    A typical request has ``prompt_tokens`` and ``answer_tokens``; prompts are computed in chunks of ``chunk_rows``
    tokens. Buffers have room for a chunk, or for ``buffer_rows`` if that is more, as a later ring may resume with
    larger chunks. They always have room for ``whole_rows``: an image's tokens, which all attend to each other.
    ``flash`` selects llama.cpp's flash attention; without it the scores of all tokens are kept, which takes more memory
    and, on a CPU, less time per token. With ``small_windows`` the KV cache of sliding-window layers is hardly larger
    than the window. Layers with a state keep as many further states per sequence as tokens can be rolled back
    (``rollback``). Devices that share layers exchange sums in the type ``wire``.
    """

    context_tokens: int
    kv_type: CacheType
    sequences: int
    prompt_tokens: int
    answer_tokens: int
    chunk_rows: int
    flash: bool = True
    buffer_rows: int = 0
    whole_rows: int = 0
    small_windows: bool = False
    rollback: int = 0
    wire: Literal["f32", "f16"] = "f32"

    @property
    def step_rows(self) -> int:
        """Maximum tokens of a step."""
        return max(self.chunk_rows, self.buffer_rows, self.whole_rows)

    def with_rows(self, chunk_rows: int, step_rows: int = 0) -> Workload:
        """Return the same workload with chunks of ``chunk_rows``, and buffers for as many or for ``step_rows``."""
        return replace(self, chunk_rows=chunk_rows, buffer_rows=step_rows if step_rows > chunk_rows else 0)
