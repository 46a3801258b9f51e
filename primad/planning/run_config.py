"""How a model is to be run, as far as a plan depends on it: built by the command line, read by planner and ring."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal, get_args

from halda import CacheType, ExpertPlace, Objective
from primad.engine.protocol import Wire
from primad.planning.batching import BatchingMode
from primad.planning.drafting import SpeculateMode

ExtraBuffers = Literal["auto", "on", "off"]
EXTRA_BUFFERS: Final[tuple[ExtraBuffers, ...]] = get_args(ExtraBuffers)
ParallelMode = Literal["auto", "pipeline", "tensor"]
PARALLEL_MODES: Final[tuple[ParallelMode, ...]] = get_args(ParallelMode)
WIRES: Final[tuple[Wire, ...]] = get_args(Wire)
CHUNK_ROWS: Final = 512
"""Tokens of a prompt that are computed at a time, unless a plan that streams is better with more."""
MAX_SEQUENCES: Final = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig:
    """What ``primad serve`` runs and ``primad plan`` plans for; None means ``auto``.

    The plan minimises ``objective``, with every device in it if ``use_all``; ``windows`` and ``rounds`` set it by hand,
    and ``ranks`` how many devices share each of the windows.

    Each of ``sequences`` concurrent requests has a KV cache of ``context_tokens``, in ``kv_type``. ``batching`` says
    whether batches must be exact. A typical request has ``prompt_tokens`` and ``answer_tokens``.

    ``experts`` says where the experts of layers on a GPU are. ``speculate`` selects the drafts; a draft model runs on
    ``draft_on``; pictures are encoded on ``encoder_on``, if it has room. A step has room for ``whole_rows``, the most
    tokens of a picture that must be in one step.

    ``parallel``: each device has whole layers, or all have a share of each layer, or whichever is faster; partial sums
    are sent as ``wire`` says.
    """

    objective: Objective = "balanced"
    use_all: bool = False
    experts: ExpertPlace = "auto"
    context_tokens: int | None = None
    kv_type: CacheType = "f16"
    sequences: int | None = None
    batching: BatchingMode = "auto"
    prompt_tokens: int | None = None
    answer_tokens: int | None = None
    chunk_rows: int = CHUNK_ROWS
    whole_rows: int = 0
    extra_buffers: ExtraBuffers = "auto"
    speculate: SpeculateMode = "auto"
    draft_on: str | None = None
    encoder_on: str | None = None
    windows: tuple[int, ...] | None = None
    rounds: int | None = None
    ranks: tuple[int, ...] = ()
    parallel: ParallelMode = "pipeline"
    wire: Wire = "f32"

    @property
    def wants_all(self) -> bool:
        """Whether every device that can take part must have layers or a share of them, even without a gain."""
        return self.use_all or self.parallel == "tensor"

    @property
    def may_share(self) -> bool:
        """Whether devices may share layers: a group must also support everything else that is asked for."""
        by_hand = self.windows is not None and not self.shares_by_hand
        asked = by_hand or self.extra_buffers == "on" or self.speculate == "mtp"
        return self.parallel != "pipeline" and self.batching != "exact" and not asked

    @property
    def shares_by_hand(self) -> bool:
        """Whether a plan by hand has devices that share layers."""
        return max(self.ranks, default=1) > 1

    @property
    def devices_by_hand(self) -> int:
        """Number of devices in a plan by hand."""
        return sum(self.ranks) or len(self.windows or ())

    @property
    def may_help(self) -> bool:
        """Whether GPUs may do prefill offload: not where results must be exact, nor with extra buffers, which no GPU
        can read."""
        return self.batching != "exact" and self.extra_buffers != "on"


DEFAULT_RUN: Final = RunConfig()
"""The run configuration without any options."""
