"""Which next tokens a ring computes together: what is exact, what is fastest, and which of the two is used.

Several rows of a step are bit-identical to single rows up to a number that depends on llama.cpp's kernels: the profile
of every device has it for each type of weights (``CpuProfile.exact_rows``). From ``SPLIT_CELLS`` cells on, flash
attention computes a single row in parts, one a thread, and several rows in another way. Experts and GPUs are not
compared and count as exact for single rows only; so do layers with a state of a kind that was not compared
(``exact_states``). Several rows of one sequence equal single rows only with flash attention; this many tokens of a
completion that another ring began are recomputed at a time.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Final, Literal, get_args

from halda import DeviceProfile, ModelProfile, Plan, StateKind, TypeRows, evaluate
from halda.instance import Instance
from halda.load import UnderLoad, under_load
from primad.engine.protocol import KV_CELL_PADDING
from primad.gguf.architectures.table import SUPPORTED
from primad.ring.chunks import Pieces
from primad.ring.grouping import Batching

BatchingMode = Literal["exact", "auto", "fast"]
BATCHING_MODES: Final[tuple[BatchingMode, ...]] = get_args(BatchingMode)
KEPT: Final = 0.9
"""Share of the tokens of the quickest batches that exact ones must keep to be taken, or be thought to keep but for noise."""
SPLIT_CELLS: Final = KV_CELL_PADDING
"""llama.cpp splits what has more than one group of cells."""
MAX_ROWS: Final = 256
"""Largest chunk where other requests may wait for it."""
_ROWS: Final = (128, 64, 32, 16)
MIN_ROWS: Final = 64
"""A processor computes a row of a chunk this small nearly as fast as in a chunk of any size."""
EFFICIENT: Final = 1.2
"""How many times as long as in the best piece a row may take: with smaller pieces every request waits longer in total.
"""
SHORT_S: Final = 0.5
"""A reader may wait this long once for another request's prompt, which takes several times as long in pieces."""
_LITTLE: Final = 0.01
"""Share of a model's bytes in float32 that are norms: no matrix has so few."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Batches:
    """How next tokens are computed together, and prompts alongside; ``is_exact``: each completion is what it would be
    alone.

    ``load`` is the forecast for that.
    """

    batching: Batching
    is_exact: bool
    load: UnderLoad
    pieces: Pieces | None = None


def batches_of(mode: BatchingMode, plan: Plan, question: Instance, sequences: int) -> Batches:
    """The batches of ``plan`` for ``sequences`` concurrent sequences, in ``mode``."""
    profiles = _profiles(plan, question)
    work, maximum = question.workload, min(sequences, question.workload.chunk_rows)
    rows = min(maximum, exact_rows(plan, profiles, question.model))
    splits = work.flash and work.kv_type == "f16" and any(device.cpu.threads > 1 for device in profiles)
    exact = under_load(plan, question, sequences=sequences, max_rows=1 if splits else rows)
    fast = under_load(plan, question, sequences=sequences, max_rows=maximum)
    thought = exact.tokens_per_s * (1 + noise(profiles, question.model))
    is_exact = mode == "exact" or maximum == 1 or (mode == "auto" and thought >= KEPT * fast.tokens_per_s)
    cells = SPLIT_CELLS if is_exact and splits else None
    return Batches(
        batching=Batching(
            rows=rows if is_exact else maximum,
            steps=fast.machines,
            cells=cells,
            pads=bool(plan.streaming)
            and cells is None
            and not question.model.is_recurrent,  # a state takes no such row
            replays=replay_rows(plan, question, profiles) if cells is not None or not splits else 1,
        ),
        is_exact=is_exact,
        load=exact if is_exact else fast,
        pieces=pieces_of(plan, question, sequences),
    )


def noise(profiles: Iterable[DeviceProfile], model: ModelProfile) -> float:
    """Relative spread of the runs that the figures of ``model`` come from, on the worst measured device.

    The time of a step of several rows was measured like that of single rows, so a gain from batching is no more
    certain.
    """
    sizes = Counter(model.output_bytes_by_type)
    for layer in model.layers:
        sizes.update(layer.bytes_by_type)

    def of(profile: DeviceProfile) -> float:
        measured = [speed for speed in profile.cpu.speeds if sizes[speed.type]]
        total = sum(sizes[speed.type] for speed in measured)
        return sum(sizes[speed.type] * speed.decode_spread for speed in measured) / total if total else 0.0

    return max(map(of, profiles), default=0.0)


def exact_rows(plan: Plan, profiles: Iterable[DeviceProfile], model: ModelProfile) -> int:
    """How many rows of a step are bit for bit single ones on all of the devices."""
    return min(each.rows for each in _known(plan, profiles, model))


def replay_rows(plan: Plan, question: Instance, profiles: Iterable[DeviceProfile]) -> int:
    """How many rows of one sequence are bit for bit single ones on all devices: more than one with flash attention alone."""
    work = question.workload
    exact = min(each.replay_rows for each in _known(plan, profiles, question.model))
    return min(exact, work.chunk_rows) if work.flash else 1


def piece_rows(plan: Plan, profiles: Iterable[DeviceProfile], model: ModelProfile) -> int:
    """The pieces of a chunk that are bit-identical to the whole on all devices are multiples of this many rows; 0:
    unknown."""
    return math.lcm(*(each.piece_rows for each in _known(plan, profiles, model)))


def _known(plan: Plan, profiles: Iterable[DeviceProfile], model: ModelProfile) -> list[TypeRows]:
    """The known properties of each type of ``model`` on each device; where nothing was compared, single rows are exact."""
    state = _state_of(model)
    is_compared = not (model.experts or plan.uses_gpu or (model.is_recurrent and state is None))
    types = {kind for layer in model.layers for kind in layer.bytes_by_type} | set(model.output_bytes_by_type)
    size = sum(layer.bytes_by_type.get("F32", 0) for layer in model.layers)
    if size <= _LITTLE * model.size_bytes:
        types.discard("F32")
    types |= {kind for layer in model.layers for kind in layer.adapter_reads}
    if state is not None:
        types.add(state)
    return [
        found.get(kind, TypeRows(type=kind, rows=1))
        for profile in profiles
        for found in [{each.type: each for each in (*profile.cpu.exact_rows, *profile.cpu.exact_states) if is_compared}]
        for kind in types
    ]


def _state_of(model: ModelProfile) -> StateKind | None:
    """How layers of ``model`` that keep a state compute it, where that is compared."""
    entry = SUPPORTED.get(model.architecture)
    return entry.state if entry is not None and model.is_recurrent else None


def multiple_of_pieces(plan: Plan, question: Instance, sequences: int) -> int:
    """The pieces of a chunk are multiples of this many rows; 0: chunks are not cut."""
    work = question.workload
    if work.flash or _needs_large(plan):
        return 0
    multiple = piece_rows(plan, _profiles(plan, question), question.model)
    return multiple if multiple < work.chunk_rows else 0


def pieces_of(plan: Plan, question: Instance, sequences: int) -> Pieces | None:
    """The pieces in which chunks are computed while others of ``sequences`` decode, and in which they are reused; None:
    none.

    A piece takes no longer than the tokens of all other requests, unless its rows would take much longer than in larger
    pieces: then both the prompt and the requests after it would wait for nothing. The rest of a prompt is one piece if
    that takes at most ``SHORT_S``. With fewer decoding requests than machines in the ring, pieces follow each other
    between two of their tokens.
    """
    multiple = multiple_of_pieces(plan, question, sequences)
    if not multiple:
        return None
    sizes = [multiple << i for i in range((question.workload.chunk_rows // multiple).bit_length())]
    took_s = {rows: _piece_s(plan, question, rows, behind=0) for rows in sizes}
    rows, efficient = list[int](), efficient_rows(took_s)
    for writing in range(1, sequences):
        load = under_load(plan, question, sequences=writing)
        between = max(1, load.machines - writing)
        rows.append(max((size for size in sizes if between * took_s[size] <= load.tbt_s), default=efficient))
    rows = [max(each, efficient) for each in rows] or [multiple]
    far = question.workload.context_tokens // 2
    slower_s = _piece_s(plan, question, rows[0], behind=far) - took_s[rows[0]]
    twice = max(1, round(far * took_s[rows[0]] / slower_s)) if slower_s > 0 else None
    short = max((size for size in sizes if took_s[size] <= SHORT_S), default=0)
    return Pieces(multiple=multiple, rows=tuple(rows), twice=twice, short=short)


def efficient_rows(took_s: Mapping[int, float]) -> int:
    """The smallest number of rows, among those with known times, with about the lowest time per row."""
    min_s = min(seconds / rows for rows, seconds in took_s.items())
    return min(rows for rows, seconds in took_s.items() if seconds <= EFFICIENT * min_s * rows)


def _piece_s(plan: Plan, question: Instance, rows: int, *, behind: int) -> float:
    """Time of a piece of ``rows`` rows on the slowest device, with ``behind`` tokens of its prompt before it."""
    asked = question.with_rows(rows)
    prompt_tokens = max(2 * behind, rows)  # on average a row of a prompt comes after half of it
    asked = replace(asked, workload=replace(asked.workload, prompt_tokens=prompt_tokens))
    return max(each.prefill_s for each in evaluate(plan, asked).devices)


def rows_of_chunks(plan: Plan, question: Instance, sequences: int, *, asked: bool) -> int:
    """Maximum rows of a chunk of a prompt, where it cannot be cut into pieces.

    Other requests wait for each chunk. Where the user asked for ``sequences``, a chunk takes no longer than the tokens
    of all others, unless its rows would take much longer than in larger chunks; otherwise one request at a time is
    expected, whose prompt is faster in larger chunks. Each chunk reads all that streams, and a GPU computes few rows
    hardly faster than many.
    """
    maximum = question.workload.chunk_rows
    if sequences == 1 or _needs_large(plan):
        return maximum
    if not asked:
        return min(MAX_ROWS, maximum)
    ring_pass_s = under_load(plan, question, sequences=sequences).tbt_s
    took_s = {rows: _piece_s(plan, question, rows, behind=0) for rows in (*_ROWS, maximum) if rows <= maximum}
    fits = (rows for rows, seconds in took_s.items() if rows < maximum and seconds <= ring_pass_s)
    return max(max(fits, default=0), efficient_rows(took_s))


def min_rows(plan: Plan, rows: int) -> int:
    """Minimum rows of a chunk of at most ``rows`` rows before a new message: with more chunks, more of a prompt is
    found in the cache when it comes again."""
    return max(1, rows // 2) if _needs_large(plan) else min(MIN_ROWS, rows)


def _profiles(plan: Plan, question: Instance) -> list[DeviceProfile]:
    return [device for device in question.devices if device.device in plan.devices]


def _needs_large(plan: Plan) -> bool:
    return bool(plan.streaming or plan.prefill_offload) or plan.gpu_layers > 0
