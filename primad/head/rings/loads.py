"""The loads of all devices of a ring, including the head."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence

import msgspec

from halda import Plan
from halda.cost import checkpoints
from primad.engine.protocol import Wire
from primad.errors import ModelError
from primad.gguf.adapter import Adapter
from primad.gguf.ranged_cutter import RangedCutter
from primad.gguf.windows import ModelCutter, WindowPlan, WindowSpec
from primad.head.members.core import StageError
from primad.head.members.stage import Stage
from primad.head.model.service import ModelSource
from primad.head.rings.ring_inputs import RingInputs
from primad.head.rings.routes import RingAddresses
from primad.layers.fetch import hash_layers
from primad.network.messages import Load
from primad.planning.extra_buffers import as_planned, choose_extra_buffers, suited
from primad.ring.messages import GROUP_KEY_BYTES, GroupRank
from primad.system.tasks import in_thread


async def loads_of(inputs: RingInputs, ring_addresses: RingAddresses) -> dict[str, Load]:
    """Return the loads of the head and each worker, by name. Raises ``StageError`` for a worker that is unreachable."""
    specs = await _specs(inputs)
    plan = inputs.forecast.plan
    head, group = plan.head, group_ranks(plan, inputs.service.options.run.wire)
    question = inputs.forecast.question
    profiles = {head: inputs.profile} | {name: worker.profile for name, worker in inputs.devices.workers.items()}
    workload, objective = inputs.service.workload, inputs.service.options.run.objective
    extra = choose_extra_buffers(
        inputs.forecast.assignments,
        {
            name: suited(profile, workload, objective) if question is None else as_planned(profile, question.devices)
            for name, profile in profiles.items()
        },
        inputs.service.model.profile,
        "off" if group else inputs.service.options.run.extra_buffers,
    )
    loads = {head: msgspec.structs.replace(_load(inputs, head, specs[head], extra[head]), group=group.get(head))}
    for name, worker in inputs.devices.workers.items():
        loads[name] = msgspec.structs.replace(
            _load(inputs, name, specs[name], extra[name]),
            sources=await ring_addresses.sources(worker),
            place=_place_of(inputs, name),
            group=group.get(name),
        )
    return loads


def group_ranks(plan: Plan, wire: Wire = "f32") -> dict[str, GroupRank]:
    """Return the rank of each device in a group, with a key of this epoch; empty without a group."""
    found = dict[str, GroupRank]()
    for ranks in plan.groups:
        devices, key = [rank.device for rank in ranks], secrets.token_bytes(GROUP_KEY_BYTES)
        found |= {name: GroupRank(rank=rank, devices=devices, key=key, wire=wire) for rank, name in enumerate(devices)}
    return found


async def _specs(inputs: RingInputs) -> dict[str, list[WindowSpec]]:
    """Return the windows of every device, or shares of them in a group; hash layers that no plan needed before, which
    reads them from the model file.

    A single window is the whole model, which is not cut. Of a model on a hub nothing is hashed, as nothing is here.
    Stopping waits for at most one chunk.
    """
    plan, model = inputs.forecast.plan, inputs.service.model
    if len(plan.route) == 1 and not plan.groups:
        whole = WindowSpec(window=0, first=0, last=plan.layer_count, metadata=b"", layers=())
        return {plan.head: [whole if model.ranged is None else await in_thread(model.ranged.whole)]}
    windows = {name: plan.windows_of(name) for name in plan.devices}
    cutters = await in_thread(lambda: {name: _cutter(model, plan, name) for name in plan.devices})
    if model.ranged is None:
        needed = {
            name: [layer for _, window in windows[name] for layer in cutter.layers_of(window.first, window.last)]
            for name, (cutter, _) in cutters.items()
        }
        done, total = 0, sum(map(len, needed.values()))
        for name, (cutter, _) in cutters.items():

            def hashed(count: int, before: int = done) -> None:
                inputs.reporter.progress(plan.head, "hash", before + count, total)

            await hash_layers(cutter, needed[name], hashed)
            done += len(needed[name])

    def specs() -> dict[str, list[WindowSpec]]:
        return {
            name: [adapted(cutter.spec(index, window.first, window.last), adapters) for index, window in windows[name]]
            for name, (cutter, adapters) in cutters.items()
        }

    return await in_thread(specs)


def _cutter(model: ModelSource, plan: Plan, name: str) -> tuple[ModelCutter, Sequence[Adapter]]:
    """Return the cutter of the layers of ``name`` and the adapters for them; in a group, both for its share."""
    ranks = plan.group_of(name)
    if not ranks:
        return model.cutter, model.adapters
    weights = tuple(rank.weight for rank in ranks)
    number = next(i for i, rank in enumerate(ranks) if rank.device == name)
    return model.share_cutter(weights, number), model.share_adapters(weights, number)


def adapted(spec: WindowSpec, adapters: Sequence[Adapter]) -> WindowSpec:
    """Return ``spec`` with the parts of ``adapters`` for its layers; hashes new parts."""
    found = [each.spec(spec.first, spec.last) for each in adapters]
    return msgspec.structs.replace(spec, adapters=tuple(each for each in found if each is not None))


def _load(inputs: RingInputs, name: str, specs: list[WindowSpec], extra_buffers: list[bool]) -> Load:
    """Return the load of ``name``; a worker's load gets more details later."""
    options, plan, ranged = inputs.service.options, inputs.forecast.plan, inputs.service.model.ranged
    own = inputs.forecast.assignments[name]
    return Load(
        ring=inputs.session,
        epoch=inputs.epoch,
        route=len(plan.route),
        width=inputs.service.model.profile.hop_values,
        windows=[
            WindowPlan(spec=spec, assignment=assignment, extra_buffers=extra)
            for spec, assignment, extra in zip(specs, own.windows, extra_buffers, strict=True)
        ],
        read_ahead_bytes=own.read_ahead_bytes,
        sources=[],
        context=inputs.forecast.context_tokens,
        sequences=inputs.forecast.sequences,
        rows=inputs.service.step_tokens(inputs.forecast),
        step_timeout_s=options.step_timeout_s,
        place=0,
        kv_type=options.run.kv_type,
        flash=inputs.forecast.flash,
        small_windows=inputs.forecast.small_windows,
        states=_states(inputs),
        rollback=_rollback(inputs),
        keeps=inputs.block_tokens is not None,
        rope=options.rope,
        files=[] if ranged is None else list(ranged.files),
        origins=[] if ranged is None else ranged.origins_of(spec.layers for spec in specs),
    )


