"""From timed windows to the figures of a profile: the cost of a window, the cost of a layer, and a rate for each type.

The model of time is ``step_s + layers * layer_s + bytes / rate`` for one row. Two windows of tiny layers, which differ
only in the number of layers, give ``step_s``. For each type a window of middle-sized layers and one of big ones give a line:
its slope is the rate, its value at no bytes the fixed cost of a layer, of which the median over the types is kept.
(Tiny layers would not do: their matrices are too small for all threads.) For one row windows are larger than the
caches, as a model is; for more rows, which take longer to compute than to read, one big layer suffices.
"""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

import msgspec

from halda import PREFILL_ROWS, OffloadSpeed, RowSpeed, StateKind, TypeRows, TypeSpeed
from primad.errors import EngineError
from primad.profiler.effort import TYPES, Budget, Effort
from primad.profiler.state_windows import WIDTH as STATE_WIDTH
from primad.profiler.state_windows import write_state_window
from primad.profiler.synthetic import BIG, MIDDLE, SMALL, LayerShape, write_window
from primad.profiler.trial import FEWEST_ROWS
from primad.profiler.trial_messages import CompareRows, TimeWindow, TrialTimes
from primad.profiler.trials import Trials

logger = logging.getLogger(__name__)

MAIN: Final = TYPES[0]
SMALL_LAYERS: Final = (2, 12)
ROW_COUNTS: Final = (2, 4, 16, 128)
"""Counts of rows that the main type is measured with besides 1, ``BATCH_ROWS`` and a chunk of a prompt."""
FEW_COUNTS: Final = ROW_COUNTS[:2]
"""Row counts timed for every type, as drafts use them: some kernels compute a second row as a whole tile, others as one
more row."""
WORTH: Final = 0.97
"""Extra buffers double the memory that a window holds: a token or a prompt must take 3 % less with them."""
_MIN_S: Final = 1e-6
_MIN_SHARE: Final = 0.5
_MIN_SHARE_GPU: Final = 0.1
"""Minimum share of the time of big layers for reading their weights; only a disturbed trial of fixed costs gives less.
"""
_MAX_READ: Final = 0.2
"""With fewer rows than a chunk, reading weights counts as at most this share of the time: it may overlap with
computing."""
_STEADY: Final = 0.25
"""A larger spread of the runs means that something else was running: the trial is repeated if ``RetryBudget`` allows."""
_OF_ROW: Final = 0.06
_OF_ROWS: Final = 0.2
"""Shares of a type's time in which one of its three trials with one row is run, and one of two with many; their windows are
written and loaded besides."""
_OF_CHUNK: Final = 0.02
"""Share of all time that a chunk of a prompt may take in a trial of the main type, in which most weights are: the few rows
that a slow device has time for otherwise take up to a tenth more for each."""
_RUN_S: Final = 0.1
"""With several rows, a processor's run of one row count ends after this time."""
_OF_OFFLOAD: Final = 0.5
"""Share of a type's time for timing prefill offload; writing and loading the windows take additional time."""
_OF_STEP: Final = 0.03
"""Share of all time for running a window of tiny layers."""
_OF_FIRST: Final = 0.6
"""Share of all types' time for their first trials; the rest is for repeating trials with one row."""
_MAX_AGAIN: Final = 5
"""Maximum number of repeated timings of a type."""


