"""Tensor-parallel plans: one group of devices, each with a share of every layer, as large as it is quick. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from halda import DeviceProfile, Infeasible, LeftOut, Objective, Plan, Rank, Solution, Window, evaluate
from halda.instance import Instance
from primad.errors import PlanError
from primad.settings.quantities import show_bytes

MAX_WEIGHT: Final = 16
"""That of the quickest device. Weights are coarse, so that shares stay what they are where figures hardly change."""


def group_of(question: Instance, max_ranks: int) -> Plan:
    """The group of the head and the quickest other devices of ``question``, at most so many, with the shares that they have
    memory for.

    Raises ``PlanError`` for a device with a GPU, and ``Infeasible`` where memory is short.
    """
    for device in question.devices:
        if device.gpu is not None:
            raise PlanError(
                f"--parallel tensor: groups compute on processors alone, and {device.device} has a GPU; start it with "
                "--gpu off, or serve with --parallel pipeline"
            )
    rates = {device.device: 1 / _alone_s(question, device) for device in question.devices}
    head, *others = (device.device for device in question.devices)
    taken = [head, *sorted(others, key=lambda name: -rates[name])[: max_ranks - 1]]
    taken = [name for name in rates if name in taken]
    left_out = tuple(
        LeftOut(device=name, reason=f"the heads of this model are for a group of {max_ranks} devices at most")
        for name in others
        if name not in taken
    )
    quickest = max(rates[name] for name in taken)
    weights = {name: max(1, round(MAX_WEIGHT * rates[name] / quickest)) for name in taken}
    return _within_memory(_plan(question, weights, left_out), question)


def group_solution(question: Instance, max_ranks: int, objective: Objective) -> Solution:
    """``group_of`` with its forecast."""
    plan = group_of(question, max_ranks)
    prediction = evaluate(plan, question)
    value_s = prediction.objective_s(objective, question.workload.answer_tokens)
    return Solution(
        plan=plan, prediction=prediction, objective=objective, objective_s=value_s, bound_s=0.0, proven=False
    )


def _plan(question: Instance, weights: dict[str, int], left_out: Sequence[LeftOut]) -> Plan:
    layers = len(question.model.layers)
    return Plan(
        rounds=1,
        route=(Window(device=question.devices[0].device, first=0, last=layers, gpu_layers=0),),
        output_on_gpu=False,
        streaming=(),
        left_out=tuple(left_out),
        groups=(tuple(Rank(device=name, weight=weight) for name, weight in weights.items()),),
    )


def _alone_s(question: Instance, device: DeviceProfile) -> float:
    """What a token would take ``device`` if it had memory for the whole model."""
    own = replace(question, devices=(device,), links={})
    window = Window(device=device.device, first=0, last=len(question.model.layers), gpu_layers=0)
    plan = Plan(rounds=1, route=(window,), output_on_gpu=False, streaming=(), left_out=())
    return evaluate(plan, own).tpot_s


def _within_memory(plan: Plan, question: Instance) -> Plan:
    """``plan``, in which devices that are short of memory have less. Raises ``Infeasible``."""
    while short := evaluate(plan, question).short:
        first = short[0]
        (ranks,) = plan.groups
        lower = tuple(
            replace(rank, weight=max(1, rank.weight - 1)) if rank.device == first.where else rank for rank in ranks
        )
        if lower == ranks:
            raise Infeasible(
                f"{first.where} is short of {show_bytes(first.short_bytes)} of {first.what} for a share of each layer; "
                "choose a smaller --context, add a device, or serve with --parallel pipeline",
                short_bytes=first.short_bytes,
            )
        plan = replace(plan, groups=(lower,))
    return plan
