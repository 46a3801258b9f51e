"""Choose which decode tokens a ring computes together: what is exact, what is fastest, and which of the two is used.

A batch gives the same bits as single tokens only if the kernels that llama.cpp picks for its size do; every device's
profile has that size for each type of weights (``CpuProfile.exact_rows``). From ``SPLIT_CELLS`` cells on, llama.cpp
splits the flash attention of one token over threads, but not that of several, so batches differ there. Experts and GPUs
are not compared, so only single tokens count as exact there; the same holds for recurrent layers of a kind that the
profile does not compare (``exact_states``). Several tokens of one sequence equal single ones only with flash attention;
a request that another ring began is recomputed in the largest batches that are exact.
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
"""Share of the fastest batches' throughput that exact ones must keep to be chosen, within the measurement noise."""
SPLIT_CELLS: Final = KV_CELL_PADDING
"""llama.cpp splits attention over more than one group of cells."""
MAX_ROWS: Final = 256
"""Largest chunk of a prompt while other requests may wait for it."""
_ROWS: Final = (128, 64, 32, 16)
MIN_ROWS: Final = 64
"""Chunk size at which a CPU is nearly as fast per token as with any larger one."""
EFFICIENT: Final = 1.2
"""Largest time per token of a piece, relative to the best size: smaller pieces make everyone wait longer in total."""
SHORT_S: Final = 0.5
"""Longest single pause of a response for another request's prompt, which takes several times as long in pieces."""
_LITTLE: Final = 0.01
"""Share of a model's bytes in float32 that are norms: matrices take more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Batches:
    """How decode tokens are batched, and the pieces of prompts computed next to them.

    ``is_exact``: each response is the same as when it runs alone. ``load`` is the predicted performance.
    """

    batching: Batching
    is_exact: bool
    load: UnderLoad
    pieces: Pieces | None = None


def batches_of(mode: BatchingMode, plan: Plan, question: Instance, sequences: int) -> Batches:
    """Return the batches of ``plan`` for ``sequences`` concurrent requests in the given ``mode``."""
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
            and not question.model.is_recurrent,  # a recurrent state takes no padding tokens
            replays=replay_rows(plan, question, profiles) if cells is not None or not splits else 1,
        ),
        is_exact=is_exact,
        load=exact if is_exact else fast,
        pieces=pieces_of(plan, question, sequences),
    )


def noise(profiles: Iterable[DeviceProfile], model: ModelProfile) -> float:
    """Relative spread of the measurements behind the figures of ``model``, on the worst measured device.

    Steps of several tokens were measured as single tokens were, so their gain is no more certain.
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
    """Largest batch that is bit-identical to single tokens on all of the devices."""
    return min(each.rows for each in _known(plan, profiles, model))


def replay_rows(plan: Plan, question: Instance, profiles: Iterable[DeviceProfile]) -> int:
    """Largest batch of one sequence that is bit-identical to single tokens on all devices; 1 without flash attention."""
    work = question.workload
    exact = min(each.replay_rows for each in _known(plan, profiles, question.model))
    return min(exact, work.chunk_rows) if work.flash else 1


def piece_rows(plan: Plan, profiles: Iterable[DeviceProfile], model: ModelProfile) -> int:
    """Multiple that the tokens of a piece must be for a bit-identical chunk on all devices; 0 if unknown."""
    return math.lcm(*(each.piece_rows for each in _known(plan, profiles, model)))


def _known(plan: Plan, profiles: Iterable[DeviceProfile], model: ModelProfile) -> list[TypeRows]:
    """Return what is known of each type of ``model`` on each device; what was not compared is exact for single tokens
    only."""
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
    """Return how the layers of ``model`` with a state compute it, where that kind is compared."""
    entry = SUPPORTED.get(model.architecture)
    return entry.state if entry is not None and model.is_recurrent else None


def multiple_of_pieces(plan: Plan, question: Instance, sequences: int) -> int:
    """Multiple of tokens at which a chunk may be cut into pieces; 0: it is not cut."""
    work = question.workload
    if work.flash or _needs_large(plan):
        return 0
    multiple = piece_rows(plan, _profiles(plan, question), question.model)
    return multiple if multiple < work.chunk_rows else 0


def pieces_of(plan: Plan, question: Instance, sequences: int) -> Pieces | None:
    """Return the pieces in which chunks are computed while other requests of ``sequences`` decode; None: chunks are not
    cut.

    A piece takes no longer than one token of all other requests, unless its time per token would be much worse than in
    larger pieces: that would delay the prompt and everything waiting after it for nothing. The rest of a prompt is one
    piece if that takes at most ``SHORT_S``. Where fewer requests decode than the ring has machines, several pieces
    follow each other between two of their tokens.
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
    """Return the smallest size in ``took_s`` whose time per token is close to the best."""
    min_s = min(seconds / rows for rows, seconds in took_s.items())
    return min(rows for rows, seconds in took_s.items() if seconds <= EFFICIENT * min_s * rows)


def _piece_s(plan: Plan, question: Instance, rows: int, *, behind: int) -> float:
    """Seconds that a piece of ``rows`` tokens, after ``behind`` tokens of its prompt, takes on the slowest device."""
    asked = question.with_rows(rows)
    prompt_tokens = max(2 * behind, rows)  # on average a prompt's tokens follow half of it
    asked = replace(asked, workload=replace(asked.workload, prompt_tokens=prompt_tokens))
    return max(each.prefill_s for each in evaluate(plan, asked).devices)


def rows_of_chunks(plan: Plan, question: Instance, sequences: int, *, asked: bool) -> int:
    """Largest number of tokens in a chunk of a prompt, where chunks cannot be cut into pieces.

    Other requests wait for each chunk. If ``sequences`` was ``asked`` for, a chunk takes no longer than one token of
    all other requests, unless its time per token would be much worse than in larger chunks. Otherwise one request is
    the expected case, and its prompt is faster in larger chunks. Each chunk reads everything that streams, and a GPU
    computes a few tokens not much faster than many.
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
    """Smallest chunk, of at most ``rows`` tokens, that ends where another message begins: with more chunks more of a
    repeated prompt is found already computed."""
    return max(1, rows // 2) if _needs_large(plan) else min(MIN_ROWS, rows)


def _profiles(plan: Plan, question: Instance) -> list[DeviceProfile]:
    return [device for device in question.devices if device.device in plan.devices]


def _needs_large(plan: Plan) -> bool:
    return bool(plan.streaming or plan.prefill_offload) or plan.gpu_layers > 0
