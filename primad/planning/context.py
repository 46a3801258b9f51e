"""Choose how much context and how many concurrent requests a plan has room for, where neither was asked for: as much as
costs next to nothing. Pure.

A larger context only takes memory, for a larger KV cache; the cost of a token depends on how much of it is filled. So a
plan that still fits and streams no more is as good as before, and a proof that it is optimal still holds. Loading
clears the cache: 0.2 s for the 530 MB by which 32,768 tokens exceed 4,096 (Gemma 3 270M); a token took 33 ms with both.

The same holds for the KV caches of more sequences. They are chosen first: a larger context applies to each of them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from halda import Plan, Prediction, Workload, evaluate
from halda.instance import Instance

MAX_AT_ONCE: Final = 4
"""Largest number of concurrent requests that is chosen by default."""
MAX_OF_FREE: Final = 0.5
"""Largest share of the memory left free by a plan that both take together: devices belong to their owners."""
LITTLE_OF_FREE: Final = 0.05
"""The same where the KV cache is larger than the layers, as for small models on large machines: a share that is not
missed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Widened:
    """A context of ``tokens``, and ``why`` it is not larger."""

    tokens: int
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class AtOnce:
    """The number of concurrent ``sequences``, and ``why`` there are not more."""

    sequences: int
    why: str


def answers_at_once(plan: Plan, question: Instance, *, served: int = 1) -> AtOnce:
    """Return how many sequences ``plan``, made for one, has room for: doubled as the context is, at most four.

    As many as were ``served`` before only need to fit. Where layers stream the result is one: each KV cache takes
    memory from layers that would then be read from disk for every token.
    """
    count, now = question.workload.sequences, evaluate(plan, question)
    assert count == 1
    while count < MAX_AT_ONCE:
        asked = replace(question, workload=replace(question.workload, sequences=2 * count))
        obstacle = _obstacle(plan, now, asked, keeps=2 * count <= served)
        if obstacle is not None:
            return AtOnce(sequences=count, why=f"{2 * count} {obstacle}; --sequences sets it")
        count *= 2
    return AtOnce(sequences=count, why="--sequences sets it")


def attends_plainly(plan: Plan, question: Instance, work: Workload) -> bool:
    """Return whether attention without flash attention is faster for a token of ``work`` and ``plan`` has room for it.

    The scores of a prompt take memory for each head and token of the context. On the CPUs measured, a token of a long
    text takes less than half of the time this way, and a prompt a tenth more. CPUs without a measurement are assumed to
    be like them.
    """
    profiles = [device.cpu for device in question.devices if device.device in plan.devices]
    is_quicker = all(cpu.plain_attention_s < cpu.attention_s or not cpu.attention_s for cpu in profiles)
    if work.kv_type != "f16" or plan.uses_gpu or not is_quicker:
        return False
    asked = replace(question, workload=replace(work, flash=False))
    return _obstacle(plan, evaluate(plan, question), asked) is None


def widened_context(plan: Plan, question: Instance, work: Workload | None = None) -> Widened:
    """Double the context of ``work`` as long as ``plan`` has room, up to what the model was trained with.

    Beyond what ``question`` takes, including ``work`` itself, it uses at most half of the memory that ``plan`` leaves
    free on any machine, and at most a twentieth where the KV cache is larger than the layers.
    """
    tokens, trained = question.workload.context_tokens, question.model.context_tokens
    now, work = evaluate(plan, question), work or question.workload
    while tokens < trained:
        wider = min(2 * tokens, trained)
        obstacle = _obstacle(plan, now, replace(question, workload=replace(work, context_tokens=wider)))
        if obstacle is not None:
            return Widened(tokens=tokens, why=f"{wider} {obstacle}; --context sets it")
        tokens = wider
    return Widened(tokens=tokens, why="all that the model was trained with" if trained else "--context sets it")


def _obstacle(plan: Plan, now: Prediction, asked: Instance, *, keeps: bool = False) -> str | None:
    """Return what prevents the larger KV cache of ``asked``, or None; if it ``keeps`` what was served, it may take all
    free memory."""
    kv_bytes = sum(asked.kv_bytes[kind] for kind in asked.kind_of)
    is_large = kv_bytes > sum(layer.size_bytes for layer in asked.model.layers)
    share = LITTLE_OF_FREE if is_large else MAX_OF_FREE
    much = f"a KV cache larger than the model's layers and over {share:.0%}" if is_large else "over half"
    streaming = ", ".join(device.device for device in now.devices if device.streamed_bytes)
    if streaming:
        return f"would read more from the disk of {streaming} for every token"
    then = evaluate(plan, asked)
    if then.short:
        return f"would not fit into the {then.short[0].what} of {then.short[0].where}"
    if keeps:
        return None
    members = {member.name: member for member in asked.members}
    both = list(zip(now.devices, then.devices, strict=True))
    for host in asked.hosts:
        here = [pair for pair in both if pair[0].device in {asked.devices[i].device for i in host}]
        if not here:
            continue
        where = " and ".join(before.device for before, _ in here)
        ram = max(members[before.device].ram_limit for before, _ in here)
        vram = max(members[before.device].vram_limit for before, _ in here)
        if _takes_much([(before.ram_bytes, after.ram_bytes) for before, after in here], ram, share):
            return f"would take {much} of the RAM that is left on {where}"
        if _takes_much([(before.vram_bytes, after.vram_bytes) for before, after in here], vram, share):
            return f"would take {much} of the VRAM that is left on {where}"
    return None


def _takes_much(used: list[tuple[int, int]], limit: int, share: float) -> bool:
    before, after = sum(sizes[0] for sizes in used), sum(sizes[1] for sizes in used)
    return after - before > share * (limit - before)
