"""What each device keeps of a plan: the one form in which a window goes from the plan to the engine.

An ``Assignment`` says how many bytes of each window stay; which of them follows from that number
(``primad.engine.streaming``). The same share of each layer streams; layers with experts stream by expert, and those used
most stay.
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
"""Of a device besides the first; llama.cpp takes no more. Assignments come from other devices, so this is checked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowAssignment:
    """The layers ``first <= layer < last``, of which the last ``gpu_layers`` are on the GPU, and the place of the output.

    Of these ``other_gpus`` are on the device's second GPU, third, ..., as in ``Window``. Of the first ``cpu_experts`` of
    those on GPUs the experts are in RAM. ``layer_bytes`` are the weights that the CPU computes, such experts among them,
    ``output_bytes`` those of an output matrix there (0 without). Of both together ``resident_bytes`` stay in memory; the
    rest is read each time it is used. Where ``prefill_offload`` a GPU computes prompts through these layers too.
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
        """How many layers the window has."""
        return self.last - self.first

    @property
    def cpu_layers(self) -> int:
        """How many of them the CPU computes."""
        return self.layers - self.gpu_layers

    @property
    def ram_layers(self) -> int:
        """Of how many of them the CPU computes something, the first ones."""
        return self.cpu_layers + self.cpu_experts

    @property
    def on_each_gpu(self) -> tuple[int, ...]:
        """How many each GPU computes."""
        return (self.gpu_layers - sum(self.other_gpus), *self.other_gpus)

    @property
    def uses_gpu(self) -> bool:
        """Whether a GPU computes anything of it."""
        return self.gpu_layers > 0 or self.output == "gpu" or self.prefill_offload

    @property
    def streamed_bytes(self) -> int:
        """Bytes that do not stay."""
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
    """A window of which nothing streams, for who does not ask how large it is."""
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
    """What a rank of a group has of a model's weights: of each layer, and of the output matrix."""

    layers: tuple[int, ...]
    output: int


ShareBytes: TypeAlias = Callable[[tuple[int, ...]], Sequence[RankBytes]]
"""What each rank of a group has, by the weights of all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """The ``windows`` of one device in the order of the route, and its ``share`` of their weights.

    ``read_ahead_bytes`` are read ahead of what streams; 0 where experts stream one by one, as they are known only when their
    layer's turn has come. The output matrix streams only where memory pressure asks for it.
    """

    windows: tuple[WindowAssignment, ...]
    read_ahead_bytes: int
    share: float = 1.0

    @property
    def layers(self) -> int:
        """How many layers the device computes."""
        return sum(window.layers for window in self.windows)

    @property
    def gpu_layers(self) -> int:
        """How many of them the GPU computes."""
        return sum(window.gpu_layers for window in self.windows)

    @property
    def on_each_gpu(self) -> tuple[int, ...]:
        """How many each GPU computes."""
        return tuple(map(sum, zip_longest(*(window.on_each_gpu for window in self.windows), fillvalue=0)))

    @property
    def layer_bytes(self) -> int:
        """Weights that the CPU computes."""
        return sum(window.layer_bytes for window in self.windows)

    @property
    def output_bytes(self) -> int:
        """Those of an output matrix that the CPU has."""
        return sum(window.output_bytes for window in self.windows)

    @property
    def resident_bytes(self) -> int:
        """Bytes that stay of what the CPU computes."""
        return sum(window.resident_bytes for window in self.windows)

    @property
    def streamed_bytes(self) -> int:
        """Bytes that do not stay."""
        return sum(window.streamed_bytes for window in self.windows)

    @property
    def streamed_layers(self) -> int:
        """How many layers' worth streams."""
        return layers_worth(self.streamed_bytes, self.layer_bytes, sum(window.ram_layers for window in self.windows))

    @property
    def resident_layers(self) -> int:
        """How many layers' worth stays, those on the GPU among them."""
        return self.layers - self.streamed_layers


def layers_worth(streamed_bytes: int, layer_bytes: int, layers: int) -> int:
    """How many of ``layers`` with ``layer_bytes`` in all stream where ``streamed_bytes`` of them do; one where few do."""
    if streamed_bytes <= 0 or not layer_bytes:
        return 0
    return max(1, round(layers * min(1.0, streamed_bytes / layer_bytes)))


def assignments(plan: Plan, model: ModelProfile, share_bytes: ShareBytes | None = None) -> dict[str, Assignment]:
    """What each device of ``plan`` keeps. Ranks have what ``share_bytes`` says; where no file is known, as much as their
    shares of attention and network."""
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
    # A device of which nothing streams may have to, when memory gets short.
    read_ahead = streaming.read_ahead_bytes if streaming.streamed_bytes else smallest_read_ahead_bytes(model)
    share = 1.0 if held is None else sum(_of_layers(window.layers, held) for window in windows) / max(whole, 1)
    return Assignment(windows=tuple(found), read_ahead_bytes=read_ahead, share=share)


def _rank_bytes(plan: Plan, model: ModelProfile, name: str, share_bytes: ShareBytes | None) -> RankBytes:
    """What the rank ``name`` has of the weights."""
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
    """Weights of a window that the CPU computes."""
    experts = sum(model.layers[layer].expert_bytes for layer in window.experts_on_cpu)
    return experts + sum(model.layers[layer].size_bytes for layer in window.on_cpu)
