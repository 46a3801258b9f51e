"""From profiles to the best plan: over rounds, ring orders and who takes part.

The head alone comes first, then rings of k = 1, 2, ... rounds. Before k rounds are solved, a program that lets go of
everything that more rounds could win (waiting for slots, equal rounds) bounds all k that are left: more rounds only
add hops, so the search mostly ends after a few. Where layers differ, the even layout is itself only a bound; what it leaves
open is settled by cutting exactly, one ring order at a time.

Before all rings come the plans that are quick to make (``cuts.py``): a program looks only for what is better than they
are.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise, permutations
from typing import Any, Final

import pulp

from halda.cuts import good_cuts
from halda.evaluate import Objective, Prediction, evaluate, is_regular, residency, stream
from halda.filling import filled
from halda.helping import OF_FIRST_TOKEN, able_to_offload, others_to_try, with_offload
from halda.instance import ExpertPlace, Instance, instance
from halda.milp.build import EVEN_MS, Program, build
from halda.milp.layouts import Layout, cut_layout, even_layout, fixed_layout, new_problem, single_device_layout
from halda.milp.time import TIE
from halda.orders import (
    EXACT_DEVICES,
    RingOrder,
    device_sequences,
    exact_orders,
    good_order,
    hops_around,
    induced_orders,
    min_hops,
)
from halda.plan import CutOff, Infeasible, LeftOut, NotBelow, Plan, Window, on_gpus_of
from halda.profile import KV_TYPES, DeviceProfile, Limits, LinkProfile, ModelProfile, Workload
from halda.simpler import simpler
from halda.solution import Solution
from halda.solving import Outcome, run
from halda.time_limit import TimeLimit
from halda.variables import MS

CHUNKS: Final = (128, 256, 1024, 2048)
"""Rows of a chunk of the prompt that may be better than those asked for where layers stream: what is read serves more of
them, or a smaller buffer leaves more room for layers."""
MAX_CHUNK_S: Final = 60.0
"""A chunk that takes longer is not made larger: nothing else is computed meanwhile, and a ring whose step does not come back
counts as broken after a while."""
RING_CHUNKS: Final = (256, 128, 64, 32)
"""Rows of a chunk with which a ring may have a prompt sooner: one device computes a chunk while another has the next.
Buffers stay as they are."""
RING_GAIN: Final = 0.01
"""Share of the objective that each smaller chunk must gain then; other prompts are hardly slower with it."""
_OVERLAP_ROWS: Final = 128
"""With chunks of so many rows it is looked for rings that are worth having for prompts alone."""
FEWER_GAIN: Final = 0.05
"""Share of the objective that fewer rows must gain: with other prompts than the typical one they may be slower."""
EXACT_CUTS: Final = 160
"""Binaries up to which windows are cut exactly where layers differ; beyond, the gap is reported."""
_HOP_TRIALS: Final = 3
_CUTS_TRIED: Final = 5
_ORDERS_OF: Final = 5
_MIN_S: Final = 0.05
_FIRST_S: Final = 5.0
_EARLY_SHARE: Final = 0.65
"""Of the time that is left, for each head and each set of devices that are helped: the likely ones come first."""
_MAIN_SHARE: Final = 0.75
"""Of the time that there is, before simpler plans are looked for."""
_SIMPLER_SHARE: Final = 0.1
"""For each of them."""
_FIRST_SHARE: Final = 0.6
"""Of the time for a head, with the chunks that were asked for."""
_AGAIN_SHARE: Final = 0.7
"""Of what is then left, with each other size of chunks."""
_LONG_S: Final = 1.5
"""With more devices than orders are tried of, a program ends after so long. By then its plans are near the best, and so is
its bound."""
_STEEP_S: Final = 1000.0
"""Where the best plan takes so long, milliseconds stand beside hours."""
_SHORT_S: Final = 0.8
"""What is missing is looked for so long, or until there is an answer."""
_ELASTIC_ORDERS: Final = 6
_MIN_BYTES: Final = 0.5
"""What is less is what the solver takes for nothing."""
_POLISHED: Final = 3
"""Plans that are quick to make of which streaming is settled by a program of its own."""
_KEPT_OF_ROUNDS: Final = 4
"""Of so many quick plans of as many rounds, the cheapest by their prices, it is worked out what streams."""
_FAR_PRICE: Final = 1.5
"""Not of those that are dearer by so much than the cheapest of as many rounds or fewer."""
_NEAR: Final = 1.1
"""Nor of those that are dearer by so much than the best plan of other questions takes."""
_NEAR_ROUNDS: Final = 2
"""Between plans of about as good questions there are so many rounds at most, as a rule."""
_WORSE_ROUNDS: Final = 4
"""After so many more rounds without a better price no quick plans of still more are made."""
_SAME: Final = 1e-9
"""Relative difference that is no difference."""
_PROVEN: Final = 1e-6
"""Relative gap below which a plan counts as the best."""


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
    below_s: float = math.inf,
    other: Solution | None = None,
) -> Solution:
    """The plan that makes ``objective`` smallest, with the best of ``heads`` (none: the first device) as head.

    They share the time limit, which is of the processor's time; of those that are alike one is tried. ``require`` names
    devices that must take part. Where layers stream, a chunk of the prompt may have as many rows as one of ``chunks``
    says instead of ``workload.chunk_rows``; where there is no plan, those with the fewest rows come first. With
    ``offloads`` GPUs may help with prompts, as in ``helping.py``; where it is known which (``prefill_offload``) only that
    is tried. ``experts`` of layers on a GPU are where the plan has them, or all in its memory, or all in RAM. Where it
    ``settles`` for a plan about as good, that fills the ring (``filling.py``) and, if it ``simplifies``, asks less of
    devices (``simpler.py``). Raises ``Infeasible``, which says which limit is short and by how much, ``CutOff`` where a
    link that does not work would be needed, and ``NotBelow`` where a plan is of interest only if it takes less than
    ``below_s``, and none does. The ``other`` plan to which it is compared tells which chunks are likely.
    """
    question = replace(instance(devices, links, model, workload, limits or {}), experts=experts)
    heads, budget = heads or [devices[0].device], TimeLimit(time_limit_s)

    able = able_to_offload(question) if offloads else frozenset[str]()
    tried = [frozenset[str]() if prefill_offload is None else prefill_offload & able]
    if prefill_offload is None and objective in OF_FIRST_TOKEN:
        tried += others_to_try(able)

    def ask(question: Instance, heads: Sequence[str], budget: TimeLimit, beaten: _Beaten) -> Solution | None:
        names = frozenset(device.device for device in question.devices)
        goal = _Goal(objective, require & names, tuple(chunks), settles)
        sets = list(dict.fromkeys(each & names for each in tried))
        return _with_offload(question, heads, goal, budget, beaten, sets, able & names)

    found = ask(question, heads, budget.part(_MAIN_SHARE if settles and simplifies else 1.0), _Beaten(below_s, other))
    if found is None:
        raise NotBelow
    if settles and simplifies:

        def in_a_hurry(question: Instance, heads: Sequence[str], quickest: Solution, below_s: float) -> Solution | None:
            return ask(question, heads, budget.part(1.0, _SIMPLER_SHARE * time_limit_s), _Beaten(below_s, quickest))

        found = simpler(found, question, heads, require, in_a_hurry)
    _check_links(found.plan.devices, question)
    return found


@dataclass(frozen=True, slots=True)
class _Goal:
    """What is looked for with every head: what is made small, who must take part, other chunks, and whether it fills."""

    objective: Objective
    require: frozenset[str]
    chunks: tuple[int, ...]
    fills: bool


@dataclass(frozen=True, slots=True)
class _Beaten:
    """Plans are looked for that take less than ``below_s``; the best of others so far is ``best``."""

    below_s: float = math.inf
    best: Solution | None = None


def _with_offload(
    question: Instance,
    heads: Sequence[str],
    goal: _Goal,
    budget: TimeLimit,
    beaten: _Beaten,
    tried: Sequence[frozenset[str]],
    able: frozenset[str],
) -> Solution | None:
    """The best plan with prompts helped as in one of ``tried``; None where none beats what is to be ``beaten``.

    Raises ``Infeasible`` where there is none, whatever it takes.
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
    """Raise ``CutOff`` where ``ring`` sends over a link of ``question`` that does not work."""
    for pair in zip(ring, (*ring[1:], ring[0]), strict=True):
        link = question.links.get(pair)
        if link is not None and not link.works:
            raise CutOff(
                f"{link.source} does not reach {link.target}, and there is no plan without the link between them"
            )


