"""Decide how many tokens of one request the ring has room for concurrently, and what several in one step cost: whether
drafts can pay.

A token passes the ring once. While one device computes, the others have nothing to do for it. So the ring holds as many
tokens as fit into a ring pass one after another, each taking the time of the busiest machine, disk or link. Where
weights stream, a step of several tokens reads them once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Final, Literal, get_args

from halda import ModelProfile, Plan, evaluate
from halda.ahead import tokens_ahead
from halda.instance import Instance
from halda.load import under_load
from primad.gguf.architectures.table import SUPPORTED
from primad.planning.batching import Batches, BatchingMode
from primad.ring.speculation.drafter import MAX_ROOM, Drafting
from primad.ring.speculation.pace import tokens_of

SpeculateMode = Literal["auto", "off", "lookup", "draft", "mtp"]
SPECULATE_MODES: Final[tuple[SpeculateMode, ...]] = get_args(SpeculateMode)
BRANCHES: Final = 4
"""Number of drafts of a tree next to its main path: each takes a token from that path."""
TYPICAL: Final = 0.7
"""Acceptance rate for which the room in the ring is chosen."""
WAITING: Final = 1.02
"""Throughput gain that an additional waiting token must give: drafting on the head delays it as well."""
BLOCKS: Final = 1.15
"""Throughput gain that blocks must give: they keep all devices busy at once, half of the steps are wasted, and the cost
of states, messages and memory shared by devices is not simulated."""
MAX_ROWS: Final = 8
"""Largest number of tokens in one step: at an acceptance rate of 0.8, seven drafts in a row are right one time in five.
"""
DRAFT: Final = 0.06
"""Time of a draft, as a share of a token's, assumed when choosing the size of a block: that of a model's own layer;
prompt lookup takes nothing."""
ROLLBACK: Final = 3
"""Drafts of one step where layers have a state: each takes as much memory as the states of all sequences."""

FOR_STATES: Final = 0.5
"""Share of a device's free memory for states saved before drafts: other things take memory as well."""


def takes_back(model: ModelProfile) -> bool:
    """Return whether rejected drafts can be rolled back in the layers of ``model`` that have a state, if any do."""
    entry = SUPPORTED.get(model.architecture)
    return not model.is_recurrent or (entry is not None and entry.takes_back)


def not_taken_back(model: ModelProfile) -> str:
    """Say why ``model``, which cannot roll back drafts, only has drafts in rings of several machines."""
    return (
        f"layers of {model.name} keep a state that llama.cpp cannot roll back for '{model.architecture}'; drafts "
        "need several machines with memory to spare"
    )


def rollback_of(mode: SpeculateMode, batching: BatchingMode, model: ModelProfile) -> int:
    """Drafts per step for which a plan reserves memory for states: only where drafts are certain."""
    is_sure = mode not in ("auto", "off") or (mode == "auto" and batching == "fast")
    return ROLLBACK if is_sure and model.is_recurrent and takes_back(model) else 0


def drafting_of(
    mode: SpeculateMode, batching: BatchingMode, plan: Plan, question: Instance, batches: Batches
) -> Drafting | None:
    """Return how drafts are computed under ``plan``; None: not at all, as where ``auto`` sees no room for them.

    A group is one place of the ring: its drafts are tokens of one step. A small cache of sliding windows cannot be cut
    back to the accepted tokens. States are restored from copies saved before drafts that have steps of their own, and
    the last tokens of one step are rolled back, both where memory allows. Steps of several tokens of one sequence are
    used where they are bit-identical to single tokens, and with fast ``batching`` everywhere. Trees need fast batching
    and weights that stream on one device: their tokens lie in the KV cache in another order, so results are not
    bit-identical to those of a chain.
    """
    work, has_state = question.workload, question.model.is_recurrent
    if mode == "off" or work.small_windows:
        return None
    ring_passes = _ring_passes(plan, question)
    rows = max(1, min(round(ring_passes), MAX_ROOM))
    room = _room(plan, question, rows)
    if mode != "auto":
        room = max(room, min(_places(plan), MAX_ROOM))
    maximum = MAX_ROWS if batching == "fast" else batches.batching.replays
    states = room + 1
    if has_state:
        states, maximum = _room_for_states(plan, question, states), min(maximum, 1 + work.rollback)
        room = min(room, states)
    costs = _costs(plan, question, min(maximum, MAX_ROWS, work.chunk_rows))
    if room == 1 and len(costs) == 1:
        return None
    has_trees = batching == "fast" and bool(plan.streaming) and len(plan.devices) == 1 and not has_state
    branches = BRANCHES if has_trees else 0
    block = 1 if plan.groups or states <= rows else _block(plan, question, room, rows, costs)
    room = rows if block > 1 else room
    return Drafting(room=room, block=block, rows=len(costs), costs=costs, branches=branches, ring_passes=ring_passes)


