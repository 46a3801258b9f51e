"""Makes plans for the head and some of its workers; plans for the loss of a device are made in advance."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from halda import CutOff, DeviceProfile, Infeasible, LinkProfile, evaluate, instance
from primad.daemon.gpu_care import GpuCare
from primad.daemon.memory_watch import MemoryWatch
from primad.errors import PlanError, PrimadError
from primad.gguf.architectures.cuts import cuttable, why_whole
from primad.gguf.architectures.tensors import turns_by_context
from primad.gguf.shares import shared_ranks
from primad.head.members.devices import Devices
from primad.head.members.worker_link import WorkerLink
from primad.head.model.learning import Learning
from primad.head.model.limits import DeviceLimits
from primad.head.model.service import Service
from primad.head.rings.taken import Taken, peak
from primad.planning.by_hand import senders_by_hand
from primad.planning.extra_buffers import as_planned
from primad.planning.forecast import Forecast
from primad.planning.plan import complete, search
from primad.planning.question import LinkSpeed, both_ways, with_default_links, without_ram
from primad.planning.request import FoundPlan, PlanRequest
from primad.planning.solver_process import solve_in_process
from primad.system.tasks import Tasks

logger = logging.getLogger(__name__)

MAX_PRECOMPUTED: Final = 8
"""In larger rings a plan for the loss of a device is made when it is lost."""

PlanResult = tuple[Forecast, float]
"""A plan with its forecast and its objective."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DevicePool:
    """The inputs of plans: this device and the others, what was learnt about them, and how much of each may be used."""

    own: OwnDevice
    others: Devices
    learning: Learning
    limits: DeviceLimits
    held: dict[str, Callable[[], Iterable[Forecast]]] = field(default_factory=dict)
    """Returns, by name of a model, the forecasts whose memory it holds or will hold on devices."""
    reserved: dict[str, int] = field(default_factory=dict)
    """Further bytes of this device's RAM that each model takes for its draft model and its encoder."""

    def taken(self, spared: Collection[str]) -> dict[str, Taken]:
        """Return what the models other than ``spared`` hold of each device."""
        found: dict[str, Taken] = {}
        for name, forecasts in self.held.items():
            if name not in spared:
                for device, taken in peak(forecasts()).items():
                    found[device] = found[device].and_also(taken) if device in found else taken
        return found


