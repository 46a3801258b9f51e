"""What each device keeps of a plan: the one form in which a window goes from the plan to the engine.

A plan streams whole layers through slots. The engine streams the same share of each layer, so that what is held ahead of it
is smaller, and what the plan leaves over of the memory keeps more. An ``Assignment`` says how many bytes stay; which of them
follows from that number (``primad.engine.streaming``). Layers with experts stream by expert: those used most stay, in the
room of all that the plan holds.

``as_run`` tells what a plan costs as the engine carries it out: a forecast, not the objective. Plans are still compared by
whole layers, which are on the safe side and which the integer program can count.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from halda.evaluate import DevicePrediction, Prediction, cpu_layers, unit_bytes
from halda.instance import Instance, ahead_bytes
from halda.plan import OutputPlace, Plan
from halda.profile import ModelProfile

LEAST_AHEAD_BYTES: Final = 16 << 20
"""So much is held ahead at least, or two layers where they are smaller: with less the disk waits between small parts."""
RESERVE_BYTES: Final = 16 << 20
"""So much of what a plan leaves over stays free: the system reads a little behind a part, and must not run dry over it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowAssignment:
    """The layers ``first <= layer < last``, of which the last ``gpu_layers`` are on the GPU, and the place of the output.

    ``layer_bytes`` are the weights of the layers that the CPU computes, ``output_bytes`` those of an output matrix there (0
    without). Of both together ``resident_bytes`` stay in memory; the rest is read each time it is used.
    """

    first: int
    last: int
    gpu_layers: int
    output: OutputPlace
    layer_bytes: int
    output_bytes: int
    resident_bytes: int

    @property
    def layers(self) -> int:
        """How many layers the window has."""
        return self.last - self.first

    @property
    def cpu_layers(self) -> int:
        """How many of them the CPU computes."""
        return self.layers - self.gpu_layers

    @property
    def streamed_bytes(self) -> int:
        """Bytes that do not stay."""
        return self.layer_bytes + self.output_bytes - self.resident_bytes


