"""Predict what a draft model would gain for a plan, and what it takes: ``primad plan --draft``.

Let E = 1 / (1 - a) be the expected number of accepted tokens in a row, where a is the acceptance rate. A ring with M
tokens of one request in flight then has E M / (M + E - 1) times the throughput: after a rejected draft the ring fills
again. The gain of steps with several tokens is in ``primad/ring/speculation/pace.py``.
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
"""Acceptance rates for which the gain is reported: the real one is not known beforehand."""
HALF_THE_CORES: Final = 2.0
"""Slowdown of the draft model on a device of the ring, where its process has half of the cores (upper bound)."""

WINS: Final = 1.03
"""Factor by which another device must beat the head's gain: messages over a network may be late."""
DRAFT_BYTES: Final = 512
_TYPICAL: Final = 1
"""Index in ``SHARES`` by which devices are compared."""

DraftKind = Literal["ahead", "together", "none"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftGain:
    """The predicted gain of a draft model.

    ``kind``: ``ahead``: drafts are computed ahead of the next token, in ``rows`` steps of one token that are in the
    ring concurrently; ``together``: in the step of the next token, which has at most ``rows`` tokens; ``none``: not at
    all, and then ``why``. The model drafts on ``device`` and takes ``token_s`` for a draft. ``times`` is the relative
    throughput, compared with no drafts, for each of ``SHARES``.
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
    """Predict the gain of the model ``draft`` on ``device`` (None: the head) for ``plan``; ``drafting`` says how drafts
    are computed.

    On a device of the ring it has half of the CPU, elsewhere all of it. Drafts of another device reach the head a round
    trip later.
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
    """Return the gain on the best device: the head, unless another one with enough memory gains ``WINS`` times as much.

    None where no device has memory for the model.
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
    """Choose the device on which ``draft`` runs, if one has room: the wished one, or where it gains most."""
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
    """Memory that ``plan`` leaves free on each device but the head."""
    taken = {each.device: each.ram_bytes for each in evaluate(plan, question).devices}
    limits = {member.profile.device: member.ram_limit for member in question.members}
    return {name: limit - taken.get(name, 0) for name, limit in limits.items() if name != plan.head}


def hosts_of(plan: Plan, question: Instance) -> frozenset[str]:
    """The machines that compute layers."""
    return frozenset(each.host for each in question.devices if each.device in plan.devices)


def with_room_for_draft(question: Question, head: str) -> Question:
    """Return ``question`` for ``head``, with the draft model's part taken from its RAM if it fits there."""
    draft = question.draft
    if draft is None:
        return question
    left = {each.device: each.ram_available_bytes - draft.memory_bytes for each in question.devices}
    if left[head] < 0:
        return replace(question, head=head, draft=replace(draft, head_has_room=False))
    return replace(question, head=head, devices=tuple(without_ram(question.devices, head, draft.memory_bytes)))


def where_drafted(device: str, group: Sequence[str]) -> str:
    """Name the ``device`` of a draft model, and the other devices of its ``group`` if it shares layers."""
    others = [name for name in group if name != device]
    return f"{device}, which shares layers with {' and '.join(others)}" if others else device


def no_room(memory_bytes: int) -> str:
    """Say that no device has ``memory_bytes`` for the draft model."""
    return f"no device has {show_bytes(memory_bytes)} of memory for it besides its layers; choose a smaller model"


def draft_part(
    draft: PlannedDraft | None, drafting: Drafting | None, place: str | None, plan: Plan, asked: Instance
) -> DraftJson | None:
    """Describe the draft model on ``place``: its memory, and its gain under ``plan`` with drafts as ``drafting`` says."""
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
    """Seconds per draft token on the CPU of ``device``."""
    alone = device.with_gpus(())
    plan = arrange([device.device], [len(draft.layers)], rounds=1, model=draft)
    question = instance([alone], [], draft, default_workload(context, 1, "f16"), {}, device.device)
    return evaluate(plan, question).tpot_s


def _round_trip_s(question: Instance, head: str, device: int) -> float:
    """Network delay from a token on the head to the drafts of another device that follow it."""
    own = next(i for i, each in enumerate(question.devices) if each.device == head)
    return sum(message_s(question.link(*pair), DRAFT_BYTES) for pair in ((own, device), (device, own)))


def _ahead(maximum: float, ring_pass_s: float, token_s: float, late_s: float, share: float) -> float:
    """Relative throughput with drafts ahead of the next token.

    The model drafts one token after the other, so a ring pass has at most as many drafts as there is time for. After a
    rejected draft the first one is ``late_s`` late.
    """
    rows = max(1.0, min(maximum, ring_pass_s / token_s))
    right = 1 / (1 - share)
    return max(1.0, right / ((rows + right - 1) / rows + late_s / ring_pass_s))


def _together(costs: Sequence[float], ring_pass_s: float, token_s: float, late_s: float, share: float) -> float:
    """Relative throughput with drafts in the next token's step, as if each were as late as the first one after a
    rejected draft."""
    draft_token = (token_s + late_s) / ring_pass_s
    return max(rate_without_waiting(costs, share, draft_token), best_wait(costs, share, draft_token)[1])


def why_none(plan: Plan, question: Instance) -> str:
    """Say why drafts save no time under ``plan``."""
    if not takes_back(question.model):
        return not_taken_back(question.model)
    if question.model.is_recurrent and not question.workload.rollback:
        return "layers keep a state, which takes memory for drafts; --speculate lookup, draft or mtp plans it"
    fast = batches_of("fast", plan, question, question.workload.sequences)
    if drafting_of("auto", "fast", plan, question, fast) is not None:
        return "several tokens in one step are not known to be exact here; --batching fast allows them"
    return "one token keeps all of these devices busy, and several in one step take proportionally longer"