class Planner:
    """Makes plans for ``service``, called ``name``, on what other models leave of the devices of ``pool``."""

    def __init__(self, service: Service, pool: DevicePool, name: str = "") -> None:
        self._service, self._pool, self._name = service, pool, name
        self._precomputed: dict[frozenset[str], tuple[list[DeviceProfile], PlanResult]] = {}
        self.foreseeing: asyncio.Task[None] | None = None
        """The running task that plans for losses."""
        self.imagines = False
        """Whether a plan is being made that will not be served."""

    async def plan(
        self, candidates: frozenset[str], served: Forecast | None, *, keeps_attention: bool = False
    ) -> PlanResult:
        """Return the plan for the head and ``candidates``, with the context and the sequences of ``served``, if it is
        given.

        With ``keeps_attention`` it also has the attention of ``served``, if there is such a plan: running requests
        resume with it.

        Raises ``PlanError`` or ``Infeasible`` if there is no plan.
        """
        workers = self._pool.others.present(candidates)
        profiles, precomputed = self._precomputed.get(candidates, ([], None))
        # A device that has become short of memory has another profile than when the plan was made.
        if precomputed is not None and profiles == [worker.profile for worker in workers]:
            return precomputed
        return await self._solve(workers, served, keeps_attention=keeps_attention)

    async def beside(
        self, candidates: frozenset[str], gone: Collection[str], *, background: bool = False
    ) -> PlanResult:
        """Return the plan for the head and ``candidates`` if the models ``gone`` were not loaded.

        Raises ``PlanError`` or ``Infeasible`` if there is no plan.
        """
        return await self._solve(self._pool.others.present(candidates), None, gone=gone, background=background)

    def shares(self, forecast: Forecast) -> list[str]:
        """Return the devices of ``forecast`` that other models use too."""
        taken = self._pool.taken({self._name})
        return [device for device in forecast.plan.devices if device in taken]

    def forget(self) -> None:
        """Drop precomputed plans, which have become invalid."""
        if self.foreseeing is not None:
            self.foreseeing.cancel()
        self._precomputed.clear()

    def precompute(self, candidates: frozenset[str], members: frozenset[str], tasks: Tasks, served: Forecast) -> None:
        """Start planning for the loss of each of ``members``, so that planning takes no time when it happens."""
        self.forget()
        if len(members) <= MAX_PRECOMPUTED and self._service.options.run.windows is None:
            self.foreseeing = tasks.start(self._precompute(candidates, members, served))

    async def _precompute(self, candidates: frozenset[str], members: frozenset[str], served: Forecast) -> None:
        for lost in sorted(members):
            rest = candidates - {lost}
            workers = self._pool.others.present(rest)
            profiles = [worker.profile for worker in workers]
            try:
                self._precomputed[rest] = (
                    profiles,
                    await self._solve(workers, served, keeps_attention=True, background=True),
                )
            except (PrimadError, Infeasible) as exc:
                logger.info("without %s there is no plan: %s", lost, exc)

    async def value(self, forecast: Forecast) -> float | None:
        """Return the objective of a plan, with current knowledge; None if it was set by hand or one of its devices is
        not connected."""
        before, run = forecast.prediction, self._service.options.run
        workers = self._pool.others.present(forecast.plan.devices)
        own = await self._pool.own.profile()
        if before is None or run.windows is not None or len(workers) + 1 < len(forecast.plan.devices):
            return None
        devices, links = self._known([own, *(worker.profile for worker in workers)])
        if forecast.question is not None:
            devices = [as_planned(device, forecast.question.devices) for device in devices]
        workload = replace(
            self._service.workload,
            context_tokens=forecast.context_tokens,
            sequences=forecast.sequences,
            flash=forecast.flash,
            small_windows=forecast.small_windows,
        )
        links = list(with_default_links(devices, links))
        known = instance(devices, links, await self._service.model.planned(), workload, {}, head=own.device)
        prediction = evaluate(forecast.plan, known.with_rows(before.chunk_rows, before.step_rows))
        return prediction.objective_s(run.objective, self._service.workload.answer_tokens)

    async def slowdown_with(
        self, device: str, candidates: frozenset[str], serving_value: float, served: Forecast
    ) -> float | None:
        """Return the share by which the best plan with layers on ``device`` is slower than one of ``serving_value``.

        None if there is no such plan, if plans are not solved for, or if the device is paused.
        """
        if (
            self._service.options.run.windows is not None
            or self._service.options.run.parallel == "tensor"
            or serving_value <= 0
            or not self._pool.limits.unpaused({device})
        ):
            return None
        try:
            _, value = await self._solve(
                self._pool.others.present(candidates),
                served,
                keeps_attention=True,
                require=frozenset({device}),
                background=True,
            )
        except (PrimadError, Infeasible) as exc:
            logger.info("with %s there is no plan: %s", device, exc)
            return None
        return value / serving_value - 1

    async def what_if(
        self, served: Forecast | None, without: frozenset[str], more: Sequence[DeviceProfile], speed: LinkSpeed
    ) -> Forecast:
        """Return the forecast of a plan without the devices ``without``, and with ``more`` that are not here, on links
        of ``speed``.

        Raises ``PlanError`` if there is no plan.
        """
        if self._service.options.run.windows is not None:
            raise PlanError("--windows sets the plan by hand, so there is nothing to compare")
        workers = self._pool.others.present(frozenset(self._pool.others.workers) - without)
        names = [(await self._pool.own.profile()).device, *(worker.profile.device for worker in workers)]
        links = list[LinkProfile]()
        for place, each in enumerate(more):
            others = [*names, *(other.device for other in more[:place])]
            links += [link for other in others for link in both_ways(each.device, other, speed)]
        self.imagines = True
        try:
            forecast, _ = await self._solve(workers, served, background=True, more=more, more_links=links)
        except Infeasible as exc:
            raise PlanError(f"there is no such plan: {exc}") from exc
        finally:
            self.imagines = False
        return forecast

    def _known(
        self, measured: Sequence[DeviceProfile], gone: Collection[str] = ()
    ) -> tuple[list[DeviceProfile], list[LinkProfile]]:
        """Return devices, this one first, and their links, both corrected, without what models other than ``gone``
        hold."""
        corrections, taken = self._pool.learning.planned(measured), self._pool.taken({self._name, *gone})
        links = self._pool.others.book.all_between(each.device for each in measured)
        limited = [self._pool.limits.apply(corrections.apply(each)) for each in measured]
        left = [taken[each.device].off(each) if each.device in taken else each for each in limited]
        others = sum(size for name, size in self._pool.reserved.items() if name not in {self._name, *gone})
        left = without_ram(left, measured[0].device, self._service.reserved_bytes + others)
        return left, [corrections.apply_link(link) for link in links]

    async def _solve(
        self,
        workers: Sequence[WorkerLink],
        served: Forecast | None,
        *,
        keeps_attention: bool = False,
        require: frozenset[str] = frozenset(),
        background: bool = False,
        more: Sequence[DeviceProfile] = (),
        more_links: Sequence[LinkProfile] = (),
        gone: Collection[str] = (),
    ) -> PlanResult:
        """Return the plan for the head and ``workers``, in which devices of ``require`` have layers: its forecast and
        its objective.

        Paused workers are left out. ``more`` are devices that are not here, with their links; memory that the models
        ``gone`` hold counts as free.

        The plan keeps the context of ``served``, unless that was automatic and there is no plan with it; its attention,
        if requested and there is a plan with it; and its sequences, unless they were automatic and the plan has no
        room. A plan that was set by hand has no prediction. ``background`` gives all other work of this device
        priority.
        """
        asked = await self._request(
            workers, served, require, keeps_attention=keeps_attention, more=more, more_links=more_links, gone=gone
        )
        by_hand = asked.run.windows is not None
        if by_hand:
            self._check_reached(asked)
            planned = complete(asked, search(asked))
        else:
            planned = complete(asked, await self._search(asked, background=background))
        model, corrections = self._service.model, self._pool.learning.corrections
        forecast = await asyncio.to_thread(Forecast.of_planned, planned, corrections, model.share_bytes)
        return forecast, 0.0 if by_hand else planned.objective_s

    async def _request(
        self,
        workers: Sequence[WorkerLink],
        served: Forecast | None,
        require: frozenset[str],
        *,
        keeps_attention: bool,
        more: Sequence[DeviceProfile],
        more_links: Sequence[LinkProfile],
        gone: Collection[str],
    ) -> PlanRequest:
        """Return the planner's question for this head and those of ``workers`` that are not paused."""
        service = self._service
        usable = self._pool.limits.unpaused(worker.profile.device for worker in workers)
        workers = [worker for worker in workers if worker.profile.device in usable]
        own = await self._pool.own.profile()
        devices, links = self._known([own, *(worker.profile for worker in workers)], gone)
        devices = [*devices, *more]
        max_ranks, parallel = 1, service.options.run.parallel
        if parallel != "pipeline" and len(devices) > 1 and service.may_share:
            max_ranks = await service.model.max_ranks(len(devices))
        if parallel == "tensor" and len(devices) > 1:
            shared_ranks(service.model.share_rules, 2)
        elif service.options.run.windows is None and len(devices) > 1:
            cuttable(service.model.header)
        return PlanRequest(
            devices=devices,
            links=list(with_default_links(devices, [*links, *more_links])),
            model=await service.model.planned(),
            run=service.options.run,
            require=require,
            shared=frozenset(self._pool.taken({self._name, *gone})),
            draft=service.planned_draft,
            encoder=service.encoder.planned,
            served=None if served is None else served.served,
            keeps_attention=keeps_attention,
            keeps_context=served is not None and turns_by_context(service.model.header),
            may_be_several=not why_whole(service.model.header),
            max_ranks=max_ranks,
            units=service.model.share_units if max_ranks > 1 else None,
        )

    async def _search(self, asked: PlanRequest, *, background: bool) -> FoundPlan:
        """Search for a plan. Raises ``PlanError`` with the reason if there is none because devices do not reach each
        other."""
        try:
            return await solve_in_process(asked, background=background)
        except CutOff as exc:
            raise PlanError(self._why_cut(device.device for device in asked.devices) or str(exc)) from exc

    def _check_reached(self, asked: PlanRequest) -> None:
        """Raise ``PlanError`` if a device of the windows by hand does not reach a device that it sends to."""
        windows, ranks = asked.run.windows, asked.run.ranks
        assert windows is not None
        names = [device.device for device in asked.devices]
        if len(names) < asked.run.devices_by_hand:
            return  # the search reports that
        for pair in senders_by_hand(names, ranks or (1,) * len(windows)):
            if (why := self._why_cut(pair)) is not None:
                raise PlanError(f"--windows {','.join(map(str, windows))}: {why}")

    def _why_cut(self, devices: Iterable[str]) -> str | None:
        """Return why two of ``devices`` do not reach each other."""
        names = list(devices)
        return next((why for each in names if (why := self._pool.others.book.why_cut(each, names)) is not None), None)


class OwnDevice:
    """``profile`` gives this device's current profile, ``memory_watch`` is notified when its memory is low,
    ``gpu_care`` limits the GPU memory of plans."""

    def __init__(self, profile: Callable[[], DeviceProfile], memory_watch: MemoryWatch, gpu_care: GpuCare) -> None:
        self._profile, self._memory_watch, self._gpu_care = profile, memory_watch, gpu_care

    async def profile(self) -> DeviceProfile:
        """Return its current profile, with at most the memory that plans may use after it was short of memory."""
        profile = self._gpu_care.now(await asyncio.to_thread(self._profile))
        maximum = self._memory_watch.max_bytes(profile.ram_available_bytes)
        return replace(profile, ram_available_bytes=maximum)

    async def begin(self) -> DeviceProfile:
        """Return its current profile, with which a ring is formed."""
        profile = await self.profile()
        self._memory_watch.begin(profile.ram_available_bytes)
        return profile

    async def report_memory_low(self, needed_bytes: int) -> None:
        """It lacks ``needed_bytes`` of memory: later plans use less of it."""
        await self._memory_watch.report_memory_low(needed_bytes)
