"""Prefer plans that require less of devices if they are nearly as fast.

A device on Wi-Fi roams and sleeps, and takes the ring down with it; as head it takes every request down. A device with
nearly full memory must give some back as soon as its owner needs it. A device that has another model too is slower
while that computes. So a plan without such devices is taken if its objective is at most ``GAIN`` above the best, and
reports what was given up. Devices that must take part stay.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

from halda.instance import NO_LIMITS, Instance
from halda.plan import LeftOut
from halda.solution import GivenUp, Solution

GAIN: Final = 0.05
"""Share of the objective that a plan must gain by using such devices."""
FULL: Final = 0.95
"""Share of a device's memory above which it counts as nearly full."""
MAX_TRIED: Final = 4
_SAME: Final = 1e-9

Ask = Callable[[Instance, Sequence[str], Solution, float], Solution | None]
"""Solves a question with the best of some heads, given the fastest plan; None if no plan is below the given seconds."""


@dataclass(frozen=True, slots=True)
class _Simpler:
    """A question that requires less of devices, and what would be given up for that."""

    what: str
    question: Instance
    heads: tuple[str, ...]


def simpler(found: Solution, question: Instance, heads: Sequence[str], require: frozenset[str], ask: Ask) -> Solution:
    """Return ``found``, the best plan of ``question`` with one of ``heads``, or a simpler one that is hardly slower."""
    taken, quickest_s, given_up = found, found.quickest_s, list[GivenUp]()
    tried, asked = set[str](), _Simpler("", question, tuple(heads))
    while len(tried) < MAX_TRIED:
        trial = next((each for each in _with_less(taken, question, asked, require) if each.what not in tried), None)
        if trial is None:
            break
        tried.add(trial.what)
        other = ask(trial.question, trial.heads, found, quickest_s * (1 + GAIN))
        if other is None:
            continue
        if other.objective_s > quickest_s * (1 + GAIN) or _burdens(other, question) >= _burdens(taken, question):
            continue
        if other.objective_s > taken.objective_s * (1 + _SAME):
            given_up.append(GivenUp(what=trial.what, objective_s=other.objective_s - taken.objective_s))
        quickest_s = min(quickest_s, other.quickest_s)
        taken, asked = other, trial
    if taken is found:
        return found
    left_out = tuple(
        LeftOut(device=device.device, reason="the others are about as fast without it")
        for device in question.devices
        if device.device not in taken.plan.devices
    )
    return replace(
        taken,
        plan=replace(taken.plan, left_out=left_out),
        bound_s=min(found.bound_s, quickest_s),
        proven=found.proven and quickest_s >= found.quickest_s * (1 - _SAME),
        given_up_s=taken.objective_s - quickest_s,
        given_up=tuple(given_up),
    )


def _wireless(found: Solution, question: Instance) -> list[str]:
    return [each.device for each in question.devices if each.wireless and each.device in found.plan.devices]


def _shared(found: Solution, question: Instance) -> list[str]:
    """Return devices that have other models too, except the head."""
    return [name for name in found.plan.devices if name in question.shared and name != found.plan.head]


def _full(found: Solution, question: Instance) -> list[str]:
    """Return devices of which the plan takes nearly all memory. Where layers stream the plan takes all it can get."""
    limits = {member.name: member.ram_limit for member in question.members}
    return [
        each.device
        for each in found.prediction.devices
        if each.ram_bytes > FULL * limits[each.device] and not found.plan.streaming
    ]


def _burdens(found: Solution, question: Instance) -> tuple[bool, int]:
    """Return the demands of the plan on devices, for comparison: whether it streams, and their number."""
    wireless, full, shared = _wireless(found, question), _full(found, question), _shared(found, question)
    return bool(found.plan.streaming), len(wireless) + (found.plan.head in wireless) + len(full) + len(shared)


def _with_less(found: Solution, whole: Instance, asked: _Simpler, require: frozenset[str]) -> Iterator[_Simpler]:
    """Yield parts of the ``whole`` question whose plans require less than ``found``: of a head, of wireless and shared
    devices, of full ones."""
    plan, question = found.plan, asked.question
    wireless, full = _wireless(found, question), _full(found, whole)
    others = tuple(head for head in asked.heads if head not in wireless)
    if plan.head in wireless and others:
        yield _Simpler(f"{plan.head} as head, which is on Wi-Fi", question, others)
    roaming = [name for name in wireless if name != plan.head]
    for burdening, why in ((roaming, "on Wi-Fi"), (_shared(found, question), "which other models share")):
        avoidable = [name for name in burdening if name not in require]
        for names in [avoidable, *([name] for name in avoidable)]:
            if names:
                left = tuple(each for each in question.devices if each.device not in names)
                heads = tuple(head for head in asked.heads if head not in names)
                yield _Simpler(f"{' and '.join(names)}, {why}", replace(question, devices=left), heads)
    if full:
        limits = {member.name: member.ram_limit for member in whole.members}
        less = {
            name: replace(question.limits.get(name, NO_LIMITS), ram_bytes=int(FULL * limits[name])) for name in full
        }
        what = f"the last {1 - FULL:.0%} of the memory of {' and '.join(full)}"
        yield _Simpler(what, replace(question, limits={**question.limits, **less}), asked.heads)
