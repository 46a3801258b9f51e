"""What a draft model would gain for a plan, and what it costs: ``primad plan --draft``.

With E = 1 / (1 - a) accepted tokens in a row, where a is the share of drafts that are accepted, a ring with M rows of
one request in flight has E M / (M + E - 1) times the tokens: after a rejected draft the ring fills again. The gain of
steps with several rows is described in ``primad/ring/speculation/pace.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal

from halda import DeviceProfile, ModelProfile, Plan, arrange, evaluate, instance
from halda.cost import message_s
from halda.instance import Instance
from primad.planning.batching import batches_of
from primad.planning.drafting import drafting_of, not_taken_back, takes_back
from primad.planning.question import PlannedDraft, Question, default_workload, without_ram
from primad.planning.schema import DraftJson, GainJson
from primad.ring.speculation.drafter import Drafting
from primad.ring.speculation.pace import best_wait, rate_without_waiting
from primad.settings.quantities import show_bytes

SHARES: Final = (0.6, 0.7, 0.8)
"""Acceptance rates for which the gain is shown, since the real one is unknown before."""
HALF_THE_CORES: Final = 2.0
"""On a device of the ring the draft process has half of the cores, and takes at most this many times as long as with
all."""

WINS: Final = 1.03
"""Another device must win this many times what the head would: messages over a network may be late."""
DRAFT_BYTES: Final = 512
_TYPICAL: Final = 1
"""By this one of ``SHARES`` devices are compared."""

DraftKind = Literal["ahead", "together", "none"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftGain:
    """``kind``: drafts are computed ``ahead`` of the next token, in ``rows`` steps of one row in flight in the ring, or
    ``together`` with it, as at most ``rows`` rows of one step, or not at all (``none``), and then ``why``.

    The model drafts on ``device`` and takes ``token_s`` for a draft. ``times`` is the speedup in tokens per second for
    each of ``SHARES``.
    """

    device: str
    kind: DraftKind
    rows: int
    token_s: float
    times: tuple[float, ...]
    why: str = ""


def draft_gain(
    drafting: Drafting | None, plan: Plan, question: Instance, draft: ModelProfile, device: str | None = None
) -> DraftGain:
    """The gain of the model ``draft`` on ``device`` (None: the head) for ``plan``; drafts are computed as ``drafting``
    says.

    On a device of the ring it has half of the processor, on any other device all of it. Drafts of another device reach
    the head a round trip later.
    """
    number = next(i for i, each in enumerate(question.devices) if each.device == (device or plan.head))
    where = question.devices[number]
    token_s = _token_s(where, draft, question.workload.context_tokens)
    token_s *= HALF_THE_CORES if where.host in hosts_of(plan, question) else 1.0
    if drafting is None:
        return DraftGain(
            device=where.device,
            kind="none",
            rows=0,
            token_s=token_s,
            times=(1.0,) * len(SHARES),
            why=why_none(plan, question),
        )
    late_s = 0.0 if where.device == plan.head else _round_trip_s(question, plan.head, number)
    ring_pass_s = evaluate(plan, replace(question, workload=replace(question.workload, sequences=1))).tpot_s
    ahead = tuple(_ahead(drafting.rows_per_pass, ring_pass_s, token_s, late_s, share) for share in SHARES)
    together = tuple(_together(drafting.costs, ring_pass_s, token_s, late_s, share) for share in SHARES)
    if len(drafting.costs) > 1 and together[_TYPICAL] >= ahead[_TYPICAL]:
        return DraftGain(
            device=where.device, kind="together", rows=len(drafting.costs), token_s=token_s, times=together
        )
    return DraftGain(device=where.device, kind="ahead", rows=drafting.room, token_s=token_s, times=ahead)


def best_gain(
    drafting: Drafting, plan: Plan, question: Instance, draft: ModelProfile, memory_bytes: int, *, head_has_room: bool
) -> DraftGain | None:
    """The gain on the device where the model wins most: the head, unless another device with memory for it wins
    ``WINS`` times as much. None if no device has memory for it.
    """
    best = draft_gain(drafting, plan, question, draft) if head_has_room else None
    hosts, computing = [each.host for each in question.devices], hosts_of(plan, question)
    for device, free_bytes in left_bytes(plan, question).items():
        host = next(each.host for each in question.devices if each.device == device)
        alone = hosts.count(host) == 1 if device in plan.devices else host not in computing
        if not alone or free_bytes < memory_bytes:
            continue
        found = draft_gain(drafting, plan, question, draft, device)
        minimum = 0.0 if best is None else best.times[_TYPICAL] * (WINS if best.device == plan.head else 1.0)
        if found.times[_TYPICAL] > minimum:
            best = found
    return best


def draft_place(
    draft: PlannedDraft | None, wish: str | None, drafting: Drafting | None, plan: Plan, question: Instance
) -> str | None:
    """The device on which ``draft`` drafts, if one has room: the one that was wished for, or where it wins most."""
    if draft is None or drafting is None:
        return None
    head = plan.head if draft.head_has_room else None
    if not draft.may_move:
        return head
    if wish is not None:
        return wish if left_bytes(plan, question).get(wish, 0) >= draft.memory_bytes else head
    found = best_gain(drafting, plan, question, draft.model, draft.memory_bytes, head_has_room=draft.head_has_room)
    return None if found is None else found.device


def left_bytes(plan: Plan, question: Instance) -> dict[str, int]:
    """Memory that ``plan`` leaves free on each device except the head."""
    taken = {each.device: each.ram_bytes for each in evaluate(plan, question).devices}
    limits = {member.profile.device: member.ram_limit for member in question.members}
    return {name: limit - taken.get(name, 0) for name, limit in limits.items() if name != plan.head}


def hosts_of(plan: Plan, question: Instance) -> frozenset[str]:
    """The machines that compute layers."""
    return frozenset(each.host for each in question.devices if each.device in plan.devices)


def with_room_for_draft(question: Question, head: str) -> Question:
    """``question`` for ``head``, of whose RAM the draft model has its part, if it fits there."""
    draft = question.draft
    if draft is None:
        return question
    left = {each.device: each.ram_available_bytes - draft.memory_bytes for each in question.devices}
    if left[head] < 0:
        return replace(question, head=head, draft=replace(draft, head_has_room=False))
    return replace(question, head=head, devices=tuple(without_ram(question.devices, head, draft.memory_bytes)))


def where_drafted(device: str, group: Sequence[str]) -> str:
    """The ``device`` of a draft model, and the other devices of its ``group``, if it shares layers with any."""
    others = [name for name in group if name != device]
    return f"{device}, which shares layers with {' and '.join(others)}" if others else device


def no_room(memory_bytes: int) -> str:
    """Why a model drafts nowhere that takes so much."""
    return f"no device has {show_bytes(memory_bytes)} of memory for it beside its layers; choose a smaller model"


def draft_part(
    draft: PlannedDraft | None, drafting: Drafting | None, place: str | None, plan: Plan, asked: Instance
) -> DraftJson | None:
    """What the draft model takes in ``place`` and would win under ``plan``, with drafts computed as ``drafting`` says."""
    if draft is None:
        return None
    if drafting is None or place is not None:
        gain = draft_gain(drafting, plan, asked, draft.model, place)
    else:
        gain = DraftGain(device="", kind="none", rows=0, token_s=0.0, times=(), why=no_room(draft.memory_bytes))
    return DraftJson(
        name=draft.model.name,
        path=draft.path,
        device=gain.device,
        bytes=draft.model.size_bytes,
        memory_bytes=draft.memory_bytes,
        token_ms=gain.token_s * 1e3,
        kind=gain.kind,
        rows=gain.rows,
        gains=[]
        if gain.kind == "none"
        else [GainJson(share=share, times=times) for share, times in zip(SHARES, gain.times, strict=True)],
        why=gain.why,
    )


def _token_s(device: DeviceProfile, draft: ModelProfile, context: int) -> float:
    """Time of a draft on the processor of ``device``."""
    alone = device.with_gpus(())
    plan = arrange([device.device], [len(draft.layers)], rounds=1, model=draft)
    question = instance([alone], [], draft, default_workload(context, 1, "f16"), {}, device.device)
    return evaluate(plan, question).tpot_s


def _round_trip_s(question: Instance, head: str, device: int) -> float:
    """Time from a token at the head to the draft that another device makes after it, without the drafting itself."""
    own = next(i for i, each in enumerate(question.devices) if each.device == head)
    return sum(message_s(question.link(*pair), DRAFT_BYTES) for pair in ((own, device), (device, own)))


def _ahead(maximum: float, ring_pass_s: float, token_s: float, late_s: float, share: float) -> float:
    """The model drafts one token after another, so a ring pass has only as many drafts as there is time for.

    After a rejected draft the first one is ``late_s`` late.
    """
    rows = max(1.0, min(maximum, ring_pass_s / token_s))
    right = 1 / (1 - share)
    return max(1.0, right / ((rows + right - 1) / rows + late_s / ring_pass_s))


def _together(costs: Sequence[float], ring_pass_s: float, token_s: float, late_s: float, share: float) -> float:
    """The gain if each draft were as late as the first one after a rejected draft."""
    draft_token = (token_s + late_s) / ring_pass_s
    return max(rate_without_waiting(costs, share, draft_token), best_wait(costs, share, draft_token)[1])


def why_none(plan: Plan, question: Instance) -> str:
    """Why there are no drafts under ``plan`` that win time."""
    if not takes_back(question.model):
        return not_taken_back(question.model)
    if question.model.is_recurrent and not question.workload.rollback:
        return "layers keep a state, which takes memory for drafts; --speculate lookup, draft or mtp plans it"
    fast = batches_of("fast", plan, question, question.workload.sequences)
    if drafting_of("auto", "fast", plan, question, fast) is not None:
        return "it is not known that several rows in one step are exact here; --batching fast takes them"
    return "one row keeps all of these devices busy, and several in one step take as much longer"
