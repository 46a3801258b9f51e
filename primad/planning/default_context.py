"""Choose the default context: what agents need, unless that costs too much. Pure.

Agents begin with thousands of tokens of instructions and tools. So the default is ``AGENT_CONTEXT_TOKENS`` for each
concurrent request, or all that the model was trained with. The small ``SMALL_CONTEXT_TOKENS`` is used instead where
otherwise layers would stream that stay in memory with it, or where a token or the objective would take more than twice
as long; ``too_small_for`` then says which clients do not fit.

Usually only the plan for agents is solved. Where more memory would improve it, the plan with the small context is
solved with a short time limit for comparison: this makes planning 45 models on the devices of ``mixed-home`` a third
slower.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Final

from halda import DeviceProfile, Infeasible, ModelProfile, Plan, Solution, Workload
from halda.instance import Instance
from primad.errors import ConfigError

SMALL_CONTEXT_TOKENS: Final = 4096
AGENT_CONTEXT_TOKENS: Final = 16384
MAX_TIMES: Final = 2.0
"""Largest slowdown of a token for the larger context."""
CLIENTS: Final = {"Codex": 6415, "Open WebUI with tools": 6640, "Claude Code": 20_000}
"""Tokens of the first request of clients, instructions and tools (measured with their versions of November 2026)."""
ANSWER_TOKENS: Final = 1024
"""Room for a completion that a useful context must leave."""

HURRIED_S: Final = 0.05
"""Time limit of the solver for a plan that is only compared."""
MIN_ROWS: Final = 128
"""Smallest chunks that the solver uses where memory is short."""
_STREAMS: Final = "have layers read from a disk for every token"

SolvedPlan = tuple[Solution, list[DeviceProfile]]
"""A plan, and the devices as they are in it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WithContext:
    """``solution`` for ``devices`` with the context of ``workload``, and ``why`` that is less than agents need, if it
    is."""

    solution: Solution
    devices: list[DeviceProfile]
    workload: Workload
    why: str = ""


def first_context(asked_tokens: int | None, model: ModelProfile) -> int:
    """Return the context that was asked for, or the small one.

    Raises ``ConfigError`` when it is more than the model was trained for.
    """
    trained = model.context_tokens or max(SMALL_CONTEXT_TOKENS, asked_tokens or 0)
    context = min(trained, SMALL_CONTEXT_TOKENS) if asked_tokens is None else asked_tokens
    if context > trained:
        raise ConfigError(
            f"--context {context}: {model.name} was trained for {trained} tokens; give less, or stretch it with --rope-scale"
        )
    return context


def wanted_context(model: ModelProfile) -> int:
    """The default context that a plan should have if it costs little: what agents need."""
    return min(model.context_tokens, AGENT_CONTEXT_TOKENS)


def with_wanted_context(
    work: Workload,
    wanted_tokens: int,
    solve: Callable[[Workload, bool], SolvedPlan],
    instance_of: Callable[[Workload], Instance],
) -> WithContext:
    """Return the solution of ``solve`` for ``wanted_tokens`` of context, if they are more than in ``work`` and cost
    little, or else for ``work``.

    The second argument of ``solve`` asks for a short time limit. ``instance_of`` makes the solver's question. Raises
    ``Infeasible`` as ``solve`` does for ``work``.
    """

    def small(against: str = "") -> WithContext:
        solution, devices = solve(work, False)
        why = why_small(wanted_tokens, against) if against else ""
        return WithContext(solution=solution, devices=devices, workload=work, why=why)

    if wanted_tokens <= work.context_tokens:
        return small()
    wide = replace(work, context_tokens=wanted_tokens)
    asked, asked_wide = instance_of(work), instance_of(wide)
    may_fit = _must_stream(asked_wide) and not _must_stream(asked)
    if may_fit and len(asked.devices) > 1:
        may_fit = _may_fit(solve(work, True)[0].plan, asked)
    if may_fit:
        found = small(_STREAMS)
        if not found.solution.plan.streaming:
            return found
    try:
        solution, devices = solve(wide, False)
    except Infeasible:
        return small("not fit into memory")
    more_bytes = _kv_bytes(asked_wide) - _kv_bytes(asked)
    if 2 * more_bytes <= _slow_bytes(solution.plan, devices, asked.model):
        return WithContext(solution=solution, devices=devices, workload=wide)
    against = obstacle(solution, solve(work, True)[0])
    return small(against) if against else WithContext(solution=solution, devices=devices, workload=wide)


