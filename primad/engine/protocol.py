"""The interface between the ring's core and llama.cpp: what a window can do.

A window is a contiguous run of layers with its own KV cache. It takes tokens or hidden states and returns hidden
states. The tail window, and a window that is the whole model, keep logits instead, from which a ``Sampler`` samples.
Everything is synchronous and belongs to one thread. ``engine/llama`` is the implementation; ``tests/fakes/engine.py``
is a strict fake that remembers every layer and position.

Daemons use options and files and never see an array, so numpy is not loaded for them.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from itertools import starmap
from typing import TYPE_CHECKING, Final, Literal, Protocol, TypeAlias

import msgspec

from halda import WindowAssignment
from primad.engine.rope import Rope
from primad.kv.cells import CellShape, LayerCells

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

Hidden: TypeAlias = "NDArray[np.float32]"
"""Hidden states, shape (rows, width), C-contiguous little-endian float32."""

Tokens: TypeAlias = "NDArray[np.int32]"
"""Token ids, shape (rows,)."""

LogitsRow: TypeAlias = "NDArray[np.float32]"
"""Logits of one token, shape (vocabulary,)."""


MIN_TEMPERATURE: Final = 1e-5
"""Below this temperature the most likely token is taken: logits divided by less would overflow."""


_BIAS: Final = struct.Struct("<if")


def packed_biases(biases: Iterable[tuple[int, float]]) -> bytes:
    """Pack ``biases`` by token as ``Sampling`` stores them: int32 and float32 each."""
    return b"".join(starmap(_BIAS.pack, biases))


def biases_in(packed: bytes) -> list[tuple[int, float]]:
    """Unpack the biases by token of a ``Sampling``."""
    return list(_BIAS.iter_unpack(packed))


class Sampling(msgspec.Struct, frozen=True, kw_only=True):
    """How the next token is sampled. The neutral value of each field switches its sampler off.

    ``temperature`` 0 is greedy; ``top_k`` 0 keeps every token; ``top_p`` 1 and ``min_p`` 0 keep everything;
    ``repeat_penalty`` 1 and the two other penalties 0 change nothing; penalties look at the last ``penalty_tokens``
    tokens of prompt and completion. ``seed`` is 0 to 2**32 - 2. The others are llama.cpp's parameters of the same
    names: ``top_n_sigma`` 0, ``typical_p`` 1, ``temperature_range`` 0, ``dry_multiplier`` 0, ``xtc_probability`` 0 and
    ``mirostat`` 0 do nothing; ``mirostat`` 1 or 2 replaces everything but bias and temperature. ``mirostat_mu`` is
    mirostat's state after the tokens so far; None before the first token.

    A completion has at least ``min_tokens`` tokens, and with ``ignore_eos`` ends only at its token limit. ``grammar``
    (in llguidance's form: Lark, or its JSON form) restricts the sampled tokens; where it says that the text is
    complete, the completion ends.
    """

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int
    presence_penalty: float
    frequency_penalty: float
    repeat_penalty: float
    penalty_tokens: int
    logit_bias: bytes
    """``packed_biases``: a request may have one for each token, shared by its 128 choices."""
    top_n_sigma: float = 0.0
    typical_p: float = 1.0
    temperature_range: float = 0.0
    temperature_exponent: float = 1.0
    mirostat: int = 0
    mirostat_tau: float = 5.0
    mirostat_eta: float = 0.1
    mirostat_mu: float | None = None
    dry_multiplier: float = 0.0
    dry_base: float = 1.75
    dry_allowed_length: int = 2
    dry_tokens: int = 0
    dry_breakers: tuple[str, ...] = ()
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1
    min_tokens: int = 0
    ignore_eos: bool = False
    grammar: str | None = None

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token of the (biased, penalised) model is always taken."""
        return self.temperature < MIN_TEMPERATURE or (self.top_k == 1 and not self.mirostat)

    @property
    def penalises(self) -> bool:
        """Whether penalties change a token's logit by how often it occurred before."""
        penalised = self.repeat_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0
        return penalised and self.penalty_tokens != 0

    @property
    def breaks_loops(self) -> bool:
        """Whether DRY penalises tokens that would repeat an earlier run of tokens."""
        return self.dry_multiplier != 0 and self.dry_base >= 1 and self.dry_tokens != 0

    @property
    def changes_logits(self) -> bool:
        """Whether bias or penalties may change the order of the tokens."""
        return bool(self.logit_bias) or self.penalises or self.breaks_loops


GREEDY: Final = Sampling(
    temperature=0,
    top_k=0,
    top_p=1,
    min_p=0,
    seed=0,
    presence_penalty=0,
    frequency_penalty=0,
    repeat_penalty=1,
    penalty_tokens=0,
    logit_bias=b"",
)
"""The most likely token; nothing is cut or penalised."""


KvType = Literal["f16", "q8_0", "q4_0"]
"""Types of KV cache."""

Wire = Literal["f32", "f16"]
"""Types in which the ranks of a group exchange values."""

KV_CELL_PADDING: Final = 256
"""llama.cpp rounds the KV cache up to a multiple of this number of cells."""
PREDICTOR_CELLS: Final = 16_384
"""Tokens for which the KV cache of multi-token prediction layers has room; less where the context is smaller."""

_MASK_64: Final = (1 << 64) - 1


def sampling_seed(seed: int, index: int) -> int:
    """Return the seed (0 to 2**32 - 2) for sampling token ``index`` of a completion whose sampling has ``seed``.

    Each token is sampled by its own generator, so the result depends on the tokens before it and not on state of a ring
    process: another process that gets those tokens samples the same one. The mix is splitmix64's (Steele, Lea and
    Flood, "Fast splittable pseudorandom number generators", 2014): the upper half of number ``index`` of the stream
    that starts at ``seed``. 2**32 - 1 asks llama.cpp for a random seed and becomes 0.
    """
    mixed = (seed + (index + 1) * 0x9E3779B97F4A7C15) & _MASK_64
    mixed = ((mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9) & _MASK_64
    mixed = ((mixed ^ mixed >> 27) * 0x94D049BB133111EB) & _MASK_64
    return ((mixed ^ mixed >> 31) >> 32) % 0xFFFFFFFF


class EngineOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How windows are opened on this device.

    ``context`` cells of KV cache of type ``kv_type`` for each of ``sequences`` sequences; at most ``rows`` tokens a
    step; ``threads`` for decode and ``batch_threads`` for prefill. ``lock`` pins resident weights to memory (mlock).
    Without ``flash``, attention keeps the scores of all cells, where the KV cache allows it. ``gpu`` is llama.cpp's
    name of the GPU that gets layers first ("": the first one), ``other_gpus`` are the device's others,
    ``offloading_gpu`` is the one for prefill offload ("": the first one). A single sequence may have ``branches``,
    which are numbered after it and share its cells; their tokens are then not bit-identical to those of a separate
    sequence. With ``small_windows``, layers with a sliding window have few more cells than the window, and go back only
    to kept states. At most ``states`` states are kept. ``rollback`` is the number of tokens of a sequence's last step
    that can be taken back where layers have a state, as long as one of them stays and no step with several sequences
    came since.
    """

    context: int
    sequences: int
    rows: int
    threads: int
    batch_threads: int
    kv_type: KvType
    lock: bool
    flash: bool = True
    gpu: str = ""
    rope: Rope = Rope()
    branches: int = 0
    other_gpus: tuple[str, ...] = ()
    offloading_gpu: str = ""
    small_windows: bool = False
    states: int = 0
    rollback: int = 0

    def __post_init__(self) -> None:
        assert not self.branches or (self.sequences == 1 and not self.small_windows)
        assert not self.rollback or not (self.branches or self.small_windows)

    @property
    def numbers(self) -> int:
        """Number of sequence ids, branches included."""
        return self.sequences + self.branches


class AdapterFile(msgspec.Struct, frozen=True):
    """A LoRA adapter of a window: its file, and the scale with which it is added."""

    path: str
    scale: float


class WindowSource(msgspec.Struct, frozen=True, kw_only=True):
    """The files that window ``window`` of the route is loaded from, in split order. The whole model is one file:
    ``metadata`` alone.

    ``assignment`` says which layers go to the GPU and how many bytes stay in memory. ``extra_buffers`` lets llama.cpp
    keep repacked or AMX copies of the weights. ``adapters`` change the weights.
    """

    window: int
    metadata: str
    layers: tuple[str, ...]
    assignment: WindowAssignment
    extra_buffers: bool
    adapters: tuple[AdapterFile, ...] = ()


class Rows(msgspec.Struct, frozen=True, kw_only=True):
    """The tokens of one step as one window sees them.

    ``content`` is (rows,) int32 token ids for the route's first window, (rows, width) float32 hidden states for all
    others. Tokens of a picture are (rows, width) for the first window as well. Row ``i`` is at position
    ``positions[i]``, belongs to ``sequences[i]`` and needs logits if ``outputs[i]``. With ``look_ahead``, rows also
    attend to later rows of the step. ``rope`` is for models with four-part positions, where a row's parts differ from
    its position, as in a picture and after it: it has all parts, row by row, and keys are rotated by these.
    """

    content: Tokens | Hidden
    positions: Sequence[int]
    sequences: Sequence[Sequence[int]]
    outputs: Sequence[bool]
    look_ahead: bool = False
    rope: Sequence[int] = ()

    def __len__(self) -> int:
        return len(self.positions)


class GroupExchange(Protocol):
    """How the ranks of a group, each with a share of the window's layers, exchange values (``engine/llama/sums.py``).

    All ranks call the same methods in the same order. Each method raises ``PrimadError`` where another rank is late,
    gone or sends something else.
    """

    @property
    def rank(self) -> int:
        """This rank's number in the group; rank 0 has the logits."""

    def lead(self, message: bytes) -> None:
        """On rank 0: have the other ranks do what ``message`` says, before this one does it."""

    def spread(self, values: Hidden) -> None:
        """Replace ``values`` (n,) of every other rank by those of rank 0."""

    def sum(self, values: Hidden) -> None:
        """Replace ``values`` (n,) by the total over all ranks, added in the order of ranks, so equal on all."""

    def gather(self, values: Hidden) -> list[Hidden]:
        """Return the ``values`` (n,) of every rank, in order, on rank 0; nothing on the others."""


class EngineWindow(Protocol):
    """A contiguous run of layers with its KV cache. Every method raises ``EngineError`` when llama.cpp fails."""

    @property
    def layers(self) -> range:
        """The window's layers, numbered as in the whole model."""

    @property
    def exchange(self) -> GroupExchange | None:
        """How its rank exchanges values, where the window is a share of its layers; else None."""

    @property
    def kv_supported(self) -> bool:
        """Whether ``kv_cells`` and ``kv_restore`` work here. Ask before anything is computed: the first call tries
        it."""

    @property
    def kv_layers(self) -> range:
        """The layer numbers under which its KV cells are stored: those of its layers, or of its share of them."""

    @property
    def kv_shapes(self) -> list[CellShape]:
        """The types and sizes of each layer's cells; only where ``kv_supported``."""

    def kv_remove(self, sequence: int, start: int, end: int) -> None:
        """Forget positions ``start <= p < end`` of ``sequence``; ``end = -1`` means to the end."""

    def kv_copy(self, source: int, target: int, end: int) -> None:
        """Forget ``target``, then give it the cells of ``source`` at positions before ``end``.

        Where ``source`` has more positions and its state cannot be cut back, the caller restores the state of ``end``
        next.
        """

    def kv_cells(self, sequence: int, start: int, end: int) -> list[LayerCells]:
        """Return copies of the cells of ``sequence`` at positions ``start <= p < end``, for each layer of the
        window."""

    def kv_restore(self, sequence: int, blocks: Sequence[Sequence[LayerCells]]) -> None:
        """Forget ``sequence``, then fill it from ``blocks``: contiguous positions from 0, each block with all
        layers."""

    def state_keep(self, number: int, sequence: int, end: int) -> None:
        """Keep the part of ``sequence`` that cannot be cut back, at ``end`` positions, as ``number``; replace that
        one."""

    def state_restore(self, number: int, sequence: int, end: int) -> None:
        """Cut ``sequence`` back to its first ``end`` positions, with the state kept there as ``number``, unless it
        already has no more."""

    def state_forget(self) -> None:
        """Drop all kept states."""

    def release(self) -> None:
        """Give back all memory; the window must not be used again."""


class HiddenWindow(EngineWindow, Protocol):
    """A window whose output is the next window's input."""

    def forward(self, rows: Rows) -> Hidden:
        """Compute ``rows``, remember their keys and values, and return their hidden states (rows, width)."""


class Sampler(Protocol):
    """Samples tokens for one generation and remembers them. Token ``i`` is sampled with ``sampling_seed``."""

    def is_ready(self, wait_s: float) -> bool:
        """Whether ``sample`` would not wait, now or within ``wait_s``, for the mask of its grammar."""

    def sample(self, row: int, kept: LogitsRow | None = None) -> int:
        """Sample the next token from the logits of row ``row`` of the last ``LogitsWindow.forward``, or from
        ``kept``."""

    def peek(self, logits: LogitsRow, index: int) -> int | None:
        """Return the token that would be sampled at ``index`` from ``logits``, given the history known so far. Nothing
        is sampled or remembered. None where the most likely token is as good a draft."""

    @property
    def mirostat_mu(self) -> float | None:
        """The value that a sampler which continues after the last token needs in ``Sampling``; None without
        mirostat."""

    def release(self) -> None:
        """Give back its memory."""


class LogitsWindow(EngineWindow, Protocol):
    """The tail window or the whole model: ends in logits, which stay with it until the next ``forward``."""

    def forward(self, rows: Rows) -> None:
        """Compute ``rows`` and keep the logits of those with output."""

    def logits(self, row: int) -> LogitsRow:
        """Logits (vocabulary,) of row ``row`` of the last forward; a view that the next forward overwrites."""

    def sampler(self, sampling: Sampling, prompt: Sequence[int], sampled: Sequence[int]) -> Sampler:
        """Return a sampler that continues after ``prompt`` and the tokens ``sampled`` so far; its penalties count
        both."""

    def is_end(self, token: int) -> bool:
        """Whether ``token`` ends a generation."""


class Predictor(Protocol):
    """A model's own layers for multi-token prediction, next to its tail. Every method raises ``EngineError``."""

    @property
    def cells(self) -> int:
        """Number of tokens for which it has room."""

    def state(self, row: int) -> Hidden:
        """Return the state (width,) of ``row``, which has logits, from the tail's last forward."""

    def keep_all(self, *, keeps: bool) -> None:
        """Set whether the tail's next forwards without output rows keep the ``states`` of all rows."""

    def states(self, rows: int) -> Hidden:
        """Return the states (rows, width) of the last forward."""

    def read(self, tokens: Sequence[int], states: Sequence[Hidden] | Hidden, first: int) -> None:
        """Add ``tokens`` from position ``first`` on, each with the state from which it was sampled. Earlier content
        from ``first`` on is forgotten."""

    def predict(self, tokens: Sequence[int], states: Sequence[Hidden] | Hidden, first: int) -> tuple[LogitsRow, Hidden]:
        """Do as ``read``, and return the logits (vocabulary,) after the last token, valid until the next call, and its
        state."""


RouteWindow = HiddenWindow | LogitsWindow
