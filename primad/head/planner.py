"""Plans for the head and some of its workers; those for the loss of a device are made before it is lost."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Final

from halda import DeviceProfile, Infeasible, LinkProfile, evaluate, instance
from primad.errors import PlanError, PrimadError
from primad.gguf.architectures import cuttable
from primad.head.devices import Devices
from primad.head.learning import Learning
from primad.head.options import plan_by_hand, stream_by_hand
from primad.head.own_device import OwnDevice
from primad.head.promise import Promise
from primad.head.service import Service
from primad.head.solver_process import SolverRequest, solve_apart
from primad.head.worker_link import WorkerLink
from primad.system.tasks import Tasks

logger = logging.getLogger(__name__)

SOLVE_S: Final = 5.0
MOST_FORESEEN: Final = 8
"""In larger rings the loss of one device is planned for when it comes."""

PlanResult = tuple[Promise, float]
"""A plan with what it promises, and its objective."""


class Planner:
    """Plans for ``service`` on ``own`` and the workers among ``devices``, with what ``learning`` knows of them."""

    def __init__(self, service: Service, own: OwnDevice, devices: Devices, learning: Learning) -> None:
        self._service, self._own, self._devices, self._learning = service, own, devices, learning
        self._foreseen: dict[frozenset[str], tuple[list[DeviceProfile], PlanResult]] = {}
        self.foreseeing: asyncio.Task[None] | None = None
        """The planning for losses that is under way."""

    async def plan(self, candidates: frozenset[str]) -> PlanResult:
        """The plan for the head and ``candidates``. Raises ``PlanError`` or ``Infeasible`` when there is none."""
        workers = self._devices.present(candidates)
        profiles, foreseen = self._foreseen.get(candidates, ([], None))
        # A device that is short of memory now has another profile than it had then.
        if foreseen is not None and profiles == [worker.profile for worker in workers]:
            return foreseen
        return await self._solve(workers)

    def forget(self) -> None:
        """What was foreseen holds no more: the head's own memory became short."""
        if self.foreseeing is not None:
            self.foreseeing.cancel()
        self._foreseen.clear()

    def foresee(self, candidates: frozenset[str], members: frozenset[str], tasks: Tasks) -> None:
        """Begin to plan for the loss of each of ``members``, so that no time goes into it when it comes."""
        self.forget()
        if len(members) <= MOST_FORESEEN and self._service.options.windows is None:
            self.foreseeing = tasks.start(self._foresee(candidates, members))

    async def _foresee(self, candidates: frozenset[str], members: frozenset[str]) -> None:
        for lost in sorted(members):
            rest = candidates - {lost}
            workers = self._devices.present(rest)
            profiles = [worker.profile for worker in workers]
            try:
                self._foreseen[rest] = profiles, await self._solve(workers, background=True)
            except (PrimadError, Infeasible) as exc:
                logger.info("without %s there is no plan: %s", lost, exc)

    async def value(self, promise: Promise) -> float | None:
        """The objective of a plan that was solved, with what is known now; None where a device of it is not spoken to."""
        before, options = promise.prediction, self._service.options
        workers = self._devices.present(promise.plan.devices)
        own = await self._own.profile()
        if before is None or len(workers) + 1 < len(promise.plan.devices):
            return None
        devices, links = self._known([own, *(worker.profile for worker in workers)])
        known = instance(devices, links, self._service.model.profile, self._service.workload, {}, head=own.device)
        prediction = evaluate(promise.plan, known.with_rows(before.chunk_rows))
        return prediction.objective_s(options.objective, self._service.workload.answer_tokens)

    async def slowdown_with(self, device: str, candidates: frozenset[str], serving_value: float) -> float | None:
        """The share by which the best plan in which ``device`` has layers is slower than one of ``serving_value``.

        None where there is no such plan, or none is solved for.
        """
        if self._service.options.windows is not None or serving_value <= 0:
            return None
        try:
            _, value = await self._solve(
                self._devices.present(candidates), require=frozenset({device}), background=True
            )
        except (PrimadError, Infeasible) as exc:
            logger.info("with %s there is no plan: %s", device, exc)
            return None
        return value / serving_value - 1

    def _known(self, measured: Sequence[DeviceProfile]) -> tuple[list[DeviceProfile], list[LinkProfile]]:
        """Devices and the links between them, with what was learnt of them."""
        corrections = self._learning.planned(measured)
        links = self._devices.book.between(each.device for each in measured)
        return [corrections.apply(each) for each in measured], [corrections.apply_link(link) for link in links]

    async def _solve(
        self, workers: Sequence[WorkerLink], *, require: frozenset[str] = frozenset(), background: bool = False
    ) -> PlanResult:
        """The plan for the head and ``workers``, in which those of ``require`` have layers; what it promises, its objective.

        Nothing is predicted for one that was set by hand. ``background`` lets all other work of this device go first.
        """
        model, options, workload = self._service.model, self._service.options, self._service.workload
        windows = options.windows
        devices, links = self._known([await self._own.profile(), *(worker.profile for worker in workers)])
        corrections = self._learning.corrections
        if windows is not None:
            if len(windows) > len(devices):
                raise PlanError(
                    f"--windows {','.join(map(str, windows))} is for {len(windows)} devices; found {len(devices)}, "
                    "this one among them; start 'primad join' on more or give fewer windows"
                )
            names = [device.device for device in devices[: len(windows)]]
            plan = plan_by_hand(names, windows, options.rounds, model.profile)
            plan = stream_by_hand(plan, devices[: len(windows)], model.profile, workload)
            return Promise.of(plan, model.profile, None), 0.0
        if len(devices) > 1:
            cuttable(model.header)
        names = [device.device for device in devices]
        solution = await solve_apart(
            SolverRequest(
                devices=devices,
                links=links,
                model=model.profile,
                workload=workload,
                objective=options.objective,
                require=frozenset(names) if options.use_all else require,
                time_limit_s=SOLVE_S,
            ),
            background=background,
        )
        promise = Promise.of(solution.plan, model.profile, solution.prediction, corrections)
        return promise, solution.objective_s
