"""A plan: the windows in route order, what streams, and which devices are left out."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

OutputPlace = Literal["none", "cpu", "gpu"]
"""Where a device or a window has the output matrix, if at all."""


class Infeasible(Exception):  # noqa: N818  (the solver's word for it)
    """No plan exists. The message names the limit and the shortage; ``short_bytes`` is the total shortage."""

    def __init__(self, message: str, *, short_bytes: int = 0) -> None:
        super().__init__(message)
        self.short_bytes = short_bytes


class NotBelow(Exception):  # noqa: N818
    """No plan was found below the requested objective; others may exist."""


class CutOff(Infeasible):
    """Every plan of the devices that must take part needs a link that does not work."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """The layers ``first <= layer < last`` that ``device`` computes in one visit of a step.

    The last ``gpu_layers`` of them are on its GPUs (paper: n of w). The first ``cpu_experts`` GPU layers have their
    experts in RAM, where the CPU computes them. With several GPUs ``other_gpus`` counts the layers on the second,
    third, ...; the first GPU has the last layers, the second those before them, and so on.
    """

    device: str
    first: int
    last: int
    gpu_layers: int
    cpu_experts: int = 0
    other_gpus: tuple[int, ...] = ()

    @property
    def layers(self) -> range:
        """The layers of the window."""
        return range(self.first, self.last)

    @property
    def on_cpu(self) -> range:
        """Layers that the CPU computes."""
        return range(self.first, self.last - self.gpu_layers)

    @property
    def on_gpu(self) -> range:
        """Layers that GPUs compute, including those without their experts."""
        return range(self.last - self.gpu_layers, self.last)

    @property
    def on_each_gpu(self) -> tuple[range, ...]:
        """Layers that each GPU computes."""
        return tuple(split_layers(self.on_gpu, self.other_gpus))

    @property
    def experts_on_cpu(self) -> range:
        """GPU layers whose experts are on the CPU."""
        return self.on_gpu[: self.cpu_experts]

    def more_on_gpu(self, gpu_layers: int, gpu: int) -> Window:
        """Return the window with ``gpu_layers`` on GPUs in total; the added ones are on ``gpu``."""
        others = [*self.other_gpus, *[0] * (gpu - len(self.other_gpus))]
        if gpu:
            others[gpu - 1] += gpu_layers - self.gpu_layers
        return replace(self, gpu_layers=gpu_layers, other_gpus=without_zeros(others))

    def fewer_on_gpu(self, gpu_layers: int) -> Window:
        """Return the window with ``gpu_layers`` on GPUs in total; the first GPU layers leave."""
        others, over = list(self.other_gpus), self.gpu_layers - gpu_layers
        for i in reversed(range(len(others))):
            gone = min(over, others[i])
            others[i], over = others[i] - gone, over - gone
        kept = min(self.cpu_experts, gpu_layers)
        return replace(self, gpu_layers=gpu_layers, cpu_experts=kept, other_gpus=without_zeros(others))

    @property
    def in_ram(self) -> range:
        """Layers of which the CPU computes a part: some of their weights are in RAM or stream."""
        return range(self.first, self.experts_on_cpu.stop)


def split_layers(layers: range, others: Sequence[int]) -> Iterator[range]:
    """Yield the layers of each GPU: the second, third, ... have the numbers in ``others``, the first has the last
    layers."""
    end = layers.stop
    for count in (len(layers) - sum(others), *others):
        yield range(end - count, end)
        end -= count


def on_gpus_of(first: int, others: Sequence[int], cpu_experts: int) -> dict[str, Any]:
    """Return the fields of a ``Window`` for layers on the first GPU and on others, and the layers with experts on the
    CPU."""
    return {"gpu_layers": first + sum(others), "cpu_experts": cpu_experts, "other_gpus": without_zeros(others)}


def without_zeros(others: Sequence[int]) -> tuple[int, ...]:
    """Return ``others`` without trailing zeros."""
    used = [i for i, count in enumerate(others, 1) if count]
    return tuple(others[: max(used, default=0)])


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftOut:
    """A device without layers, and the reason."""

    device: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Streaming:
    """Streaming of ``device``: ``streamed_bytes`` of the weights that its CPU computes are read from disk for each use.

    The same share of each layer streams. At most ``read_ahead_bytes`` of them are in memory at a time. (0 where layers
    have experts, which stream one by one: what is read of a layer is known only when its router has picked.)
    """

    device: str
    streamed_bytes: int
    read_ahead_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Rank:
    """A device of a tensor-parallel group; its share of each layer is proportional to ``weight``.

    Attention heads and quantisation blocks are not split, so the real shares are ``heads`` of the attention and
    ``values`` of the feed-forward network; 0 where unknown. The whole share is on the device's first GPU (``on_gpu``)
    or on the CPU.
    """

    device: str
    weight: int
    heads: float = 0.0
    values: float = 0.0
    on_gpu: bool = False

    def shares(self, total: int) -> tuple[float, float]:
        """Return its shares of attention and feed-forward, with ``total`` the weights of all ranks."""
        by_weight = self.weight / total
        return self.heads or by_weight, self.values or by_weight


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Which device computes which layers.

    ``route`` holds the windows in the order a step visits them, without gaps; the first and the last are the head's. A
    route of one window is the whole model on one device. ``rounds`` is the number of ring passes a token makes (paper:
    k). ``output_on_gpu``: the output matrix is on the head's GPU; llama.cpp puts it there before any layer of the tail
    window, and may put it there without any. ``streaming`` names the devices that stream; all layers of the others are
    resident, and the output matrix always is. On ``prefill_offload`` devices the GPU computes prompts through layers in
    RAM too; these devices do not stream. The devices of each of ``groups`` share every layer of the group's windows.
    The route lists these windows under the group's first device, without GPU layers. Each rank that is not on a GPU
    streams as its memory requires.
    """

    rounds: int
    route: tuple[Window, ...]
    output_on_gpu: bool
    streaming: tuple[Streaming, ...]
    left_out: tuple[LeftOut, ...]
    prefill_offload: tuple[str, ...] = ()
    groups: tuple[tuple[Rank, ...], ...] = ()

    def __post_init__(self) -> None:
        assert self.rounds >= 1
        assert self.route
        assert self.route[0].device == self.route[-1].device
        assert self.route[0].first == 0
        for before, after in zip(self.route, self.route[1:], strict=False):
            assert before.last == after.first
        assert all(window.first < window.last for window in self.route)
        assert all(0 <= window.cpu_experts <= window.gpu_layers for window in self.route)
        assert all(0 <= sum(window.other_gpus) <= window.gpu_layers for window in self.route)
        assert len({streaming.device for streaming in self.streaming}) == len(self.streaming)
        for streaming in self.streaming:
            assert streaming.streamed_bytes > 0
            assert streaming.read_ahead_bytes >= 0
            assert streaming.device not in self.prefill_offload
        assert set(self.prefill_offload) <= {window.device for window in self.route}
        for ranks in self.groups:
            assert self.rounds == 1 < len(ranks)
            assert ranks[0].device in self.places
            assert not any(window.gpu_layers for window in self.route if window.device == ranks[0].device)
            assert ranks[0].device != self.head or not self.output_on_gpu
            names = {rank.device for rank in ranks}
            assert names.isdisjoint(self.prefill_offload)
            on_gpus = {rank.device for rank in ranks if rank.on_gpu}
            assert on_gpus.isdisjoint(streaming.device for streaming in self.streaming)
        followers = [rank.device for ranks in self.groups for rank in ranks[1:]]
        assert len({*self.places, *followers}) == len(self.places) + len(followers)

    @property
    def head(self) -> str:
        """The device that holds the first and the last window."""
        return self.route[0].device

    @property
    def layer_count(self) -> int:
        """The number of the model's layers."""
        return self.route[-1].last

    @property
    def gpu_layers(self) -> int:
        """Number of layers that GPUs compute."""
        return sum(window.gpu_layers for window in self.route)

    @property
    def cpu_experts(self) -> int:
        """Number of GPU layers whose experts CPUs compute."""
        return sum(window.cpu_experts for window in self.route)

    @property
    def uses_gpu(self) -> bool:
        """Whether GPUs compute any part."""
        in_groups = any(rank.on_gpu for ranks in self.groups for rank in ranks)
        return self.output_on_gpu or self.gpu_layers > 0 or bool(self.prefill_offload) or in_groups

    def output_place(self, device: str) -> OutputPlace:
        """Return where ``device`` has the output matrix; the head has it, after the tail window."""
        if self.place_of(device) != self.head:
            return "none"
        return "gpu" if self.output_on_gpu or self._is_on_gpu(device) else "cpu"

    @property
    def places(self) -> tuple[str, ...]:
        """The devices between which steps travel, in the order a step first reaches them; a group counts as its first
        device."""
        return tuple(dict.fromkeys(window.device for window in self.route))

    @property
    def devices(self) -> tuple[str, ...]:
        """All devices in the order of ``places``; a group's other ranks follow its first. The head comes first."""
        if not self.groups:
            return self.places
        return tuple(name for place in self.places for name in self._names(place))

    def _names(self, place: str) -> tuple[str, ...]:
        return tuple(rank.device for rank in self.group_of(place)) or (place,)

    def group_of(self, device: str) -> tuple[Rank, ...]:
        """Return the group of ``device``; empty if it is in none."""
        return next((ranks for ranks in self.groups if any(rank.device == device for rank in ranks)), ())

    def place_of(self, device: str) -> str:
        """Return the device whose windows in the route ``device`` computes: the first of its group, or itself."""
        ranks = self.group_of(device) if self.groups else ()  # called for each window that is judged
        return ranks[0].device if ranks else device

    def windows_of(self, device: str) -> tuple[tuple[int, Window], ...]:
        """The windows of ``device`` with their route indices."""
        place = self.place_of(device)
        found = ((i, window) for i, window in enumerate(self.route) if window.device == place)
        if not self.groups or not self.group_of(device):
            return tuple(found)
        on_gpu = self._is_on_gpu(device)
        return tuple((i, replace(each, device=device, gpu_layers=on_gpu * len(each.layers))) for i, each in found)

    def _is_on_gpu(self, device: str) -> bool:
        """Whether ``device`` is a rank of a group and has its share on its GPU."""
        return any(rank.on_gpu for rank in self.group_of(device) if rank.device == device)

    def of_rank(self, device: str) -> Plan:
        """Return the plan from the view of ``device``, a rank of a group, as if the group's windows were its own."""
        own, output = dict(self.windows_of(device)), self.output_place(device)
        route = tuple(own.get(i, window) for i, window in enumerate(self.route))
        return replace(self, route=route, output_on_gpu=output == "gpu", prefill_offload=(), groups=())

    def heads_of(self, device: str) -> float:
        """Return the share of the attention, and so of the KV cache, that ``device`` has of its layers: 1 without a
        group."""
        ranks = self.group_of(device)
        total = sum(rank.weight for rank in ranks)
        return next((rank.shares(total)[0] for rank in ranks if rank.device == device), 1.0)

    def layers_of(self, device: str) -> int:
        """Return the number of layers that ``device`` computes."""
        return sum(len(window.layers) for _, window in self.windows_of(device))

    def streaming_of(self, device: str) -> Streaming:
        """Return what ``device`` streams; 0 bytes if nothing."""
        for streaming in self.streaming:
            if streaming.device == device:
                return streaming
        return Streaming(device=device, streamed_bytes=0, read_ahead_bytes=0)

    def ram_layers_of(self, device: str) -> int:
        """Return the number of layers that its CPU computes in part, or its GPU from RAM."""
        return sum(len(window.in_ram) for _, window in self.windows_of(device))

    def with_offload(self, devices: Iterable[str]) -> Plan:
        """Return the plan with prefill offload on exactly these devices."""
        names = set(devices)
        return replace(self, prefill_offload=tuple(name for name in self.devices if name in names))

    def after(self, device: str) -> str:
        """Return the next place in the ring, which receives what the place of ``device`` sends."""
        order = self.places
        return order[(order.index(self.place_of(device)) + 1) % len(order)]