class RetryBudget:
    """Seconds left for repeating disturbed trials."""

    def __init__(self, seconds: float) -> None:
        self._left_s = seconds

    def is_left(self) -> bool:
        """Whether another trial may be repeated."""
        return self._left_s > 0

    @contextmanager
    def used(self) -> Iterator[None]:
        """Subtract the time that the block takes."""
        start = time.monotonic()
        yield
        self._left_s -= time.monotonic() - start


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """Where and how windows are timed: on the CPU, or entirely on the GPU that llama.cpp calls ``gpu``; if that
    ``offloads``, in RAM with prompts on the GPU.

    About ``weights`` weights stand for a model where many rows are computed, ``model_bytes`` where one row is.
    ``sweep_bytes`` are read between steps of windows that may stay in caches; ``folder`` holds the files. The types of
    ``effort`` are measured as far as the ``budget`` allows.
    """

    trials: Trials
    folder: Path
    threads: int
    batch_threads: int
    gpu: str | None
    weights: int
    model_bytes: int
    sweep_bytes: int
    effort: Effort
    budget: Budget
    patience: RetryBudget
    offloads: bool = False
    taken_bytes: list[int] = field(default_factory=list)
    """GPU memory that many rows took in each trial, in addition to weights."""

    @property
    def on_gpu(self) -> bool:
        """Whether windows are on a GPU."""
        return self.gpu is not None and not self.offloads

    def layers_to_read(self, shape: LayerShape, kind: str) -> int:
        """The number of layers that no cache can hold."""
        return -(-self.model_bytes // shape.weight_bytes(kind))

    @property
    def layers_to_compute(self) -> int:
        """The number of big layers with which fixed costs hardly matter when many rows are computed."""
        return self.layers_of(BIG)

    def layers_of(self, shape: LayerShape) -> int:
        """The number of layers that have the weights of a trial with many rows."""
        return -(-self.weights // shape.weights)

    def time_decode(
        self, shape: LayerShape, kind: str, extra: Sequence[bool], seconds: float, layers: int | None = None
    ) -> list[TrialTimes | str]:
        """Time one row through ``layers`` of ``kind`` (None: more than caches hold), for each setting of ``extra``
        buffers.

        Runs of each setting are repeated for ``seconds``, at least once.
        """
        layers = layers or self.layers_to_read(shape, kind)
        return self._time(shape, kind, layers, extra, seconds, sweep_bytes=0, many_rows=False)

    def time_small(self, layers: int, seconds: float) -> TrialTimes | str:
        """Time one row through ``layers`` tiny layers, the caches swept before each step."""
        return self._time(SMALL, MAIN, layers, (False,), seconds, sweep_bytes=self.sweep_bytes, many_rows=False)[0]

    def time_rows(
        self, kind: str, extra: Sequence[bool], seconds: float, shape: LayerShape = BIG, chunk_s: float = 0.0
    ) -> list[TrialTimes | str]:
        """Time many rows through layers of ``kind`` with the weights of a trial, for each setting of ``extra``; a chunk
        may always take ``chunk_s``."""
        return self._time(
            shape,
            kind,
            self.layers_of(shape),
            extra,
            seconds,
            sweep_bytes=self.sweep_bytes,
            many_rows=True,
            chunk_s=chunk_s,
        )

    def chunk_s(self, kind: str) -> float:
        """The time that a chunk may take in a trial of a type."""
        return 0.0 if self.on_gpu or kind != MAIN else _OF_CHUNK * self.effort.seconds

    def time_cached(
        self, shape: LayerShape, kind: str, layers: int, cached: int, seconds: float, *, flash: bool, rows: int
    ) -> TrialTimes | str:
        """Time ``rows`` of a sequence after ``cached`` tokens through a few layers, which may stay in caches."""
        return self._time(
            shape,
            kind,
            layers,
            (False,),
            seconds,
            sweep_bytes=0,
            many_rows=False,
            cached=cached,
            flash=flash,
            rows=rows,
        )[0]

    def exact_rows(self, kind: str, *, extra: bool) -> TypeRows:
        """Which steps of several rows a layer of type ``kind`` computes bit for bit like single rows."""
        with TemporaryDirectory(prefix="window-", dir=self.folder) as name:
            window = write_window(Path(name), MIDDLE, kind, 1, gpu_layers=1 if self.on_gpu else 0)
            window = msgspec.structs.replace(window, extra_buffers=extra)
            found = self.trials.compare(CompareRows(window=window, width=MIDDLE.width, threads=self.threads))
        if isinstance(found, str):
            return TypeRows(type=kind, rows=1)
        return TypeRows(type=kind, rows=found.rows, piece_rows=found.piece_rows, replay_rows=found.replay_rows)

    def exact_states(self, state: StateKind, kind: str) -> TypeRows:
        """``exact_rows`` for layers with such a ``state``, whose matrices are of type ``kind``."""
        with TemporaryDirectory(prefix="window-", dir=self.folder) as name:
            window = write_state_window(Path(name), state, kind)
            task = CompareRows(window=window, width=STATE_WIDTH, threads=self.threads, has_state=True)
            found = self.trials.compare(task)
        if isinstance(found, str):
            return TypeRows(type=state, rows=1)
        return TypeRows(type=state, rows=found.rows, piece_rows=found.piece_rows, replay_rows=found.replay_rows)

    def _time(
        self,
        shape: LayerShape,
        kind: str,
        layers: int,
        extra: Sequence[bool],
        seconds: float,
        *,
        sweep_bytes: int,
        many_rows: bool,
        cached: int = 0,
        flash: bool = True,
        rows: int = 1,
        chunk_s: float = 0.0,
    ) -> list[TrialTimes | str]:
        with TemporaryDirectory(prefix="window-", dir=self.folder) as name:
            window = write_window(Path(name), shape, kind, layers, gpu_layers=layers if self.on_gpu else 0)
            window = msgspec.structs.replace(
                window, assignment=replace(window.assignment, prefill_offload=self.offloads)
            )
            found = [
                self._steadily(
                    TimeWindow(
                        window=msgspec.structs.replace(window, extra_buffers=setting),
                        width=shape.width,
                        threads=self.threads,
                        batch_threads=self.batch_threads,
                        sweep_bytes=sweep_bytes,
                        many_rows=many_rows,
                        seconds=seconds,
                        counts=self._counts(kind) if many_rows else (),
                        cached=cached,
                        flash=flash,
                        rows=rows,
                        gpu=self.gpu or "",
                        run_s=seconds if self.gpu is not None else _RUN_S if many_rows else None,
                        chunk_s=chunk_s,
                    )
                )
                for setting in extra
            ]
        if many_rows and self.on_gpu:
            weights = layers * shape.weight_bytes(kind)
            self.taken_bytes.extend(each.taken_bytes - weights for each in found if not isinstance(each, str))
        return found

    def _counts(self, kind: str) -> tuple[int, ...]:
        if self.effort.is_quick:
            return ()
        return ROW_COUNTS if kind == MAIN else FEW_COUNTS

    def _steadily(self, task: TimeWindow) -> TrialTimes | str:
        """Time ``task``, again while its runs disagree; disturbances only add, so each phase keeps its best trial."""
        best = self.trials.time(task)
        while not isinstance(best, str) and not _is_steady(best) and self.patience.is_left():
            with self.patience.used():
                more = self.trials.time(task)
            if isinstance(more, str):
                return more
            if more.prefill_rows != best.prefill_rows:  # a faster trial may have computed more rows at a time
                best = more if more.prefill_rows > best.prefill_rows else best
                continue
            best = TrialTimes(
                decode_s=_better(best.decode_s, more.decode_s),
                batch_s=_better(best.batch_s, more.batch_s),
                prefill_s=_better(best.prefill_s, more.prefill_s),
                prefill_rows=best.prefill_rows,
                few_s=min(best.few_s, more.few_s),
                counts_s=tuple(map(min, zip(best.counts_s, more.counts_s, strict=True))),
                taken_bytes=min(best.taken_bytes, more.taken_bytes),
            )
        return best


def _better(one: tuple[float, ...], other: tuple[float, ...]) -> tuple[float, ...]:
    return min(one, other, key=statistics.median) if one and other else one


def _is_steady(timings: TrialTimes) -> bool:
    return all(spread(times) <= _STEADY for times in (timings.decode_s, timings.prefill_s) if times)


def answered(timings: TrialTimes | str) -> TrialTimes:
    """The timings. Raises ``EngineError`` if the child ended without them."""
    if isinstance(timings, str):
        raise EngineError(f"llama.cpp cannot compute a window on this device: {timings}")
    return timings


def measure_step(bench: Bench) -> float:
    """Seconds that a step of one row costs a window besides its layers.

    It is a difference of short times, so the minimum of the runs counts: disturbances only add time. Raises
    ``EngineError`` when llama.cpp fails, ``OSError`` when the files cannot be written.
    """
    few, many = SMALL_LAYERS
    seconds = bench.budget.left_s * _OF_STEP
    few_s, many_s = (min(answered(bench.time_small(layers, seconds)).decode_s) for layers in SMALL_LAYERS)
    return max(_MIN_S, few_s - few * max(0.0, many_s - few_s) / (many - few))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Trial:
    """The timings of one type: big layers in their best setting, and middle-sized ones if they were timed.

    ``plain`` are big layers without extra buffers, where those are faster with them.
    """

    kind: str
    big: TrialTimes
    extra: bool
    plain: TrialTimes | None
    middle: TrialTimes | None


_Timings = list[TrialTimes | None]
"""The times of a trial of a type, one per run; None first if it did not run."""


def measure_types(bench: Bench, step_s: float, advance: Callable[[str], None]) -> tuple[float, tuple[TypeSpeed, ...]]:
    """The fixed seconds of a layer, and the speed of every type that llama.cpp computes here and for which time is left.

    A type gets extra buffers if a token or a prompt is faster with them; a quick effort does not try them. Its speed
    without them is then included too, and the plan decides. The first type is always measured. Raises ``EngineError`` if
    no type is computed, ``OSError`` if the files cannot be written.
    """
    trials = _again(bench, _first_trials(bench, advance))
    lines = [
        fit_layer(bench, trial.kind, step_s, trial.middle, trial.big) for trial in trials if trial.middle is not None
    ]
    layer_s = max(_MIN_S, statistics.median(lines)) if lines else _MIN_S
    speeds = [speed(bench, trial.kind, trial.big, step_s, layer_s, extra_buffers=trial.extra) for trial in trials]
    plain = {
        trial.kind: speed(bench, trial.kind, trial.plain, step_s, layer_s, extra_buffers=False)
        for trial in trials
        if trial.plain is not None
    }
    return layer_s, tuple(replace(each, plain=plain.get(each.type)) for each in speeds)


def _first_trials(bench: Bench, advance: Callable[[str], None]) -> list[_Trial]:
    """Each type once, as far as time lasts."""
    trials: list[_Trial] = []
    types, why = bench.effort.types, ""
    settings = (False,) if bench.on_gpu or bench.effort.is_quick else (False, True)
    took_s, later_s = 0.0, (1 - _OF_FIRST) * max(0.0, bench.budget.left_s)
    for number, kind in enumerate(types):
        left_s = bench.budget.left_s
        if trials and left_s < took_s:
            break
        advance(kind)
        share_s = max(0.0, left_s - later_s) / (len(types) - number)
        decode = bench.time_decode(BIG, kind, settings, _OF_ROW * share_s)
        has_one = any(isinstance(each, TrialTimes) for each in decode)
        rows = bench.time_rows(kind, settings, _OF_ROWS * share_s, chunk_s=bench.chunk_s(kind)) if has_one else decode
        plain, *more = [together(one, many) for one, many in zip(decode, rows, strict=True)]
        chosen, extra = choose(plain, more[0] if more else "not tried")
        if isinstance(chosen, str):
            logger.warning("%s is not measured: %s", kind, chosen)
            why = why or chosen
            continue
        middle = bench.time_decode(MIDDLE, kind, (extra,), _OF_ROW * share_s)[0]
        took_s = left_s - bench.budget.left_s
        trials.append(
            _Trial(
                kind=kind,
                big=chosen,
                extra=extra,
                plain=plain if extra and isinstance(plain, TrialTimes) else None,
                middle=middle if isinstance(middle, TrialTimes) else None,
            )
        )
    if not trials:
        raise EngineError(
            f"llama.cpp cannot compute any quantisation type on this device: {why}; reinstall llama-cpp-python"
        )
    return trials


def _again(bench: Bench, trials: list[_Trial]) -> list[_Trial]:
    """``trials`` with each timed again and again while time is left.

    Other work on the machine slows it for seconds, and would otherwise count as the speed of the type that was being
    timed.
    """
    seconds = _OF_ROW * _OF_FIRST * max(0.0, bench.budget.left_s) / len(trials)
    found: list[tuple[_Timings, ...]] = [
        ([trial.big], [trial.big], [trial.middle], [trial.plain], [trial.plain]) for trial in trials
    ]
    took_s = 0.0
    for _ in range(0 if bench.effort.is_quick else _MAX_AGAIN):
        for trial, (big, rows, middle, plain, plain_rows) in zip(trials, found, strict=True):
            left_s = bench.budget.left_s
            if left_s <= took_s:
                break
            settings = (trial.extra,) if trial.plain is None else (trial.extra, False)
            for several, timings in (
                ((big, plain), bench.time_decode(BIG, trial.kind, settings, seconds)),
                (
                    (rows, plain_rows),
                    bench.time_rows(trial.kind, settings, seconds, chunk_s=bench.chunk_s(trial.kind)),
                ),
                ((middle,), bench.time_decode(MIDDLE, trial.kind, (trial.extra,), seconds)),
            ):
                for times, timing in zip(several, timings, strict=False):
                    if isinstance(timing, TrialTimes) and times[0] is not None:
                        times.append(timing)
            took_s = max(took_s, left_s - bench.budget.left_s)
    return [
        replace(
            trial,
            big=_with_rows(_with_row(trial.big, big), rows),
            plain=None if trial.plain is None else _with_rows(_with_row(trial.plain, plain), plain_rows),
            middle=None if trial.middle is None else _with_row(trial.middle, middle),
        )
        for trial, (big, rows, middle, plain, plain_rows) in zip(trials, found, strict=True)
    ]


def _with_row(first: TrialTimes, times: Sequence[TrialTimes | None]) -> TrialTimes:
    """``first`` with the median of each of ``times`` with one row in place of its runs, if there are several."""
    medians = tuple(statistics.median(each.decode_s) for each in times if each is not None)
    return first if len(medians) < 2 else msgspec.structs.replace(first, decode_s=medians)


def _with_rows(first: TrialTimes, times: Sequence[TrialTimes | None]) -> TrialTimes:
    """``_with_row`` for several rows; a chunk of a prompt counts if it had the same number of rows."""
    every = [each for each in times if each is not None]
    alike = [each for each in every if each.prefill_rows == first.prefill_rows]
    if len(every) < 2:
        return first
    return msgspec.structs.replace(
        first,
        batch_s=tuple(statistics.median(each.batch_s) for each in every),
        prefill_s=tuple(statistics.median(each.prefill_s) for each in alike),
        few_s=statistics.median(each.few_s for each in every),
        counts_s=tuple(map(statistics.median, zip(*(each.counts_s for each in every), strict=False))),
    )


def fit_layer(bench: Bench, kind: str, step_s: float, middle: TrialTimes, big: TrialTimes) -> float:
    """Seconds of a layer of type ``kind`` without bytes, from the times of middle-sized and of big layers."""
    points = []
    for shape, timings in ((MIDDLE, middle), (BIG, big)):
        layers = bench.layers_to_read(shape, kind)
        points.append((shape.weight_bytes(kind), (statistics.median(timings.decode_s) - step_s) / layers))
    (few_bytes, few_s), (many_bytes, many_s) = points
    return few_s - few_bytes * max(0.0, many_s - few_s) / (many_bytes - few_bytes)


def together(decode: TrialTimes | str, rows: TrialTimes | str) -> TrialTimes | str:
    """Both timings of one setting, or why one of them is missing."""
    if isinstance(decode, str):
        return decode
    if isinstance(rows, str):
        return rows
    return TrialTimes(
        decode_s=decode.decode_s,
        batch_s=rows.batch_s,
        prefill_s=rows.prefill_s,
        prefill_rows=rows.prefill_rows,
        few_s=rows.few_s,
        counts_s=rows.counts_s,
    )


def choose(plain: TrialTimes | str, extra: TrialTimes | str) -> tuple[TrialTimes | str, bool]:
    """The timing with extra buffers and True where a token or a prompt takes less with them, else the one without."""
    if isinstance(extra, str):
        return plain, False
    if isinstance(plain, str) or any(
        with_them < WORTH * without for with_them, without in zip(_rates(extra), _rates(plain), strict=True)
    ):
        return extra, True
    return plain, False


def _rates(timings: TrialTimes) -> tuple[float, float]:
    """Seconds of a single row, and of a row of a prompt."""
    return statistics.median(timings.decode_s), statistics.median(timings.prefill_s) / timings.prefill_rows


def speed(
    bench: Bench, kind: str, timings: TrialTimes, step_s: float, layer_s: float, *, extra_buffers: bool
) -> TypeSpeed:
    """The rates of type ``kind``, after subtracting fixed costs."""
    layer_bytes, to_read, to_compute = BIG.weight_bytes(kind), bench.layers_to_read(BIG, kind), bench.layers_to_compute
    rows = timings.prefill_rows

    def weights_s(times: Sequence[float], layers: int) -> float:
        median = statistics.median(times)
        return max(median - step_s - layers * layer_s, median * (_MIN_SHARE_GPU if bench.on_gpu else _MIN_SHARE))

    decode_bytes_per_s = to_read * layer_bytes / weights_s(timings.decode_s, to_read)
    prefill_s = weights_s(timings.prefill_s, to_compute)
    # A processor reads the weights once per chunk, whatever its number of rows.
    read_s = 0.0 if bench.on_gpu else min(_MAX_READ * prefill_s, to_compute * layer_bytes / decode_bytes_per_s)
    chunk_flop = _prefill_flop(bench, PREFILL_ROWS)
    chunk_s = read_s + (prefill_s - read_s) * chunk_flop / _prefill_flop(bench, rows)
    counted = {**dict(zip(ROW_COUNTS, timings.counts_s, strict=False)), FEWEST_ROWS: timings.few_s}
    counted[rows] = statistics.median(timings.prefill_s)  # fewer than a chunk if a chunk takes too long
    return TypeSpeed(
        type=kind,
        decode_bytes_per_s=decode_bytes_per_s,
        batch_bytes_per_s=to_compute * layer_bytes / weights_s(timings.batch_s, to_compute),
        prefill_flop_per_s=chunk_flop / chunk_s,
        extra_buffers=extra_buffers,
        decode_spread=spread(timings.decode_s),
        prefill_spread=spread(timings.prefill_s),
        rows=tuple(
            RowSpeed(rows=count, bytes_per_s=to_compute * layer_bytes / weights_s((seconds,), to_compute))
            for count, seconds in counted.items()
            if seconds and count <= rows and count < PREFILL_ROWS
        ),
    )


def measure_offload(bench: Bench, kinds: Sequence[str]) -> tuple[OffloadSpeed, ...]:
    """How fast the GPU of ``bench`` computes prompts through layers in RAM, of those of ``kinds`` for which time is left.

    Empty if a trial fails: such a GPU does no prefill offload. Raises ``OSError`` when the files cannot be written.
    """
    found: list[OffloadSpeed] = []
    took_s = 0.0
    for number, kind in enumerate(kinds):
        left_s = bench.budget.left_s
        if found and left_s < took_s:
            break
        timings = bench.time_rows(kind, (False,), _OF_OFFLOAD * max(0.0, left_s) / (len(kinds) - number))[0]
        if isinstance(timings, str):
            logger.warning("%s does not help with prompts: %s", bench.gpu, timings)
            return ()
        took_s = left_s - bench.budget.left_s
        found.append(_offload_speed(bench, kind, timings))
    return tuple(found)


def _offload_speed(bench: Bench, kind: str, timings: TrialTimes) -> OffloadSpeed:
    """The rates of type ``kind``, including all costs of a window, since copies are much of them."""
    return OffloadSpeed(
        type=kind,
        few_bytes_per_s=bench.layers_to_compute * BIG.weight_bytes(kind) / timings.few_s,
        prefill_flop_per_s=_prefill_flop(bench, timings.prefill_rows) / statistics.median(timings.prefill_s),
    )


def _prefill_flop(bench: Bench, rows: int) -> int:
    """FLOP of ``rows`` rows. Attention is computed for the whole square of rows and columns, masked or not."""
    return bench.layers_to_compute * rows * (2 * BIG.weights + 4 * rows * BIG.width)


def spread(times: Sequence[float]) -> float:
    """(Largest - smallest) / median."""
    return (max(times) - min(times)) / statistics.median(times)
