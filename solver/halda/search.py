"""From profiles to the best plan: over heads, chunk sizes and the devices that use prefill offload.

Each combination is a search of its own (``rings.py``). Quick plans tell with which to begin; every later search only
looks for plans better than the best so far, and mostly ends by its first bound. Searches that ran out of time are
resumed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

from halda.chunk_rows import FEWER_GAIN, in_smaller_chunks, other_chunks
from halda.evaluate import Objective, evaluate
from halda.filling import WEIGHT, WEIGHT_AT_ONCE, evened, filled
from halda.helping import OF_FIRST_TOKEN, able_to_offload, others_to_try, with_offload
from halda.instance import ExpertPlace, Instance, instance
from halda.orders import (
    EXACT_DEVICES,
)
from halda.plan import CutOff, Infeasible, NotBelow, Plan
from halda.profile import DeviceProfile, Limits, LinkProfile, ModelProfile, Workload
from halda.rings import NEAR, PROVEN, SAME, Goal, Search
from halda.simpler import GAIN, simpler
from halda.solution import Solution
from halda.time_limit import TimeLimit

_OVERLAP_ROWS: Final = 128
"""Chunk size with which rings are tried that pay off only for prompts."""
_EARLY_SHARE: Final = 0.65
"""Share of the time left for each head and each set of offloading devices: the likely ones come first."""
_MAIN_SHARE: Final = 0.75
"""Share of the total time before simpler plans are searched."""
_SIMPLER_SHARE: Final = 0.1
"""Share of the time for each simpler plan."""
_FIRST_SHARE: Final = 0.6
"""Share of the time of a head for the requested chunk size."""
_AGAIN_SHARE: Final = 0.7
"""Share of the time then left for each other chunk size."""


def solve(
    devices: Sequence[DeviceProfile],
    links: Sequence[LinkProfile],
    model: ModelProfile,
    workload: Workload,
    *,
    objective: Objective = "balanced",
    heads: Sequence[str] = (),
    limits: Mapping[str, Limits] | None = None,
    require: frozenset[str] = frozenset(),
    chunks: Sequence[int] = (),
    time_limit_s: float = 10.0,
    offloads: bool = False,
    prefill_offload: frozenset[str] | None = None,
    experts: ExpertPlace = "auto",
    settles: bool = False,
    simplifies: bool = True,
    at_once: int = 1,
    below_s: float = math.inf,
    other: Solution | None = None,
    shared: frozenset[str] = frozenset(),
) -> Solution:
    """Return the plan that minimises ``objective``, with the best of ``heads`` (none: the first device) as head.

    All heads share the time limit, which is in processor time; of heads that are alike one is tried. ``require`` names
    devices that must take part. Where layers stream, prompt chunks may have one of the sizes in ``chunks`` instead of
    ``workload.chunk_rows``; without any plan the smallest sizes are tried first. With ``offloads`` GPUs may use prefill
    offload, as in ``helping.py``; if the offloading devices are given (``prefill_offload``) only these are tried.
    ``experts`` of GPU layers are where the plan decides, or all in VRAM, or all in RAM. If it ``settles``, it returns a
    plan that is about as good, fills the ring for ``at_once`` concurrent requests (``filling.py``) and, if it
    ``simplifies``, requires less of devices (``simpler.py``), including those ``shared`` with other models. Raises
    ``Infeasible``, which says which limit is short and by how much, ``CutOff`` if a link that does not work would be
    needed, and ``NotBelow`` if the objective must be below ``below_s`` and no plan's is. The ``other`` plan, to which
    the result is compared, tells which chunk sizes are likely.
    """
    question = replace(instance(devices, links, model, workload, limits or {}), experts=experts, shared=shared)
    heads, budget = heads or [devices[0].device], TimeLimit(time_limit_s)

    able = able_to_offload(question) if offloads else frozenset[str]()
    tried = [frozenset[str]() if prefill_offload is None else prefill_offload & able]
    if prefill_offload is None and objective in OF_FIRST_TOKEN:
        tried += others_to_try(able)

    def ask(question: Instance, heads: Sequence[str], budget: TimeLimit, beaten: _Beaten) -> Solution | None:
        names = frozenset(device.device for device in question.devices)
        goal = Goal(objective, require & names, tuple(chunks), settles)
        sets = list(dict.fromkeys(each & names for each in tried))
        return _with_offload(question, heads, goal, budget, beaten, sets, able & names)

    found = ask(question, heads, budget.part(_MAIN_SHARE if settles and simplifies else 1.0), _Beaten(below_s, other))
    if found is None:
        raise NotBelow
    if settles and simplifies:

        def in_a_hurry(question: Instance, heads: Sequence[str], quickest: Solution, below_s: float) -> Solution | None:
            return ask(question, heads, budget.part(1.0, _SIMPLER_SHARE * time_limit_s), _Beaten(below_s, quickest))

        found = simpler(found, question, heads, require, in_a_hurry)
    if settles:
        asked = question.with_head(found.plan.head)
        asked = asked.with_rows(found.prediction.chunk_rows, found.prediction.step_rows)
        found = _filled(found, asked, weight=WEIGHT_AT_ONCE * at_once, longest_s=(1 + GAIN) * found.quickest_s)
        found = _with(evened(found.plan, asked, objective), found, asked)
    _check_links(found.plan.devices, question)
    return found


@dataclass(frozen=True, slots=True)
class _Beaten:
    """Plans must have an objective below ``below_s``; ``best`` is the best of others so far."""

    below_s: float = math.inf
    best: Solution | None = None


def _with_offload(
    question: Instance,
    heads: Sequence[str],
    goal: Goal,
    budget: TimeLimit,
    beaten: _Beaten,
    tried: Sequence[frozenset[str]],
    able: frozenset[str],
) -> Solution | None:
    """Return the best plan with prefill offload on one of the sets ``tried``; None if none beats ``beaten``.

    Raises ``Infeasible`` if there is no plan at all.
    """
    best: Solution | None = None
    searches = list[_Heads]()

    def take(search: _Heads, found: Solution | None) -> None:
        nonlocal best, beaten
        if found is not None:
            best = with_offload(found, search.question.with_head(found.plan.head), able) if able else found
            beaten = _Beaten(best.objective_s, best)

    for i, prefill_offload in enumerate(tried):
        if beaten.best is not None and budget.left_s <= 0:
            break
        search = _Heads(question.changed(prefill_offload=prefill_offload), goal, beaten)
        found = search.best_of(heads, budget.part(max(_EARLY_SHARE, 1 / (len(tried) - i))))
        if found is None and beaten == _Beaten():
            raise search.infeasible()
        take(search, found)
        searches.append(search)
    for search in searches:
        take(search, search.again(beaten, budget))
    return best


def _check_links(ring: Sequence[str], question: Instance) -> None:
    """Raise ``CutOff`` if ``ring`` sends over a link of ``question`` that does not work."""
    for pair in zip(ring, (*ring[1:], ring[0]), strict=True):
        link = question.links.get(pair)
        if link is not None and not link.works:
            raise CutOff(
                f"{link.source} does not reach {link.target}, and there is no plan without the link between them"
            )


class _Heads:
    """The best plan of a question over heads and chunk sizes. Only plans better than the best so far are searched.

    A plan with smaller buffers than requested must gain ``FEWER_GAIN``, since prompts unlike the typical one may be
    slower with it. So objectives are compared after weighting (``_handicap``).
    """

    def __init__(self, question: Instance, goal: Goal, beaten: _Beaten) -> None:
        self.question = self._question = question
        self._goal, self._beaten = goal, beaten
        self._best: Solution | None = None
        self._bound_s = math.inf
        self._without_plan: list[Search] = []
        self._asked: set[tuple[str, Workload]] = set()
        self._open: list[tuple[Search, Callable[[TimeLimit], object]]] = []
        """Searches that ran out of time, and how to resume each."""
        self._is_usual = False
        """Whether there are plans with the requested chunk size."""

    def best_of(self, heads: Sequence[str], budget: TimeLimit) -> Solution | None:
        """Return the plan with the best of ``heads``; None if none is better than what must be beaten."""
        questions = [self._question.with_head(head) for head in self._question.unlike(heads)]
        todo = self._searches(questions, budget)
        self._begin(todo, budget)
        todo += self._searches([other for search in todo for other in self._in_other_rows(search, questions)], budget)
        self._begin(todo, budget)
        while todo:
            if self._best_yet is not None and budget.left_s <= 0:
                self._bound_s = 0.0
                break
            search = todo.pop(0)
            self._look(search, budget.part(max(_EARLY_SHARE, 1 / (1 + len(todo)))))
            todo += self._searches(self._in_other_rows(search, questions), budget)
        return self._proven(self._best)

    def again(self, beaten: _Beaten, budget: TimeLimit) -> Solution | None:
        """Resume searches that ran out of time. Return a plan better than the best found meanwhile; None if there is
        none."""
        self._best, self._beaten = None, beaten
        unsettled, self._open, self._asked = self._open, [], set()
        for search, look in sorted(unsettled, key=lambda each: each[0].bound_s):
            below_s = self._best_s * self._handicap(search.question.workload.step_rows)
            if budget.left_s > 0 and search.bound_s < below_s * (1 - PROVEN):
                look(budget.part(_AGAIN_SHARE))
        return self._proven(self._best)

    def _proven(self, best: Solution | None) -> Solution | None:
        if best is None:
            return None
        proven = self._bound_s >= best.quickest_s * (1 - PROVEN)
        return replace(best, bound_s=min(self._bound_s, best.quickest_s), proven=proven)

    def infeasible(self) -> Infeasible:
        """Return which limit is short with the head that is closest to a plan."""
        return min((search.infeasible() for search in self._without_plan), key=lambda failure: failure.short_bytes)

    def _searches(self, questions: Iterable[Instance], budget: TimeLimit) -> list[Search]:
        """Return a search for each of ``questions`` that had none yet."""
        new = {(each.devices[0].device, each.workload): each for each in questions}
        found = [Search(each, self._goal, budget) for key, each in new.items() if key not in self._asked]
        self._asked.update(new)
        return found

    def _begin(self, todo: list[Search], budget: TimeLimit) -> None:
        """Begin the searches and sort them: their quick plans tell which is likely to have the best plan.

        The others can then be given up early.
        """
        if len(todo) == 1 or len(self._question.devices) > EXACT_DEVICES or self._beaten.best is not None:
            return
        best_s, rounds = self._best_s, self._rounds
        for search in todo:
            if best_s < math.inf and budget.left_s <= 0:
                break
            search.begin(NEAR * best_s * self._handicap(search.question.workload.step_rows), rounds)
            if self._weighed_s(search) < best_s:
                best_s, rounds = self._weighed_s(search), search.quick_rounds
        todo.sort(key=self._weighed_s)

    def _in_other_rows(self, search: Search, questions: Sequence[Instance]) -> Iterator[Instance]:
        """Yield variants of ``questions``: larger chunks if the plan of ``search`` streams, smaller buffers if it lacks
        memory or there is none.

        With another buffer, other windows, more GPU layers or other streamed layers may be best.
        """
        question, chunks, usual = search.question, self._goal.chunks, self._question.workload.chunk_rows
        is_usual = question.workload.chunk_rows == usual
        self._is_usual = self._is_usual or (is_usual and search.quick_s < math.inf)
        if not chunks or not search.is_begun or (self._is_usual and not is_usual):
            return
        rows = list[int]()
        if search.quick_s < math.inf:
            found = search.solution()
            rows += other_chunks(found, question, chunks)
            is_short = _is_short(found.plan, question)
        else:
            is_short = self._best_yet is None
        if is_short and min(chunks) < usual:
            rows.append(min(chunks))
        yield from (each.with_rows(count) for count in rows for each in questions)

    def _handicap(self, step_rows: int) -> float:
        return 1 - FEWER_GAIN if step_rows < self._question.workload.chunk_rows else 1.0

    def _weighed_s(self, search: Search) -> float:
        return search.quick_s / self._handicap(search.question.workload.step_rows)

    @property
    def _best_s(self) -> float:
        """Weighted objective that others must beat."""
        best = self._best_yet
        seconds = self._beaten.below_s if self._best is None else self._best.objective_s
        return seconds if best is None else seconds / self._handicap(best.prediction.step_rows)

    @property
    def _best_yet(self) -> Solution | None:
        return self._best or self._beaten.best

    @property
    def _rounds(self) -> int:
        return 0 if self._best_yet is None else self._best_yet.plan.rounds

    def _look(self, search: Search, budget: TimeLimit) -> None:
        """Look for a better plan with the head and the chunk size of ``search``."""
        question, before = search.question, self._best_yet
        usual, chunks = question.workload.chunk_rows == self._question.workload.chunk_rows, self._goal.chunks
        part = budget.part(_FIRST_SHARE)
        found = self._searched(search, part, is_certain=usual)
        if part.left_s <= 0:
            self._open.append((search, lambda budget: self._look(Search(question, self._goal, budget), budget)))
        if not search.found:
            self._without_plan.append(search)
        if found is not None:
            if chunks and self._goal.objective not in OF_FIRST_TOKEN and not found.plan.streaming:
                found = in_smaller_chunks(found, question)
            self._take(found)
        best = self._best_yet
        is_overlapping = chunks and self._goal.objective in OF_FIRST_TOKEN and len(question.processors) > 1
        if is_overlapping and best is not None and not best.plan.streaming:
            self._overlap(found, question, budget, is_first=before is None)

    def _searched(
        self, search: Search, budget: TimeLimit, *, gain: float = 0.0, is_certain: bool = True
    ) -> Solution | None:
        """Return what ``search`` finds better than the best so far by a share of ``gain``, filled if requested.

        What it leaves open counts if the search ``is_certain`` to cover all plans that might be the best.
        """
        below_s = self._best_s * self._handicap(search.question.workload.step_rows) * (1 - gain)
        search.run(budget, below_s, self._rounds)
        is_better = search.quick_s < below_s
        if is_certain or is_better:
            self._bound_s = min(self._bound_s, search.bound_s)
        if not is_better:
            return None
        found = search.solution()
        found = _filled(found, search.question) if self._goal.fills else found
        return found if found.objective_s < below_s else None

    def _take(self, found: Solution) -> None:
        """Keep ``found`` if it is the best so far."""
        below_s = self._best_s * self._handicap(found.prediction.step_rows)
        if found.objective_s < below_s * (1 - SAME * (self._best is not None)):
            self._best = found

    def _overlap(self, found: Solution | None, question: Instance, budget: TimeLimit, *, is_first: bool) -> None:
        """Look for a plan with a lower TTFT, as several devices compute smaller chunks concurrently.

        Only with one round: with more, chunks follow each other slightly closer, but tokens go round more often.
        """
        if found is not None:
            # Among like splits, one in which no machine has most of a chunk gains most from smaller ones.
            even = found if self._goal.fills else _filled(found, question)
            self._take(in_smaller_chunks(even, question))
        best, work = self._best_yet, question.workload
        assert best is not None
        if best.prediction.ttft_s <= FEWER_GAIN * best.objective_s:
            return
        usual = best.prediction.chunk_rows == work.chunk_rows
        wanted = [best.prediction.chunk_rows, *[_OVERLAP_ROWS] * (is_first or usual)]
        tried = {work.chunk_rows} | ({found.prediction.chunk_rows} if found is not None else set())
        while wanted and budget.left_s > 0:
            rows = wanted.pop(0)
            if rows not in tried and rows < work.prompt_tokens:
                tried.add(rows)
                wanted += self._with_rows(rows, question, budget)

    def _with_rows(self, rows: int, question: Instance, budget: TimeLimit) -> list[int]:
        """Look for a better ring with chunks of ``rows`` tokens. Return the chunk size that suits it best."""
        best, work = self._best_yet, question.workload
        assert best is not None
        is_usual = best is self._best and best.prediction.chunk_rows == work.chunk_rows
        step_rows = best.prediction.step_rows if rows == best.prediction.chunk_rows else work.step_rows
        asked, gain = question.with_rows(rows, step_rows), FEWER_GAIN * is_usual
        if not self._searches([asked], budget):
            return []
        search, part = Search(asked, self._goal, budget, is_one_round=True), budget.part(_AGAIN_SHARE)
        found = self._searched(search, part, gain=gain, is_certain=not is_usual)
        if part.left_s <= 0:
            self._open.append((search, partial(self._with_rows, rows, question)))
        if found is None or found.plan.streaming:
            return []
        even = in_smaller_chunks(found if self._goal.fills else _filled(found, asked), asked)
        better = min(found, even, key=lambda each: each.objective_s)
        self._take(better)
        return [better.prediction.chunk_rows]


def _filled(found: Solution, question: Instance, *, weight: float = WEIGHT, longest_s: float = math.inf) -> Solution:
    """Return ``found``, or a plan about as good that fills the ring."""
    return _with(filled(found.plan, question, found.objective, weight=weight, longest_s=longest_s), found, question)


def _with(plan: Plan, found: Solution, question: Instance) -> Solution:
    """Return ``found`` with ``plan``, which is about as good."""
    if plan is found.plan:
        return found
    prediction = evaluate(plan, question)
    objective_s = prediction.objective_s(found.objective, question.workload.answer_tokens)
    given_up_s = found.given_up_s + objective_s - found.objective_s
    return replace(found, plan=plan, prediction=prediction, objective_s=objective_s, given_up_s=given_up_s)


def _is_short(plan: Plan, question: Instance) -> bool:
    """Whether more memory would help: something streams, or is computed by a CPU despite a GPU."""
    has_gpu = any(member.has_gpu for member in question.members)
    return bool(plan.streaming) or (has_gpu and any(len(window.in_ram) for window in plan.route))