def _states(inputs: RingInputs) -> int:
    """Number of states to keep for going back, including those before drafts."""
    if not (inputs.service.model.profile.is_recurrent or inputs.forecast.small_windows):
        return 0
    return checkpoints(inputs.forecast.sequences) + (0 if inputs.drafting is None else inputs.drafting.states)


def _rollback(inputs: RingInputs) -> int:
    """Number of tokens of a step that can be rolled back from states after rejected drafts."""
    drafting = inputs.drafting
    return drafting.rows - 1 if drafting is not None and inputs.service.model.profile.is_recurrent else 0


def _place_of(inputs: RingInputs, name: str) -> int:
    """Return the number of devices on the machine of ``name`` from its turn in the ring to the ring's end."""
    plan = inputs.forecast.plan
    rest = plan.devices[plan.devices.index(name) :]
    hosts = {worker: link.profile.host for worker, link in inputs.devices.workers.items()}
    return sum(hosts.get(other) == hosts[name] for other in rest)


def learn_downloaded(cutter: RangedCutter | None, workers: Mapping[str, Stage]) -> None:
    """Record the digests of the layers that ``workers`` fetched.

    Raises ``StageError`` for one that contradicts a known digest.
    """
    if cutter is None:
        return
    for name, worker in workers.items():
        for each in worker.downloaded:
            try:
                known = cutter.learn(each.name, each.tree)
            except ModelError as exc:
                raise StageError(f"{name}: {exc}", name, "fetch") from exc
            if known is not None:
                raise StageError(
                    f"{name}: fetched other bytes for layer {known[:12]} than another device, so one of the two did "
                    "not get the hub's; 'primad rm' the model here and serve it again",
                    name,
                    "fetch",
                )
