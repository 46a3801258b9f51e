"""What a head serves: the model file with learnt facts, and how it is served."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Final

from halda import ModelProfile, RankBytes, Workload
from primad.certify.verdict import why_not_shared, windows_line
from primad.daemon.node import Node
from primad.errors import ModelError, PrimadError, WeightsError
from primad.gguf.adapter import Adapter
from primad.gguf.adapter_shares import adapted_ranks, share_adapter
from primad.gguf.architectures.cuts import cuttable
from primad.gguf.architectures.table import NotCutError
from primad.gguf.digests import LayerDigests
from primad.gguf.header import Header
from primad.gguf.hub_library import token
from primad.gguf.hub_ranges import own_hubs
from primad.gguf.layers import LayerCut
from primad.gguf.model import check_unchanged, open_model, stamps_of
from primad.gguf.profile import model_profile
from primad.gguf.ranged import RangedModel
from primad.gguf.ranged_cutter import RangedCutter
from primad.gguf.share_rules import ShareRules
from primad.gguf.shares import share_bytes, share_header
from primad.gguf.splits import ShareUnits
from primad.gguf.whole_file import write_without_weights
from primad.gguf.windows import ModelCutter
from primad.head.model.encoder import NO_ENCODER, EncoderFile
from primad.head.model.options import ServeOptions, model_id
from primad.planning.adapters import with_expert_use
from primad.planning.forecast import Forecast
from primad.planning.question import PlannedDraft, workload_of
from primad.ring.speculation.messages import DraftModel
from primad.settings.config import digests_file

START_AGAIN: Final = "start 'primad serve' again to serve the new one"
REQUEST_AGAIN: Final = "the next request loads the new one"


class ModelSource:
    """The model file: its ``header``, its ``profile``, and its layers, with what was learnt of it in ``home``; and its
    ``adapters``.

    ``ranged`` is the source of its weights on a hub, if any. It ``predicts``: its own layer drafts. A file that could not be
    read is tried again after ``again_s``; one that changed is served after ``remedy``.
    """

    def __init__(
        self,
        header: Header,
        profile: ModelProfile,
        home: Path,
        ranged: RangedModel | None = None,
        adapters: Sequence[Adapter] = (),
        *,
        again_s: float,
        predicts: bool = False,
        name: str | None = None,
        remedy: str = START_AGAIN,
    ) -> None:
        assert ranged is None or not adapters, "a model with adapters is here"
        self.adapters = tuple(adapters)
        self.predicts = predicts
        self._again_s, self._remedy = again_s, remedy
        self._ranged, self._name = ranged, name
        self.header, self.profile = header, profile
        self._home = home
        self._stamps = stamps_of(header)
        for each in adapters:
            self._stamps |= stamps_of(each.header)
        self._unreadable: tuple[str, float] | None = None
        self._cutter: ModelCutter | None = None
        self._shares: dict[tuple[tuple[int, ...], int], ModelCutter] = {}
        """By weights and rank: what cuts layers out of a rank's share. What was hashed once is known then."""
        self._shared_adapters: dict[tuple[tuple[int, ...], int], tuple[Adapter, ...]] = {}
        self._share_bytes: dict[tuple[int, ...], list[RankBytes]] = {}
        self._max_ranks: dict[int, int] = {}

    @property
    def id(self) -> str:
        """Its name in the API."""
        return self._name or model_id(self.header.path)

    @property
    def stamp(self) -> str:
        """Identifies it among model files, and changes when it does."""
        added = [(each.digest, each.scale) for each in self.adapters]
        return repr((sorted((str(path), stamp) for path, stamp in self._stamps.items()), added))

    @property
    def _keeps_name(self) -> bool:
        return any(each.changes_output for each in self.adapters)

    @property
    def cutter(self) -> ModelCutter:
        """Cuts out its layers; created when first needed."""
        if self._cutter is None:
            digests, ranged = LayerDigests(self.header, digests_file(self._home)), self._ranged
            self._cutter = (
                ModelCutter(
                    self.header,
                    digests,
                    keeps_name=self._keeps_name,
                    predicts=self.predicts,
                )
                if ranged is None
                else RangedCutter(
                    self.header, digests, files=ranged.files, parts=ranged.parts, hubs=own_hubs(), token=token()
                )
            )
        return self._cutter

    def share_cutter(self, weights: tuple[int, ...], rank: int) -> ModelCutter:
        """Cuts layers out of the share of ``rank`` of a group with these ``weights``. Raises ``NotCutError``."""
        if (weights, rank) not in self._shares:
            own = share_header(self.share_rules, weights, rank)
            self._shares[weights, rank] = ModelCutter(
                own, LayerDigests(own, digests_file(self._home)), keeps_name=self._keeps_name
            )
        return self._shares[weights, rank]

    @cached_property
    def share_rules(self) -> ShareRules:
        """How its layers are cut between ranks of a group. Raises ``NotCutError`` where they cannot."""
        return ShareRules(self.header)

    @cached_property
    def share_units(self) -> ShareUnits | None:
        """What shares of its layers are cut by."""
        return self.share_rules.units

    def share_bytes(self, weights: tuple[int, ...]) -> Sequence[RankBytes]:
        """What each rank of a group with these ``weights`` has of its weights. Raises ``NotCutError``."""
        if weights not in self._share_bytes:
            self._share_bytes[weights] = share_bytes(self.share_rules, weights)
        return self._share_bytes[weights]

    def share_adapters(self, weights: tuple[int, ...], rank: int) -> tuple[Adapter, ...]:
        """Its adapters, cut as that share is. Raises ``NotCutError``."""
        if (weights, rank) not in self._shared_adapters:
            self._shared_adapters[weights, rank] = tuple(
                share_adapter(each, self.share_rules, weights, rank) for each in self.adapters
            )
        return self._shared_adapters[weights, rank]

    async def max_ranks(self, limit: int) -> int:
        """How many of ``limit`` devices can share each layer."""
        if limit not in self._max_ranks:
            try:
                self._max_ranks[limit] = await asyncio.to_thread(self._ranks, limit)
            except NotCutError:
                self._max_ranks[limit] = 1
        return self._max_ranks[limit]

    def _ranks(self, limit: int) -> int:
        if why_not_shared(self._home, self.header):
            return 1
        return adapted_ranks(self.share_rules, limit, self.adapters)

    @property
    def ranged(self) -> RangedCutter | None:
        """The ``cutter`` of a model on a hub; None if the file is here. A model that cannot be cut has none."""
        cutter = None if self._ranged is None else self.cutter
        return cutter if isinstance(cutter, RangedCutter) else None

    @property
    def file(self) -> Path:
        """The local file with the vocabulary, and with everything else if the model is local."""
        return self.header.path if self._ranged is None else self._ranged.vocabulary

    def file_for_encoder(self) -> Path:
        """A local file that has all but the weights, which is what an encoder of pictures loads of its model. Raises
        ``DiskError``."""
        if self._ranged is None:
            return self.header.path
        path = self._ranged.vocabulary.with_name(f"{self.header.path.stem}.metadata")
        write_without_weights(self.header, path)
        return path

    async def checked(self, firsts: Iterable[int]) -> str | None:
        """The known verdict on its windows that begin at these layers; None for the whole model alone."""
        return await asyncio.to_thread(windows_line, self._home, self.header, firsts)

    async def planned(self) -> ModelProfile:
        """Its profile with the known use of its experts."""
        return await asyncio.to_thread(with_expert_use, self.profile, self.header, self._home)

    def source(self, digest: str) -> LayerCut | None:
        """The layer ``digest`` of the model or an adapter, if a plan needed it and it is in a local file."""
        own = [] if self._cutter is None else [self._cutter]
        shared = (each for adapters in self._shared_adapters.values() for each in adapters)
        cutters: list[ModelCutter | Adapter] = [*own, *self._shares.values(), *self.adapters, *shared]
        return next((cut for each in cutters if (cut := each.source(digest)) is not None), None)

    def check(self) -> None:
        """Raises ``ModelError`` if the file has changed, or could not be read a moment ago."""
        check_unchanged(self._stamps, self._remedy)
        if self._unreadable is not None and time.monotonic() < self._unreadable[1] + self._again_s:
            raise ModelError(f"{self._unreadable[0]}; check the disk, or serve another copy of the model")

    def remember(self, error: PrimadError | None) -> None:
        """A ring ended with ``error``. All depend on this file: if its disk fails, the next ring waits."""
        if isinstance(error, WeightsError) and error.file is not None and Path(error.file) in self._stamps:
            self._unreadable = str(error), time.monotonic()


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """The served model, the owner's options, the planned workload, the draft model, and the encoder of pictures.

    ``draft_source`` has the draft model's layers, for other devices; None if it cannot be cut. It drafts only there
    unless ``head_has_room``.
    """

    model: ModelSource
    options: ServeOptions
    workload: Workload
    draft: DraftModel | None = None
    draft_source: ModelSource | None = None
    head_has_room: bool = True
    encoder: EncoderFile = NO_ENCODER

    def step_tokens(self, forecast: Forecast) -> int:
        """Tokens per step, as planned if the plan was solved."""
        predicted, run = forecast.prediction, self.options.run
        return max(run.chunk_rows, run.whole_rows) if predicted is None else predicted.step_rows

    def chunk_tokens(self, forecast: Forecast) -> int:
        """Tokens per prompt chunk, likewise."""
        predicted = forecast.prediction
        return self.options.run.chunk_rows if predicted is None else predicted.chunk_rows

    @property
    def reserved_bytes(self) -> int:
        """Memory of the head that its draft model takes, and its encoder of pictures."""
        draft = 0 if self.draft is None or not self.head_has_room else self.draft.memory_bytes
        return draft + self.encoder.memory_bytes

    @property
    def may_share(self) -> bool:
        """Whether devices may have shares of its layers, with all that it is served with."""
        also = (self.model.ranged, self.model.predicts)
        return self.options.run.may_share and not any(also)

    @property
    def planned_draft(self) -> PlannedDraft | None:
        """The draft model, for plans."""
        draft, source = self.draft, self.draft_source
        if draft is None:
            return None
        return PlannedDraft(
            path=draft.path,
            model=self.model.profile if source is None else source.profile,
            memory_bytes=draft.memory_bytes,
            head_has_room=self.head_has_room,
            may_move=source is not None,
        )


