"""The default context of a plan: what agents need, unless that costs too much. Pure.

Agents begin with thousands of tokens: their instructions and tools. So the context is ``AGENT_CONTEXT_TOKENS``, or all
that the model was trained with, for each concurrent request; but not where layers would then stream that stay in memory
with ``SMALL_CONTEXT_TOKENS``, or where TPOT or the objective would more than double. Then the context is the small one,
and ``too_small_for`` says which clients do not fit.

Usually only one plan is solved for, the one for agents. Where more memory would improve it, the plan for the small
context is found in a hurry, to compare: this makes planning 45 models on the devices of ``mixed-home`` take a third
longer.
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
"""How many times as long a token may take for the larger context."""
CLIENTS: Final = {"Codex": 6415, "Open WebUI with tools": 6640, "Claude Code": 20_000}
"""Tokens of the first request of clients (measured with their versions of November 2026): instructions and tools."""
ANSWER_TOKENS: Final = 1024
"""Room that a context must leave for a completion, to be useful."""

HURRIED_S: Final = 0.05
"""Time limit for plans that are only compared: those that are quick to find."""
MIN_ROWS: Final = 128
"""The solver's smallest chunks where memory is short."""
_STREAMS: Final = "have layers read from a disk for every token"

SolvedPlan = tuple[Solution, list[DeviceProfile]]
"""A plan, and the devices as they are in it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WithContext:
    """``solution`` for ``devices``, with the context of ``workload``; ``why`` that is less than agents need, if it is."""

    solution: Solution
    devices: list[DeviceProfile]
    workload: Workload
    why: str = ""


def first_context(asked_tokens: int | None, model: ModelProfile) -> int:
    """The context that was asked for, or the small one.

    Raises ``ConfigError`` when more was asked for than the model was trained for.
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
    """What ``solve`` finds for ``wanted_tokens`` of context where they are more than in ``work`` and cost little, or for
    ``work``; in a hurry where it is told so.

    ``instance_of`` is what is solved for. Raises ``Infeasible`` as ``solve`` does for ``work``.
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
    """Why the context is not ``wanted_tokens``: an ``obstacle``."""
    return f"{wanted_tokens} would {against}; --context sets it"


def obstacle(wide: Solution, small: Solution) -> str:
    """Why the plan for more context is rejected; empty if it is not."""
    if wide.plan.streaming and not small.plan.streaming:
        return _STREAMS
    times = max(wide.prediction.tpot_s / small.prediction.tpot_s, wide.objective_s / small.objective_s)
    return f"make answers {times:.2g} times as slow" if times > MAX_TIMES else ""


def _slow_bytes(plan: Plan, devices: Iterable[DeviceProfile], model: ModelProfile) -> float:
    """Bytes of weights that more memory would speed up: those that stream, or else those in RAM next to a GPU.

    Infinity if there are none, since more memory gains nothing. With memory for half of them more, they take at least
    half of the time, and the part that still streams takes its own.
    """
    if plan.streaming:
        return sum(each.streamed_bytes for each in plan.streaming)
    with_gpu = {device.device for device in devices if device.gpu is not None}
    in_ram = [layer for window in plan.route if window.device in with_gpu for layer in window.in_ram]
    return sum(model.layers[layer].size_bytes for layer in in_ram) if in_ram else math.inf


def _kv_bytes(asked: Instance) -> int:
    return sum(asked.kv_bytes[kind] for kind in asked.kind_of)


def _may_fit(hurried: Plan, asked: Instance) -> bool:
    """Whether a plan in memory may exist where this one was made in a hurry: each of its devices may be off by some
    layers."""
    streamed = sum(each.streamed_bytes - each.read_ahead_bytes for each in hurried.streaming)
    each_off = 2 * asked.model.cut_multiple * asked.model.largest_layer_bytes + asked.reserve_bytes
    return len(hurried.devices) < len(asked.devices) or streamed <= len(asked.devices) * each_off


def _must_stream(asked: Instance) -> bool:
    """Whether layers and KV cache alone are more than all memory besides the smallest buffers."""
    smallest = asked.with_rows(min(MIN_ROWS, asked.workload.chunk_rows))
    room = 0
    for member in smallest.members:
        gpus = range(member.gpu_count)
        vram = sum(max(0, member.vram_limits[i] - smallest.gpu_besides(member, i, 1)) for i in gpus)
        room += max(0, member.ram_limit - smallest.runtime_bytes(1)) + vram
    layers = sum(layer.size_bytes for layer in asked.model.layers)
    return layers + _kv_bytes(asked) > room


def too_small_for(context_tokens: int, model: ModelProfile) -> str:
    """Names the clients whose first request does not fit into a default context of ``context_tokens``, and what to
    type; or nothing."""
    needs = {name: tokens + ANSWER_TOKENS for name, tokens in CLIENTS.items()}
    out = [name for name, tokens in needs.items() if tokens > context_tokens]
    trained = model.context_tokens or max(needs.values())
    never = [name for name in out if needs[name] > trained]
    prefill_offload = [name for name in out if name not in never]
    reasons = []
    if prefill_offload:
        enough = 1 << (max(needs[name] for name in prefill_offload) - 1).bit_length()
        reasons.append(f"{_do_not_fit(prefill_offload)}: type --context {min(enough, trained)}")
    if never:
        reasons.append(f"{_do_not_fit(never)}: the model was trained with {trained} tokens")
    return "; ".join(reasons)


def _do_not_fit(names: Sequence[str]) -> str:
    *others, last = [f"{name} ({CLIENTS[name]:,} tokens)" for name in names]
    return f"{', '.join(others)} and {last} do not fit" if others else f"{last} does not fit"