def _block(plan: Plan, question: Instance, room: int, rows: int, costs: Sequence[float]) -> int:
    """Return the best number of tokens in a step ahead of the next token, with at most ``rows`` such steps in the ring.

    The result is 1 unless larger steps beat ``room`` single-token steps and drafts in the next token's step.
    """
    if rows == 1:
        return 1
    asked = _single_device(question)
    token_s = evaluate(plan, asked).tpot_s
    played = partial(tokens_ahead, plan, asked, share=TYPICAL, draft_s=DRAFT * token_s)
    rates = {more: played(rows, block=more) for more in range(2, min(len(costs), MAX_ROOM // rows) + 1)}
    best = max(rates, key=rates.__getitem__, default=1)
    together = max(tokens_of(more, TYPICAL) / (cost + more * DRAFT) for more, cost in enumerate(costs)) / token_s
    return best if best > 1 and rates[best] >= BLOCKS * max(played(room), together) else 1


def _room(plan: Plan, question: Instance, rows: int) -> int:
    """Return ``rows``, which fill the ring, or one more that waits where that gains: the busiest device then continues
    immediately, but a head that begins the extra step is late for the deciding token. Simulated for rings of whole
    devices."""
    if rows == 1 or plan.groups:
        return rows
    asked, more = _single_device(question), min(rows + 1, MAX_ROOM)
    without, waiting = (tokens_ahead(plan, asked, room, TYPICAL) for room in (rows, more))
    return more if waiting >= WAITING * without else rows


def _places(plan: Plan) -> int:
    """Number of places that compute different steps at the same time."""
    return len(plan.places)


def _ring_passes(plan: Plan, question: Instance) -> float:
    """Number of single-token steps that the ring computes in the time of one ring pass; 1 where weights stream, as each
    step reads them all."""
    if plan.streaming or _places(plan) == 1:
        return 1.0
    ring_pass_s = evaluate(plan, _single_device(question)).tpot_s
    return ring_pass_s * under_load(plan, question, sequences=MAX_ROOM, max_rows=1).tokens_per_s


def _room_for_states(plan: Plan, question: Instance, room: int) -> int:
    """Return how many of ``room`` states every device has memory for, besides what it computes with."""
    limits = {member.profile.device: member.ram_limit for member in question.members}
    for each in evaluate(plan, question).devices:
        layers = [layer for _, window in plan.windows_of(each.device) for layer in window.layers]
        size = sum(question.model.layers[layer].state_bytes for layer in layers)
        if size:
            room = min(room, int(FOR_STATES * (limits[each.device] - each.ram_bytes) / size))
    return max(1, room)


def _costs(plan: Plan, question: Instance, maximum: int) -> tuple[float, ...]:
    """Cost of a step of 1, 2, ... tokens, in steps of one token, up to the last that is cheaper than single steps."""
    took_s = [
        evaluate(plan, replace(_single_device(question), decode_rows=rows)).tpot_s for rows in range(1, maximum + 1)
    ]
    costs = [each / took_s[0] for each in took_s]
    while len(costs) > 1 and costs[-1] >= len(costs):
        costs.pop()
    return tuple(costs) or (1.0,)


def _single_device(question: Instance) -> Instance:
    return replace(question, workload=replace(question.workload, sequences=1))