def service_of(
    node: Node,
    header: Header,
    model: ModelProfile,
    options: ServeOptions,
    ranged: RangedModel | None = None,
    draft: DraftModel | None = None,
    adapters: Sequence[Adapter] = (),
    *,
    head_has_room: bool = True,
    predicts: bool = False,
    encoder: EncoderFile = NO_ENCODER,
) -> Service:
    """The model of ``header`` with ``options``. Raises ``PlanError`` if no work can be planned for them."""
    again_s = node.timings.head.model_again_s
    source = ModelSource(
        header,
        model,
        node.config.home,
        ranged,
        adapters,
        again_s=again_s,
        predicts=predicts,
        name=options.name,
        remedy=START_AGAIN if options.is_only else REQUEST_AGAIN,
    )
    return Service(
        model=source,
        options=options,
        workload=workload_of(options.run, model),
        draft=draft,
        draft_source=None if draft is None else _source_of(draft, node, again_s),
        head_has_room=head_has_room,
        encoder=encoder,
    )


def _source_of(draft: DraftModel, node: Node, again_s: float) -> ModelSource | None:
    header = open_model(Path(draft.path))
    try:
        cuttable(header)
    except ModelError:
        return None
    return ModelSource(header, model_profile(header), node.config.home, again_s=again_s)
