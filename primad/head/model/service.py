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
from primad.errors import ModelError, PrimadError, UnreadableError, WeightsError
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
    """The model file: its ``header``, its ``profile``, its layers, facts about it that are stored in ``home``, and its
    ``adapters``.

    ``ranged`` is the source of its weights on a hub, if any. It ``predicts`` if its own layer drafts. A file that could
    not be read is tried again after ``again_s``; a file that changed is served after ``remedy``.
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
        """Cutters of the layers of a rank's share, by weights and rank. They are kept, so that layers are hashed
        once."""
        self._shared_adapters: dict[tuple[tuple[int, ...], int], tuple[Adapter, ...]] = {}
        self._share_bytes: dict[tuple[int, ...], list[RankBytes]] = {}
        self._max_ranks: dict[int, int] = {}

    @property
    def id(self) -> str:
        """Its name in the API."""
        return self._name or model_id(self.header.path)

    @property
    def stamp(self) -> str:
        """Identifies the model among model files, and changes when it does."""
        added = [(each.digest, each.scale) for each in self.adapters]
        return repr((sorted((str(path), stamp) for path, stamp in self._stamps.items()), added))

    @property
    def _keeps_name(self) -> bool:
        return any(each.changes_output for each in self.adapters)

    @property
    def cutter(self) -> ModelCutter:
        """Cuts out the model's layers; created when first needed."""
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
        """Return the cutter of layers for the share of ``rank`` in a group with these ``weights``. Raises
        ``NotCutError``."""
        if (weights, rank) not in self._shares:
            own = share_header(self.share_rules, weights, rank)
            self._shares[weights, rank] = ModelCutter(
                own, LayerDigests(own, digests_file(self._home)), keeps_name=self._keeps_name
            )
        return self._shares[weights, rank]

    @cached_property
    def share_rules(self) -> ShareRules:
        """How its layers are divided between ranks of a group. Raises ``NotCutError`` if they cannot be."""
        return ShareRules(self.header)

    @cached_property
    def share_units(self) -> ShareUnits | None:
        """The units by which shares of its layers are cut."""
        return self.share_rules.units

    def share_bytes(self, weights: tuple[int, ...]) -> Sequence[RankBytes]:
        """Return each rank's bytes of weights in a group with these ``weights``. Raises ``NotCutError``."""
        if weights not in self._share_bytes:
            self._share_bytes[weights] = share_bytes(self.share_rules, weights)
        return self._share_bytes[weights]

    def share_adapters(self, weights: tuple[int, ...], rank: int) -> tuple[Adapter, ...]:
        """Return its adapters, cut like that share. Raises ``NotCutError``."""
        if (weights, rank) not in self._shared_adapters:
            self._shared_adapters[weights, rank] = tuple(
                share_adapter(each, self.share_rules, weights, rank) for each in self.adapters
            )
        return self._shared_adapters[weights, rank]

    async def max_ranks(self, limit: int) -> int:
        """Return how many of ``limit`` devices can share each layer."""
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
        """The ``cutter`` of a model on a hub; None if the file is local, or the model cannot be cut."""
        cutter = None if self._ranged is None else self.cutter
        return cutter if isinstance(cutter, RangedCutter) else None

    @property
    def file(self) -> Path:
        """The local file with the vocabulary, and with everything else if the model is local."""
        return self.header.path if self._ranged is None else self._ranged.vocabulary

    def file_for_encoder(self) -> Path:
        """Return a local file with everything but the weights, which is what a picture encoder loads of its model.
        Raises ``DiskError``."""
        if self._ranged is None:
            return self.header.path
        path = self._ranged.vocabulary.with_name(f"{self.header.path.stem}.metadata")
        write_without_weights(self.header, path)
        return path

    async def checked(self, firsts: Iterable[int]) -> str | None:
        """Return the known verdict on its windows that begin at the layers ``firsts``; None for the whole model."""
        return await asyncio.to_thread(windows_line, self._home, self.header, firsts)

    async def planned(self) -> ModelProfile:
        """Return its profile with the known use of its experts."""
        return await asyncio.to_thread(with_expert_use, self.profile, self.header, self._home)

    def source(self, digest: str) -> LayerCut | None:
        """Return the layer ``digest`` of the model or an adapter, if a plan needed it and it is in a local file."""
        own = [] if self._cutter is None else [self._cutter]
        shared = (each for adapters in self._shared_adapters.values() for each in adapters)
        cutters: list[ModelCutter | Adapter] = [*own, *self._shares.values(), *self.adapters, *shared]
        return next((cut for each in cutters if (cut := each.source(digest)) is not None), None)

    def check(self) -> None:
        """Raise ``ModelError`` if the file has changed, or could not be read a moment ago."""
        check_unchanged(self._stamps, self._remedy)
        if self._unreadable is not None and time.monotonic() < self._unreadable[1] + self._again_s:
            raise ModelError(f"{self._unreadable[0]}; check the disk, or serve another copy of the model")

    def remember(self, error: PrimadError | None) -> None:
        """Remember the ``error`` that ended a ring, if this file's disk failed: as all rings need the file, the next
        one waits."""
        file = error.file if isinstance(error, WeightsError | UnreadableError) else None
        if file is not None and Path(file) in self._stamps:
            self._unreadable = str(error), time.monotonic()


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """The served model, the owner's options, the planned workload, the draft model, and the picture encoder.

    ``draft_source`` has the draft model's layers, for other devices; None if it cannot be cut. Unless
    ``head_has_room``, drafting runs only on another device.
    """

    model: ModelSource
    options: ServeOptions
    workload: Workload
    draft: DraftModel | None = None
    draft_source: ModelSource | None = None
    head_has_room: bool = True
    encoder: EncoderFile = NO_ENCODER

    def step_tokens(self, forecast: Forecast) -> int:
        """Return the tokens per step, as planned if the plan was solved."""
        predicted, run = forecast.prediction, self.options.run
        return max(run.chunk_rows, run.whole_rows) if predicted is None else predicted.step_rows

    def chunk_tokens(self, forecast: Forecast) -> int:
        """Return the tokens per prompt chunk, as planned if the plan was solved."""
        predicted = forecast.prediction
        return self.options.run.chunk_rows if predicted is None else predicted.chunk_rows

    @property
    def reserved_bytes(self) -> int:
        """Memory of the head that the draft model and the picture encoder take."""
        draft = 0 if self.draft is None or not self.head_has_room else self.draft.memory_bytes
        return draft + self.encoder.memory_bytes

    @property
    def may_share(self) -> bool:
        """Whether devices may have shares of its layers, given the options and everything else that it is served
        with."""
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
    """Return the service of the model of ``header`` with ``options``. Raises ``PlanError`` if no work can be planned
    for them."""
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