def in_memory(first: int, last: int, *, gpu_layers: int = 0, output: OutputPlace = "none") -> WindowAssignment:
    """A window of which nothing streams, for who does not ask how large it is."""
    return WindowAssignment(
        first=first, last=last, gpu_layers=gpu_layers, output=output, layer_bytes=0, output_bytes=0, resident_bytes=0
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """The ``windows`` of one device in the order of the route.

    ``ahead_bytes`` are held ahead of what streams, or two parts of layers where that is more; 0 where experts stream one by
    one, as they are known only when their layer's turn has come. All streams of the layers before anything of the output
    matrix does.
    """

    windows: tuple[WindowAssignment, ...]
    ahead_bytes: int

    @property
    def layers(self) -> int:
        """How many layers the device computes."""
        return sum(window.layers for window in self.windows)

    @property
    def layer_bytes(self) -> int:
        """Weights of the layers that the CPU computes."""
        return sum(window.layer_bytes for window in self.windows)

    @property
    def resident_bytes(self) -> int:
        """Bytes that stay of what the CPU computes."""
        return sum(window.resident_bytes for window in self.windows)

    @property
    def streamed_bytes(self) -> int:
        """Bytes that do not stay."""
        return sum(window.streamed_bytes for window in self.windows)

    @property
    def streams_output(self) -> bool:
        """Whether something of the output matrix streams."""
        return self.streamed_bytes > self.layer_bytes

    @property
    def streamed_layers(self) -> int:
        """How many layers' worth streams."""
        return layers_worth(self.streamed_bytes, self.layer_bytes, sum(window.cpu_layers for window in self.windows))

    @property
    def resident_layers(self) -> int:
        """How many layers' worth stays, those on the GPU among them."""
        return self.layers - self.streamed_layers

    @property
    def slots(self) -> int:
        """Of how many layers something is held ahead."""
        count = sum(window.cpu_layers for window in self.windows)
        streamed = min(self.streamed_bytes, self.layer_bytes)
        if not streamed or not self.ahead_bytes:
            return 0
        return min(count, max(2, self.ahead_bytes * count // streamed))

    def streamed_in(self, index: int) -> int:
        """How many of ``streamed_layers`` are in window ``index`` of the device."""
        count, total = sum(window.cpu_layers for window in self.windows), self.streamed_layers
        before = sum(window.cpu_layers for window in self.windows[:index])
        behind = before + self.windows[index].cpu_layers
        return (total * behind // count - total * before // count) if count else 0


def layers_worth(streamed_bytes: int, layer_bytes: int, layers: int) -> int:
    """How many of ``layers`` with ``layer_bytes`` in all stream where ``streamed_bytes`` of them do; one where few do."""
    if streamed_bytes <= 0 or not layer_bytes:
        return 0
    return max(1, round(layers * min(1.0, streamed_bytes / layer_bytes)))


def assignments(plan: Plan, model: ModelProfile, prediction: Prediction | None) -> dict[str, Assignment]:
    """What each device of ``plan`` keeps. Without a ``prediction`` no memory is known to be left over."""
    rooms = {device.device: device.room_bytes for device in (prediction.devices if prediction is not None else ())}
    return {name: _assignment(plan, model, name, rooms.get(name, 0)) for name in plan.devices}


def _assignment(plan: Plan, model: ModelProfile, name: str, room_bytes: int) -> Assignment:
    windows = [window for _, window in plan.windows_of(name)]
    sizes = [sum(model.layers[layer].size_bytes for layer in cpu_layers(window)) for window in windows]
    output = plan.output_place(name)
    output_bytes = model.output_bytes if output == "cpu" else 0
    layer_bytes = sum(sizes)
    streamed = _streamed_bytes(plan, model, name, max(0, room_bytes - RESERVE_BYTES))
    of_layers, before, found = min(streamed, layer_bytes), 0, []
    for i, (window, size) in enumerate(zip(windows, sizes, strict=True)):
        is_last = i == len(windows) - 1
        part = of_layers * (before + size) // max(layer_bytes, 1) - of_layers * before // max(layer_bytes, 1)
        before += size
        beside = output_bytes if is_last else 0
        found.append(
            WindowAssignment(
                first=window.first,
                last=window.last,
                gpu_layers=window.gpu_layers,
                output=output if is_last else "none",
                layer_bytes=size,
                output_bytes=beside,
                resident_bytes=size - part + beside - (streamed - of_layers if is_last else 0),
            )
        )
    if streamed and _by_expert(plan, model, name):
        return Assignment(windows=tuple(found), ahead_bytes=0)
    slots = plan.streaming_of(name).slots if len(plan.route) > 1 else 0
    return Assignment(windows=tuple(found), ahead_bytes=max(slots * model.slot_bytes, _least_ahead_bytes(model)))


def _by_expert(plan: Plan, model: ModelProfile, name: str) -> bool:
    """Whether what streams of a device are experts, one by one."""
    return any(model.layers[layer].expert_bytes for _, window in plan.windows_of(name) for layer in cpu_layers(window))


def _least_ahead_bytes(model: ModelProfile) -> int:
    return min(LEAST_AHEAD_BYTES, 2 * model.slot_bytes)


def _streamed_bytes(plan: Plan, model: ModelProfile, name: str, more_bytes: int) -> int:
    """Bytes that stream of a device that has ``more_bytes`` of memory more than its part of ``plan`` counts.

    What does not fit, and what is held ahead of it. A device alone needs no more ahead than two parts of layers, one that is
    computed and one that is read; with others, slots are filled for its next window while they compute.
    """
    streaming = plan.streaming_of(name)
    counted = sum(unit_bytes(model, unit) for unit in streaming.layers)
    ahead = ahead_bytes(model, streaming.slots, output=name == plan.head and plan.streams_output)
    over = counted - ahead - more_bytes  # what is in no case in memory
    if over <= 0:
        return 0
    if _by_expert(plan, model, name):
        return over
    if len(plan.route) > 1:
        return over + ahead
    layers = sum(model.layers[layer].size_bytes for _, window in plan.windows_of(name) for layer in cpu_layers(window))
    two = 2 * model.slot_bytes
    # Two parts of layers are held ahead, a share of them that is the share of all that streams.
    parted = over / (1 - two / layers) if layers > two else layers
    if parted > layers:
        parted = over + two  # all layers do, and of the output matrix what is left
    return int(min(max(parted, over + _least_ahead_bytes(model)), counted))


def as_run(plan: Plan, prediction: Prediction, instance: Instance) -> Prediction:
    """``prediction`` of ``plan`` with what is read for a token as the engine reads it; other figures as far as they follow.

    While tokens are drawn, the compute buffer's room keeps more. Where experts stream one by one, and where nothing streams,
    nothing changes.
    """
    if instance.model.experts or not plan.streaming:
        return prediction
    found = [_parted(plan, device, instance) for device in prediction.devices]
    hop_s = sum(device.hop_s for device in found)
    busy = [sum(found[i].window_s for i in _same_host(plan, instance, host)) for host in instance.hosts]
    disks = [sum(found[i].disk_s for i in _same_host(plan, instance, host)) for host in instance.hosts]
    disk_s = max(disks)
    tpot_s = min(prediction.tpot_s, max(sum(device.window_s for device in found) + hop_s, disk_s))
    saved_s = prediction.tpot_s - tpot_s
    return replace(
        prediction,
        tpot_s=tpot_s,
        period_s=min(
            prediction.period_s, max(tpot_s / instance.workload.sequences, *busy, prediction.period_s - saved_s)
        ),
        stall_s=sum(device.stall_s for device in found),
        disk_s=disk_s,
        devices=tuple(found),
    )


def _same_host(plan: Plan, instance: Instance, host: tuple[int, ...]) -> list[int]:
    """Places in the prediction of the devices of a machine that take part."""
    places = {name: place for place, name in enumerate(plan.devices)}
    names = [instance.devices[i].device for i in host]
    return [places[name] for name in names if name in places]


def _parted(plan: Plan, device: DevicePrediction, instance: Instance) -> DevicePrediction:
    if not device.disk_bytes_per_token:
        return device
    more = max(0, device.room_bytes - RESERVE_BYTES) + instance.buffer_bytes
    read = _streamed_bytes(plan, instance.model, device.device, more)
    rate = device.disk_bytes_per_token / device.disk_s
    saved_s = (device.disk_bytes_per_token - read) / rate
    return replace(
        device,
        disk_bytes_per_token=read,
        disk_s=read / rate,
        stall_s=max(0.0, device.stall_s - saved_s),
    )
