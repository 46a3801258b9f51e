"""Choose which windows use llama.cpp's extra buffers (AMX, repacked weights), from the devices' profiles and where
memory allows.

On some builds they crash (llama.cpp issue 20824: GCC before 12.4 on a CPU with AMX), on some machines they speed up
decode and slow down prefill, for some types they change nothing. A device's profile was measured with its build of
llama.cpp, in processes where a crash is a result; it has the speed of each type with and without them. Which is better
depends on the plan's objective (``suited``): a token, the first token, or a typical request.

Windows that stream have none, so a plan made for their speed may not come true. It is then solved again with the
profiles of such devices without them (``solved_as_planned``), until every device of the plan is as it was planned for.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final

from halda import (
    Assignment,
    CpuProfile,
    DeviceProfile,
    LayerProfile,
    ModelProfile,
    Objective,
    Plan,
    Solution,
    TypeSpeed,
    WindowAssignment,
    Workload,
    assignments,
)
from halda.quantisation import bytes_per_weight

MEMORY_SHARE: Final = 0.4
"""Largest share of a machine's usable memory that the copies of weights in extra buffers may take."""
WORTH: Final = 0.97
"""Extra buffers double the memory that a window holds, so they must save 3 % of the objective."""


def suited(device: DeviceProfile, workload: Workload, objective: Objective) -> DeviceProfile:
    """Return ``device`` with extra buffers only for the types that improve ``objective``."""
    return device.with_extra_buffers(
        [
            speed.type
            for speed in device.cpu.speeds
            if speed.extra_buffers
            and (
                speed.plain is None
                or _weight_s(speed, workload, objective) < WORTH * _weight_s(speed.plain, workload, objective)
            )
        ]
    )


def _weight_s(speed: TypeSpeed, workload: Workload, objective: Objective) -> float:
    """Time that a weight takes of the objective: of a token, of the first token, or of a typical request."""
    token_s = bytes_per_weight(speed.type) / speed.decode_bytes_per_s
    prompt_s = 2 * workload.prompt_tokens / speed.prefill_flop_per_s
    if objective == "ttft":
        return prompt_s + token_s
    return workload.answer_tokens * token_s + (prompt_s if objective == "balanced" else 0.0)


def why_extra(measured: DeviceProfile, planned: DeviceProfile, model: ModelProfile) -> str:
    """Say why ``measured`` has extra buffers as it was ``planned``, or has none; empty where they make nothing faster."""
    speeds = {speed.type: speed for speed in measured.cpu.speeds if speed.plain is not None}
    weights = _bytes_by_type(model.layers, model.layers, model.output_bytes_by_type)
    kind = max(speeds, key=lambda each: weights[each], default="")
    if not weights[kind] or (plain := speeds[kind].plain) is None:
        return ""
    token = plain.decode_bytes_per_s / speeds[kind].decode_bytes_per_s
    prompt = plain.prefill_flop_per_s / speeds[kind].prefill_flop_per_s
    takes = f"for {kind} a token takes {token:.2f} times as long with them, a prompt {prompt:.2f}"
    if any(speed.type == kind and speed.extra_buffers for speed in planned.cpu.speeds):
        return f"has extra buffers: {takes}"
    return f"has no extra buffers: {takes}, or their copies have no room"


def choose_extra_buffers(
    assigned: Mapping[str, Assignment], profiles: Mapping[str, DeviceProfile], model: ModelProfile, wish: str
) -> dict[str, list[bool]]:
    """Decide for each window ``assigned`` to a device whether it uses extra buffers; ``wish`` is auto, on or off.

    ``profiles`` are those of the devices, as of now and within their owners' limits. A window that streams has no
    copies, nor has one with prefill offload: weights in extra buffers cannot be copied to a GPU.
    """

    def may(window: WindowAssignment) -> bool:
        return not (window.streamed_bytes or window.prefill_offload)

    if wish != "auto":
        return {
            name: [wish == "on" and may(window) for window in assignment.windows]
            for name, assignment in assigned.items()
        }
    chosen, copied_bytes = {}, Counter[str]()
    for name, assignment in assigned.items():
        profile = profiles[name]
        chosen[name] = [may(window) and is_faster(window, model, profile.cpu) for window in assignment.windows]
        for window, extra in zip(assignment.windows, chosen[name], strict=True):
            copied_bytes[profile.host] += extra * (window.layer_bytes + window.output_bytes)
    for name, profile in profiles.items():
        if copied_bytes[profile.host] > MEMORY_SHARE * profile.ram_available_bytes:
            chosen[name] = [False] * len(chosen[name])
    return chosen


def solved_as_planned(
    solve: Callable[[list[DeviceProfile]], Solution], devices: Sequence[DeviceProfile], model: ModelProfile, wish: str
) -> tuple[Solution, list[DeviceProfile]]:
    """Solve for ``devices`` with the extra buffers that they have in the plan; return the solution and these devices.

    Raises as ``solve``.
    """
    devices = list(devices)
    while True:
        solution = solve(devices)
        others = without_copies(solution.plan, devices, model, wish)
        if others is None:
            return solution, devices
        devices = others


def without_copies(
    plan: Plan, devices: Sequence[DeviceProfile], model: ModelProfile, wish: str
) -> list[DeviceProfile] | None:
    """Return ``devices``, without extra buffers for those whose windows in ``plan`` have none.

    None where ``plan`` was already made for these profiles; devices with prefill offload are not changed.
    """
    profiles = {device.device: device for device in devices if device.device in plan.devices}
    chosen = choose_extra_buffers(assignments(plan, model), profiles, model, wish)
    chosen |= {name: [True] for name in plan.prefill_offload}
    found = [device if any(chosen.get(device.device, [True])) else device.without_extra_buffers() for device in devices]
    return None if found == list(devices) else found


def as_planned(device: DeviceProfile, planned: Sequence[DeviceProfile]) -> DeviceProfile:
    """Return ``device`` as it is now, with extra buffers for those types that it was ``planned`` with."""
    for other in planned:
        if other.device == device.device:
            return device.with_extra_buffers([speed.type for speed in other.cpu.speeds if speed.extra_buffers])
    return device


def is_faster(window: WindowAssignment, model: ModelProfile, cpu: CpuProfile) -> bool:
    """Return whether most weights that ``cpu`` computes of ``window`` are of types that it computes faster with extra
    buffers."""
    faster = {speed.type for speed in cpu.speeds if speed.extra_buffers}
    weights = _bytes_by_type(
        model.layers[window.first : window.first + window.cpu_layers],
        model.layers[window.first : window.first + window.ram_layers],
        model.output_bytes_by_type if window.output == "cpu" else {},
    )
    return 2 * sum(weights[kind] for kind in faster) > weights.total()


def _bytes_by_type(
    layers: Iterable[LayerProfile], experts_of: Iterable[LayerProfile], output: Mapping[str, int]
) -> Counter[str]:
    """Bytes by type: ``layers`` without experts, the experts of ``experts_of``, and ``output``."""
    found = Counter[str](output)
    for layer in layers:
        found.update(layer.bytes_by_type)
    for layer in experts_of:
        found.update(layer.expert_bytes_by_type)
    return found
