"""Correct device and link profiles from measured requests: bounded factors on the seconds that the profiles predict.

A prediction already includes the current factors, so a term that took r times its prediction asks for r times the
factor used. After each request a factor moves half of the way there, or stays where it is near enough. A term that
would need a factor beyond the bounds is a fault, not a speed to plan with; the verdict says so.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from typing import Final, Literal

from halda import (
    CpuProfile,
    DeviceProfile,
    DiskProfile,
    GpuProfile,
    Instance,
    LinkProfile,
    Plan,
    Prediction,
    RoutingCost,
    TypeSpeed,
    prompt_row_s,
)
from primad.ring.messages import DecodeStatus, Status

MIN: Final = 0.5
MAX: Final = 2.0
STEP: Final = 0.5
"""Share of the way to the wanted factor that one request moves it."""
NEAR: Final = 0.05
"""Relative error below which a factor stays, so that chance does not change plans."""
MIN_TOKENS: Final = 16
"""Minimum number of tokens of a request that is learnt from."""
OFF: Final = 0.25
"""Relative error of a plan beyond which it is reported."""
_MIN_SHARE: Final = 0.05
"""Share of a token's time that a term must take, as predicted or measured, to say anything about speed."""
_FEW_ROWS: Final = 16
"""Largest batch that is corrected by what single tokens showed; larger ones are corrected by prompts."""
Pair = tuple[str, str]
TermKind = Literal["compute", "disk", "hops"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceFactors:
    """Factors on the times of one device; ``stamp`` identifies the measurement that they correct."""

    stamp: str
    compute: float = 1.0
    disk: float = 1.0
    prompts: float = 1.0
    """Factor on prefill compute."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Corrections:
    """Factors of devices by name, and of links by source and target."""

    devices: Mapping[str, DeviceFactors] = field(default_factory=dict)
    links: Mapping[Pair, float] = field(default_factory=dict)

    def of(self, profile: DeviceProfile) -> DeviceFactors:
        """Return the factors of a device; those of an earlier measurement are dropped."""
        stamp = stamp_of(profile)
        kept = self.devices.get(profile.device)
        return kept if kept is not None and kept.stamp == stamp else DeviceFactors(stamp=stamp)

    def noted(self, profiles: Iterable[DeviceProfile]) -> Corrections:
        """Return the corrections with an entry for each of ``profiles``, as they are measured now."""
        return replace(self, devices={**self.devices} | {each.device: self.of(each) for each in profiles})

    def apply(self, profile: DeviceProfile) -> DeviceProfile:
        """Return ``profile`` with the speeds that requests showed."""
        factors = self.of(profile)
        if factors.compute == factors.disk == factors.prompts == 1.0:
            return profile
        return replace(
            profile.with_gpus([_slower_gpu(gpu, factors) for gpu in profile.gpus]),
            cpu=slower_cpu(profile.cpu, factors),
            ram_read_bytes_per_s=profile.ram_read_bytes_per_s / factors.compute,
            disk=_slower_disk(profile.disk, factors),
        )

    def apply_link(self, link: LinkProfile) -> LinkProfile:
        """Return ``link`` with the speed that requests showed."""
        factor = self.links.get((link.source, link.target), 1.0)
        if factor == 1.0:
            return link
        messages = tuple(replace(each, beyond_s=each.beyond_s * factor) for each in link.messages)
        return replace(
            link,
            round_trip_s=link.round_trip_s * factor,
            bytes_per_s=link.bytes_per_s / factor,
            late_s=link.late_s * factor,
            messages=messages,
            network_s=None if link.network_s is None else link.network_s * factor,
        )

    def changed(self, before: Corrections, plan: Plan, share: float) -> set[str]:
        """Devices of ``plan`` with a factor, their own or of a link from them, that differs by ``share`` from
        ``before``."""
        found = set[str]()
        for pair in hops_of(plan):
            if abs(self.links.get(pair, 1.0) / before.links.get(pair, 1.0) - 1) >= share:
                found.add(pair[0])
        for name in self.devices.keys() & before.devices.keys() & set(plan.devices):
            now, then = self.devices[name], before.devices[name]
            pairs = ((now.compute, then.compute), (now.disk, then.disk), (now.prompts, then.prompts))
            step = max(abs(one / other - 1) for one, other in pairs)
            if now.stamp == then.stamp and step >= share:
                found.add(name)
        return found


NOTHING_LEARNT: Final = Corrections()


@dataclass(frozen=True, slots=True, kw_only=True)
class Term:
    """One part of a token's time: of a ``device``, or of all hops together. ``factor`` is the factor that it asks for."""

    kind: TermKind
    device: str | None
    predicted_s: float
    measured_s: float
    factor: float | None

    @property
    def is_beyond(self) -> bool:
        """Whether it needs a factor beyond the bounds."""
        return self.factor is not None and not MIN <= self.factor <= MAX


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The measured time of a request's tokens against the prediction, and its parts."""

    predicted_s: float
    measured_s: float
    terms: tuple[Term, ...]

    @property
    def is_off(self) -> bool:
        """Whether the error of the plan is large enough to report."""
        return abs(self.measured_s / self.predicted_s - 1) > OFF

    @property
    def worst(self) -> Term:
        """The term with the largest error in seconds."""
        return max(self.terms, key=lambda term: abs(term.measured_s - term.predicted_s))


def verdict_of(
    plan: Plan, prediction: Prediction, used: Corrections, statuses: Mapping[str, Status | None]
) -> Verdict | None:
    """Compare the latest tokens on ``plan`` with its ``prediction``, which was made with the factors ``used``.

    None where they were not measured cleanly: a device did not answer, is short of memory, or has computed too few
    tokens.
    """
    decodes = {name: _clean(statuses.get(name)) for name in plan.devices}
    found = {name: decode for name, decode in decodes.items() if decode is not None}
    head = found.get(plan.head)
    if len(found) < len(decodes) or head is None or head.token_s is None or not 0 < head.token_s < math.inf:
        return None
    if not 0 < prediction.tpot_s < math.inf:
        return None
    terms = list[Term]()
    for device in prediction.devices:
        decode = found[device.device]
        factors = used.devices[device.device]
        min_s = _MIN_SHARE * head.token_s
        is_significant = device.compute_s > 0 and max(decode.compute_s, device.compute_s) >= min_s
        terms.append(
            Term(
                kind="compute",
                device=device.device,
                predicted_s=device.compute_s,
                measured_s=decode.compute_s,
                factor=factors.compute * decode.compute_s / device.compute_s if is_significant else None,
            )
        )
        factor = None
        waits = max(decode.stall_s, device.stall_s) >= min_s
        if waits and device.disk_bytes_per_token > 0 and decode.read_bytes > 0 and device.disk_s > 0:
            # Reads that overlap with compute are not waited for; the planned overlap counts as such.
            read_s = decode.stall_s + max(0.0, device.disk_s - device.stall_s)
            factor = factors.disk * (read_s / decode.read_bytes) / (device.disk_s / device.disk_bytes_per_token)
        terms.append(
            Term(
                kind="disk",
                device=device.device,
                predicted_s=device.stall_s,
                measured_s=decode.stall_s,
                factor=factor,
            )
        )
    if len(plan.devices) > 1:
        between_s = head.token_s - sum(decode.compute_s + decode.stall_s for decode in found.values())
        is_significant = max(between_s, prediction.hop_s) >= _MIN_SHARE * head.token_s
        terms.append(_hops(plan, prediction, used, max(0.0, between_s), is_significant=is_significant))
    return Verdict(predicted_s=prediction.tpot_s, measured_s=head.token_s, terms=tuple(terms))


def _hops(plan: Plan, prediction: Prediction, used: Corrections, between_s: float, *, is_significant: bool) -> Term:
    """Attribute the rest of a token's time to its hops: all links of the ring get one factor, as they are not timed
    separately."""
    known = [used.links.get(pair, 1.0) for pair in hops_of(plan)]
    ratio = between_s / prediction.hop_s if is_significant and prediction.hop_s > 0 and between_s > 0 else None
    return Term(
        kind="hops",
        device=None,
        predicted_s=prediction.hop_s,
        measured_s=between_s,
        factor=None if ratio is None else ratio * math.prod(known) ** (1 / len(known)),
    )


def learnt(before: Corrections, verdict: Verdict, plan: Plan, used: Corrections) -> Corrections:
    """Return the corrections after a request on ``plan``, which was made with the factors ``used``.

    Nothing is learnt of a device that was measured again since then.
    """
    devices, links = dict(before.devices), dict(before.links)
    for term in verdict.terms:
        if term.factor is None:
            continue
        if term.device is None:
            for pair in hops_of(plan):
                links[pair] = moved(links.get(pair, 1.0), term.factor)
            continue
        factors = devices.get(term.device)
        if factors is None or factors.stamp != used.devices[term.device].stamp:
            continue
        if term.kind == "compute":
            devices[term.device] = replace(factors, compute=moved(factors.compute, term.factor))
        else:
            devices[term.device] = replace(factors, disk=moved(factors.disk, term.factor))
    return Corrections(devices=devices, links=links)


def prompts_learnt(
    before: Corrections, plan: Plan, instance: Instance, used: Corrections, statuses: Mapping[str, Status | None]
) -> Corrections:
    """Return the corrections after prompts on ``plan``, made for ``instance`` with the factors ``used``.

    Nothing is learnt of devices that stream: their compute takes longer while they read.
    """
    devices = dict(before.devices)
    for name in plan.devices:
        status, factors = statuses.get(name), devices.get(name)
        if status is None or status.prompt is None or factors is None or plan.streaming_of(name).streamed_bytes:
            continue
        rows, row_s = status.prompt.rows, status.prompt.row_s
        if not (1 <= rows < math.inf and 0 < row_s < math.inf) or factors.stamp != used.devices[name].stamp:
            continue
        ratio = row_s / prompt_row_s(plan, instance, rows)[name]
        devices[name] = replace(factors, prompts=moved(factors.prompts, used.devices[name].prompts * ratio))
    return replace(before, devices=devices)


def moved(factor: float, wanted: float) -> float:
    """Return ``factor`` after a request that asks for ``wanted``."""
    target = min(MAX, max(MIN, wanted))
    return factor if abs(target / factor - 1) <= NEAR else factor + STEP * (target - factor)


def hops_of(plan: Plan) -> list[Pair]:
    """The links that a token crosses."""
    return [(name, plan.after(name)) for name in plan.places] if len(plan.places) > 1 else []


def stamp_of(profile: DeviceProfile) -> str:
    """Identify one measurement of a device: another one has other figures. Values that change by the minute are left
    out."""
    measured = (profile.host, profile.cpu, profile.ram_read_bytes_per_s, replace(profile.disk, free_bytes=0))
    gpus = tuple(replace(gpu, vram_available_bytes=0) for gpu in profile.gpus) or (None,)
    return blake2b(repr((*measured, *gpus)).encode(), digest_size=8).hexdigest()


def _clean(status: Status | None) -> DecodeStatus | None:
    """Return the status of a device's latest tokens, if it covers enough of them and nothing disturbed it."""
    decode = None if status is None else status.decode
    if status is None or decode is None or decode.tokens < MIN_TOKENS:
        return None
    if status.memory is not None and status.memory.pressure != "calm":
        return None
    figures = (decode.compute_s, decode.stall_s, decode.read_bytes)
    return decode if all(0 <= figure < math.inf for figure in figures) else None


def slower_cpu(cpu: CpuProfile, factors: DeviceFactors) -> CpuProfile:
    factor = factors.compute
    return replace(
        cpu,
        step_s=cpu.step_s * factor,
        layer_s=cpu.layer_s * factor,
        token_s=cpu.token_s * factor,
        value_s=cpu.value_s * factor,
        row_s=cpu.row_s * factor,
        attention_s=cpu.attention_s * factor,
        plain_attention_s=cpu.plain_attention_s * factor,
        rows_attention_s=cpu.rows_attention_s * factor,
        routing=_slower_routing(cpu.routing, factors),
        speeds=tuple(_slower_speed(speed, factors) for speed in cpu.speeds),
    )


def _slower_gpu(gpu: GpuProfile, factors: DeviceFactors) -> GpuProfile:
    factor = factors.compute
    return replace(
        gpu,
        step_s=gpu.step_s * factor,
        layer_s=gpu.layer_s * factor,
        vram_read_bytes_per_s=gpu.vram_read_bytes_per_s / factor,
        attention_flop_per_s=gpu.attention_flop_per_s / factors.prompts,
        routing=_slower_routing(gpu.routing, factors),
        speeds=tuple(_slower_speed(speed, factors) for speed in gpu.speeds),
        prefill_offload=tuple(
            replace(
                speed,
                few_bytes_per_s=speed.few_bytes_per_s / factors.prompts,
                prefill_flop_per_s=speed.prefill_flop_per_s / factors.prompts,
            )
            for speed in gpu.prefill_offload
        ),
    )


def _slower_routing(routing: RoutingCost, factors: DeviceFactors) -> RoutingCost:
    return replace(routing, layer_s=routing.layer_s * factors.compute, row_s=routing.row_s * factors.prompts)


def _slower_speed(speed: TypeSpeed, factors: DeviceFactors) -> TypeSpeed:
    """A device that is slower for one token is slower for small batches; prompts correct large batches."""
    return replace(
        speed,
        decode_bytes_per_s=speed.decode_bytes_per_s / factors.compute,
        batch_bytes_per_s=speed.batch_bytes_per_s / factors.compute,
        prefill_flop_per_s=speed.prefill_flop_per_s / factors.prompts,
        rows=tuple(
            replace(
                each,
                bytes_per_s=each.bytes_per_s / (factors.compute if each.rows <= _FEW_ROWS else factors.prompts),
            )
            for each in speed.rows
        ),
        plain=None if speed.plain is None else _slower_speed(speed.plain, factors),
    )


def _slower_disk(disk: DiskProfile, factors: DeviceFactors) -> DiskProfile:
    return replace(
        disk,
        prefetch_bytes_per_s=disk.prefetch_bytes_per_s / factors.disk,
        fault_bytes_per_s=disk.fault_bytes_per_s / factors.disk,
        random_bytes_per_s=disk.random_bytes_per_s / factors.disk,
        slows_s_per_byte=disk.slows_s_per_byte * factors.compute,
    )
