"""What the solver is told: measured devices and links, and the model that was read. Required fields, frozen, SI units."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuProfile:
    """One GPU as its backend reports it. ``unified_memory``: its memory is the RAM of the device."""

    name: str
    backend: str
    vram_total_bytes: int
    vram_available_bytes: int
    unified_memory: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceProfile:
    """One device. Every figure was measured on it; who is head is the plan's business.

    ``host`` is equal for devices that are processes on one machine. ``ram_available_bytes`` respects limits of cgroups;
    ``ram_read_bytes_per_s`` is what all cores together read; ``disk_read_bytes_per_s`` is the sequential read rate of the
    file system that holds the layer cache.
    """

    device: str
    host: str
    system: str
    machine: str
    cpu: str
    cores: int
    ram_total_bytes: int
    ram_available_bytes: int
    ram_read_bytes_per_s: float
    disk_read_bytes_per_s: float
    disk_free_bytes: int
    gpu: GpuProfile | None


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkProfile:
    """The link from ``source`` to ``target``: round trip in seconds, throughput in bytes per second."""

    source: str
    target: str
    round_trip_s: float
    bytes_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerProfile:
    """One layer: bytes of weights by quantisation type, and bytes of KV cache (F16) per token of context."""

    bytes_by_type: Mapping[str, int]
    kv_bytes_per_token: int

    @property
    def size_bytes(self) -> int:
        """Bytes of all weights."""
        return sum(self.bytes_by_type.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelProfile:
    """What of a model matters to the plan.

    ``width`` is that of the hidden state, ``context_tokens`` what it was trained for, ``experts`` 0 for a dense model. A
    window may begin only at a multiple of ``cut_multiple`` layers.
    """

    name: str
    architecture: str
    layers: tuple[LayerProfile, ...]
    embedding_bytes: int
    output_bytes: int
    width: int
    vocabulary: int
    context_tokens: int
    experts: int
    experts_used: int
    cut_multiple: int

    @property
    def size_bytes(self) -> int:
        """Bytes of all weights."""
        return self.embedding_bytes + self.output_bytes + sum(layer.size_bytes for layer in self.layers)
