"""What a ring is formed from."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from halda import DeviceProfile, Plan, Prediction
from primad.daemon.extra_buffers import Tried
from primad.daemon.layer_files import Workspace
from primad.daemon.reporter import Reporter
from primad.engine.protocol import KvType
from primad.gguf.header import Header
from primad.gguf.windows import ModelCutter
from primad.head.link_book import LinkBook
from primad.head.worker_link import WorkerLink
from primad.ring.messages import Finished, Sampled
from primad.settings.config import Config

Deliver = Callable[[int, Sampled | Finished], None]
"""Takes an event of a generation, with the epoch that it comes from."""
OnBroken = Callable[[int, str | None, str, bool], None]
"""Hears that ring ``epoch`` broke: the device to blame or None, the reason, and whether it will last."""
OnMemoryLow = Callable[[int], None]
"""Hears how many bytes of memory the head itself is short of for its own windows."""


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
class RingInputs:
    """What a ring is formed from; ``prediction`` is what the plan promises, None when it was set by hand.

    ``workers`` are those with a window. ``key`` and ``layer_port`` are the head's own as a source of layers; every one of
    ``holders`` may hold layers and is a source as well. ``tried`` is what is known of extra buffers for this model.
    """

    plan: Plan
    prediction: Prediction | None
    workers: Mapping[str, WorkerLink]
    holders: Mapping[str, WorkerLink]
    config: Config
    key: str
    layer_port: int
    place: Workspace
    header: Header
    cutter: ModelCutter | None
    profile: DeviceProfile
    options: RingOptions
    deliver: Deliver
    on_broken: OnBroken
    on_memory_low: OnMemoryLow
    reporter: Reporter
    links: LinkBook
    tried: Tried

    def room_bytes(self, device: str) -> int:
        """Bytes of a device's memory that the plan leaves."""
        devices = self.prediction.devices if self.prediction is not None else ()
        return sum(each.room_bytes for each in devices if each.device == device)
