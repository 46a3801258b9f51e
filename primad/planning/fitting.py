"""Complete a solved plan: the number of concurrent requests, chunk size, attention and context."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from halda import Prediction, Solution, Workload, evaluate
from halda.chunk_rows import in_smaller_chunks
from halda.instance import Instance, sharing_cores
from primad.planning.batching import Batches, batches_of, multiple_of_pieces, rows_of_chunks
from primad.planning.context import AtOnce, answers_at_once, attends_plainly, widened_context
from primad.planning.run_config import RunConfig

UNKNOWN: Final = AtOnce(sequences=1, why="more are not known to be exact with such a model; --sequences sets it")


@dataclass(frozen=True, slots=True, kw_only=True)
class Fitted:
    """``question`` is what the plan runs with and ``prediction`` the result.

    ``why_sequences`` and ``why_context`` say why they are not more, where they were not asked for.
    """

    question: Instance
    prediction: Prediction
    objective_s: float
    batches: Batches
    why_sequences: str
    why_context: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """What was served before: the number of ``sequences``, their ``context_tokens``, and whether attention was
    ``flash``.

    ``small_windows`` is as in ``Workload``.
    """

    context_tokens: int
    sequences: int
    flash: bool
    small_windows: bool = False


def fitted(
    solution: Solution,
    question: Instance,
    served: Served | None = None,
    *,
    run: RunConfig,
    widens: bool,
    keeps_attention: bool = False,
    why_context: str = "",
    may_be_several: bool = True,
) -> Fitted:
    """Return the plan of ``solution`` with the sequences, attention and chunks that it has room for; with more context
    if it ``widens``.

    The number of sequences is that of ``run``, or if that is None, as many as there is room for: as many as were
    ``served`` only need to fit, and it is one unless several are known to be exact (``may_be_several``). With
    ``keeps_attention`` attention stays as in ``question``. ``why_context`` says why the solved context is less than
    agents need, if it is.
    """
    plan, solved = solution.plan, solution.prediction
    question = question.with_rows(solved.chunk_rows, solved.step_rows)
    work, why_sequences = question.workload, ""
    if run.sequences is None:
        count = 1 if served is None else served.sequences
        found = answers_at_once(plan, question, served=count) if may_be_several else UNKNOWN
        work, why_sequences = replace(work, sequences=found.sequences), found.why

    def attending(work: Workload) -> Workload:
        if keeps_attention:
            return work
        smallest = replace(work, buffer_rows=0)  # larger chunks take larger buffers for scores
        plain = [each for each in (work, smallest) if attends_plainly(plan, question, each)]
        return replace(plain[0], flash=False) if plain else replace(work, flash=True)

    work = attending(work)
    if work.flash != question.workload.flash:
        work = in_suited_chunks(solution, replace(question, workload=work)).workload
    if not multiple_of_pieces(plan, replace(question, workload=work), work.sequences):
        asked = replace(question, workload=work)
        rows = rows_of_chunks(plan, asked, work.sequences, asked=run.sequences is not None)
        work = attending(replace(work, chunk_rows=rows))
    if widens:
        wider = widened_context(plan, question, work)
        work, why_context = replace(work, context_tokens=wider.tokens), why_context or wider.why
    question = replace(question, workload=work)
    prediction = evaluate(plan, question)
    return Fitted(
        question=question,
        prediction=prediction,
        objective_s=prediction.objective_s(run.objective, work.answer_tokens),
        batches=batches_of(run.batching, plan, question, work.sequences),
        why_sequences=why_sequences,
        why_context=why_context,
    )


def in_suited_chunks(solution: Solution, question: Instance) -> Instance:
    """Return ``question`` with chunks of a prompt that suit its attention, which differs from that of ``solution``:
    flash attention takes longer per token in small chunks."""
    plan, work = solution.plan, question.workload
    machines = sharing_cores([device for device in question.devices if device.device in plan.devices])
    if plan.streaming or len(machines) == 1:
        return question
    largest = question.with_rows(work.step_rows)
    prediction = evaluate(plan, largest)
    objective_s = prediction.objective_s(solution.objective, work.answer_tokens)
    found = in_smaller_chunks(replace(solution, prediction=prediction, objective_s=objective_s), largest)
    return question.with_rows(found.prediction.chunk_rows, found.prediction.step_rows)
