"""The request to the planner, and the result of its search: both are sent to a separate process and back."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import msgspec

from halda import DeviceProfile, Limits, LinkProfile, ModelProfile, Solution, Workload, instance
from primad.gguf.splits import ShareUnits
from primad.planning.default_context import wanted_context
from primad.planning.fitting import Served
from primad.planning.question import SOLVE_S, PlannedDraft, PlannedEncoder, workload_of
from primad.planning.run_config import RunConfig

if TYPE_CHECKING:
    from halda.instance import Instance


class Settled(msgspec.Struct, frozen=True, kw_only=True):
    """What another plan settled: context, attention and chunk size in ``workload``, and the devices with prefill
    offload."""

    workload: Workload
    prefill_offload: frozenset[str]


class PlanRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The input of a plan: ``devices`` as measured, ``links`` between them, and how ``model`` is to ``run``.

    One of ``heads`` is the head (empty: the first device), devices of ``require`` have layers, and no device uses more
    than its ``limits``. The plan that was ``served`` before passes on its sequences, if they fit, and its context; with
    ``keeps_attention`` its attention too, and with ``keeps_context`` its context stays unchanged. A model has one
    request at a time unless it ``may_be_several``. ``draft`` is the draft model, ``encoder`` the picture encoder; the
    head's memory is given without their parts. Devices that are ``shared`` with other models are used where that gains
    something. What is ``settled`` is not searched again, nor is a plan that asks less of devices: such a plan is only
    compared. A tensor-parallel group of the model has at most ``max_ranks`` devices, whose shares are cut by ``units``,
    where these are known.
    """

    devices: list[DeviceProfile]
    links: list[LinkProfile]
    model: ModelProfile
    run: RunConfig
    heads: list[str] = []
    limits: dict[str, Limits] = {}
    require: frozenset[str] = frozenset()
    shared: frozenset[str] = frozenset()
    draft: PlannedDraft | None = None
    encoder: PlannedEncoder | None = None
    served: Served | None = None
    keeps_attention: bool = False
    keeps_context: bool = False
    may_be_several: bool = True
    settled: Settled | None = None
    time_limit_s: float = SOLVE_S
    max_ranks: int = 1
    units: ShareUnits | None = None

    @property
    def workloads(self) -> list[Workload]:
        """The workloads to solve for, in order, until one has a plan.

        The context and attention of what was served come first; then flash attention, which takes less memory; and last
        the small context, where none was asked for.
        """
        if self.settled is not None:
            return [self.settled.workload]
        first, served = workload_of(self.run, self.model), self.served
        work = first
        if served is not None:
            work = replace(first, context_tokens=served.context_tokens)
            if self.keeps_attention:
                work = replace(work, flash=served.flash, small_windows=served.small_windows)
        tried = [work] if work.flash else [work, replace(work, flash=True)]
        if self.run.context_tokens is None:
            tried += [replace(each, context_tokens=first.context_tokens) for each in tried]
        return list(dict.fromkeys(tried))

    @property
    def may_have_small_windows(self) -> bool:
        """Whether sliding layers may have a small cache: it rules out drafts, so none must have been asked for."""
        is_kept = self.settled is not None or (self.keeps_attention and self.served is not None)
        return self.model.has_windows and self.run.speculate in ("auto", "off") and not is_kept

    @property
    def wanted_tokens(self) -> int:
        """The context that a plan should have if it costs little; 0: that of its workload."""
        is_kept = self.settled is not None or (self.served is not None and self.keeps_context)
        is_set = self.run.context_tokens is not None or is_kept
        return 0 if is_set else wanted_context(self.model)

    def instance(self, work: Workload, head: str | None = None) -> Instance:
        """The solver's question for ``work``."""
        return instance(self.devices, self.links, self.model, work, self.limits, head)


class FoundPlan(msgspec.Struct, frozen=True, kw_only=True):
    """``solution`` for ``devices`` as they are in its plan, with the context of ``workload``, and why that is small.

    ``why_parallel`` says why devices share layers or not, where that was a choice.
    """

    solution: Solution
    devices: list[DeviceProfile]
    workload: Workload
    why_context: str = ""
    why_parallel: str = ""
