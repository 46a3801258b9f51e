"""What each device keeps of a plan, in the only form in which windows go from the plan to the engine.

An ``Assignment`` gives the number of resident bytes of each window; which bytes these are follows from the number
(``primad.engine.streaming``). The same share of each layer streams. Layers with experts stream by expert, and the most
used experts stay.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Annotated, Final, TypeAlias

from msgspec import Meta

from halda.plan import OutputPlace, Plan, Window
from halda.profile import ModelProfile
from halda.streaming import smallest_read_ahead_bytes

MAX_GPUS: Final = 16
"""Maximum number of GPUs besides a device's first, llama.cpp's limit. Checked because assignments come from other
devices."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowAssignment:
    """The layers ``first <= layer < last``, of which the last ``gpu_layers`` are on GPUs, and the place of the output
    matrix.

    ``other_gpus`` counts the layers on the device's second GPU, third, ..., as in ``Window``. The first ``cpu_experts``
    GPU layers have their experts in RAM. ``layer_bytes`` are the weights that the CPU computes, including these
    experts, ``output_bytes`` those of an output matrix on the CPU (0 without). ``resident_bytes`` of their sum stay in
    memory; the rest is read for each use. With ``prefill_offload`` a GPU computes prompts through these layers too.
    """

    first: int
    last: int
    gpu_layers: int
    output: OutputPlace
    layer_bytes: int
    output_bytes: int
    resident_bytes: int
    prefill_offload: bool = False
    cpu_experts: int = 0
    other_gpus: Annotated[tuple[int, ...], Meta(max_length=MAX_GPUS)] = ()

    @property
    def layers(self) -> int:
        """Number of layers in the window."""
        return self.last - self.first

    @property
    def cpu_layers(self) -> int:
        """Number of layers that the CPU computes."""
        return self.layers - self.gpu_layers

    @property
    def ram_layers(self) -> int:
        """Number of layers, the first ones, of which the CPU computes at least a part."""
        return self.cpu_layers + self.cpu_experts

    @property
    def on_each_gpu(self) -> tuple[int, ...]:
        """Number of layers that each GPU computes."""
        return (self.gpu_layers - sum(self.other_gpus), *self.other_gpus)

    @property
    def uses_gpu(self) -> bool:
        """Whether a GPU computes any part of the window."""
        return self.gpu_layers > 0 or self.output == "gpu" or self.prefill_offload

    @property
    def streamed_bytes(self) -> int:
        """Bytes that are not resident."""
        return self.layer_bytes + self.output_bytes - self.resident_bytes


