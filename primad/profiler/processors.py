"""Measure the CPU, and the GPU if llama.cpp can use one."""

from __future__ import annotations

import contextlib
import logging
import os
import platform
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final, Protocol

import psutil

from halda import CpuProfile, GpuProfile, OffloadSpeed, RoutingCost
from primad.engine.devices import GpuDevice
from primad.errors import EngineError
from primad.profiler.beside import VOCABULARIES, head_costs, measure_wake
from primad.profiler.effort import Budget, Effort
from primad.profiler.routing import measure_routing
from primad.profiler.shapes import (
    measure_attention,
    measure_caches,
    measure_exact,
    measure_rows,
    measure_states,
    measure_widths,
)
from primad.profiler.speeds import (
    MAIN,
    Bench,
    RetryBudget,
    answered,
    measure_offload,
    measure_step,
    measure_types,
    together,
)
from primad.profiler.synthetic import BIG
from primad.profiler.trial_messages import HeadTimes, TimeHead
from primad.profiler.trials import child_trials
from primad.settings.profiles import Implausible, check_gpu, with_bounded_costs
from primad.system.processors import Others, usable_cores

logger = logging.getLogger(__name__)


class HeadTrials(Protocol):
    """Times a head's work in a separate process; a text instead of a result says how the process ended."""

    def head(self, task: TimeHead) -> HeadTimes | str:
        """Time a head's work besides computing."""


Advance = Callable[[str], None]
"""Called before each step with what is measured now."""

_CPU_WEIGHTS: Final = BIG.weights
"""Weights of a trial on the CPU: the time of one big layer is large compared with the fixed costs."""
_GPU_WEIGHTS: Final = 350_000_000
"""Weights of a trial on a GPU: more than its caches hold, since nothing sweeps them."""
_GPU_MODEL_BYTES: Final = 256 << 20
_GPU_TIMEOUT_S: Final = 40.0
"""A longer trial counts as hung: trials are sized for some seconds, most of them spent compiling shaders."""
_OF_GPU_RUN: Final = 0.03
"""Share of a GPU's time for a run of one row."""
_OF_OFFLOAD: Final = 0.2
"""Share of a GPU's time for measuring prefill offload, unless the effort is small."""
_GPU_RUN_STEPS: Final = 7
"""Steps of a run, as in ``trial.py``, with the first one that is not timed."""
_SWEEP_BYTES: Final = 96 << 20
_MAX_SWEEP_BYTES: Final = 256 << 20
_WAKE_BYTES: Final = 32 << 20
_OF_THREADS: Final = 0.02
"""Share of all time for each of the four trials that find the best number of threads."""
_MIN_CONTEXT_BYTES: Final = 64 << 20
"""No driver takes less."""
_OF_PATIENCE: Final = 0.15
"""Share of all time for repeating disturbed trials."""
_OF_BESIDE: Final = 0.025
"""Share of all time for measuring a head's work besides computing, and the cost of waking after another process."""
_OF_SHAPES: Final = 0.4
"""Share of the types' time for layers of other shapes."""
_ENOUGH: Final = 0.4
"""Share of all time that must be left for them."""
_TOKENS: Final = 40
_WORTH: Final = 0.95
"""Fewer threads leave cores to the owner, but must be faster by this factor, since timings are noisy."""
_OTHERS: Final = 0.25
"""If other programs keep more of a core busy, fewer threads look faster than they are without those programs."""


