"""What a trial is asked, and what it answers: between the process that measures and its child."""

from __future__ import annotations

import msgspec

from primad.engine.devices import GpuDevice
from primad.engine.protocol import WindowSource


class TrialTimes(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds of a step by run: with the rows that were asked for, one as a rule, with ``BATCH_ROWS`` and with
    ``prefill_rows``; empty where not asked for.

    ``prefill_rows`` are ``PREFILL_ROWS``, fewer where those take too long; ``few_s`` is what ``FEWEST_ROWS`` take.
    ``counts_s`` are of the counts that were asked for. ``taken_bytes`` is what the GPU had less free behind many rows than
    before the process computed anything on it.
    """

    decode_s: tuple[float, ...]
    batch_s: tuple[float, ...]
    prefill_s: tuple[float, ...]
    prefill_rows: int
    few_s: float = 0.0
    counts_s: tuple[float, ...] = ()
    taken_bytes: int = 0


class TimeWindow(msgspec.Struct, frozen=True, kw_only=True, tag="time"):
    """Time ``window``; ``sweep_bytes`` are read between two steps (0: the window itself is larger than caches).

    One row, or where ``many_rows`` several and a chunk of a prompt: runs for ``seconds``, one in any case. ``counts`` are
    more counts of rows, of which one run is made each. One row, or ``rows`` of the same sequence, come behind ``cached``
    tokens in the KV cache, with ``flash`` attention or without. What of the window is on a GPU is on ``gpu``, as in
    ``EngineOptions``. A run that takes longer than ``run_s`` ends with the steps that it has. A chunk may take ``chunk_s``
    whatever else took of the time.
    """

    window: WindowSource
    width: int
    threads: int
    batch_threads: int
    sweep_bytes: int
    many_rows: bool
    seconds: float
    counts: tuple[int, ...] = ()
    cached: int = 0
    flash: bool = True
    rows: int = 1
    gpu: str = ""
    run_s: float | None = None
    chunk_s: float = 0.0


class CompareRows(msgspec.Struct, frozen=True, kw_only=True, tag="compare"):
    """Compare what ``window`` computes of the rows of several sequences, and of one, together with what it computes of each
    alone, and what it computes of a chunk with what it computes of its pieces. One that ``has_state`` begins anew each time,
    and computes several steps of each sequence."""

    window: WindowSource
    width: int
    threads: int
    has_state: bool = False


class ExactRows(msgspec.Struct, frozen=True, tag="exact"):
    """Steps of up to so many ``rows`` compute each bit for bit as alone, pieces of multiples of ``piece_rows`` what the
    whole chunk does (0: none does), and with flash attention ``replay_rows`` of one sequence what they are alone."""

    rows: int
    piece_rows: int
    replay_rows: int


class HoldWindow(msgspec.Struct, frozen=True, kw_only=True, tag="hold"):
    """Load ``window``, compute a step of one row, and keep it."""

    window: WindowSource
    width: int
    threads: int


class StepWindow(msgspec.Struct, frozen=True, tag="step"):
    """Compute another step of the window that is held."""


class Stepped(msgspec.Struct, frozen=True, tag="stepped"):
    """What that took."""

    seconds: float


class StepOn(msgspec.Struct, frozen=True, tag="on"):
    """Compute steps of the window that is held for so many ``seconds``, two at least."""

    seconds: float


class SteppedOn(msgspec.Struct, frozen=True, tag="on"):
    """What each step took."""

    steps_s: tuple[float, ...]


class TimeHead(msgspec.Struct, frozen=True, kw_only=True, tag="head"):
    """Time what a head does for a token besides computing it, as in ``beside.time_head``: ``tokens`` of them, fewer where
    that takes longer than ``seconds``."""

    vocabulary: int
    tokens: int
    sweep_bytes: int
    seconds: float


class HeadTimes(msgspec.Struct, frozen=True, tag="head"):
    """The answer."""

    token_s: tuple[float, ...]


class ListGpus(msgspec.Struct, frozen=True, tag="gpus"):
    """Name the GPUs that the installed llama.cpp can use."""


class Gpus(msgspec.Struct, frozen=True, tag="gpus"):
    """The answer."""

    gpus: tuple[GpuDevice, ...]


Task = TimeWindow | CompareRows | HoldWindow | StepWindow | StepOn | TimeHead | ListGpus
