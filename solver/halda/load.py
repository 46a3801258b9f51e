"""What a plan gives several sequences at once.

Their next tokens are computed in steps of b rows, each of another sequence, of which several are in the ring: G where a
token passes G machines, so that none of them waits; one where weights stream, since every step reads all of them. Of n
sequences n / b such steps follow each other, so that all together write

    X = b / max(T(b) / G, busiest machine, disk or link with b rows) tokens a second,

and each waits n / X for its next one. T(b) is what a step of b rows takes to pass the ring (``evaluate``). Where tokens make
several rounds and nothing streams, steps wait for each other besides, as they are played (``play.py``).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from halda.evaluate import evaluate
from halda.instance import Instance, sharing_cores
from halda.plan import Plan
from halda.play import simulated_period_s


@dataclass(frozen=True, slots=True, kw_only=True)
class UnderLoad:
    """``sequences`` at once: steps of ``rows`` rows, of which ``machines`` fill the ring and ``steps`` make a round.

    All write ``tokens_per_s``; one waits ``tbt_s`` between two tokens, and ``ttft_s`` for the first one of a typical request
    that comes while the others write.
    """

    sequences: int
    rows: int
    machines: int
    steps: int
    tokens_per_s: float
    tbt_s: float
    ttft_s: float


def under_load(plan: Plan, instance: Instance, *, sequences: int, max_rows: int | None = None) -> UnderLoad:
    """What ``plan`` gives so many ``sequences``, with at most ``max_rows`` rows a step, or as many as are of use."""
    machines = (
        1
        if plan.streaming
        else len(sharing_cores([device for device in instance.devices if device.device in plan.places]))
    )
    rows = min(math.ceil(sequences / machines), max_rows or sequences)
    steps = math.ceil(sequences / rows)
    asked = replace(
        instance, decode_rows=rows, workload=replace(instance.workload, sequences=1 if plan.streaming else steps)
    )
    period_s = evaluate(plan, asked).period_s
    if plan.rounds > 1 and steps > 1 and not plan.streaming:
        period_s = max(period_s, simulated_period_s(plan, asked, steps))
    between_s = steps * period_s
    others_s = math.ceil((sequences - 1) / rows) * period_s
    return UnderLoad(
        sequences=sequences,
        rows=rows,
        machines=machines,
        steps=steps,
        tokens_per_s=sequences / between_s,
        tbt_s=between_s,
        ttft_s=evaluate(plan, instance).ttft_s + instance.chunks * others_s,
    )
