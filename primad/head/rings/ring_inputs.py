"""The inputs for forming a ring."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import zmq.asyncio
from msgspec.structs import replace

from halda import DeviceProfile
from primad.api.answering.pieces import ModelPieces
from primad.daemon.node import Node
from primad.daemon.reporter import Reporter
from primad.head.members.link_book import LinkBook
from primad.head.members.worker_link import WorkerLink
from primad.head.model.service import Service
from primad.membership.types import LoadStage, RingFailed
from primad.planning.forecast import Forecast
from primad.planning.replicas import state_tokens
from primad.ring.messages import GenerationEvent, KvNews
from primad.ring.speculation.drafter import Drafting
from primad.ring.speculation.messages import DraftModel


class RingListener(Protocol):
    """Receives a ring's events."""

    def deliver(self, epoch: int, event: GenerationEvent) -> None:
        """Deliver an event of a generation, and its epoch."""

    def kv_changed(self, epoch: int, event: KvNews) -> None:
        """Ring ``epoch`` keeps KV blocks, or no longer needs them."""

    def progressed(self, epoch: int, device: str, stage: LoadStage, done: int, total: int) -> None:
        """A device has finished ``done`` of ``total`` in ``stage`` of loading ring ``epoch``: bytes for ``FETCH``,
        windows for ``LOAD``."""

    def overdue(self, epoch: int, waited_s: float) -> None:
        """A step of ring ``epoch`` has been out for ``waited_s``, which is much longer than usual."""

    def broken(self, failed: RingFailed) -> None:
        """A ring broke."""

    def memory_low(self, needed_bytes: int) -> None:
        """The head itself lacks this much memory for its windows."""


FindsWorker = Callable[[], WorkerLink | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class RingDevices:
    """``workers`` have a window, ``holders`` may have layers to give; ``links`` are those between all devices.

    The draft model, if there is one, runs on the device that ``draft_device`` finds, which may be absent; None: on the
    head, or nowhere.
    """

    workers: Mapping[str, WorkerLink]
    holders: Mapping[str, WorkerLink]
    links: LinkBook
    draft_device: FindsWorker | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RingInputs:
    """The inputs of a ring: the ``forecast`` of plan ``epoch`` for ``service``, whose tokens ``pieces`` returns.

    ``session`` distinguishes starts of the head. ``profile`` is the head's own profile; the head serves layers on TCP
    port ``layer_port``.
    """

    epoch: int
    session: int
    forecast: Forecast
    service: Service
    pieces: Callable[[], Awaitable[ModelPieces]]
    devices: RingDevices
    node: Node
    profile: DeviceProfile
    layer_port: int
    context: zmq.asyncio.Context
    listener: RingListener
    reporter: Reporter

    @property
    def block_tokens(self) -> int | None:
        """Number of tokens per KV block; None: no blocks are kept."""
        return self.service.options.block_tokens(has_cache=self.node.config.kv_cache is not None)

    @property
    def state_tokens(self) -> int | None:
        """Number of generated tokens per saved state; None if the KV cache resumes without a state. A cache needs
        states of prompts only."""
        if not self.service.model.profile.is_recurrent:
            return None
        plan, options = self.forecast.plan, self.service.options
        if len(plan.devices) == 1 or options.kv_backup == 0:
            return self.forecast.context_tokens
        links, layers = self.devices.links.rates(plan.devices), self.service.model.profile.layers
        return state_tokens(plan, layers, options.run.kv_type, links, self.forecast.tokens_per_s)

    @property
    def drafting(self) -> Drafting | None:
        """How draft tokens are computed."""
        return self.forecast.drafting_with(self.block_tokens)

    @property
    def draft(self) -> DraftModel | None:
        """The draft model; None without drafting, or if no device has room for it.

        Where a step cannot take a tree of drafts, alternative drafts are only of use later, so those that the step
        takes are computed first.
        """
        draft, drafting = self.service.draft, self.drafting
        if draft is None or drafting is None or not (self.service.head_has_room or self.devices.draft_device):
            return None
        first = 0 if drafting.branches else min(max(drafting.rows - 1, drafting.room), draft.maximum)
        return replace(draft, context=min(draft.context, self.forecast.context_tokens), first=first)
