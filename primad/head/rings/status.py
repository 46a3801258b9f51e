"""A ring's part of ``/status`` and lines for the owner: plain data."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import msgspec

from halda import Assignment, LinkProfile, ModelProfile, Plan, Prediction
from halda.evaluate import GpuPrediction
from halda.load import UnderLoad
from primad.api.http.status import (
    DeviceStatus,
    GpuFigures,
    LinkStatus,
    MemoryFigures,
    PlannedFigures,
    RingFigures,
    RingForecast,
)
from primad.planning.draft_gain import no_room, where_drafted, why_none
from primad.planning.drafting import SpeculateMode, not_taken_back, takes_back
from primad.planning.forecast import Forecast
from primad.ring.messages import Status
from primad.settings.quantities import show_count, show_gpu, show_ms, show_speed

WINDOW_S: Final = 10.0
"""Means cover the passes of this many seconds, however often the status is queried."""
_GAP_S: Final = 1.0


@dataclass(frozen=True, slots=True)
class _Mark:
    """The sums of a status with new passes, and its time."""

    at_s: float
    steps: int
    read_bytes: int
    stall_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """The cost of reading weights on one device: the sums of its last statuses that counted, and the means until the
    latest.

    The means are per pass through all windows of the device, which is a token in decode; a prompt chunk is one pass
    too. They cover the passes since the latest status that counted and is ``WINDOW_S`` old, or all passes since the
    ring process was opened. A status without a new pass does not count: the means stay.
    """

    marks: tuple[_Mark, ...] = (_Mark(-math.inf, 0, 0, 0.0),)
    bytes_read_per_token: float | None = None
    stall_ms_per_token: float | None = None

    def after(self, status: Status, windows: int, now_s: float) -> Costs:
        """Return the costs after the next ``status``, at ``now_s``, of a device that has ``windows`` windows."""
        memory = status.memory
        if memory is None:
            return Costs()
        before = self if _goes_on(self.marks[-1], status) else Costs()
        if status.steps == before.marks[-1].steps:
            return before
        mark = _Mark(now_s, status.steps, memory.read_bytes, memory.stall_s)
        first = max((i for i, each in enumerate(before.marks) if each.at_s <= now_s - WINDOW_S), default=0)
        base, *later = before.marks[first:]
        if len(later) > 1 and later[-1].at_s - later[-2].at_s < _GAP_S:
            later.pop()  # frequent queries must not fill the memory
        passes = (mark.steps - base.steps) / windows
        return Costs(
            marks=(base, *later, mark),
            bytes_read_per_token=(mark.read_bytes - base.read_bytes) / passes,
            stall_ms_per_token=(mark.stall_s - base.stall_s) * 1e3 / passes,
        )


def _goes_on(before: _Mark, status: Status) -> bool:
    """Return whether ``status`` continues ``before``; a ring process that was opened again restarts its counters."""
    memory = status.memory
    return (
        memory is not None
        and status.steps >= before.steps
        and memory.read_bytes >= before.read_bytes
        and memory.stall_s >= before.stall_s
    )


def plan_lines(plan: Plan, assignments: Mapping[str, Assignment], prediction: Prediction | None = None) -> list[str]:
    """Return one line per device about its layers; ``prediction`` has those on each of several GPUs."""
    gpus = {} if prediction is None else {each.device: each.each_gpu for each in prediction.devices}
    lines = []
    for name in plan.devices:
        windows = ", ".join(
            f"{window.first}-{window.last - 1}" if len(window.layers) > 1 else str(window.first)
            for _, window in plan.windows_of(name)
        )
        kept = assignments[name]
        streams = f", {kept.streamed_layers} of them streamed" if kept.streamed_layers else ""
        on_gpu = f", {kept.gpu_layers} of them on {_where(gpus.get(name, ()))}" if kept.gpu_layers else ""
        experts_on_cpu = sum(window.cpu_experts for window in kept.windows)
        on_gpu += f" (the experts of {experts_on_cpu} in RAM)" if experts_on_cpu else ""
        prefill_offload = ", prefill offload to the GPU" if name in plan.prefill_offload else ""
        share = f"{kept.share:.0%} of each of " if plan.group_of(name) else ""
        lines.append(f"{name}: {share}{show_count(kept.layers, 'layer')} ({windows}){on_gpu}{streams}{prefill_offload}")
    return lines


def _where(gpus: Sequence[GpuPrediction]) -> str:
    """Name the GPU of a device, or each of several with its number of layers."""
    if len(gpus) < 2:
        return "the GPU"
    return " and ".join(f"{show_gpu(gpu.name, gpu.id)}: {gpu.layers}" for gpu in gpus if gpu.layers)


def left_out_line(device: str, reason: str, slowdown: float | None) -> str:
    """Say why ``device`` has no layers; with it the ring would be slower by the share ``slowdown`` (None: unknown)."""
    if slowdown is None:
        return f"{device} is left out: {reason}"
    how = f"{slowdown:.0%} slower" if slowdown >= 0.005 else "no faster"
    return f"{device} is left out: the ring would be {how} with it; --use-all takes it anyway"


def device_status(
    plan: Plan,
    prediction: Prediction | None,
    kept: Assignment,
    name: str,
    status: Status | None,
    costs: Costs,
    daemon_rss_bytes: int,
    *,
    computes: bool = False,
) -> DeviceStatus:
    """Return layers, state, counters and planned memory of the device ``name``.

    ``status`` is None if it did not reply, for example while it ``computes`` a step.
    """
    return DeviceStatus(
        name=name,
        role="head" if name == plan.head else "worker",
        windows=[(window.first, window.last) for _, window in plan.windows_of(name)],
        layers=kept.layers,
        gpu_layers=kept.gpu_layers,
        gpus=[] if prediction is None else _gpus(prediction, name),
        daemon_rss_bytes=daemon_rss_bytes,
        ring=None if status is None else _figures(status),
        computes=computes,
        memory=_memory(status, costs),
        predicted=_planned(prediction, kept, name),
    )


def _gpus(prediction: Prediction, name: str) -> list[GpuFigures]:
    """Return the GPUs of a device that has several."""
    each = next((device.each_gpu for device in prediction.devices if device.device == name), ())
    several = each if len(each) > 1 else ()
    return [GpuFigures(name=gpu.name, id=gpu.id, layers=gpu.layers, planned_bytes=gpu.vram_bytes) for gpu in several]


def at_once_line(forecast: Forecast) -> str:
    """State the number of concurrent requests, why there are not more, if known, and whether they affect each other."""
    why = f" ({forecast.why_sequences})" if forecast.why_sequences else ""
    if forecast.sequences == 1:
        return f"1 request at a time{why}"
    line = f"{forecast.sequences} concurrent requests, each with that context{why}"
    if forecast.is_exact:
        return f"{line}; output is identical to running alone"
    return f"{line}; batching may change the text (--batching exact avoids that)"


def attention_line(forecast: Forecast) -> str:
    """Return the setting with which llama.cpp gives the same text; empty if batching or a GPU may change the last
    bits."""
    if not forecast.is_exact or forecast.plan.uses_gpu or forecast.plan.prefill_offload or forecast.plan.groups:
        return ""
    has_windows = forecast.question is not None and forecast.question.model.has_windows
    swa = " --swa-full" if has_windows and not forecast.small_windows else ""
    return f"output equals llama.cpp's with --flash-attn {'on' if forecast.flash else 'off'}{swa}"


def chains_line(forecast: Forecast, block_tokens: int | None) -> str:
    """Return why the drafts of a step are not a tree although they could be; otherwise empty."""
    planned, drafting = forecast.drafting, forecast.drafting_with(block_tokens)
    if planned is None or drafting is None or planned.branches == drafting.branches:
        return ""
    asks = ["--sequences 1"] * (forecast.sequences > 1) + ["--kv-backup off without --kv-cache"] * (
        block_tokens is not None
    )
    return f"drafts are chains; trees, which may gain more, need {' and '.join(asks)}"


def no_drafts_line(forecast: Forecast, model: ModelProfile, mode: SpeculateMode) -> str:
    """Return why there are no drafts, if they were asked for or layers of ``model`` keep a state; otherwise empty."""
    if forecast.drafting is not None or mode == "off":
        return ""
    if not takes_back(model):
        return f"no drafts: {not_taken_back(model)}"
    if mode == "auto" or forecast.question is None:
        return ""
    return f"no drafts: {why_none(forecast.plan, forecast.question)}"


def draft_place_line(forecast: Forecast, memory_bytes: int) -> str:
    """State where the draft model, which takes ``memory_bytes``, runs."""
    if forecast.draft_device is None:
        return f"is not used: {no_room(memory_bytes)}"
    group = [rank.device for rank in forecast.plan.group_of(forecast.draft_device)]
    return f"drafts on {where_drafted(forecast.draft_device, group)}"


def page_line(url: str) -> str:
    """Return the line that tells the owner where the page is."""
    return f"the page is at {url}; 'primad page' opens it with the owner's rights"


def predicted_line(
    prediction: Prediction, load: UnderLoad | None, prompt_tokens: int, shared: Sequence[str] = ()
) -> str:
    """Return the forecast for one request and for several, while other models on ``shared`` devices are idle."""
    together = ""
    if load is not None and load.sequences > 1:
        together = f" ({show_speed(load.tokens_per_s)} with {load.sequences} requests)"
    return (
        f"forecast: {show_speed(1 / prediction.tpot_s)}{together}, TTFT {show_ms(prediction.ttft_s * 1e3)} "
        f"for a prompt of {prompt_tokens} tokens"
        + (f", while the other models on {' and '.join(shared)} are idle" if shared else "")
    )


def predicted_status(prediction: Prediction) -> RingForecast:
    """Return the plan's forecast for one request."""
    return RingForecast(
        tokens_per_s=1 / prediction.tpot_s,
        tpot_ms=prediction.tpot_s * 1e3,
        ttft_ms=prediction.ttft_s * 1e3,
    )


