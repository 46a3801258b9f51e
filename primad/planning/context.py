"""How much context a plan has room for, where nobody said how much: as much as costs next to nothing. Pure.

A wider context takes memory alone, for a larger KV cache; what a token costs depends on how much of it is filled. So a plan
that still fits, and streams no more, is as good with it as it was, and a proof that it is the best one holds. Loading clears
the cache: 0.2 s for the 530 MB by which 32,768 tokens are more than 4,096 (Gemma 3 270M); a token took 33 ms with both.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from halda import Plan, Prediction, evaluate
from halda.instance import Instance

MOST_OF_FREE: Final = 0.5
"""Of the memory that a plan leaves free a wider context takes at most so much: devices are their owners'."""
LITTLE_OF_FREE: Final = 0.05
"""The same where the KV cache is larger than the layers: memory that nobody misses, of small models on large machines."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Widened:
    """A context of ``tokens``, and ``why`` it is not more."""

    tokens: int
    why: str


def widened_context(plan: Plan, question: Instance) -> Widened:
    """The context of ``question``, doubled as long as ``plan`` has room for it, at most what the model was trained with.

    It takes no more than half of what ``plan`` leaves free on any machine, and no more than a twentieth where the KV cache
    is larger than the layers are.
    """
    tokens, trained = question.workload.context_tokens, question.model.context_tokens
    now = evaluate(plan, question)
    while tokens < trained:
        wider = min(2 * tokens, trained)
        obstacle = _obstacle(plan, question, now, wider)
        if obstacle is not None:
            return Widened(tokens=tokens, why=f"{wider} {obstacle}; --context sets it")
        tokens = wider
    return Widened(tokens=tokens, why="all that the model was trained with" if trained else "--context sets it")


def _obstacle(plan: Plan, question: Instance, now: Prediction, wider: int) -> str | None:
    """What speaks against so many tokens."""
    asked = replace(question, workload=replace(question.workload, context_tokens=wider))
    kv_bytes = sum(asked.kv_bytes[kind] for kind in asked.kind_of)
    is_large = kv_bytes > sum(layer.size_bytes for layer in asked.model.layers)
    share = LITTLE_OF_FREE if is_large else MOST_OF_FREE
    much = f"a KV cache larger than the model's layers and over {share:.0%}" if is_large else "over half"
    streaming = ", ".join(device.device for device in now.devices if device.streamed_bytes)
    if streaming:
        return f"would have more read from the disk of {streaming} for every token"
    then = evaluate(plan, asked)
    if then.short:
        return f"would not fit into the {then.short[0].what} of {then.short[0].where}"
    members = {member.name: member for member in question.members}
    both = list(zip(now.devices, then.devices, strict=True))
    for host in question.hosts:
        here = [pair for pair in both if pair[0].device in {question.devices[i].device for i in host}]
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