class _Heads:
    """The best plan of a question among heads and sizes of chunks. Only what is better than the best so far is looked for.

    A plan whose buffers are for fewer rows than were asked for has to gain ``FEWER_GAIN``: with other prompts than the
    typical one it may be slower. So objectives are compared as ``_weighed_s``.
    """

    def __init__(self, question: Instance, goal: _Goal, beaten: _Beaten) -> None:
        self.question = self._question = question
        self._goal, self._beaten = goal, beaten
        self._best: Solution | None = None
        self._bound_s = math.inf
        self._without_plan: list[_Search] = []
        self._asked: set[tuple[str, Workload]] = set()
        self._open: list[tuple[_Search, Callable[[TimeLimit], object]]] = []
        """Searches that time was too short for, and how to look again."""
        self._is_usual = False
        """Whether there are plans with the chunks that were asked for."""

    def best_of(self, heads: Sequence[str], budget: TimeLimit) -> Solution | None:
        """The plan with the best of ``heads``; None where none is better than what is to be beaten."""
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
        """A plan that is better than what was found meanwhile, where time was too short; None where there is none."""
        self._best, self._beaten = None, beaten
        unsettled, self._open, self._asked = self._open, [], set()
        for search, look in sorted(unsettled, key=lambda each: each[0].bound_s):
            below_s = self._best_s * self._handicap(search.question.workload.step_rows)
            if budget.left_s > 0 and search.bound_s < below_s * (1 - _PROVEN):
                look(budget.part(_AGAIN_SHARE))
        return self._proven(self._best)

    def _proven(self, best: Solution | None) -> Solution | None:
        if best is None:
            return None
        proven = self._bound_s >= best.quickest_s * (1 - _PROVEN)
        return replace(best, bound_s=min(self._bound_s, best.quickest_s), proven=proven)

    def infeasible(self) -> Infeasible:
        """Which limit is short with the head that is closest to a plan."""
        return min((search.infeasible() for search in self._without_plan), key=lambda failure: failure.short_bytes)

    def _searches(self, questions: Iterable[Instance], budget: TimeLimit) -> list[_Search]:
        """A search for each of ``questions`` that there was none for."""
        new = {(each.devices[0].device, each.workload): each for each in questions}
        found = [_Search(each, self._goal, budget) for key, each in new.items() if key not in self._asked]
        self._asked.update(new)
        return found

    def _begin(self, todo: list[_Search], budget: TimeLimit) -> None:
        """Begin the searches, and sort them: their quick plans tell which is likely to have the best one.

        Others can then be given up early.
        """
        if len(todo) == 1 or len(self._question.devices) > EXACT_DEVICES:
            return
        best_s, rounds = self._best_s, self._rounds
        for search in todo:
            if best_s < math.inf and budget.left_s <= 0:
                break
            search.begin(_NEAR * best_s * self._handicap(search.question.workload.step_rows), rounds)
            if self._weighed_s(search) < best_s:
                best_s, rounds = self._weighed_s(search), search.quick_rounds
        todo.sort(key=self._weighed_s)

    def _in_other_rows(self, search: _Search, questions: Sequence[Instance]) -> Iterator[Instance]:
        """Of all ``questions``, those with larger chunks where the plan of ``search`` streams, and those with smaller
        buffers where it misses memory, or there is none.

        With another buffer other windows, more layers of a GPU or other layers that stream may be the best.
        """
        question, chunks, usual = search.question, self._goal.chunks, self._question.workload.chunk_rows
        is_usual = question.workload.chunk_rows == usual
        self._is_usual = self._is_usual or (is_usual and search.quick_s < math.inf)
        if not chunks or not search.is_begun or (self._is_usual and not is_usual):
            return
        rows = list[int]()
        if search.quick_s < math.inf:
            found = search.solution()
            rows += _other_chunks(found, question, chunks)
            is_short = _is_short(found.plan, question)
        else:
            is_short = self._best_yet is None
        if is_short and min(chunks) < usual:
            rows.append(min(chunks))
        yield from (each.with_rows(count) for count in rows for each in questions)

    def _handicap(self, step_rows: int) -> float:
        return 1 - FEWER_GAIN if step_rows < self._question.workload.chunk_rows else 1.0

    def _weighed_s(self, search: _Search) -> float:
        return search.quick_s / self._handicap(search.question.workload.step_rows)

    @property
    def _best_s(self) -> float:
        """What others have to be below, weighed."""
        best = self._best_yet
        seconds = self._beaten.below_s if self._best is None else self._best.objective_s
        return seconds if best is None else seconds / self._handicap(best.prediction.step_rows)

    @property
    def _best_yet(self) -> Solution | None:
        return self._best or self._beaten.best

    @property
    def _rounds(self) -> int:
        return 0 if self._best_yet is None else self._best_yet.plan.rounds

    def _look(self, search: _Search, budget: TimeLimit) -> None:
        """Look for a better plan with the head and the chunks of ``search``."""
        question, before = search.question, self._best_yet
        usual, chunks = question.workload.chunk_rows == self._question.workload.chunk_rows, self._goal.chunks
        part = budget.part(_FIRST_SHARE)
        found = self._searched(search, part, is_certain=usual)
        if part.left_s <= 0:
            self._open.append((search, lambda budget: self._look(_Search(question, self._goal, budget), budget)))
        if not search.found:
            self._without_plan.append(search)
        if found is not None:
            if chunks and self._goal.objective not in OF_FIRST_TOKEN and not found.plan.streaming:
                found = _in_smaller_chunks(found, question)
            self._take(found)
        best = self._best_yet
        is_overlapping = chunks and self._goal.objective in OF_FIRST_TOKEN and len(question.processors) > 1
        if is_overlapping and best is not None and not best.plan.streaming:
            self._overlap(found, question, budget, is_first=before is None)

    def _searched(
        self, search: _Search, budget: TimeLimit, *, gain: float = 0.0, is_certain: bool = True
    ) -> Solution | None:
        """What ``search`` finds that is better than the best so far, by a share of ``gain``; filled where that is asked.

        What it leaves open counts where the search ``is_certain`` to be for all plans that might be the best.
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
        if found.objective_s < below_s * (1 - _SAME * (self._best is not None)):
            self._best = found

    def _overlap(self, found: Solution | None, question: Instance, budget: TimeLimit, *, is_first: bool) -> None:
        """Look for a plan that has a prompt sooner, as several devices compute smaller chunks of it at the same time.

        In one round: with more of them chunks follow each other a little closer, and tokens go round more often.
        """
        if found is not None:
            # Of like splits one in which no machine has most of a chunk gains most from smaller ones.
            even = found if self._goal.fills else _filled(found, question)
            self._take(_in_smaller_chunks(even, question))
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
        """Look for a better ring with chunks of so many rows. Answers with how many it is best."""
        best, work = self._best_yet, question.workload
        assert best is not None
        is_usual = best is self._best and best.prediction.chunk_rows == work.chunk_rows
        step_rows = best.prediction.step_rows if rows == best.prediction.chunk_rows else work.step_rows
        asked, gain = question.with_rows(rows, step_rows), FEWER_GAIN * is_usual
        if not self._searches([asked], budget):
            return []
        search, part = _Search(asked, self._goal, budget, is_one_round=True), budget.part(_AGAIN_SHARE)
        found = self._searched(search, part, gain=gain, is_certain=not is_usual)
        if part.left_s <= 0:
            self._open.append((search, partial(self._with_rows, rows, question)))
        if found is None or found.plan.streaming:
            return []
        even = _in_smaller_chunks(found if self._goal.fills else _filled(found, asked), asked)
        better = min(found, even, key=lambda each: each.objective_s)
        self._take(better)
        return [better.prediction.chunk_rows]


def _filled(found: Solution, question: Instance) -> Solution:
    """``found``, or a plan about as good that fills the ring."""
    plan = filled(found.plan, question, found.objective)
    if plan is found.plan:
        return found
    prediction = evaluate(plan, question)
    objective_s = prediction.objective_s(found.objective, question.workload.answer_tokens)
    given_up_s = found.given_up_s + objective_s - found.objective_s
    return replace(found, plan=plan, prediction=prediction, objective_s=objective_s, given_up_s=given_up_s)


def _in_smaller_chunks(found: Solution, question: Instance) -> Solution:
    """``found`` with the chunks of a prompt that suit its ring best; for the first token where the objective is another."""
    best, work = found, question.workload

    def value(prediction: Prediction) -> float:
        is_of_prompts = found.objective in OF_FIRST_TOKEN
        return prediction.objective_s(found.objective, work.answer_tokens) if is_of_prompts else prediction.ttft_s

    for rows in RING_CHUNKS:
        if rows >= min(work.chunk_rows, work.prompt_tokens):
            continue
        prediction = evaluate(found.plan, question.with_rows(rows, work.step_rows))
        if not prediction.short and value(prediction) < value(best.prediction) * (1 - RING_GAIN):
            objective_s = prediction.objective_s(found.objective, work.answer_tokens)
            is_as_before = objective_s >= found.objective_s * (1 - _SAME)
            best = replace(found, prediction=prediction, objective_s=objective_s, proven=found.proven and is_as_before)
    return best


def _is_short(plan: Plan, question: Instance) -> bool:
    """Whether more memory would be of use: something streams, or is computed beside a GPU."""
    has_gpu = any(member.has_gpu for member in question.members)
    return bool(plan.streaming) or (has_gpu and any(len(window.in_ram) for window in plan.route))


def _other_chunks(found: Solution, question: Instance, chunks: Sequence[int]) -> list[int]:
    """How many rows of a chunk are best for the plan that was found, as it then has to stream, if others are than it has.

    Fewer rows have to be clearly better, and more rows than a prompt has are of no use.
    """
    rows, work = question.workload.chunk_rows, question.workload
    if not found.plan.streaming:
        return []
    best, best_s = list[int](), found.objective_s
    more = sorted(chunk for chunk in chunks if chunk > rows and work.prompt_tokens > rows)
    fewer = sorted((chunk for chunk in chunks if chunk < rows), reverse=True)
    for chunk in more + fewer:
        other = question.with_rows(chunk)
        plan = residency(found.plan, other, lambda each: each.objective_s(found.objective, work.answer_tokens))
        prediction = evaluate(plan, other)
        value = prediction.objective_s(found.objective, work.answer_tokens)
        gain = _SAME if chunk > rows else FEWER_GAIN
        too_long = chunk > rows and prediction.prefill_chunk_s > MAX_CHUNK_S
        if value < best_s * (1 - gain) and not prediction.short and not too_long:
            best, best_s = [chunk], value
    return best


class _Search:
    """One search: what was found, what is left of the time, and below what no plan can be."""

    def __init__(
        self,
        question: Instance,
        goal: _Goal,
        budget: TimeLimit,
        *,
        is_one_round: bool = False,
    ) -> None:
        self.question = self._instance = question
        self._is_one_round = is_one_round
        self._objective: Objective = goal.objective
        self._required = frozenset(m for m, device in enumerate(question.devices) if device.device in goal.require)
        self._budget = budget
        self._below_s = math.inf
        self.is_begun = self._has_quick = False
        self._quick: list[tuple[float, int, tuple[Window, ...]]] = []
        self._best: tuple[float, Plan] | None = None
        self._best_is_quick = False
        self._open_bound_s = float("inf")
        self._min_s = 0.0
        """No ring of as many rounds as were looked at last, or more, is better."""

    @property
    def found(self) -> bool:
        """Whether there is a plan, of those below the bound."""
        return self._best is not None

    @property
    def bound_s(self) -> float:
        """No plan is better, as far as is known."""
        return min(self._best_s, self._open_bound_s)

    @property
    def quick_s(self) -> float:
        """The objective of the best plan so far."""
        return math.inf if self._best is None else self._best[0]

    @property
    def quick_rounds(self) -> int:
        """Its rounds; 0 without one."""
        return 0 if self._best is None else self._best[1].rounds

    def run(self, budget: TimeLimit, below_s: float = math.inf, near_rounds: int = 0) -> None:
        """Look for the best plan, of those with an objective of less than ``below_s``; quick ones as in ``begin``."""
        self._budget, self._below_s, self.is_begun = budget, below_s, True
        if not self._required - {0} and not self._is_one_round:
            self._single_device()
        if len(self._instance.devices) > 1:
            orders = (
                exact_orders(self._instance, self._objective) if len(self._instance.devices) <= EXACT_DEVICES else None
            )
            if orders is None and not self._may_win(1, orders):
                return  # with many devices it takes seconds to look for plans that there are not
            self.begin(below_s, near_rounds)
            self._polish()
            first = 1 if self._is_one_round else max(1, self.quick_rounds)
            self._rounds(first, orders)
            if first > 1:
                self._rounds(1, orders)
            if self._is_one_round:
                self._leave_more_rounds(orders)
            else:
                self._more_rounds(orders, {first})

    def _leave_more_rounds(self, orders: Sequence[RingOrder] | None) -> None:
        """Of more rounds only the bound is of interest: how much better they might be."""
        if self._instance.model.max_rounds > 1 and self._may_win(2, orders):
            self._open_bound_s = min(self._open_bound_s, self._min_s)

    def _more_rounds(self, orders: Sequence[RingOrder] | None, done: set[int]) -> None:
        """Rings of two rounds or more: first of as many as the best so far has: others are then soon known to be worse.

        More rounds add only hops and memory to what the bound leaves open: where it cannot win the search ends. It is asked
        at numbers of rounds half as large again, and when there is a better plan.
        """
        asked_of, ask_at = math.inf, 2
        for rounds in range(2, self._instance.model.max_rounds + 1):
            if rounds == ask_at or self._best_s < asked_of:
                if not self._may_win(rounds, orders):
                    return
                asked_of, ask_at = self._best_s, rounds + max(1, rounds // 2)
            for each in (max(2, self.quick_rounds), rounds) if rounds == 2 else (rounds,):
                if each not in done:
                    done.add(each)
                    self._rounds(each, orders)

    def begin(self, below_s: float = math.inf, near_rounds: int = 0) -> None:
        """Keep the best of the plans that are quick to make: of one round, and of more as long as more rounds help.

        Of those with an objective of less than ``below_s`` alone, and, where it is known of how many rounds other
        questions' best plan is, near these.

        All of them have equal rounds and a tail, as the programs' plans have, so a search that proves its answer the best
        proves it against the same plans.
        """
        question = self._instance
        self.is_begun = True
        if self._has_quick or len(question.devices) == 1:
            return
        self._below_s = min(self._below_s, below_s)
        self._has_quick, max_rounds = True, 1 if self._is_one_round else question.model.max_rounds
        everyone, best_before_s, worse = range(len(question.devices)), math.inf, 0
        one_a_machine = sorted({host[0] for host in question.hosts} | self._required)
        orders = dict.fromkeys(good_order(question, members).members for members in (everyone, one_a_machine))
        for rounds in range(1, max_rounds + 1):
            if near_rounds and rounds > 1 and abs(rounds - near_rounds) > _NEAR_ROUNDS:
                continue
            if rounds > 1 and self._best is not None and not self._best[1].streaming:
                break  # rounds serve streaming alone
            cuts = good_cuts(question, orders, rounds, self._objective, self._required)
            if not cuts and rounds == 1:
                break  # more rounds take more memory
            best_s = min((price for price, _ in cuts), default=math.inf)
            for price, route in cuts[:_KEPT_OF_ROUNDS]:
                if price <= min(_FAR_PRICE * min(best_s, best_before_s), self._near_s):
                    self._quick.append((price, rounds, route))
                    self._keep(residency(self._plan(rounds, route), question, self._objective_s), is_quick=True)
            worse = 0 if best_s < best_before_s else worse + 1
            best_before_s = min(best_s, best_before_s)
            if worse == _WORSE_ROUNDS:
                break

    def _polish(self) -> None:
        """Settle what streams of the best quick plans."""
        for price, rounds, route in sorted(self._quick, key=lambda each: each[0])[:_POLISHED]:
            if price <= self._near_s:
                self._offer(rounds, route)

    @property
    def _best_s(self) -> float:
        return min(self._below_s, self.quick_s)

    @property
    def _near_s(self) -> float:
        """Quick plans of a larger price are not looked at. A price has one chunk of a prompt, and all of a token."""
        return math.inf if self._objective == "throughput" else _NEAR * self._below_s

    def solution(self) -> Solution:
        """The best plan."""
        assert self._best is not None
        plan = self._without_needless_streaming(self._best[1])
        prediction = evaluate(plan, self._instance)
        value = self._objective_s(prediction)
        bound = min(value, self._open_bound_s)
        return Solution(
            plan=replace(plan, left_out=self._left_out(plan)),
            prediction=prediction,
            objective=self._objective,
            objective_s=value,
            bound_s=bound,
            proven=bound >= value * (1 - _PROVEN),
        )

    def _without_needless_streaming(self, plan: Plan) -> Plan:
        """``plan`` where no device streams more than its memory asks for, if that is no slower.

        What a disk reads while others compute costs nothing in the model, and what streams leaves memory free; but a disk
        that need not work shall not.
        """
        value = self._objective_s(evaluate(plan, self._instance))
        minimum = stream(plan, self._instance, {})
        for device in [streaming.device for streaming in plan.streaming]:
            others = [streaming for streaming in plan.streaming if streaming.device != device]
            own = [streaming for streaming in minimum.streaming if streaming.device == device]
            streaming = sorted([*others, *own], key=lambda each: plan.devices.index(each.device))
            trial = replace(plan, streaming=tuple(streaming))
            found = evaluate(trial, self._instance)
            is_no_slower = not found.short and self._objective_s(found) <= value * (1 + _SAME)
            if is_no_slower and self._read_bytes(trial) < self._read_bytes(plan):
                plan = trial
        return plan

    def _read_bytes(self, plan: Plan) -> int:
        return sum(each.streamed_bytes for each in plan.streaming)

    def _left_out(self, plan: Plan) -> tuple[LeftOut, ...]:
        return tuple(
            LeftOut(device=device.device, reason="the others are faster without it")
            for device in self._instance.devices
            if device.device not in plan.devices
        )

    def _single_device(self) -> None:
        problem, head = new_problem("alone"), self._instance.only([0])
        outcome, program = self._run(problem, single_device_layout(problem, head), head, required=frozenset())
        self._note(outcome)
        if outcome.found:
            total = len(self._instance.model.layers)
            name, found = self._instance.devices[0].device, program.layout.variables
            bounds, whole = [_height(bound) for bound in found["start"]], _height(found["whole"])
            self._offer(1, (Window(device=name, first=0, last=total, **_on_gpus(bounds, whole)),))

    def _may_win(self, rounds: int, orders: Sequence[RingOrder] | None) -> bool:
        """Whether any ring of ``rounds`` rounds or more can be better than the best so far."""
        problem = new_problem("bound")
        layout = self._even(problem, rounds, orders, loose=True)
        outcome, _ = self._run(problem, layout, max_s=self._max_s(orders))
        self._min_s = max(self._min_s, outcome.bound / MS)
        if self._min_s >= self._best_s * (1 - _SAME):
            return False
        if self._budget.left_s <= 0:
            self._open_bound_s = min(self._open_bound_s, self._min_s)
            return False
        return True

    @staticmethod
    def _max_s(orders: Sequence[RingOrder] | None) -> float:
        """Seconds that a program over these ring orders may take; none are those of too many devices to try."""
        return math.inf if orders is not None else _LONG_S

    def _rounds(self, rounds: int, orders: Sequence[RingOrder] | None) -> None:
        """Look for the best ring of ``rounds`` rounds; what the even layout leaves open is cut exactly, or stays open."""
        problem = new_problem(f"rounds_{rounds}")
        layout = self._even(problem, rounds, orders)
        outcome, program = self._run(problem, layout, max_s=self._max_s(orders))
        bound_s, differ = max(self._min_s, outcome.bound / MS), len(self._instance.kinds) > 1
        if outcome.found:
            ring = self._take_even(program)
            if orders is None and bound_s < self._best_s * (1 - _SAME):
                self._try_hops(rounds, ring)
            if differ and len(ring) > 1 and bound_s < self._best_s * (1 - _SAME):
                self._offer_cuts(rounds, ring)
        if bound_s >= self._best_s * (1 - _SAME):
            return
        if differ and self._is_small(rounds):
            self._cut(rounds, orders, bound_s)
        else:
            self._open_bound_s = min(self._open_bound_s, bound_s)

    def _even(
        self,
        problem: Any,
        rounds: int,
        orders: Sequence[RingOrder] | None,
        *,
        loose: bool = False,
        columns: int | None = None,
    ) -> Layout:
        """The even layout; of hops that have no order yet the least that they can be."""
        shares = min_hops(self._instance) if orders is None else None
        return even_layout(problem, self._instance, rounds, orders, loose=loose, columns=columns, shares=shares)

    def _try_hops(self, rounds: int, ring: Sequence[int]) -> None:
        """With many devices: lay the hops of a good ring to its members, solve again, and again from what comes out."""
        for _ in range(_HOP_TRIALS):
            shares = hops_around(self._instance, good_order(self._instance, ring))
            problem = new_problem("hops")
            layout = even_layout(problem, self._instance, rounds, None, shares=shares)
            outcome, program = self._run(problem, layout, cutoff=False, max_s=_LONG_S)
            if not outcome.found:
                return
            before, ring = ring, self._take_even(program)
            if set(ring) == set(before):
                return

    def _offer_cuts(self, rounds: int, ring: Sequence[int]) -> None:
        """Where layers differ: windows cut for the ring that the even layout chose, in several orders."""
        others = permutations(ring[1:]) if len(ring) <= _ORDERS_OF else [ring[1:]]
        orders = [(0, *order) for order in others]
        for _, route in good_cuts(self._instance, orders, rounds, self._objective, self._required)[:_CUTS_TRIED]:
            self._offer(rounds, route)

    def _is_small(self, rounds: int) -> bool:
        devices, layers = len(self._instance.devices), len(self._instance.model.layers)
        return devices <= EXACT_DEVICES and devices * layers // rounds <= EXACT_CUTS

    def _cut(self, rounds: int, orders: Sequence[RingOrder] | None, bound_s: float) -> None:
        """Settle what the even layout leaves open where layers differ."""
        model, cut = self._instance.model, self._instance.model.cut_multiple
        total = len(model.layers)
        maximum = model.last_cut // (rounds * cut) * cut
        for columns in [total] if rounds == 1 else range(maximum, 0, -cut):
            if rounds > 1:
                problem = new_problem("columns")
                layout = self._even(problem, rounds, orders, columns=columns)
                outcome, program = self._run(problem, layout)
                if outcome.found:
                    self._take_even(program)
                if outcome.bound / MS >= self._best_s * (1 - _SAME):
                    continue
            for sequence in device_sequences(self._instance):
                if self._budget.left_s <= 0:
                    self._open_bound_s = min(self._open_bound_s, bound_s)
                    return
                if bound_s >= self._best_s * (1 - _SAME):
                    return
                self._cut_in_order(rounds, sequence, columns)

    def _cut_in_order(self, rounds: int, sequence: Sequence[int], columns: int) -> None:
        orders = induced_orders(self._instance, sequence)
        problem = new_problem("cut")
        layout = cut_layout(problem, self._instance, rounds, orders, sequence, columns)
        outcome, program = self._run(problem, layout)
        self._note(outcome)
        if outcome.found:
            order = next(o for o, z in zip(orders, layout.picked, strict=True) if round(z.value()))
            self._offer(rounds, self._cut_route(program, rounds, sequence, order))

    def _cut_route(
        self, program: Program, rounds: int, sequence: Sequence[int], order: RingOrder
    ) -> tuple[Window, ...]:
        """Read windows off the staircases."""
        found, names = program.layout.variables, [device.device for device in self._instance.devices]
        columns, route, before = found["columns"], [], 0
        shape = []
        for m in sequence:
            end, whole = (_height(found[what][m]) for what in ("end", "whole"))
            if end > before:
                shape.append((m, before, end, _on_gpus([_height(bound) for bound in found["start"][m]], whole)))
            before = end
        assert [m for m, *_ in shape] == list(order.members)
        for r in range(rounds):
            for m, first, last, on_gpus in shape:
                at = r * columns
                route.append(Window(device=names[m], first=at + first, last=at + last, **on_gpus))
        total, tail_first = len(self._instance.model.layers), route[-1].last
        on_gpus = _on_gpus([_height(bound) for bound in found["tail_start"]], _height(found["tail_whole"]))
        return (*route, Window(device=names[0], first=tail_first, last=total, **on_gpus))

    def _take_even(self, program: Program) -> tuple[int, ...]:
        """Make a plan of an even layout's solution. Answers its ring."""
        layout, names = program.layout, [device.device for device in self._instance.devices]
        found = layout.variables
        w = [round(pulp.value(value)) for value in found["w"]]
        on_gpus = [_counted(n, a) for n, a in zip(found["n"], found["a"], strict=True)]
        order = self._order(layout, w)
        if len(order) == 1:
            return order
        route, at = [], 0
        for _ in range(layout.rounds):
            for m in order:
                route.append(Window(device=names[m], first=at, last=at + w[m], **on_gpus[m]))
                at += w[m]
        tail = Window(
            device=names[0],
            first=at,
            last=len(self._instance.model.layers),
            **_counted(found["tail_gpu"], found["tail_experts_on_cpu"]),
        )
        self._offer(layout.rounds, (*route, tail))
        return order

    def _order(self, layout: Layout, w: Sequence[int]) -> tuple[int, ...]:
        if layout.picked:
            return next(
                order.members for order, z in zip(layout.orders, layout.picked, strict=True) if round(z.value())
            )
        return good_order(self._instance, [m for m in range(len(w)) if w[m]]).members

    def _offer(self, rounds: int, route: tuple[Window, ...]) -> None:
        """Keep the plan with these windows, and the streaming that suits them best, if it is the best so far."""
        plan, problem = self._plan(rounds, route), new_problem("fixed")
        in_memory = self._in_memory(plan)
        if in_memory is not None:
            self._keep(in_memory, is_quick=False)
            return
        index = {device.device: m for m, device in enumerate(self._instance.devices)}
        members = self._instance.only([index[name] for name in plan.devices])
        outcome, program = self._run(problem, fixed_layout(members, plan), members, required=frozenset())
        if not outcome.found:
            return
        unit = self._instance.largest_layer_bytes
        plan = replace(plan, output_on_gpu=bool(round(program.output_on_gpu.value())))
        read_ahead, minimum = ({}, {})
        for m, name in enumerate(plan.devices):
            if round(program.streams.streams[m].value()):
                read_ahead[name] = round(program.streams.read_ahead[m].value() * unit)
                if self._is_on_shared_machine(name):
                    minimum[name] = math.ceil(program.streams.bytes[m].value() * unit) + 1
        self._keep(stream(plan, self._instance, read_ahead, minimum), is_quick=False)

    def _in_memory(self, plan: Plan) -> Plan | None:
        """``plan`` with the better place for the output matrix, if RAM is enough for all; None where something streams."""
        here = evaluate(plan, self._instance)
        if any(short.what == "RAM" for short in here.short):
            return None
        if plan.output_on_gpu or not self._instance.members[0].has_gpu:
            return plan
        other = replace(plan, output_on_gpu=True)
        there = evaluate(other, self._instance)
        is_better = self._value(there) < self._value(here) * (1 - _SAME)
        return other if here.short or (is_better and not there.short) else plan

    def _plan(self, rounds: int, route: tuple[Window, ...]) -> Plan:
        """A plan with these windows that streams nothing; all are helped that the question says.

        Of their layers as many are on a GPU as llama.cpp can have there.
        """
        route = tuple(self._openable(window) for window in route)
        on_gpu = route[-1].gpu_layers > 0
        plan = Plan(rounds=rounds, route=route, output_on_gpu=on_gpu, streaming=(), left_out=())
        return plan.with_offload(self._instance.prefill_offload)

    def _openable(self, window: Window) -> Window:
        return window.fewer_on_gpu(self._instance.model.openable(window.layers, window.gpu_layers))

    def _is_on_shared_machine(self, name: str) -> bool:
        """Whether what ``name`` holds is bounded by what others of its machine hold."""
        host = next(device.host for device in self._instance.devices if device.device == name)
        return sum(device.host == host for device in self._instance.devices) > 1

    def _keep(self, plan: Plan, *, is_quick: bool) -> None:
        """Keep ``plan`` if it holds all limits and is the best so far, or as good and better to have."""
        if not is_regular(plan, self._instance):
            return
        prediction = evaluate(plan, self._instance)
        value = self._value(prediction)
        slack = _SAME if not is_quick and self._wins_ties(plan.rounds) else -_SAME
        if not prediction.short and value < self._best_s * (1 + slack):
            self._best, self._best_is_quick = (value, plan), is_quick

    def _wins_ties(self, rounds: int) -> bool:
        """Whether a program's plan of ``rounds`` rounds is the one to take if the best so far is as good.

        Of plans of as many rounds a program's leaves the most memory, which a quick one's need not.
        """
        return self._best is not None and (rounds < self._best[1].rounds or self._best_is_quick)

    def _value(self, prediction: Prediction) -> float:
        return self._objective_s(prediction) + TIE * prediction.tpot_s

    def _objective_s(self, prediction: Prediction) -> float:
        return prediction.objective_s(self._objective, self._instance.workload.answer_tokens)

    def _note(self, outcome: Outcome) -> None:
        """Remember what an unfinished program leaves open."""
        if not outcome.proven:
            self._open_bound_s = min(self._open_bound_s, outcome.bound / MS)

    def _run(
        self,
        problem: Any,
        layout: Layout,
        question: Instance | None = None,
        required: frozenset[int] | None = None,
        *,
        cutoff: bool = True,
        max_s: float = math.inf,
    ) -> tuple[Outcome, Program]:
        program = build(
            problem,
            question or self._instance,
            layout,
            self._objective,
            self._required if required is None else required,
            elastic=False,
        )
        maximum, is_known = math.inf, self._best_s < math.inf
        if cutoff and is_known:
            slack = self._best_s * MS * _SAME
            maximum = self._best_s * MS + (slack + EVEN_MS if self._wins_ties(layout.rounds) else -slack)
        # Without any plan yet a program gets time enough to find one.
        limit_s = max(_MIN_S if is_known else _FIRST_S, min(max_s, self._budget.left_s))
        return run(problem, limit_s, maximum=maximum, is_steep=_STEEP_S < self._best_s < math.inf), program

    def infeasible(self) -> Infeasible:
        """Which limit is short for the plan of one round that is closest to fitting."""
        shortages = [self._elastic(*program) for program in self._elastic_layouts()]
        found = [shortage for shortage in shortages if shortage is not None]
        if not found:
            return Infeasible("the devices that must take part are more than the model has layers for", short_bytes=0)
        size, text = min(found)
        return Infeasible(text, short_bytes=round(size))

    def _elastic_layouts(self) -> Iterator[tuple[Any, Layout, Instance]]:
        instance = self._instance
        if not self._required - {0}:
            problem, head = new_problem("short_alone"), self._instance.only([0])
            yield problem, single_device_layout(problem, head), head
        if len(instance.devices) == 1 or not instance.model.cut_points:
            return
        if len(instance.kinds) > 1 and self._is_small(1):
            for sequence in device_sequences(instance)[:_ELASTIC_ORDERS]:
                problem, orders = new_problem("short_cut"), induced_orders(instance, sequence)
                columns = len(instance.model.layers)
                yield problem, cut_layout(problem, instance, 1, orders, sequence, columns), instance
            return
        problem = new_problem("short_ring")
        rings = exact_orders(instance, self._objective) if len(instance.devices) <= EXACT_DEVICES else None
        yield problem, even_layout(problem, instance, 1, rings), instance

    def _elastic(self, problem: Any, layout: Layout, question: Instance) -> tuple[float, str] | None:
        required = self._required if len(question.devices) > 1 else frozenset[int]()
        build(problem, question, layout, self._objective, required, elastic=True)
        outcome = run(problem, _SHORT_S)
        if not (outcome.found or outcome.proven):
            outcome = run(problem, max(_FIRST_S, self._budget.seconds))
        if not outcome.found:
            return None
        unit = self._instance.largest_layer_bytes
        shortages = []
        for variable in problem.variables():
            kind, _, rest = variable.name.partition("_")
            if kind == "short" and variable.value() and variable.value() * unit >= _MIN_BYTES:
                what, *members = rest.split("_")
                where = " and ".join(self._named(place) for place in members)
                size = -(-variable.value() * unit // 1)
                shortages.append((size, f"{what} of {where} is short of {max(size / 1e6, 0.1):,.1f} MB"))
        text = "; ".join(sentence for _, sentence in sorted(shortages, reverse=True))
        model, work = self._instance.model, self._instance.workload
        if not shortages:
            return None
        advice = "" if all(sentence.startswith("disk ") for _, sentence in shortages) else self._advice()
        return sum(size for size, _ in shortages), (
            f"no plan for {model.name} with {work.context_tokens} tokens of context for {work.sequences} sequence(s) fits, "
            f"streaming included: {'at the least' if outcome.proven else 'as far as is known'}, {text}{advice}"
        )

    def _named(self, place: str) -> str:
        """The member that a name of ``add_memory`` stands for, or its GPU."""
        m, _, gpu = place.partition("g")
        member = self._instance.members[int(m)]
        return member.gpu_name(int(gpu)) if gpu else member.name

    def _advice(self) -> str:
        """What else than more memory helps: less of a KV cache, which never streams."""
        work = self._instance.workload
        size = sum(self._instance.kv_bytes[kind] for kind in self._instance.kind_of)
        if not size:
            return ""
        smaller = KV_TYPES[KV_TYPES.index(work.kv_type) + 1 :]
        other = f" or a KV cache in {' or '.join(smaller)}" if smaller else ""
        return f"; the KV cache ({work.kv_type}) takes {size / 1e6:,.1f} MB in all: a smaller context{other} takes less"


def _height(stairs: Sequence[Any]) -> int:
    return sum(round(step if isinstance(step, int) else step.value()) for step in stairs)


def _counted(on_gpus: Sequence[Any], experts_on_cpu: Sequence[Any]) -> dict[str, Any]:
    """What a window has on each GPU, as ``Window`` has it, from the variables of a layout."""
    first, *others = (round(pulp.value(count)) for count in on_gpus)
    experts = sum(round(pulp.value(count)) for count in experts_on_cpu)
    return on_gpus_of(first, others, experts)


def _on_gpus(bounds: Sequence[int], whole: int) -> dict[str, Any]:
    """The same from the boundaries between GPUs, the last GPU's first, and to where experts are on the CPU."""
    first, *others = reversed([high - low for low, high in pairwise(bounds)])
    return on_gpus_of(first, others, whole - bounds[0])
