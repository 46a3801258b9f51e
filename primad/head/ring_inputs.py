"""What a ring is formed from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from halda import DeviceProfile
from primad.daemon.reporter import Reporter
from primad.daemon.station import Station
from primad.engine.protocol import KvType
from primad.head.link_book import LinkBook
from primad.head.promise import Promise
from primad.head.service import ModelSource
from primad.head.worker_link import WorkerLink
from primad.ring.messages import Finished, Sampled


class RingListener(Protocol):
    """Who hears what becomes of a ring."""

    def deliver(self, epoch: int, event: Sampled | Finished) -> None:
        """An event of a generation, and the epoch that it comes from."""

    def broken(self, epoch: int, device: str | None, reason: str, lasting: bool) -> None:
        """Ring ``epoch`` broke: the device to blame or None, the reason, and whether it will last."""

    def memory_low(self, needed_bytes: int) -> None:
        """The head itself is short of so much memory for its windows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RingOptions:
    """What all devices of a ring must agree on."""

    epoch: int
    session: int
    context_tokens: int
    rows: int
    kv_type: KvType
    extra_buffers: str
    step_timeout_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RingDevices:
    """``workers`` are those with a window, ``holders`` those that may have layers to give; ``links`` are between all."""

    workers: Mapping[str, WorkerLink]
    holders: Mapping[str, WorkerLink]
    links: LinkBook


@dataclass(frozen=True, slots=True, kw_only=True)
class RingInputs:
    """What a ring is formed from. ``profile`` is the head's own; it gives layers of ``model`` on TCP port ``layer_port``."""

    promise: Promise
    options: RingOptions
    model: ModelSource
    devices: RingDevices
    station: Station
    profile: DeviceProfile
    layer_port: int
    listener: RingListener
    reporter: Reporter
