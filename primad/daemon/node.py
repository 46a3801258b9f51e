"""This device as its daemon sees it, in either role: values that are handed down together."""

from __future__ import annotations

from dataclasses import dataclass, field

import zmq.asyncio

from primad.daemon.gpu_care import GpuCare
from primad.daemon.layer_files import Workspace
from primad.layers.source_link import Transfers
from primad.settings.config import Config
from primad.settings.timings import Timings
from primad.trust.identity import Identity
from primad.trust.trust import TrustStore


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """This device's settings, folders, keys, trusted devices and durations, and how far its GPUs are trusted."""

    config: Config
    workspace: Workspace
    identity: Identity
    trust: TrustStore
    timings: Timings = Timings()
    gpu_care: GpuCare = field(init=False)

    def __post_init__(self) -> None:
        care = GpuCare(self.config.limits, look_every_s=self.timings.gpu_look_every_s)
        object.__setattr__(self, "gpu_care", care)

    def transfers(self, sockets: zmq.asyncio.Context) -> Transfers:
        """Return how this device fetches layers and KV blocks."""
        return Transfers(
            context=sockets,
            identity=self.identity,
            timings=self.timings.layers,
            bytes_per_s=self.config.transfer_limit_bytes_per_s,
        )