def why_small(wanted_tokens: int, against: str) -> str:
    """Say why the context is not ``wanted_tokens``, given its ``obstacle``."""
    return f"{wanted_tokens} would {against}; --context sets it"


def obstacle(wide: Solution, small: Solution) -> str:
    """Return what speaks against the plan with more context; empty if nothing does."""
    if wide.plan.streaming and not small.plan.streaming:
        return _STREAMS
    times = max(wide.prediction.tpot_s / small.prediction.tpot_s, wide.objective_s / small.objective_s)
    return f"make responses {times:.2g} times as slow" if times > MAX_TIMES else ""


def _slow_bytes(plan: Plan, devices: Iterable[DeviceProfile], model: ModelProfile) -> float:
    """Bytes of weights that more memory would speed up: those that stream, or else those in RAM next to a GPU.

    Infinity where there are none, as more memory gains nothing. With memory for half of them, they still take at least
    half of the time, and what streams still streams.
    """
    if plan.streaming:
        return sum(each.streamed_bytes for each in plan.streaming)
    with_gpu = {device.device for device in devices if device.gpu is not None}
    in_ram = [layer for window in plan.route if window.device in with_gpu for layer in window.in_ram]
    return sum(model.layers[layer].size_bytes for layer in in_ram) if in_ram else math.inf


def _kv_bytes(asked: Instance) -> int:
    return sum(asked.kv_bytes[kind] for kind in asked.kind_of)


def _may_fit(hurried: Plan, asked: Instance) -> bool:
    """Return whether a plan without streaming may exist, given one ``hurried`` within a short time limit, in which the
    layers of each device may be off by a few."""
    streamed = sum(each.streamed_bytes - each.read_ahead_bytes for each in hurried.streaming)
    each_off = 2 * asked.model.cut_multiple * asked.model.largest_layer_bytes + asked.reserve_bytes
    return len(hurried.devices) < len(asked.devices) or streamed <= len(asked.devices) * each_off


def _must_stream(asked: Instance) -> bool:
    """Return whether layers and KV cache alone exceed all memory besides the smallest buffers."""
    smallest = asked.with_rows(min(MIN_ROWS, asked.workload.chunk_rows))
    room = 0
    for member in smallest.members:
        gpus = range(member.gpu_count)
        vram = sum(max(0, member.vram_limits[i] - smallest.gpu_besides(member, i, 1)) for i in gpus)
        room += max(0, member.ram_limit - smallest.runtime_bytes(1)) + vram
    layers = sum(layer.size_bytes for layer in asked.model.layers)
    return layers + _kv_bytes(asked) > room


def too_small_for(context_tokens: int, model: ModelProfile) -> str:
    """Say which clients' first request does not fit into a default context of ``context_tokens``, and what to type;
    else empty."""
    needs = {name: tokens + ANSWER_TOKENS for name, tokens in CLIENTS.items()}
    out = [name for name, tokens in needs.items() if tokens > context_tokens]
    trained = model.context_tokens or max(needs.values())
    never = [name for name in out if needs[name] > trained]
    fitting = [name for name in out if name not in never]
    reasons = []
    if fitting:
        enough = 1 << (max(needs[name] for name in fitting) - 1).bit_length()
        reasons.append(f"{_do_not_fit(fitting)}: type --context {min(enough, trained)}")
    if never:
        reasons.append(f"{_do_not_fit(never)}: the model was trained with {trained} tokens")
    return "; ".join(reasons)


def _do_not_fit(names: Sequence[str]) -> str:
    *others, last = [f"{name} ({CLIENTS[name]:,} tokens)" for name in names]
    return f"{', '.join(others)} and {last} do not fit" if others else f"{last} does not fit"
