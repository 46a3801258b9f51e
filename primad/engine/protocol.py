"""What a window can do: the one interface between the ring's core and llama.cpp.

A window is a contiguous run of layers with its own KV cache. It takes rows (tokens or hidden states) and gives hidden
states; the tail window, and the window that is the whole model, keep logits instead, from which a ``Sampler`` draws.
Everything is synchronous and belongs to one thread. ``engine/llama`` is the implementation; ``tests/fakes/engine.py``
is a strict one that remembers every layer and position.

Daemons speak of options and files and never see an array, so numpy is not loaded for them.
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
"""Of one row, shape (vocabulary,)."""


MIN_TEMPERATURE: Final = 1e-5
"""Below, the most likely token is taken: logits divided by less are no numbers any more."""


_BIAS: Final = struct.Struct("<if")


def packed_biases(biases: Iterable[tuple[int, float]]) -> bytes:
    """``biases`` by token as a ``Sampling`` has them: int32 and float32 for each."""
    return b"".join(starmap(_BIAS.pack, biases))


def biases_in(packed: bytes) -> list[tuple[int, float]]:
    """The biases by token of a ``Sampling``."""
    return list(_BIAS.iter_unpack(packed))


class Sampling(msgspec.Struct, frozen=True, kw_only=True):
    """How the next token is sampled. The neutral value of each field switches its sampler off.

    ``temperature`` 0 is greedy; ``top_k`` 0 keeps every token; ``top_p`` 1 and ``min_p`` 0 keep everything;
    ``repeat_penalty`` 1 and the two other penalties 0 change nothing; penalties look at the last ``penalty_tokens``
    tokens of prompt and answer. ``seed`` is 0 to 2**32 - 2. The others are llama.cpp's of those names: ``top_n_sigma`` 0,
    ``typical_p`` 1, ``temperature_range`` 0, ``dry_multiplier`` 0, ``xtc_probability`` 0 and ``mirostat`` 0 (or 1 or 2, in
    place of everything but bias and temperature) do nothing. ``mirostat_mu`` is what mirostat learnt from
    the tokens of before; None: there are none.

    An answer ends at ``min_tokens`` tokens at the earliest, and with ``ignore_eos`` where it is full. ``grammar`` (as
    llguidance reads it: Lark, or its JSON form) bounds what is sampled; where it says that the answer is over, it is.
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
    """``packed_biases``: a request may have one for each token, and 128 choices that have it."""
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
        """Whether tokens of before are made rarer or more frequent, by how often they were there."""
        penalised = self.repeat_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0
        return penalised and self.penalty_tokens != 0

    @property
    def breaks_loops(self) -> bool:
        """Whether tokens that would repeat a run of before are made rarer (DRY)."""
        return self.dry_multiplier != 0 and self.dry_base >= 1 and self.dry_tokens != 0

    @property
    def changes_logits(self) -> bool:
        """Whether bias or penalties change the order of the tokens."""
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
"""The likeliest token, nothing cut or penalised."""


KvType = Literal["f16", "q8_0", "q4_0"]
"""Types of KV cache."""

Wire = Literal["f32", "f16"]
"""Types of values that a group exchanges."""

KV_CELL_PADDING: Final = 256
"""llama.cpp rounds the KV cache up to whole groups of so many cells."""
PREDICTOR_CELLS: Final = 16_384
"""The KV cache of layers for multi-token prediction has room for so many tokens, or for the whole context."""

_MASK_64: Final = (1 << 64) - 1


