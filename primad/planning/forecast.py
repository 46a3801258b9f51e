"""A plan, what each device holds of it, and the solver's forecast."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final, Self

from halda import Assignment, Instance, ModelProfile, Plan, Prediction, ShareBytes, assignments
from halda.instance import sharing_cores
from primad.planning.batching import Batches
from primad.planning.corrections import NOTHING_LEARNT, Corrections
from primad.planning.encoder_place import EncoderPlace
from primad.planning.fitting import Served
from primad.planning.plan import Planned
from primad.ring.chunks import Pieces
from primad.ring.grouping import Batching
from primad.ring.speculation.drafter import Drafting

FIRST_TOKENS_PER_S: Final = 20.0
"""Tokens per second assumed without a prediction."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """``prediction`` is the forecast of ``plan``, if it was planned; ``assignments`` are those of its devices.

    It was made with the ``corrections`` learnt until then, for ``sequences`` concurrent requests with a context of
    ``context_tokens`` each; ``why_sequences`` and ``why_context`` say why there is not more, where it was not asked
    for. Attention is ``flash`` attention or not, with ``small_windows`` as in ``Workload``. ``batches`` says how decode
    tokens are batched, ``drafting`` how drafts are computed, by a model on ``draft_device`` if there is one; pictures are
    encoded at ``encoder_place``. ``question`` is what was planned for; ``why_parallel`` says why devices share layers
    or not, where that was a choice.
    """

    plan: Plan
    prediction: Prediction | None
    assignments: Mapping[str, Assignment]
    context_tokens: int
    sequences: int = 1
    corrections: Corrections = NOTHING_LEARNT
    why_context: str = ""
    why_sequences: str = ""
    flash: bool = True
    small_windows: bool = False
    batches: Batches | None = None
    question: Instance | None = None
    drafting: Drafting | None = None
    draft_device: str | None = None
    encoder_place: EncoderPlace | None = None
    why_parallel: str = ""

    @property
    def batching(self) -> Batching:
        """How decode tokens are batched; one by one by default."""
        return Batching() if self.batches is None else self.batches.batching

    @property
    def pieces(self) -> Pieces | None:
        """The pieces in which chunks of a prompt are computed next to other requests; None: they are not cut."""
        return None if self.batches is None else self.batches.pieces

    @property
    def is_exact(self) -> bool:
        """Whether each response is the same as when it runs alone."""
        return self.batches is None or self.batches.is_exact

    @property
    def served(self) -> Served:
        """What the next plan may take over."""
        return Served(
            context_tokens=self.context_tokens,
            sequences=self.sequences,
            flash=self.flash,
            small_windows=self.small_windows,
        )

    @property
    def attention(self) -> tuple[bool, bool]:
        """The attention kernels; a change would alter the last bits of running responses."""
        return self.flash, self.small_windows

    @property
    def chunks_at_once(self) -> int:
        """Number of prompt chunks computed at the same time: one for all processes that share the same cores."""
        plan = self.plan
        if self.question is None or plan.streaming or plan.uses_gpu or plan.groups:
            return len(plan.places)
        return len(sharing_cores([each for each in self.question.devices if each.device in plan.devices]))

    @property
    def tokens_per_s(self) -> float:
        """The predicted throughput of all requests together."""
        if self.batches is not None:
            return self.batches.load.tokens_per_s
        return FIRST_TOKENS_PER_S if self.prediction is None else 1 / self.prediction.tpot_s

    def drafting_with(self, keep_rows: int | None) -> Drafting | None:
        """Return how drafts are computed: as trees only where one sequence has all cells and none of them is
        replicated."""
        if self.drafting is None or (self.sequences == 1 and keep_rows is None):
            return self.drafting
        return replace(self.drafting, branches=0)

    @classmethod
    def of_planned(cls, planned: Planned, corrections: Corrections, share_bytes: ShareBytes | None = None) -> Self:
        """The forecast of ``planned``; ranks of its groups have ``share_bytes``."""
        work = planned.question.workload
        found = cls.of(
            planned.plan,
            planned.question.model,
            planned.prediction,
            context_tokens=work.context_tokens,
            sequences=work.sequences,
            corrections=corrections,
            why_context=planned.why_context,
            why_sequences=planned.why_sequences,
            flash=work.flash,
            small_windows=work.small_windows,
            batches=planned.batches,
            question=planned.question,
            drafting=planned.drafting,
            draft_device=planned.draft_device,
            encoder_place=planned.encoder_place,
            share_bytes=share_bytes,
        )
        return replace(found, why_parallel=planned.why_parallel)

    @classmethod
    def of(
        cls,
        plan: Plan,
        model: ModelProfile,
        prediction: Prediction | None,
        *,
        context_tokens: int,
        sequences: int = 1,
        corrections: Corrections = NOTHING_LEARNT,
        why_context: str = "",
        why_sequences: str = "",
        flash: bool = True,
        small_windows: bool = False,
        batches: Batches | None = None,
        question: Instance | None = None,
        drafting: Drafting | None = None,
        draft_device: str | None = None,
        encoder_place: EncoderPlace | None = None,
        share_bytes: ShareBytes | None = None,
    ) -> Self:
        """The forecast of ``plan`` for ``model``."""
        return cls(
            plan=plan,
            prediction=prediction,
            assignments=assignments(plan, model, share_bytes),
            context_tokens=context_tokens,
            sequences=sequences,
            corrections=corrections,
            why_context=why_context,
            why_sequences=why_sequences,
            flash=flash,
            small_windows=small_windows,
            batches=batches,
            question=question,
            drafting=drafting,
            draft_device=draft_device,
            encoder_place=encoder_place,
        )
