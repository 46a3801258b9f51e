"""Requests and results of trials: between the process that measures and its child."""

from __future__ import annotations

import msgspec

from primad.engine.devices import GpuDevice
from primad.engine.protocol import WindowSource


class TrialTimes(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds of a step by run: with the requested rows, usually one, with ``BATCH_ROWS`` and with ``prefill_rows``;
    empty where not requested.

    ``prefill_rows`` are ``PREFILL_ROWS``, or fewer if those take too long; ``few_s`` is the time of ``FEWEST_ROWS``.
    ``counts_s`` are the times of the requested counts. ``taken_bytes`` is how much less memory the GPU had free after
    many rows than before the process computed anything on it.
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

    One row, or with ``many_rows`` several and a chunk of a prompt: runs for ``seconds``, at least one. ``counts`` are
    more row counts, with one run each. One row, or ``rows`` of the same sequence, follow ``cached`` tokens in the KV
    cache, with ``flash`` attention or without. The window's part on a GPU is on ``gpu``, as in ``EngineOptions``. A run
    that takes longer than ``run_s`` ends with the steps that it has. A chunk may always take ``chunk_s``, however much
    of the time is used up.
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
    """Compare the results of ``window`` for rows of several sequences, and of one, with those for each row alone, and
    the results for a chunk with those for its pieces. A window that ``has_state`` starts afresh each time, and computes
    several steps of each sequence."""

    window: WindowSource
    width: int
    threads: int
    has_state: bool = False


class ExactRows(msgspec.Struct, frozen=True, tag="exact"):
    """Steps of up to ``rows`` compute each row bit for bit as alone; pieces of multiples of ``piece_rows`` compute what
    the whole chunk does (0: none do); and with flash attention ``replay_rows`` rows of one sequence equal single rows.
    """

    rows: int
    piece_rows: int
    replay_rows: int


class HoldWindow(msgspec.Struct, frozen=True, kw_only=True, tag="hold"):
    """Load ``window``, compute a step of one row, and keep it."""

    window: WindowSource
    width: int
    threads: int


class StepWindow(msgspec.Struct, frozen=True, tag="step"):
    """Compute another step of the loaded window."""


class Stepped(msgspec.Struct, frozen=True, tag="stepped"):
    """The seconds of a step."""

    seconds: float


class StepOn(msgspec.Struct, frozen=True, tag="on"):
    """Compute steps of the loaded window for ``seconds``, at least two steps."""

    seconds: float


class SteppedOn(msgspec.Struct, frozen=True, tag="on"):
    """The seconds of each step."""

    steps_s: tuple[float, ...]


class TimeHead(msgspec.Struct, frozen=True, kw_only=True, tag="head"):
    """Time a head's work per token besides computing, as in ``beside.time_head``: ``tokens`` of them, fewer if that takes
    longer than ``seconds``."""

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
