"""What the solver is told: measured devices and links, the model that was read, the work to do. Required fields, SI units.

A speed belongs to a quantisation type: kernels differ more between types than their sizes do. Weights are counted in bytes
as stored, so ``bytes / rate`` is a time whatever the type.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, Literal, get_args

BATCH_ROWS: Final = 8
"""Rows of the middle measurement of a ``TypeSpeed``."""
PREFILL_ROWS: Final = 512
"""Rows of the largest measurement of a ``TypeSpeed``."""
CacheType = Literal["f16", "q8_0", "q4_0"]
"""What the KV cache holds its values in."""
KV_TYPES: Final[tuple[CacheType, ...]] = get_args(CacheType)
"""The largest first."""
OFFLOAD_FEW_ROWS: Final = 64
"""Rows of the smaller measurement of a ``OffloadSpeed``."""
RATE_WIDTH: Final = 2048
"""Values of a row of the matrices that ``TypeSpeed`` is measured with."""
MIN_HEAD_WIDTH: Final = 64
"""Channels of a head of attention, as narrow as they are in most models."""
ATTENTION_SHARE: Final = 1 / 3
"""Of the weights of layers, in most models."""
KV_BLOCK: Final = 32
"""Values of a block of a quantised KV cache: the heads of a model must be whole blocks wide."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowSpeed:
    """Bytes of weights a second with so many ``rows``, between one and ``PREFILL_ROWS``."""

    rows: int
    bytes_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class WidthCost:
    """What one row of a layer of ``weights`` takes of each byte over what the rates say, which hold for big layers.

    ``many_ratio`` is the same of several rows.
    """

    weights: int
    ratio: float
    many_ratio: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheCost:
    """What one row takes of each byte over what the rates say, where a token reads no more than so many ``bytes``: caches
    hold some of them from token to token."""

    bytes: int
    ratio: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TypeSpeed:
    """How fast weights of one quantisation type are computed, as measured on windows of llama.cpp layers.

    ``decode_bytes_per_s``: bytes of weights a second with 1 row; ``batch_bytes_per_s``: with ``BATCH_ROWS`` rows;
    ``prefill_flop_per_s``: 2 FLOP a weight and row, with ``PREFILL_ROWS`` rows. ``extra_buffers``: whether these figures
    hold with llama.cpp's repacked or AMX copies. The spreads are (largest - smallest) / median of the runs, 0 where
    nothing was measured. ``rows`` are more counts of rows; without them costs lie on straight lines between the three.
    ``plain`` is the speed without extra buffers, where these figures are with them.
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
    """How fast a chunk of a prompt is computed where a GPU helps: the weights stay in RAM and are copied to it each time.

    ``few_bytes_per_s``: bytes of weights a second with ``OFFLOAD_FEW_ROWS`` rows, most of which is copying;
    ``prefill_flop_per_s``: 2 FLOP a weight and row, with ``PREFILL_ROWS`` rows. Fixed costs are in both.
    """

    type: str
    few_bytes_per_s: float
    prefill_flop_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TypeRows:
    """What layers of one quantisation type compute bit for bit the same.

    Of a step of up to ``rows`` rows, each of another sequence, each is computed as it is alone; so it is in a step of up to
    ``replay_rows`` of one sequence with flash attention. A chunk of a prompt may be cut at multiples of ``piece_rows``
    without flash attention if its last piece is no smaller; 0: not at any that is known.
    """

    type: str
    rows: int
    piece_rows: int = 0
    replay_rows: int = 1


StateKind = Literal["delta", "scan", "convolution"]
"""How layers that keep a state compute it, of those that are compared: by a gated delta rule, a scan as Mamba 2 has it, or
a short convolution alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingCost:
    """What a layer with experts costs besides their bytes: the router, picking, and collecting rows for each expert.

    ``layer_s`` is what it costs a step, ``row_s`` each row more. ``many_ratio`` is what a byte of an expert takes over what
    the rates say where an expert has several rows: each expert has some of its own, and few of them fill no kernel.
    """

    layer_s: float = 0.0
    row_s: float = 0.0
    many_ratio: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuProfile:
    """The processor. ``threads`` and ``batch_threads`` are the counts that the speeds hold for (decode, prefill).

    ``step_s`` is what a window costs a step besides its layers, ``layer_s`` what a layer costs a step besides its bytes.
    ``token_s`` is what a head does for a token besides computing it (plan the step, draw, tell the daemon), ``value_s``
    more for each token of the vocabulary. ``wake_s`` is what it costs that the cores computed for another process just
    before: of use only where devices share a machine. ``widths`` corrects the rates for layers of other sizes, ``caches``
    for models so small that caches hold some of them. ``row_s`` is what each row of a matrix costs besides its bytes, of
    which rates hold for rows of ``RATE_WIDTH`` values; ``attention_s`` what a token in the KV cache costs for each channel
    of the queries of one row, ``plain_attention_s`` the same without flash attention, ``rows_attention_s`` where rows of a
    sequence are computed as a matrix (0: as its products are). ``exact_rows`` are of the types that were compared, with
    extra buffers and without; ``exact_states`` those of layers that keep a state, by its kind. ``routing`` is what layers
    with experts cost besides.
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
        """The processor that has extra buffers for weights of ``types`` at most; others it computes as they lie in files."""
        return replace(self, speeds=tuple(at if at.type in types else at.plain or at for at in self.speeds))


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuProfile:
    """One GPU as its backend reports it. ``unified_memory``: its memory is the RAM of the device.

    ``step_s`` is what a window with layers on this GPU costs a step besides them (copies to and fro among it). ``id`` is
    what llama.cpp calls it ("CUDA0"): the only name that two of one kind do not share. ``prefill_offload`` is how fast
    it computes prompts through layers that stay in RAM, by type; empty where it is not known to help.
    ``attention_flop_per_s`` is how fast it computes attention of many rows (0: as products of F16), ``routing`` what
    layers with experts cost besides. ``context_bytes`` is what a process that computes on it takes of its memory besides
    buffers (context, kernels; 0: not measured), ``pci`` its address, empty where it has none: two daemons of a machine know
    by it that they share a GPU.
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
    """The file system that holds the layer cache, the page cache bypassed.

    ``prefetch_bytes_per_s``: large ranges with the call that the engine prefetches with; ``fault_bytes_per_s``: the same
    ranges by page faults; ``random_bytes_per_s``: 4 kB reads at random places. ``slows_s_per_byte``: what each byte that is
    read meanwhile adds to the time of computing, as memory and cores serve both. ``disk_id`` is equal for devices of one
    machine whose layer caches lie on one disk; where it is not known (empty), the disk counts as the machine's.
    """

    prefetch_bytes_per_s: float
    fault_bytes_per_s: float
    random_bytes_per_s: float
    free_bytes: int
    slows_s_per_byte: float = 0.0
    disk_id: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceProfile:
    """One device. Every figure was measured on it; who is head is the plan's business.

    ``host`` is equal for devices that are processes on one machine: they share its memory and its cores, and
    its disk unless that has other names (``disk.disk_id``).
    ``ram_available_bytes`` respects limits of cgroups; ``ram_read_bytes_per_s`` is what all cores together read.
    ``cores`` are those of the machine that it is bound to; none: it may use all.
    ``wireless`` devices of a cluster share one air: a cluster is one subnet, and so, as a rule, one access point.
    ``gpu`` is the fastest GPU, ``other_gpus`` are the others, the faster ones first.
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
        """The device with these GPUs instead."""
        return replace(self, gpu=gpus[0] if gpus else None, other_gpus=tuple(gpus[1:]))

    def with_extra_buffers(self, types: Collection[str]) -> DeviceProfile:
        """The device whose processor has extra buffers for weights of ``types`` at most."""
        return replace(self, cpu=self.cpu.with_extra_buffers(types))

    def without_extra_buffers(self) -> DeviceProfile:
        """The device whose processor does without them, as all do with what streams."""
        return self.with_extra_buffers(())


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageTime:
    """What a message of ``size_bytes`` takes one way beyond an empty one, as a rule (the median)."""

    size_bytes: int
    beyond_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkProfile:
    """The link from ``source`` to ``target``; that from ``target`` to ``source`` has figures of its own.

    ``address`` is the address of ``target`` that ``source`` reaches it by best; empty where nothing was measured.
    ``round_trip_s`` is an empty message there and back, as a rule (the median). ``bytes_per_s`` is the rate of large
    messages that follow each other, and so what a byte occupies of the link. ``late_s``: one message of twenty comes so much
    later than the median or more (the 95th percentile). ``messages`` were measured, by size; without them a message takes
    its bytes at ``bytes_per_s`` beyond an empty one. Where it does not ``work`` the figures are not measured: they lead the
    search away from it, and no plan that sends over it is an answer. ``network_s`` is what the network takes of
    ``round_trip_s`` on average, without the programs at both ends; None where that was not measured.
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
    """What the owner of a device allows; None is no limit besides what is free."""

    ram_bytes: int | None = None
    vram_bytes: int | None = None
    disk_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerProfile:
    """One layer: bytes of weights by quantisation type, and bytes of KV cache (F16) per token of context.

    A recurrent layer has ``state_bytes`` for each sequence instead, whatever its length, and does not attend. (One without
    cells of its own may attend to those of another layer.) ``query_width`` counts the channels of its queries, 0 for as many
    as the model says. ``row_values`` are those that a row
    has in the compute buffer, at the least if it is recurrent; 0 where they are estimated from the weights.
    ``adapter_bytes`` are those of adapters and of what makes its inputs, which lie in memory beside it, also where it
    streams; ``adapter_reads`` what a row reads of them, by type.

    With ``window_tokens`` it attends to so many of the last tokens alone; 0: to all.

    ``bytes_by_type`` are the weights that every row uses, ``expert_bytes_by_type`` those of all experts, of which a row uses
    ``experts_used`` of ``experts``.
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
        """Bytes of all experts that a router picks from; 0 for a dense layer."""
        return sum(self.expert_bytes_by_type.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelProfile:
    """What of a model matters to the plan.

    ``embedding_bytes`` is the table that tokens are looked up in; ``output_bytes_by_type`` is the matrix that gives logits
    (the same bytes again where the two are tied). ``width`` is that of the hidden state, ``context_tokens`` what the model
    was trained for, ``experts`` 0 for a dense model. ``query_width`` counts the channels of the queries of all heads of a
    layer, 0 for as many as the hidden state has; ``heads`` are those heads, 0 where that is not known. ``cell_bytes`` are
    those of the compute buffer that a row has for each cell of the KV cache besides masks. ``kv_head_width``
    divides the widths of all heads in the KV cache. A window behind the first may begin only at a multiple of
    ``cut_multiple`` layers and ``cut_offset`` more, which is less than a multiple, and the last of several has
    ``tail_layers`` at least. ``beside_values`` go from window to window with each hidden state. ``expert_use`` says how
    likely a row picks an expert of each of as many groups, which have as many experts each; without it all are alike.
    Behind a window's layers there may be one that is not computed, which takes as much as ``stand_in``. Of the weights of
    layers ``attention_share`` belongs to their attention, 0 where that is not known.
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
        """The last layer at which a window may begin, but for ``cut_multiple`` and ``cut_offset``."""
        return max(len(self.layers) - self.tail_layers, 0)

    @property
    def hop_values(self) -> int:
        """Values of a row that goes from window to window."""
        return self.width + self.beside_values

    @property
    def attention_part(self) -> float:
        """``attention_share``, or what it is of most models."""
        return self.attention_share or ATTENTION_SHARE

    @property
    def attention_width(self) -> int:
        """Channels of all heads' queries: as many as the hidden state is wide where the model says nothing else."""
        return self.query_width or self.width

    @property
    def attention_heads(self) -> int:
        """Heads of queries: as many as of ``MIN_HEAD_WIDTH`` channels where the model says nothing else."""
        return self.heads or -(-self.attention_width // MIN_HEAD_WIDTH)

    @property
    def cut_points(self) -> range:
        """The layers at which windows behind the first may begin."""
        return range(self.cut_offset or self.cut_multiple, self.last_cut + 1, self.cut_multiple)

    @property
    def cut_missing(self) -> int:
        """Layers that the first window has less than a multiple of ``cut_multiple``."""
        return -self.cut_offset % self.cut_multiple

    @property
    def max_rounds(self) -> int:
        """Rounds for which there may be places. With an offset those of a second round would be at twice as much of it."""
        return min(len(self.cut_points), 1) if self.cut_offset else len(self.cut_points)

    @property
    def uncut(self) -> ModelProfile:
        """The same model, in one window."""
        return replace(self, cut_multiple=max(len(self.layers), 1), cut_offset=0)

    @property
    def is_recurrent(self) -> bool:
        """Whether some layers keep a state, which goes on from row to row and cannot be cut back."""
        return any(layer.state_bytes for layer in self.layers)

    @property
    def has_windows(self) -> bool:
        """Whether some layers attend to a window of the last tokens alone."""
        return any(layer.window_tokens for layer in self.layers)

    @property
    def kept_on_cpu(self) -> int:
        """Layers that a window behind the first has on the CPU at the least."""
        return int(self.beside_values > 0)

    def openable(self, layers: range, on_gpu: int) -> int:
        """How many of ``layers``, the last ones and at most ``on_gpu``, a GPU can have.

        llama.cpp opens no KV cache that is empty where some layers of a window are. (That of a recurrent model counts only
        those that attend.) Where values go beside hidden states they are taken in by the CPU, in a window's first layer.
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
    """What the plan is for: ``sequences`` at once, each with ``context_tokens`` of KV cache of type ``kv_type``.

    A typical request has ``prompt_tokens`` and ``answer_tokens``; prompts are computed ``chunk_rows`` rows at a time.
    Buffers hold as many, or ``buffer_rows`` if that is more: a ring that follows may go on with larger chunks. They hold
    ``whole_rows`` in any case: a picture's, where each sees them all.
    Attention is llama.cpp's ``flash`` attention, or keeps the scores of all tokens: that takes more memory, and on a CPU
    less time for a token. With ``small_windows`` layers that attend to a window have little more of a KV cache than that.
    Layers with a state have as many more of a sequence as rows can be taken back (``rollback``). Devices that share layers
    exchange sums in ``wire``.
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
        """Rows that a step may have."""
        return max(self.chunk_rows, self.buffer_rows, self.whole_rows)

    def with_rows(self, chunk_rows: int, step_rows: int = 0) -> Workload:
        """The same work with chunks of so many rows, and buffers of as many or of ``step_rows``."""
        return replace(self, chunk_rows=chunk_rows, buffer_rows=step_rows if step_rows > chunk_rows else 0)