def sampling_seed(seed: int, index: int) -> int:
    """The seed (0 to 2**32 - 2) of the draw of token ``index`` of an answer whose sampling has ``seed``.

    Each draw has a generator of its own, so that what is sampled depends on the tokens before it and on nothing that a ring
    process remembers: another process that is given those tokens draws the same. The mix is that of splitmix64 (Steele,
    Lea and Flood, "Fast splittable pseudorandom number generators", 2014): number ``index`` of the stream that starts at
    ``seed``, of which the upper half is taken. 2**32 - 1 asks llama.cpp for a random seed and becomes 0.
    """
    mixed = (seed + (index + 1) * 0x9E3779B97F4A7C15) & _MASK_64
    mixed = ((mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9) & _MASK_64
    mixed = ((mixed ^ mixed >> 27) * 0x94D049BB133111EB) & _MASK_64
    return ((mixed ^ mixed >> 31) >> 32) % 0xFFFFFFFF


class EngineOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How windows are opened on this device.

    ``context`` cells of KV cache of type ``kv_type`` for each of ``sequences`` sequences; at most ``rows`` rows a step;
    ``threads`` for decode and ``batch_threads`` for prefill. ``lock`` pins resident weights to memory (mlock). Without
    ``flash`` attention keeps the scores of all cells, where the KV cache allows it. ``gpu`` is what llama.cpp calls the GPU
    that layers are to lie on first ("": the first there is), ``other_gpus`` are the device's others, ``offloading_gpu`` is
    the one that helps with prompts ("": the first). Beside a single sequence there may be so many ``branches`` of it, which
    are numbered behind it and share its cells: rows are then not bit for bit what they are in a sequence of their own.
    With ``small_windows`` layers with a sliding window have little more cells than that, and go back to kept states alone.
    So many ``states`` may be kept. Where layers have one, so many rows of a sequence's last step can be taken back
    (``rollback``), as long as one of them stays and no step of several sequences came since.
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
        """How many numbers of sequences there are."""
        return self.sequences + self.branches


class AdapterFile(msgspec.Struct, frozen=True):
    """A LoRA adapter of a window: its file, and how much of it is added."""

    path: str
    scale: float


class WindowSource(msgspec.Struct, frozen=True, kw_only=True):
    """What window ``window`` of the route is loaded from: its files in split order. The whole model is its own file as
    ``metadata`` alone.

    ``assignment`` says what of it goes to the GPU and how much stays in memory. ``extra_buffers`` lets llama.cpp keep
    repacked or AMX copies of its weights. ``adapters`` change them.
    """

    window: int
    metadata: str
    layers: tuple[str, ...]
    assignment: WindowAssignment
    extra_buffers: bool
    adapters: tuple[AdapterFile, ...] = ()


class Rows(msgspec.Struct, frozen=True, kw_only=True):
    """The rows of one step as one window sees them.

    ``content`` is (rows,) int32 token ids for the route's first window, (rows, width) float32 hidden states for all
    others. For the first window it is (rows, width) as well where the rows are a picture's. Row ``i`` stands at
    ``positions[i]``, belongs to ``sequences[i]`` and wants logits when ``outputs[i]``. Rows that ``look_ahead`` see those
    behind them in the step too. Where a model's positions have four parts and those of a row are not its position, as in a
    picture and behind it, ``rope`` has all of them, row by row: its keys are turned by these.
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
    """What a window swaps numbers with, where each rank of a group has a share of its layers (``engine/llama/sums.py``).

    All ranks call the same methods in the same order. Each method raises ``PrimadError`` where another rank is late, gone
    or sends something else.
    """

    @property
    def rank(self) -> int:
        """This rank's number in the group; the first one, 0, has the logits."""

    def lead(self, message: bytes) -> None:
        """On the first rank: have the others do what ``message`` says, before this one does it."""

    def spread(self, values: Hidden) -> None:
        """Put the first rank's ``values`` (n,) in the place of those of every other one."""

    def sum(self, values: Hidden) -> None:
        """Put the total over all ranks in the place of ``values`` (n,): added up in the order of ranks, so equal on all."""

    def gather(self, values: Hidden) -> list[Hidden]:
        """The ``values`` (n,) of every rank, in order, on the first rank; none on the others."""


class EngineWindow(Protocol):
    """A contiguous run of layers with its KV cache. Every method raises ``EngineError`` when llama.cpp fails."""

    @property
    def layers(self) -> range:
        """The window's layers, numbered as in the whole model."""

    @property
    def exchange(self) -> GroupExchange | None:
        """What it swaps numbers with, where it is a share of its layers."""

    @property
    def kv_supported(self) -> bool:
        """Whether ``kv_cells`` and ``kv_restore`` work here. To be asked before rows are computed: it is tried then."""

    @property
    def kv_layers(self) -> range:
        """The numbers under which its cells are kept: those of its layers, or of its share of them."""

    @property
    def kv_shapes(self) -> list[CellShape]:
        """What the cells of each layer are made of; only where ``kv_supported``."""

    def kv_remove(self, sequence: int, start: int, end: int) -> None:
        """Forget positions ``start <= p < end`` of ``sequence``; ``end = -1`` means to the end."""

    def kv_copy(self, source: int, target: int, end: int) -> None:
        """Forget ``target``, and let it have the cells that ``source`` has at positions before ``end``.

        Where ``source`` has more, and its state cannot be cut back, one of ``end`` is put back next.
        """

    def kv_cells(self, sequence: int, start: int, end: int) -> list[LayerCells]:
        """The cells of ``sequence`` at positions ``start <= p < end``, for each layer of the window, copied."""

    def kv_restore(self, sequence: int, blocks: Sequence[Sequence[LayerCells]]) -> None:
        """Forget ``sequence``, and let it have ``blocks``: positions from 0 on, without a hole, each for all layers."""

    def state_keep(self, number: int, sequence: int, end: int) -> None:
        """Keep what cannot be cut back of ``sequence``, which has ``end`` positions, as ``number``, in place of another."""

    def state_restore(self, number: int, sequence: int, end: int) -> None:
        """Go back: ``sequence`` has its first ``end`` positions again, behind which its state was kept as ``number``, unless
        it has no more of them."""

    def state_forget(self) -> None:
        """Keep no state of any sequence any more."""

    def release(self) -> None:
        """Give back all memory; the window must not be used again."""


class HiddenWindow(EngineWindow, Protocol):
    """A window whose output is the next window's input."""

    def forward(self, rows: Rows) -> Hidden:
        """Compute ``rows``, remember their keys and values, and return their hidden states (rows, width)."""


class Sampler(Protocol):
    """Draws tokens for one generation; remembers what it drew. Token ``i`` of the answer is sampled with
    ``sampling_seed``."""

    def is_ready(self, wait_s: float) -> bool:
        """Whether ``sample`` would not wait, now or within ``wait_s``: the mask of its grammar is there."""

    def sample(self, row: int, kept: LogitsRow | None = None) -> int:
        """The next token from the logits of row ``row`` of the last ``LogitsWindow.forward``, or from ``kept`` ones."""

    def peek(self, logits: LogitsRow, index: int) -> int | None:
        """Token ``index`` of the answer, if it is drawn from such ``logits`` as far as its history is known. Nothing is
        drawn, or remembered. None where the likeliest token comes next as well as any: a draft needs no draw then."""

    @property
    def mirostat_mu(self) -> float | None:
        """What a sampler that goes on behind the last token must be told in ``Sampling``; None without mirostat."""

    def release(self) -> None:
        """Give back its memory."""


class LogitsWindow(EngineWindow, Protocol):
    """The tail window or the whole model: ends in logits, which stay with it until the next ``forward``."""

    def forward(self, rows: Rows) -> None:
        """Compute ``rows`` and keep the logits of those that want output."""

    def logits(self, row: int) -> LogitsRow:
        """Logits (vocabulary,) of row ``row`` of the last forward; a view that the next forward overwrites."""

    def sampler(self, sampling: Sampling, prompt: Sequence[int], sampled: Sequence[int]) -> Sampler:
        """A sampler that goes on behind ``prompt`` and the tokens ``sampled`` for it so far: its penalties know them all."""

    def is_end(self, token: int) -> bool:
        """Whether ``token`` ends a generation."""


class Predictor(Protocol):
    """A model's own layers for multi-token prediction, beside its tail. Every method raises ``EngineError``."""

    @property
    def cells(self) -> int:
        """Rows that it has room for."""

    def state(self, row: int) -> Hidden:
        """The state (width,) that the tail's last forward left of ``row``, which has logits."""

    def keep_all(self, *, keeps: bool) -> None:
        """Whether the tail's next forwards, in which no row wants logits, leave the ``states`` of all rows."""

    def states(self, rows: int) -> Hidden:
        """Those (rows, width) of the last forward."""

    def read(self, tokens: Sequence[int], states: Sequence[Hidden] | Hidden, first: int) -> None:
        """Know ``tokens`` from position ``first`` on, each with the state that it was drawn from. What was there and behind
        is forgotten."""

    def predict(self, tokens: Sequence[int], states: Sequence[Hidden] | Hidden, first: int) -> tuple[LogitsRow, Hidden]:
        """The same; logits (vocabulary,) of what follows the last of them, until the next call, and its state."""


RouteWindow = HiddenWindow | LogitsWindow