def link_status(link: LinkProfile) -> LinkStatus:
    """Return the status of one direction of a link."""
    return LinkStatus(
        source=link.source,
        target=link.target,
        round_trip_ms=link.round_trip_s * 1e3,
        late_ms=link.late_s * 1e3,
        mbit_per_s=link.bytes_per_s * 8 / 1e6,
    )


def _figures(status: Status) -> RingFigures:
    hops = sorted(status.hop_s)
    return RingFigures(
        steps=status.steps,
        rows=status.rows,
        compute_s=status.compute_s,
        hops=len(hops),
        hop_median_s=statistics.median(hops) if hops else None,
        hop_p99_s=hops[min(len(hops) - 1, len(hops) * 99 // 100)] if hops else None,
        rss_bytes=status.rss_bytes,
        private_bytes=status.private_bytes,
        refused_messages=status.refused,
        compute_ms_per_token=None if status.decode is None else status.decode.compute_s * 1e3,
    )


def _memory(status: Status | None, costs: Costs) -> MemoryFigures:
    if status is None or status.memory is None:
        return MemoryFigures()
    return MemoryFigures(
        **msgspec.structs.asdict(status.memory),
        bytes_read_per_token=costs.bytes_read_per_token,
        stall_ms_per_token=costs.stall_ms_per_token,
    )


def _planned(prediction: Prediction | None, kept: Assignment, name: str) -> PlannedFigures:
    for device in prediction.devices if prediction is not None else ():
        if device.device == name:
            return PlannedFigures(
                resident=kept.resident_layers,
                streamed=kept.streamed_layers,
                read_ahead_bytes=device.read_ahead_bytes,
                ram_bytes=device.ram_bytes,
                bytes_read_per_token=device.disk_bytes_per_token,
                stall_ms_per_token=device.stall_s * 1e3,
                compute_ms_per_token=device.compute_s * 1e3,
                hop_ms=device.hop_s * 1e3,
            )
    return PlannedFigures()