def measure_cpu(
    folder: Path, pinned: int | None, advance: Advance, effort: Effort = Effort(), budget: Budget | None = None
) -> CpuProfile:
    """The profile of the CPU with ``pinned`` threads, or with the best counts that were tried.

    Its types are measured within the ``budget``, by default the whole time of ``effort``. Trials write to ``folder``.
    Raises ``EngineError`` when llama.cpp fails, ``OSError`` when the files cannot be written.
    """
    advance("threads")
    budget = budget or Budget(effort.seconds)
    patience, seconds = RetryBudget(_OF_PATIENCE * budget.left_s), _OF_THREADS * budget.left_s
    counts = [pinned] if pinned is not None else sorted({usable_cores(), max(1, usable_cores() // 2)}, reverse=True)
    tried = {}
    others = Others()
    for count in counts if len(counts) > 1 else ():
        with _cpu_bench(folder, count, count, effort, budget, patience) as bench:
            decode = bench.time_decode(BIG, MAIN, (False,), seconds)[0]
            tried[count] = answered(together(decode, bench.time_rows(MAIN, (False,), seconds)[0]))
    threads = batch_threads = counts[0]
    if tried:
        tokens = {count: statistics.median(timings.decode_s) for count, timings in tried.items()}
        rows = {count: statistics.median(timings.prefill_s) / timings.prefill_rows for count, timings in tried.items()}
        others_cores = others.cores()
        threads, batch_threads = fastest(tokens, others_cores), fastest(rows, others_cores)
    # Measurements that a quick effort or a slow device has no time for get typical values.
    has_time = not effort.is_quick and budget.left_s > _ENOUGH * effort.seconds
    beside = _measure_beside(folder, threads, _OF_BESIDE * effort.seconds) if has_time else {}
    with _cpu_bench(folder, threads, batch_threads, effort, budget, patience) as bench:
        advance("layers")
        step_s = measure_step(bench)
        reserve = 0.0 if effort.is_quick else _OF_SHAPES * budget.left_s
        types = replace(bench, budget=budget.less(reserve))
        layer_s, speeds = measure_types(types, step_s, advance)
        caches = measure_caches(bench, speeds[0], step_s, layer_s)
        attention = measure_attention(bench, speeds[0])
        exact_states = measure_states(bench)
        row_s = measure_rows(bench, speeds[0], step_s, layer_s)
        widths = measure_widths(bench, speeds[0], step_s, layer_s)
        found = CpuProfile(
            name=cpu_name(),
            cores=psutil.cpu_count(logical=False) or os.cpu_count() or 1,
            threads=threads,
            batch_threads=batch_threads,
            step_s=step_s,
            layer_s=layer_s,
            speeds=speeds,
            widths=widths,
            row_s=row_s,
            exact_rows=(),
            exact_states=exact_states,
            caches=caches,
            routing=RoutingCost(),
            **attention,
            **beside,
        )
        found = replace(found, routing=measure_routing(bench, found))
        found = replace(found, exact_rows=measure_exact(bench, speeds))  # of rarer types if time is left
    return with_bounded_costs(found)


def _measure_beside(folder: Path, threads: int, seconds: float) -> dict[str, float]:
    """The figures of a ``CpuProfile`` about a head's work and shared cores."""
    with child_trials(threads) as one:
        token_s, value_s = _measure_head(one, seconds)
        with child_trials(threads, place=1) as other:
            wake_s = measure_wake(folder, one, other, threads, _wake_bytes(), Budget(seconds))
    return {"token_s": token_s, "value_s": value_s, "wake_s": wake_s}


def _measure_head(trials: HeadTrials, seconds: float) -> tuple[float, float]:
    """Seconds of a token and of each token of the vocabulary. Raises ``EngineError`` if the child ends without a result."""
    medians = []
    for vocabulary in VOCABULARIES:
        answer = trials.head(
            TimeHead(vocabulary=vocabulary, tokens=_TOKENS, sweep_bytes=sweep_bytes(), seconds=seconds / 2)
        )
        if isinstance(answer, str):
            raise EngineError(f"a head's work cannot be timed on this device: {answer}")
        medians.append(statistics.median(answer.token_s))
    return head_costs((medians[0], medians[1]))


@contextlib.contextmanager
def _cpu_bench(
    folder: Path, threads: int, batch_threads: int, effort: Effort, budget: Budget, patience: RetryBudget
) -> Iterator[Bench]:
    with child_trials(max(threads, batch_threads)) as trials:
        yield Bench(
            trials=trials,
            folder=folder,
            threads=threads,
            batch_threads=batch_threads,
            gpu=None,
            weights=_CPU_WEIGHTS,
            model_bytes=sweep_bytes(),
            sweep_bytes=sweep_bytes(),
            effort=effort,
            budget=budget,
            patience=patience,
        )


def fastest(seconds: dict[int, float], others_cores: float) -> int:
    """The fastest number of threads: the largest, unless another is clearly faster and not only because other programs
    kept ``others_cores`` busy."""
    maximum = max(seconds)
    if others_cores > _OTHERS:
        return maximum
    best = min(seconds, key=lambda count: seconds[count])
    return best if seconds[best] < _WORTH * seconds[maximum] else maximum


def sweep_bytes() -> int:
    """Bytes to read so that no part of a layer stays in the caches: more than the last-level cache, within bounds."""
    return min(max(_SWEEP_BYTES, 2 * _cache_bytes()), _MAX_SWEEP_BYTES)


def _wake_bytes() -> int:
    """Bytes of windows of two processes that compute in turn: the caches hold both from step to step, or neither.

    The smaller they are, the less of their time is noise; waking is a small part of it.
    """
    return _WAKE_BYTES if _cache_bytes() >= 4 * _WAKE_BYTES else sweep_bytes()


def _cache_bytes() -> int:
    """Bytes of the largest cache; 0 if unknown."""
    largest = 0
    for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        try:
            text = path.read_text().strip()
            largest = max(
                largest, int(text.rstrip("KMG")) * {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}.get(text[-1:], 1)
            )
        except (OSError, ValueError):
            continue
    return largest


def measure_gpu(
    folder: Path, device: GpuDevice, threads: int, effort: Effort = Effort(), budget: Budget | None = None
) -> GpuProfile | str:
    """The profile of ``device``, or a text on why it cannot be used; ``effort`` and ``budget`` as for a CPU.

    The first trial is small, and later ones fit into the time: a GPU may be slow, and a driver may hang or end the
    trial. The rate of its memory is the best rate of any type, since a decode step only has to read. Raises
    ``OSError`` when the files of the trials cannot be written.
    """
    budget = budget or Budget(effort.seconds)
    own = budget.less(0.0 if effort.is_quick else _OF_OFFLOAD * budget.left_s)
    with child_trials(threads, timeout_s=_GPU_TIMEOUT_S, gpu=True) as trials:
        bench = Bench(
            trials=trials,
            folder=folder,
            threads=threads,
            batch_threads=threads,
            gpu=device.id,
            weights=1,
            model_bytes=1,
            sweep_bytes=8,
            effort=effort,
            budget=own,
            patience=RetryBudget(_OF_PATIENCE * own.left_s),
        )
        try:
            step_s = measure_step(bench)
            bench = _affordable(bench, step_s)
            layer_s, speeds = measure_types(bench, step_s, lambda _: None)
        except EngineError as exc:
            return str(exc)
    found = GpuProfile(
        id=device.id,
        name=device.name,
        backend=device.backend,
        vram_total_bytes=device.vram_total_bytes,
        vram_available_bytes=device.vram_available_bytes,
        unified_memory=device.unified_memory,
        vram_read_bytes_per_s=max(speed.decode_bytes_per_s for speed in speeds),
        step_s=step_s,
        layer_s=layer_s,
        speeds=speeds,
        context_bytes=context_bytes(bench.taken_bytes, device),
        pci=device.pci,
    )
    found = with_bounded_costs(found)
    try:
        check_gpu(found)
    except Implausible as exc:
        return f"it was measured, but {exc}"
    if effort.is_quick:
        return found
    with child_trials(threads, timeout_s=_GPU_TIMEOUT_S, gpu=True) as trials:
        found = replace(found, routing=measure_routing(replace(bench, trials=trials, budget=budget), found))
        helper = replace(bench, trials=trials, sweep_bytes=sweep_bytes(), budget=budget, offloads=True)
        return _with_offload(found, measure_offload(helper, [speed.type for speed in speeds]))


def context_bytes(taken: Sequence[int], device: GpuDevice) -> int:
    """GPU memory of a process besides weights and KV cache, from what trials took; 0 if none shows it.

    The small buffers of trials are included. Since other programs start and end meanwhile, it is the median, within
    the bounds for a driver.
    """
    if device.unified_memory or not taken:
        return 0
    found = int(statistics.median(taken))
    return min(max(found, _MIN_CONTEXT_BYTES), device.vram_total_bytes // 8) if found > 0 else 0


def _with_offload(gpu: GpuProfile, prefill_offload: tuple[OffloadSpeed, ...]) -> GpuProfile:
    """``gpu`` with its measured prefill offload, unless the figures are implausible."""
    found = replace(gpu, prefill_offload=prefill_offload)
    try:
        check_gpu(found)
    except Implausible as exc:
        logger.warning("%s does not help with prompts: it was measured, but %s", gpu.name, exc)
        return gpu
    return found


def _affordable(bench: Bench, step_s: float) -> Bench:
    """``bench`` with as large windows as the GPU has time for, judged by one layer. Raises ``EngineError``."""
    seconds = _OF_GPU_RUN * max(bench.budget.left_s, 1.0)
    answer = answered(bench.time_decode(BIG, MAIN, (False,), seconds)[0])
    layers = max(1, int(seconds / _GPU_RUN_STEPS / max(statistics.median(answer.decode_s) - step_s, 1e-9)))
    size = BIG.weight_bytes(MAIN)
    return replace(
        bench, weights=min(_GPU_WEIGHTS, layers * BIG.weights), model_bytes=min(_GPU_MODEL_BYTES, layers * size)
    )


def cpu_name() -> str:
    """The processor's own name."""
    if platform.system() == "Linux":
        try:
            lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
        except OSError:
            lines = []
        for line in lines:
            if line.startswith(("model name", "Model\t", "Hardware")):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()