def in_memory(
    first: int,
    last: int,
    *,
    gpu_layers: int = 0,
    cpu_experts: int = 0,
    other_gpus: tuple[int, ...] = (),
    output: OutputPlace = "none",
) -> WindowAssignment:
    """Return a window without streaming, for callers that do not need its size."""
    return WindowAssignment(
        first=first,
        last=last,
        gpu_layers=gpu_layers,
        cpu_experts=cpu_experts,
        other_gpus=other_gpus,
        output=output,
        layer_bytes=0,
        output_bytes=0,
        resident_bytes=0,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class RankBytes:
    """Bytes that a rank of a group has of each layer and of the output matrix."""

    layers: tuple[int, ...]
    output: int


ShareBytes: TypeAlias = Callable[[tuple[int, ...]], Sequence[RankBytes]]
"""Maps the weights of all ranks of a group to the bytes of each rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """The ``windows`` of one device in route order, and its ``share`` of their weights.

    ``read_ahead_bytes`` is the read-ahead of streamed weights; 0 where experts stream, as these are known only when
    their layer's router has picked. The output matrix streams only under memory pressure.
    """

    windows: tuple[WindowAssignment, ...]
    read_ahead_bytes: int
    share: float = 1.0

    @property
    def layers(self) -> int:
        """Number of layers that the device computes."""
        return sum(window.layers for window in self.windows)

    @property
    def gpu_layers(self) -> int:
        """Number of layers that its GPUs compute."""
        return sum(window.gpu_layers for window in self.windows)

    @property
    def on_each_gpu(self) -> tuple[int, ...]:
        """Number of layers that each GPU computes."""
        return tuple(map(sum, zip_longest(*(window.on_each_gpu for window in self.windows), fillvalue=0)))

    @property
    def layer_bytes(self) -> int:
        """Bytes of weights that the CPU computes."""
        return sum(window.layer_bytes for window in self.windows)

    @property
    def output_bytes(self) -> int:
        """Bytes of the output matrix if the CPU has it."""
        return sum(window.output_bytes for window in self.windows)

    @property
    def resident_bytes(self) -> int:
        """Bytes that stay of the weights that the CPU computes."""
        return sum(window.resident_bytes for window in self.windows)

    @property
    def streamed_bytes(self) -> int:
        """Bytes that are not resident."""
        return sum(window.streamed_bytes for window in self.windows)

    @property
    def streamed_layers(self) -> int:
        """Streamed bytes as a number of layers."""
        return layers_worth(self.streamed_bytes, self.layer_bytes, sum(window.ram_layers for window in self.windows))

    @property
    def resident_layers(self) -> int:
        """Resident bytes as a number of layers, including GPU layers."""
        return self.layers - self.streamed_layers


def layers_worth(streamed_bytes: int, layer_bytes: int, layers: int) -> int:
    """Convert ``streamed_bytes`` to a number of ``layers`` with ``layer_bytes`` in total; at least one if any byte
    streams."""
    if streamed_bytes <= 0 or not layer_bytes:
        return 0
    return max(1, round(layers * min(1.0, streamed_bytes / layer_bytes)))


def assignments(plan: Plan, model: ModelProfile, share_bytes: ShareBytes | None = None) -> dict[str, Assignment]:
    """Return what each device of ``plan`` keeps. The bytes of ranks come from ``share_bytes``; without a model file
    they follow from the ranks' shares of attention and feed-forward."""
    return {name: _assignment(plan, model, name, share_bytes) for name in plan.devices}


def _assignment(plan: Plan, model: ModelProfile, name: str, share_bytes: ShareBytes | None) -> Assignment:
    windows, is_rank = [window for _, window in plan.windows_of(name)], bool(plan.group_of(name))
    held = _rank_bytes(plan, model, name, share_bytes) if is_rank else None
    sizes = [_ram_bytes(window, model) if held is None else _of_layers(window.on_cpu, held) for window in windows]
    output_bytes = model.output_bytes if held is None else held.output
    whole = sum(model.layers[layer].size_bytes for window in windows for layer in window.layers)
    output, streaming = plan.output_place(name), plan.streaming_of(name)
    layer_bytes, before, found = sum(sizes), 0, []
    for i, (window, size) in enumerate(zip(windows, sizes, strict=True)):
        is_last = i == len(windows) - 1
        streamed = min(streaming.streamed_bytes, layer_bytes)
        part = streamed * (before + size) // max(layer_bytes, 1) - streamed * before // max(layer_bytes, 1)
        before += size
        beside = output_bytes if is_last and output == "cpu" else 0
        found.append(
            WindowAssignment(
                first=window.first,
                last=window.last,
                gpu_layers=window.gpu_layers,
                cpu_experts=window.cpu_experts,
                other_gpus=window.other_gpus,
                output=output if is_last else "none",
                layer_bytes=size,
                output_bytes=beside,
                resident_bytes=size - part + beside,
                prefill_offload=name in plan.prefill_offload and size > 0,
            )
        )
    # A device that does not stream may have to when memory gets short.
    read_ahead = streaming.read_ahead_bytes if streaming.streamed_bytes else smallest_read_ahead_bytes(model)
    share = 1.0 if held is None else sum(_of_layers(window.layers, held) for window in windows) / max(whole, 1)
    return Assignment(windows=tuple(found), read_ahead_bytes=read_ahead, share=share)


def _rank_bytes(plan: Plan, model: ModelProfile, name: str, share_bytes: ShareBytes | None) -> RankBytes:
    """Return the bytes of weights that the rank ``name`` has."""
    ranks = plan.group_of(name)
    number = [rank.device for rank in ranks].index(name)
    if share_bytes is not None:
        return share_bytes(tuple(rank.weight for rank in ranks))[number]
    heads, values = ranks[number].shares(sum(rank.weight for rank in ranks))
    share = values + model.attention_part * (heads - values)
    return RankBytes(
        layers=tuple(int(share * layer.size_bytes) for layer in model.layers), output=int(values * model.output_bytes)
    )


def _of_layers(layers: range, held: RankBytes) -> int:
    return sum(held.layers[layer] for layer in layers)


def _ram_bytes(window: Window, model: ModelProfile) -> int:
    """Bytes of a window's weights that the CPU computes."""
    experts = sum(model.layers[layer].expert_bytes for layer in window.experts_on_cpu)
    return experts + sum(model.layers[layer].size_bytes for layer in window.on_cpu)
