"""Forecast the throughput of a plan with several concurrent sequences.

The next tokens are computed in steps of b tokens, each of another sequence. G steps are in the ring at the same time:
as many as the machines a token passes, so that none of them waits, or one where weights stream, since every step reads
all of them. n sequences need n / b such steps in turn, so their total throughput is

    X = b / max(T(b) / G, busiest machine, disk or link with b tokens) tokens per second,

and a sequence waits n / X for its next token. T(b) is the time that a step of b tokens takes through the ring
(``evaluate``). With several rounds per token and nothing streamed, steps also wait for each other, which is simulated
(``play.py``).
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
    """Forecast with ``sequences`` concurrent: steps of ``rows`` tokens, G of which (``machines``) fill the ring;
    ``steps`` serve all sequences once.

    Together the sequences produce ``tokens_per_s``. One waits ``tbt_s`` between two tokens, and a typical request that
    arrives while the others decode has a TTFT of ``ttft_s``.
    """

    sequences: int
    rows: int
    machines: int
    steps: int
    tokens_per_s: float
    tbt_s: float
    ttft_s: float


def under_load(plan: Plan, instance: Instance, *, sequences: int, max_rows: int | None = None) -> UnderLoad:
    """Return the forecast of ``plan`` with ``sequences`` concurrent and at most ``max_rows`` tokens a step (None: no
    limit)."""
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
